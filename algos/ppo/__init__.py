"""PPO: an actor-critic that trains on each batch several times, within bounds."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """What is now in `algorithm`, for `algo.entry` and imports of before. Gone after 0.1."""
    moved = {} if name == "algorithm" else vars(import_module(f"{__name__}.algorithm"))
    if name.startswith("_") or name not in moved:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return moved[name]
