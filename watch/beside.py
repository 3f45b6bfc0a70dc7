"""`penstock train --watch`: serves the page in a process of its own, as long as the run lasts.

That process is this module, too (`main`). It serves one run, until its standard input is closed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from penstock.configs.errors import UserError
from penstock.core.interfaces import Json, MetricSink
from penstock.core.notes import note_logger
from penstock.core.processes import python

# The process of the page may take this long to end.
END_S = 5.0
# The longest line with its address.
LINE_NBYTES = 4096
logger = note_logger(__name__)


class PageBeside(MetricSink):
    """Starts `penstock watch RUN` at the first tick and notes its address.

    A page that cannot be served is noted too, and the run continues without it.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._line = b""
        """What the process has printed so far."""
        self._awaits_address = True

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        """Do nothing: the page reads the files of the run."""

    def tick(self) -> None:
        """Start the process, or see whether it has printed its address. Never blocks."""
        if self._process is None:
            self._start()
        elif self._awaits_address and self._process.stdout is not None:
            while select.select([self._process.stdout], [], [], 0)[0]:
                data = self._process.stdout.raw.read(LINE_NBYTES)  # type: ignore[attr-defined]
                self._line += data
                has_ended = not data
                if has_ended or b"\n" in self._line or len(self._line) > LINE_NBYTES:
                    self._awaits_address = False
                    self._note_address()
                    break

    def _start(self) -> None:
        """Start the process; note it if that fails."""
        command = python("penstock.watch.beside", self._run_dir.absolute())
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # closed when this process ends, however it ends
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only the supervisor
            )
        except OSError as error:
            self._awaits_address = False
            logger.warning(f"the page of the run cannot be served: {error}")

    def _note_address(self) -> None:
        """Note the address that the process has printed, or why it serves no page."""
        try:
            message = json.loads(self._line.partition(b"\n")[0])
        except ValueError:
            message = {}
        if "address" in message:
            logger.info(f"the run is shown at {message['address']}")
        else:
            reason = message.get("error", "its process has ended")
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


def main(run_dir: str) -> int:
    """Serve the run on loopback, until standard input is closed; returns the exit code.

    The address, or the reason for none, is a JSON object on standard output.
    """
    from penstock.core.web.listen import Listen
    from penstock.watch.server import serve

    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serve(run_dir, Listen(), lambda address: _print_json(address=address))
    except UserError as error:
        _print_json(error=str(error))
        return 2
    return 0


def _print_json(**fields: str) -> None:
    """Print a JSON object with these fields as a line."""
    print(json.dumps(fields), flush=True)


def _end_with_parent() -> None:
    """Wait until standard input is closed, which the parent does by ending too; then end."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
