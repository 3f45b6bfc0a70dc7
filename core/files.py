"""Files of a run: readable by this user only, and replaced as a whole.

They hold the run's config and what it learned.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

# The most bytes that are read of a summary, or of the versions of a run.
TEXT_NBYTES = 4 << 20
# The most bytes that are read of a run's config; the YAML of so many is parsed in 5 seconds.
CONFIG_NBYTES = 256 << 10

DAMAGE = (
    *(OSError, LookupError, ArithmeticError, AttributeError, MemoryError, RecursionError),
    *(TypeError, ValueError),
)
"""What reading a file with damaged or hostile content may raise."""


def open_private(path: str | Path, flags: int) -> int:
    """Open a file, as the ``opener`` of `open`: a new file gets mode 0600 under any umask.

    An existing file keeps its mode.
    """
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, also through a link.

    Raises OSError for anything else: opening a FIFO waits for its writer, and a device may have no
    end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path, most: int = TEXT_NBYTES) -> str:
    """Returns the text of a regular file.

    Raises:
        OSError: as of `open_regular`, or the file has more than ``most`` bytes.
        UnicodeDecodeError: the file is not UTF-8.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content.decode()


def is_trusted(uid: int) -> bool:
    """Whether files and processes of a user may be shown to this user: its own, and root's."""
    return uid in (os.geteuid(), 0)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file atomically: a reader finds the old or the new content, complete.

    Only this user may read it.
    """
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8", opener=open_private) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder without waiting; returns False if another process holds the lock.

    The kernel releases it when all processes that have the descriptor have closed it or ended.
    Raises OSError, for example for a file system without locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Write the names of the files in a folder to the disk."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def without_nan(value: Any) -> Any:
    """Returns a JSON value with None for NaN and infinity, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
