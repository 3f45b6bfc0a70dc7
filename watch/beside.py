"""`penstock train --watch`: serves the page in a process of its own, as long as the run lasts."""

from __future__ import annotations

import json
import select
import subprocess
from contextlib import suppress
from pathlib import Path

from penstock.core.interfaces import Json, MetricSink
from penstock.core.notes import note_logger
from penstock.core.processes import python

END_S = 5.0
LINE_NBYTES = 4096
logger = note_logger(__name__)


class PageBeside(MetricSink):
    """Starts `penstock watch RUN` at the first tick and notes its address. A page that cannot be
    served is noted too, and the run continues without it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._line = b""
        self._waits = True  # for the address

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        """Nothing: the page reads the files of the run."""

    def tick(self) -> None:
        """Start the process, or see whether it has printed its address. Never blocks."""
        if self._process is None:
            self._start()
        elif self._waits and self._process.stdout is not None:
            while select.select([self._process.stdout], [], [], 0)[0]:
                data = self._process.stdout.raw.read(LINE_NBYTES)  # type: ignore[attr-defined]
                self._line += data
                if not data or b"\n" in self._line or len(self._line) > LINE_NBYTES:
                    self._waits = False
                    self._note_address()
                    break

    def _start(self) -> None:
        command = python("penstock.watch.beside_process", self._run_dir.absolute())
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # closed when this process ends, however it ends
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only the supervisor
            )
        except OSError as error:
            self._waits = False
            logger.warning(f"the page of the run cannot be served: {error}")

    def _note_address(self) -> None:
        try:
            said = json.loads(self._line.partition(b"\n")[0])
        except ValueError:
            said = {}
        if "address" in said:
            logger.info(f"the run is shown at {said['address']}")
        else:
            reason = said.get("error", "its process has ended")
            logger.warning(f"the page of the run cannot be served: {reason}")

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
