"""A private folder of this process; folders of processes that have ended are removed.

The folder holds one socket and a marker file. It is locked while its owner lives; the kernel
releases the lock when the owner ends, however it ends. A process that makes a new folder removes
those that are not locked. Nothing else is removed: no folder without the marker, and no other files
in one.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "penstock-replay-"
SOCKET = "store"
MARKER = ".penstock-replay-socket"
MARK = b"The folder of a replay's socket. Penstock removes it once the replay has ended.\n"
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnFolder:
    """A new folder ``path`` of mode 0700 in the system's temporary folder, until `remove`."""

    def __init__(self) -> None:
        remove_abandoned()
        while (held := _make()) is None:  # another removed it before it was locked
            pass
        self.path, self._fd = held

    def remove(self) -> None:
        if self._fd >= 0:
            _remove(self.path, self._fd)
            os.close(self._fd)
            self._fd = -1


def remove_abandoned() -> None:
    """Remove the folders of this user whose owners have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, FOLDER)
        except OSError:  # another user's, a link, or it is gone
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path, fd)
        except OSError:  # its owner lives
            pass
        finally:
            os.close(fd)


def _remove(path: Path, fd: int) -> None:
    """Remove the socket and the marker of a folder that has one, and the folder if it is empty
    then.
    """
    with suppress(OSError):
        marker = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        with os.fdopen(marker, "rb") as stream:
            ours = stream.read(len(MARK) + 1) == MARK and os.fstat(fd).st_uid == os.getuid()
        if not ours:
            return
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(SOCKET, dir_fd=fd, follow_symlinks=False).st_mode):
                os.unlink(SOCKET, dir_fd=fd)
        if os.listdir(fd) == [MARKER]:
            os.unlink(MARKER, dir_fd=fd)
            path.rmdir()


def _make() -> tuple[Path, int] | None:
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        fd = os.open(path, FOLDER)
    except FileNotFoundError:
        return None
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(MARKER, flags, 0o600, dir_fd=fd), "wb") as marker:
            marker.write(MARK)
    except FileNotFoundError:  # another removed it before it was locked
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        path.rmdir()
        raise
    return path, fd
