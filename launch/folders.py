"""The two folders of a run: what it leaves to the user, and what only its processes need.

Both are held by a lock that the kernel lets go when its holders have died, however they died. So a
run folder is written by one run at a time, a runtime folder without a holder is known to be stale,
and `systemd-tmpfiles`, which respects such locks, does not clean up under a long run. The runtime
folder is not put into XDG_RUNTIME_DIR: logging out removes that, and runs outlast logins.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from penstock.configs.errors import UserError

Resume = Literal["no", "auto", "must"]

RUNTIME_PREFIX = "penstock-"
RUNTIME_PATH_NBYTES = 80  # a Unix socket's path has 107; its name comes on top


@contextmanager
def run_folder(path: Path, resume: Resume) -> Iterator[int]:
    """Make and lock the folder of a run; gives the lock's descriptor for the learner to hold too.

    Raises UserError where it holds a run already and ``resume`` does not allow for it.
    """
    check(path, resume)
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the run folder {path} cannot be made: {error.strerror}; set run.dir to another place"
        ) from error
    lock = _lock(path)
    if lock is None:
        raise UserError(f"{path} is in use by a run that has not ended; wait for it, or stop it")
    try:
        yield lock
    finally:
        os.close(lock)


def in_use(path: Path) -> bool:
    """Whether a run holds this folder."""
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
    """``runs/<name>-<time>``, not yet taken."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = base, 1
    while path.exists():
        path, n = base.with_name(f"{base.name}-{n + 1}"), n + 1
    return path


@contextmanager
def runtime_folder() -> Iterator[Path]:
    """A folder of mode 0700 with a short path, for sockets; it is removed in the end."""
    places = [Path(tempfile.gettempdir()), Path("/tmp")]
    for place in places:
        sweep(place)
    hidden, lock = _make(places)
    path = hidden.with_name(hidden.name[1:])
    hidden.rename(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep(place: Path) -> None:
    """Remove runtime folders in ``place`` whose supervisor was killed."""
    for path in place.glob(f"{RUNTIME_PREFIX}*"):
        with suppress(OSError):
            if path.stat().st_uid == os.getuid() and (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _make(places: list[Path]) -> tuple[Path, int]:
    """A new folder, locked before it has the name by which `sweep` would find it."""
    for place in places:
        if len(os.fsencode(place)) + len(RUNTIME_PREFIX) + 8 > RUNTIME_PATH_NBYTES:
            continue
        with suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix="." + RUNTIME_PREFIX, dir=place))
            lock = _lock(path)
            assert lock is not None, "a folder that was just made has no holder"
            return path, lock
    raise UserError(
        f"no folder for sockets can be made in {places[0]}; set TMPDIR to a writable folder with a "
        "short path"
    )


def _lock(path: Path) -> int | None:
    """Lock a folder; None where another process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def check(path: Path, resume: Resume) -> None:
    """Raise UserError where the folder does not allow for ``resume``."""
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


def has_checkpoint(path: Path) -> bool:
    """Whether a run has saved a checkpoint to go on from, damaged or not."""
    folder = path / "checkpoints"
    return (folder / "last").exists() or any(folder.glob("step-*"))


def _holds_a_run(path: Path) -> bool:
    """Whether anything would be lost. A run that ended before it began may be tried again."""
    metrics = path / "metrics.jsonl"
    if not metrics.exists():
        return (path / "checkpoints").exists() or (path / "config.yaml").exists()
    return (path / "checkpoints").exists() or metrics.stat().st_size > 0
