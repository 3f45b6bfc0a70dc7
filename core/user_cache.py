"""The cache folder of the user: small JSON files that save time, and that a run can do without.

Nothing fails because of it: a folder that cannot be written leaves every call without a cache. A
file is data from outside: its reader checks all of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.core.files import write_atomic

LOCK = "lock"
WAIT_S = 5.0  # for the lock; a holder that is suspended must not delay a run for longer
POLL_S = 0.02
MOST_NBYTES = 1 << 16  # of a file that is read


def cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/penstock``, by default ``~/.cache/penstock``. None without a home.

    A relative path in the variable is ignored, as the XDG Base Directory Specification 0.8 demands.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "penstock"
    except RuntimeError:  # the user has no home
        return None


def read_cached(path: Path) -> Any:
    """The JSON value of a file; None where it cannot be read, is none, or is too large."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_NBYTES + 1)
        return None if len(raw) > MOST_NBYTES else json.loads(raw)
    except (OSError, ValueError, RecursionError):
        return None


def write_cached(path: Path, value: Any) -> bool:
    """Replace a file atomically, while its folder is `locked`; False where it cannot be written."""
    try:
        write_atomic(path, json.dumps(value, indent=1) + "\n")
    except OSError:
        return False
    return True


def by_age(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """The regular files of ``folder`` with names that ``name`` matches fully, newest first."""
    found: list[tuple[int, Path]] = []
    with suppress(OSError):  # there is no such folder
        for path in folder.iterdir():
            if name.fullmatch(path.name):
                with suppress(OSError):  # another process has deleted it
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):
                        found.append((status.st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def delete_oldest(folder: Path, name: re.Pattern[str], kept: int) -> None:
    """Delete the files that `by_age` returns, except the newest ``kept``. The caller holds the lock
    of the folder (`locked`). Links, folders and files of other names stay."""
    for path in by_age(folder, name)[kept:]:
        with suppress(OSError):
            path.unlink()


@contextmanager
def locked(folder: Path | None) -> Iterator[bool]:
    """Make ``folder`` and lock it among the processes of all hosts that have it.

    Yields whether it is locked: False where it cannot be made or locked, or where another process
    keeps it for longer than `WAIT_S`. The kernel releases the lock of a process that dies.
    """
    descriptor = _open(folder)
    try:
        yield descriptor is not None and _lock(descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open(folder: Path | None) -> int | None:
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _lock(descriptor: int) -> bool:
    ends_s = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends_s:
                return False
            time.sleep(POLL_S)
        except OSError:  # a file system without locks
            return False
        else:
            return True
