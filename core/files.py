"""Files of a run: readable by this user alone, as they hold its config and what it learned, and
written whole or not at all."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any


def open_private(path: str | Path, flags: int) -> int:
    """An opener for `open`: a file that is made gets mode 0600, whatever the umask allows; one that
    exists keeps its mode."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def write_atomic(path: Path, text: str) -> None:
    """Replace a file in one step: a reader finds the old or the new one, whole. Only this user may
    read it."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", opener=open_private) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def without_nan(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON cannot say."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
