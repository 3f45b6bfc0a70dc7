"""Which checkpoints of a run hold its replay, and how a resume gets it back.

A thread writes the snapshot while the run trains, and the run waits for it only at its end. So the
snapshot is of the checkpoint's moment or later: weights and replay need not agree to the step. A
snapshot that is interrupted leaves the previous one in place.

With `replay.checkpoint` true each checkpoint gets a snapshot, and one that cannot be written is an
error. With `auto` snapshots must be no burden, so each of these rules may leave one out:

    the disk    at the start there must be room for three whole buffers: the snapshot, the next one
                beside it while that is written, and as much for all else; before each snapshot for
                two of them
    the time    after a snapshot, `PAUSE` times as long passes before the next one begins
    the end     the last one must be complete within a share of `run.grace_s`, or it is given up

A resumed run then continues with a replay that is older than its weights, which does no harm to
learning: the steps in between are missing, as if they had not been played.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from penstock.configs.errors import UserError
from penstock.core.formatting import duration, size
from penstock.core.notes import note_logger
from penstock.replay import Replay, ReplayError
from penstock.replay.errors import DamagedSnapshotError
from penstock.replay.snapshot import MANIFEST, discard

logger = note_logger(__name__)

# Seconds between two heartbeats of a run that waits.
POLL_S = 0.1
# With `auto`: writing takes at most the fiftieth part of the time, as it takes processor time too.
PAUSE = 50.0
# With `auto`: the share of `run.grace_s` for the last snapshot. Actors and connectors may have used
# six tenths of it when learners save, and the checkpoint itself is written before.
GRACE_SHARE = 0.3


class KeptReplay:
    """Saves and restores ``replay`` with the checkpoints of a run, as `replay.checkpoint` says.

    Call `plan` first, then `resume` in a resumed run, `begin` with each checkpoint and `finish`
    with the last one.
    """

    def __init__(
        self,
        replay: Replay,
        *,
        mode: bool | Literal["auto"],
        grace_s: float,
        learners: int = 1,
        more: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Save nothing yet.

        Args:
            replay: that is saved.
            mode: the value of `replay.checkpoint`.
            grace_s: that of `run.grace_s`, in seconds.
            learners: of the run, each of which keeps a replay on the same disk.
            more: returns what is saved at the same instant, as for `Replay.save`.
        """
        self._replay = replay
        self._mode = mode
        self._last_s = GRACE_SHARE * grace_s
        """Longest time of the last snapshot with `auto`."""
        self._learners = learners
        self._more = more
        self.restored: dict[str, Any] = {}
        """What ``more`` returned when the restored snapshot was taken."""

        self._kept = mode is not False
        """Whether checkpoints hold the replay."""
        self._thread: threading.Thread | None = None
        """The thread that writes or loads a snapshot, or has done so last."""
        self._give_up = threading.Event()
        """Tells that thread to end without a snapshot."""
        self._error: Exception | None = None
        """The exception of that thread, until `_raise_error`."""
        self._took_s = 0.0
        """Duration of the last snapshot, also of one that was given up."""
        self._next_s = 0.0
        """With `auto` the earliest time of the next snapshot, of CLOCK_MONOTONIC."""

    @property
    def saving(self) -> bool:
        """Whether a snapshot is being written, or loaded."""
        return self._thread is not None and self._thread.is_alive()

    def plan(self, folder: Path) -> str:
        """Decide whether checkpoints hold the replay, by the disk of ``folder``.

        Returns:
            A sentence on it for the user; "" if `replay.checkpoint` is false.
        """
        if self._mode is False:
            return ""

        # What is there of an earlier run is replaced.
        free = _free_nbytes(folder) + _nbytes_in(folder.parent)
        whole = self._replay.stats()["nbytes"] * self._learners
        if self._mode == "auto" and 3 * whole > free:
            self._kept = False
            return (
                f"checkpoints do not keep the replay: three times its {size(whole)} are more than "
                f"the {size(free)} free at {folder}, so a resumed run begins with an empty one; "
                "free some space, lower replay.capacity, or set replay.checkpoint=true"
            )
        return (
            f"checkpoints keep the replay, with up to {size(whole)}, and twice that while it is "
            f"written; {size(free)} are free (replay.checkpoint)"
        )

    def begin(self, folder: Path) -> None:
        """Write a snapshot to ``folder`` in the background, unless one is still being written.

        Raises:
            ReplayError: the previous snapshot could not be written, and `replay.checkpoint` is
                true. Any other exception of its thread is raised, too.
        """
        if not self._kept:
            discard(folder)  # belongs to another moment than its checkpoint
            return

        self._raise_error()
        is_early = self._mode == "auto" and time.monotonic() < self._next_s
        if not self.saving and not is_early and self._has_room(folder):
            self._start(folder)

    def finish(self, folder: Path, beat: Callable[[], None]) -> None:
        """Write a snapshot now, and wait for it while calling ``beat``.

        Raises what went wrong with this one, unless `replay.checkpoint` is `auto`. It takes the
        place of the previous snapshot, so that an error of that does not matter any more.
        """
        if not self._kept:
            discard(folder)
            return

        if self._mode == "auto":
            self._finish_in_time(folder, beat)
            return
        self._wait(beat)
        self._error = None
        self._start(folder)
        self._wait(beat)
        self._raise_error()

    def resume(self, folder: Path, beat: Callable[[], None] = lambda: None) -> str:
        """Load the snapshot in ``folder``, if there is one, calling ``beat`` meanwhile.

        Returns:
            A sentence on the result, for the user.

        Raises:
            UserError: the snapshot is damaged; or it was made with other settings, and
                `replay.checkpoint` is true.
        """
        if self._mode is False:
            return "the replay begins empty, as replay.checkpoint is false, and is filled first"
        if not (folder / MANIFEST).is_file():
            return f"the replay begins empty: {folder} has no snapshot; it is filled first"

        # Minutes for a large one: a snapshot of 1.5 GB was loaded in 31 s on a busy machine.
        self._thread = threading.Thread(
            target=self._load, args=(folder,), name="replay-load", daemon=True
        )
        self._thread.start()
        self._wait(beat)
        error, self._error = self._error, None
        if isinstance(error, ReplayError):
            # Of a damaged snapshot some rows may be loaded.
            if self._mode == "auto" and not isinstance(error, DamagedSnapshotError):
                return f"the replay begins empty, and is filled first: {error}"
            raise UserError(
                f"{error}; or begin with an empty one: replay.checkpoint=false"
            ) from error
        if error is not None:
            raise error
        return f"the replay continues with {len(self._replay)} stored steps"

    def _finish_in_time(self, folder: Path, beat: Callable[[], None]) -> None:
        """Write the last snapshot, or give it up where it takes too long."""
        deadline_s = time.monotonic() + self._last_s
        self._wait(beat, deadline_s)

        if not self.saving:
            self._raise_error()
            if not self._has_room(folder):
                return
            if self._took_s <= deadline_s - time.monotonic():
                self._start(folder)
                self._wait(beat, deadline_s)
                if not self.saving:
                    self._raise_error()
                    return

        self._give_up.set()
        self._wait(beat)
        self._error = None
        is_there = (folder / MANIFEST).is_file()
        resumed = "continues with that of an earlier checkpoint" if is_there else "begins empty"
        logger.info(
            "the replay of this checkpoint is not kept, as it was not written within %s, a share "
            "of run.grace_s: in a resumed run it %s; raise run.grace_s to keep it",
            duration(self._last_s),
            resumed,
        )

    def _has_room(self, folder: Path) -> bool:
        """Whether the disk has room for a snapshot; with `auto` it must not take more than half of
        what is free."""
        if self._mode is True:
            return True  # an error says so

        table = self._replay.table
        nbytes = len(table.order) * table.spec.payload_nbytes * self._learners
        free = _free_nbytes(folder)
        if 2 * nbytes <= free:
            return True
        logger.info(
            "this checkpoint does not keep the replay, which would take %s of the %s free at %s; "
            "the one of before stays",
            size(nbytes),
            size(free),
            folder,
        )
        return False

    def _start(self, folder: Path) -> None:
        """Let a thread write a snapshot."""
        self._give_up.clear()
        self._thread = threading.Thread(
            target=self._save, args=(folder,), name="replay-save", daemon=True
        )
        self._thread.start()

    def _save(self, folder: Path) -> None:
        """Write a snapshot; the work of the thread."""
        began_s = time.monotonic()
        try:
            self._replay.save(folder, more=self._more, give_up=self._give_up)
        except Exception as error:
            self._error = error
        now_s = time.monotonic()
        self._took_s = now_s - began_s
        self._next_s = now_s + PAUSE * self._took_s

    def _load(self, folder: Path) -> None:
        """Load a snapshot; the work of a thread."""
        try:
            self.restored = self._replay.restore(folder)
        except Exception as error:
            self._error = error

    def _wait(self, beat: Callable[[], None], deadline_s: float = float("inf")) -> None:
        """Wait for the thread, until ``deadline_s`` of CLOCK_MONOTONIC at most."""
        while self._thread is not None and self.saving and time.monotonic() < deadline_s:
            beat()
            self._thread.join(POLL_S)

    def _raise_error(self) -> None:
        """Raise the exception of the thread, if there was one, once; with `auto` log it."""
        error, self._error = self._error, None
        if error is None:
            return
        if self._mode == "auto" and isinstance(error, ReplayError):
            logger.info("%s", error)
            return
        raise error


def _free_nbytes(folder: Path) -> int:
    """Returns the bytes that this user may still write to the disk of a folder, or of the next one
    above it that exists."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _nbytes_in(folder: Path) -> int:
    """Returns the bytes of the snapshots of all learners."""
    nbytes = 0
    for path in folder.glob("*/*/*.bin"):
        with contextlib.suppress(FileNotFoundError):  # another learner replaces its own
            nbytes += path.stat().st_size
    return nbytes
