"""The folder of a run, which one run writes to at a time.

It is held by a lock that the kernel releases when its holders have died, however they died.
`core.runtime_folder` makes the folder for the sockets of the run's processes.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from penstock.configs.errors import UserError
from penstock.core.files import try_lock

Resume = Literal["no", "auto", "must"]

SUPERVISOR_FILE = "supervisor.json"  # exists while the run does
# The file in the folder of each checkpoint.
CHECKPOINT = "checkpoint.safetensors"
# The name of a folder that holds runs until they are measured begins with it.
TEMPORARY = "bench-penstock-"
# Files that a run replaces.
REPLACED = ("config.yaml", "summary.json", "versions.json")


@contextmanager
def run_folder(path: Path, resume: Resume) -> Iterator[int]:
    """Make and lock the folder of a run for the ``with`` block.

    Yields:
        The descriptor that holds the lock. The learner inherits it, so that the folder stays locked
        until the learner has ended too.

    Raises:
        UserError: ``resume`` does not allow a run in this folder, another run holds it, or it
            cannot be made.
    """
    check(path, resume)

    try:
        for folder in (path, path / "logs"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(
            f"the run folder {path} cannot be made: {error.strerror}; set run.dir to another place"
        ) from error

    try:
        _lock(path, lock)
        yield lock
    finally:
        os.close(lock)


def _lock(path: Path, descriptor: int) -> None:
    """Lock an open run folder. Raises UserError if it has no locks, or another run holds it."""
    try:
        is_locked = try_lock(descriptor)
    except OSError as error:
        raise UserError(
            f"the run folder {path} cannot be locked: {error.strerror}; set run.dir to a file "
            "system that has locks"
        ) from error
    if not is_locked:
        raise UserError(f"{path} is in use by a run that has not ended; wait for it, or stop it")


class RunFolderGuard:
    """The folder that a run has locked.

    A user may remove it, and the next run may make another one at its path. The first run must not
    write to that.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._stat = os.stat(path) if path.exists() else None

    def is_in_place(self) -> bool:
        """Returns whether the folder is still at its path.

        It is compared by its inode, which the kernel gives to no other folder, as the lock keeps a
        descriptor of it.
        """
        if self._stat is None:
            return True
        try:
            return os.path.samestat(os.stat(self._path), self._stat)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a disk that does not answer tells nothing
            return True

    def check(self) -> None:
        """Raise UserError if the folder is not at its path."""
        if not self.is_in_place():
            raise UserError(
                f"{self._path} was removed or replaced while its run went on, so the run ends "
                "without saving there; give every run a folder of its own with run.dir"
            )


def is_temporary(path: Path) -> bool:
    """Returns whether a run's folder is removed after the run, as that of a benchmark is."""
    return path.parent.name.startswith(TEMPORARY)


def in_use(path: Path) -> bool:
    """Returns whether a run holds this folder. One that cannot be opened is not in use."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def default_run_dir(name: str) -> Path:
    """Returns ``runs/<name>-<time>``, with a number from 2 on if that exists already."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = base
    number = 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def check(path: Path, resume: Resume) -> None:
    """Raise UserError if the folder holds a run that ``resume`` would lose, or none to resume."""
    if resume == "no" and _holds_a_run(path):
        raise UserError(
            f"{path} already holds a run; resume it with --resume auto, or set run.dir to another "
            "folder"
        )
    if resume == "must" and not has_checkpoint(path):
        raise UserError(
            f"{path} has no checkpoint to resume from; use --resume auto to start where there is "
            "none, or set run.dir to the folder of the run"
        )


def check_not_replaced(path: Path) -> None:
    """Raise UserError if the folder holds files of another program that a run would replace."""
    # A folder with one of these is of a run.
    if any(os.path.lexists(path / name) for name in ("metrics.jsonl", "checkpoints")):
        return

    for name in REPLACED:
        if os.path.lexists(path / name):
            raise UserError(
                f"{path / name} is not of a run, as {path} holds no metrics.jsonl, and a run would "
                "replace it; set run.dir to another folder"
            )


def has_checkpoint(path: Path) -> bool:
    """Returns whether a run has saved a checkpoint to resume from, damaged or not.

    The folder of a checkpoint alone is none: it is made before the file, which a crash or a full
    disk may prevent.
    """
    folder = path / "checkpoints"
    return any(any(folder.glob(f"{name}/{CHECKPOINT}")) for name in ("last", "step-*"))


def _holds_a_run(path: Path) -> bool:
    """Returns whether a new run in this folder would lose something of an earlier one.

    A run that has ended before its first metrics loses nothing, and may be repeated.
    """
    metrics = path / "metrics.jsonl"
    if not metrics.exists():
        return (path / "checkpoints").exists() or (path / "config.yaml").exists()
    return (path / "checkpoints").exists() or metrics.stat().st_size > 0
