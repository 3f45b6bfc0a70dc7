"""Files that only this user may read: those of a run hold its whole config, and what it learned."""

from __future__ import annotations

import os
from pathlib import Path


def open_private(path: str | Path, flags: int) -> int:
    """An opener for `open`: a file that is made gets mode 0600, whatever the umask allows; one that
    exists keeps its mode."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
