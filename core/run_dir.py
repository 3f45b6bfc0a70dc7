"""The two folders of a run: the run folder for the user, and the runtime folder of its processes.

Both are held by a lock that the kernel releases when its holders have died, however they died. So a
run folder is written by one run at a time, a runtime folder without a holder is stale, and
`systemd-tmpfiles`, which respects such locks, does not clean up during a long run. The runtime
folder is not put into XDG_RUNTIME_DIR: logging out removes that, and runs outlast logins.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from penstock.configs.errors import UserError

Resume = Literal["no", "auto", "must"]

SUPERVISOR_FILE = "supervisor.json"  # exists while the run does
RUNTIME_PREFIX = "penstock-run-"
RUNTIME_RANDOM_NBYTES = 10
RUNTIME_NAME = re.compile(f"{RUNTIME_PREFIX}[0-9a-f]{{{2 * RUNTIME_RANDOM_NBYTES}}}")
RUNTIME_PATH_NBYTES = 80  # a Unix socket's path has 107; its name comes on top
CHECKPOINT = "checkpoint.safetensors"  # in a folder of each checkpoint
REPLACED = ("config.yaml", "summary.json", "versions.json")  # files that a run replaces
MARKER = ".penstock-runtime-folder"
MARKER_TEXT = (
    "Made by penstock for the sockets of one run. When no process locks this folder, the next run "
    "removes it with all files in it.\n"
    "name {name}\ndevice {device}\ninode {inode}\n"
)


@contextmanager
def run_folder(path: Path, resume: Resume) -> Iterator[int]:
    """Make and lock the folder of a run; yields the lock's descriptor, which the learner keeps too.

    Raises UserError where it holds a run already and ``resume`` does not allow that.
    """
    check(path, resume)
    try:
        for folder in (path, path / "logs"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the run folder {path} cannot be made: {error.strerror}; set run.dir to another place"
        ) from error
    try:
        lock = _lock(path)
    except OSError as error:
        raise UserError(
            f"the run folder {path} cannot be locked: {error.strerror}; set run.dir to a file "
            "system that has locks"
        ) from error
    if lock is None:
        raise UserError(f"{path} is in use by a run that has not ended; wait for it, or stop it")
    try:
        yield lock
    finally:
        os.close(lock)


class HeldFolder:
    """The folder that a run has locked. A user may remove it, and the next run make another one at
    its path, which this one must not write to."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._stat = os.stat(path) if path.exists() else None

    def is_in_place(self) -> bool:
        """Whether it is still at its path. The kernel gives its inode to no other folder, as the
        lock holds a descriptor."""
        if self._stat is None:
            return True
        try:
            return os.path.samestat(os.stat(self._path), self._stat)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a disk that does not answer tells nothing
            return True

    def check(self) -> None:
        """Raise UserError where it is not at its path."""
        if not self.is_in_place():
            raise UserError(
                f"{self._path} was removed or replaced while its run went on, so the run ends "
                "without saving there; give every run a folder of its own with run.dir"
            )


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
    """Make a folder of mode 0700 with a short path, for sockets; it is removed at the end."""
    places = [Path(tempfile.gettempdir()), Path("/tmp")]
    for place in places:
        sweep(place)
    path, descriptor = _make(places)
    try:
        yield path
    finally:
        _remove(path, descriptor)
        os.close(descriptor)


def sweep(place: Path) -> None:
    """Remove the runtime folders in ``place`` whose supervisor was killed.

    A folder is removed only if it is a directory of this user with mode 0700, has a name as `_make`
    gives it, holds the marker that `_make` wrote into that very folder, and is not locked. Within
    it only what is not a folder is removed.
    """
    with suppress(OSError):
        for path in [path for path in place.iterdir() if RUNTIME_NAME.fullmatch(path.name)]:
            with suppress(OSError):
                _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        about = os.fstat(descriptor)
        ours = about.st_uid == os.getuid() and stat.S_IMODE(about.st_mode) == 0o700
        if ours and _marked(path.name, descriptor) and _try_lock(descriptor):
            _remove(path, descriptor)
    finally:
        os.close(descriptor)


def _marker(name: str, descriptor: int) -> bytes:
    """The content of the marker of a runtime folder: it matches this folder and no copy of it."""
    about = os.fstat(descriptor)
    return MARKER_TEXT.format(name=name, device=about.st_dev, inode=about.st_ino).encode()


def _marked(name: str, descriptor: int) -> bool:
    expected = _marker(name, descriptor)
    marker = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=descriptor)
    try:
        return os.read(marker, len(expected) + 1) == expected
    finally:
        os.close(marker)


def _remove(path: Path, descriptor: int) -> None:
    """Remove the files and sockets in a runtime folder, then the folder.

    Not if another folder has been moved to ``path``. The marker is removed last, so that an
    interrupted removal is resumed.
    """
    with suppress(OSError):
        for name in sorted(os.listdir(descriptor), key=MARKER.__eq__):
            if not stat.S_ISDIR(os.lstat(name, dir_fd=descriptor).st_mode):
                os.unlink(name, dir_fd=descriptor)
        if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
            path.rmdir()  # only an empty folder can be removed so


def _make(places: list[Path]) -> tuple[Path, int]:
    """Make a runtime folder; returns it with the descriptor that locks it.

    It is locked and marked before it gets the name by which `sweep` would find it.
    """
    name = RUNTIME_PREFIX + secrets.token_hex(RUNTIME_RANDOM_NBYTES)
    for place in places:
        path = place / name
        if len(os.fsencode(path)) > RUNTIME_PATH_NBYTES:
            continue
        with suppress(OSError):
            hidden = place / f".{name}"
            hidden.mkdir(mode=0o700)
            descriptor = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            _try_lock(descriptor)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            marker = os.open(MARKER, flags, 0o600, dir_fd=descriptor)
            try:
                os.write(marker, _marker(name, descriptor))
            finally:
                os.close(marker)
            hidden.rename(path)
            return path, descriptor
    raise UserError(
        f"no folder for sockets can be made in {places[0]}; set TMPDIR to a writable folder with a "
        "short path"
    )


def _try_lock(descriptor: int) -> bool:
    """Lock an open folder; False where another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(path: Path) -> int | None:
    """Lock a folder; None where another process holds it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    locked = False
    try:
        locked = _try_lock(descriptor)
    finally:
        if not locked:
            os.close(descriptor)
    return descriptor if locked else None


def check(path: Path, resume: Resume) -> None:
    """Raise UserError where the folder does not allow ``resume``."""
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
    """Raise UserError where the folder holds files of another program that a run would replace."""
    if any(os.path.lexists(path / name) for name in ("metrics.jsonl", "checkpoints")):
        return
    for name in REPLACED:
        if os.path.lexists(path / name):
            raise UserError(
                f"{path / name} is not of a run, as {path} holds no metrics.jsonl, and a run would "
                "replace it; set run.dir to another folder"
            )


def has_checkpoint(path: Path) -> bool:
    """Whether a run has saved a checkpoint to resume from, damaged or not. A folder alone is none:
    it is made before the file, which a crash or a full disk may prevent."""
    folder = path / "checkpoints"
    return any(any(folder.glob(f"{name}/{CHECKPOINT}")) for name in ("last", "step-*"))


def _holds_a_run(path: Path) -> bool:
    """Whether anything would be lost. A run that ended before it began may be repeated."""
    metrics = path / "metrics.jsonl"
    if not metrics.exists():
        return (path / "checkpoints").exists() or (path / "config.yaml").exists()
    return (path / "checkpoints").exists() or metrics.stat().st_size > 0
