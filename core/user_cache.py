"""The cache folder of the user: small JSON files that save time, and that a run can do without.

Nothing fails because of it: a folder that cannot be written leaves every call without a cache.
`timed_once` keeps times that were measured on this machine, one file for each description of what
was timed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import penstock
from penstock.core.files import try_lock, write_atomic
from penstock.core.machine import processor, version_of

T = TypeVar("T")

LOCK = "lock"
# The longest wait for the lock; a holder that is suspended must not delay a run for longer.
WAIT_S = 5.0
POLL_S = 0.02
# The most files of a folder; each change of a task, of torch or of Penstock adds some.
KEPT = 64


def cache_folder() -> Path | None:
    """Returns ``$XDG_CACHE_HOME/penstock``, by default ``~/.cache/penstock``; None without a home.

    A relative path in the variable is ignored, as the XDG Base Directory Specification 0.8 demands.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "penstock"
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError:  # the user has no home
        return None


def read_cached(path: Path) -> Any:
    """Returns the JSON value in a file of `write_cached`.

    None if there is no file, or half of one after the machine has failed.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_cached(path: Path, value: Any) -> None:
    """Replace a file atomically, if it can be written. Call it while its folder is `locked`."""
    with suppress(OSError):
        write_atomic(path, json.dumps(value, indent=1) + "\n")


def timed_once(
    name: str,
    about: dict[str, Any],
    read: Callable[[Any], T | None],
    measure: Callable[[], list[list[Any]]],
) -> tuple[T, bool]:
    """Measure the times of a task, unless an earlier process on this machine has done so.

    Processes that start together measure once: the others wait for the file. One that has waited
    for `WAIT_S` measures too.

    Args:
        name: the name of a folder in `cache_folder`.
        about: what the times belong to, as JSON, with a "task" in words; `own_machine` is added.
        read: makes the times of a list of entries; None if they are not sound.
        measure: measures the entries, which are JSON values.

    Returns:
        The times, and whether they are those of an earlier process.
    """
    about = {**about, **own_machine()}
    folder = cache_folder()
    folder = folder and folder / name
    path = folder and folder / f"{digest(json.dumps(about, sort_keys=True))}.json"

    def read_times() -> T | None:
        value = read_cached(path) if path else None
        return None if value is None else read(value["seconds"])

    # Without a lock first: usually the file is there.
    times = read_times()
    if times is not None:
        return times, True

    with locked(folder) as is_locked:
        # The process that held the lock until now may have written the file.
        times = read_times()
        if times is not None:
            return times, True

        entries = measure()
        if is_locked and folder and path:
            for old_path in _by_age(folder)[KEPT - 1 :]:
                old_path.unlink()
            write_cached(path, {"about": about, "seconds": entries})

    times = read(entries)
    assert times is not None, entries
    return times, False


def cached_times(name: str) -> Iterator[tuple[Path, str, Any]]:
    """Yield the files of `timed_once` in a folder that are of this machine, the newest first.

    Each comes as its path, the task in words and the entries.
    """
    folder = cache_folder()
    if folder is None:
        return

    machine = own_machine().items()
    for path in _by_age(folder / name):
        value = read_cached(path)
        if value is not None and machine <= value["about"].items():
            yield path, value["about"]["task"], value["seconds"]


def _by_age(folder: Path) -> list[Path]:
    """Returns the files of `timed_once` in ``folder``, the newest first."""
    dated_paths: list[tuple[int, Path]] = []
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # another process has deleted it
            dated_paths.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(dated_paths, reverse=True)]


def own_machine() -> dict[str, Any]:
    """Returns processor and versions, on which every time depends."""
    this_processor = processor()
    return {
        "processor": this_processor.model,
        "flags": digest(" ".join(sorted(this_processor.flags))),
        "torch": version_of("torch"),
        "penstock": penstock.__version__,
    }


def digest(text: str) -> str:
    """Returns a short name for a text: 20 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@contextmanager
def locked(folder: Path | None) -> Iterator[bool]:
    """Make ``folder`` and lock it for the ``with`` block, among the processes of all its hosts.

    The kernel releases the lock of a process that dies.

    Yields:
        Whether it is locked. It is not if it cannot be made or locked, or if another process keeps
        the lock for longer than `WAIT_S`.
    """
    # The lock is on a file in the folder.
    descriptor = None
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    try:
        yield descriptor is not None and _lock(descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Lock an open file, waiting at most `WAIT_S`; returns whether it is locked."""
    deadline_s = time.monotonic() + WAIT_S
    try:
        while not try_lock(descriptor):
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(POLL_S)
    except OSError:  # a file system without locks
        return False
    return True
