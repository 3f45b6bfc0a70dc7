"""A folder of this process's own, which no process that ended leaves behind for long.

The folder, which holds one socket, is locked while its owner lives; the kernel releases the lock
when it ends, however it ends. Whoever makes the next one removes those that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "penstock-replay-"
SOCKET = "store"


class OwnFolder:
    """``path``: a new folder of mode 0700 in the system's place for such, until `remove`."""

    def __init__(self) -> None:
        remove_abandoned()
        while (held := _make()) is None:  # another removed it before it was locked
            pass
        self.path, self._fd = held

    def remove(self) -> None:
        _remove(self.path)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def remove_abandoned() -> None:
    """Remove the folders of this user whose owners have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # another user's, or it is gone
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path)
        except OSError:  # its owner lives
            pass
        finally:
            os.close(fd)


def _remove(path: Path) -> None:
    """The socket, and the folder if that was all: what else has such a name is not ours."""
    with suppress(OSError):
        if (path / SOCKET).is_socket():
            (path / SOCKET).unlink()
        path.rmdir()


def _make() -> tuple[Path, int] | None:
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(fd, fcntl.LOCK_EX)
    if path.is_dir():
        return path, fd
    os.close(fd)
    return None
