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

TEXT_NBYTES = 4 << 20  # of a summary, of versions
CONFIG_NBYTES = 256 << 10  # of a run's config; the YAML of so many bytes is parsed in 5 seconds

DAMAGE = (
    *(OSError, LookupError, ArithmeticError, AttributeError, MemoryError, RecursionError),
    *(TypeError, ValueError),
)
"""What reading a file with damaged or hostile content may raise."""


def open_private(path: str | Path, flags: int) -> int:
    """An opener for `open`: a new file gets mode 0600 under any umask.

    An existing one keeps its mode.
    """
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, also through a link. Raises OSError for anything else:
    opening a FIFO waits for its writer, and a device may have no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path, most: int = TEXT_NBYTES) -> str:
    """The text of a regular file. Raises OSError as `open_regular`, and for more than ``most``
    bytes; UnicodeDecodeError if it is not UTF-8."""
    with open_regular(path) as file:
        found = file.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return found.decode()


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
    """Lock an open file or folder; False where another process holds it. The kernel releases the
    lock when all processes that have the descriptor have closed it or ended. Raises OSError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def without_nan(value: Any) -> Any:
    """``value`` with null for NaN and infinity, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
