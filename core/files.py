"""Files of a run: readable by this user only, and replaced as a whole.

They hold the run's config and what it learned.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

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
