"""A replay kept with a run's checkpoints, where `replay.checkpoint` asks for it.

A snapshot is taken while the run goes on: a thread writes it beside the training, and the run waits
for it only at its end. So it is of the checkpoint's moment or a little later; weights and replay
need not agree to the step, and a snapshot that a crash cuts short leaves the one before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from penstock.configs.errors import UserError
from penstock.replay import Replay, ReplayError
from penstock.replay.snapshot_files import MANIFEST, discard

LOOK_S = 0.1  # between two beats of a run that waits


class KeptReplay:
    """``replay`` as it goes to disk and comes back; nothing of it unless ``wanted``."""

    def __init__(self, replay: Replay, *, wanted: bool) -> None:
        self._replay, self._wanted = replay, wanted
        self._thread: threading.Thread | None = None
        self._error: ReplayError | None = None

    @property
    def saving(self) -> bool:
        """Whether a snapshot is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, folder: Path) -> None:
        """Write a snapshot to ``folder`` in the background, unless one is still being written.

        Raises ReplayError where the one before could not be written.
        """
        if not self._wanted:
            discard(folder)  # of another moment than its checkpoint
            return
        self._raise()
        if not self.saving:
            self._thread = threading.Thread(
                target=self._save, args=(folder,), name="replay-save", daemon=True
            )
            self._thread.start()

    def finish(self, folder: Path, beat: Callable[[], None]) -> None:
        """Write a snapshot of now, and wait for it. Raises ReplayError where it cannot be."""
        self._wait(beat)
        self.begin(folder)
        self._wait(beat)
        self._raise()

    def resume(self, folder: Path) -> str:
        """Go on with what ``folder`` holds, if anything; says what the replay begins with.

        Raises UserError for a snapshot that is damaged or was made with other settings.
        """
        if not self._wanted:
            return "the replay begins empty, as replay.checkpoint is false, and is filled first"
        if not (folder / MANIFEST).is_file():
            return f"the replay begins empty: {folder} holds none; it is filled first"
        try:
            self._replay.restore(folder)
        except ReplayError as error:
            raise UserError(
                f"{error}; or begin with an empty one: replay.checkpoint=false"
            ) from error
        return f"the replay goes on with {len(self._replay)} stored steps"

    def _save(self, folder: Path) -> None:
        try:
            self._replay.save(folder)
        except ReplayError as error:
            self._error = error

    def _wait(self, beat: Callable[[], None]) -> None:
        while self._thread is not None and self._thread.is_alive():
            beat()
            self._thread.join(LOOK_S)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
