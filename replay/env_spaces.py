"""What a replay needs to know of a gymnasium environment."""

from __future__ import annotations

from typing import Any

from penstock.replay.errors import ReplayError
from penstock.replay.steps import Autoreset

MODES: dict[str, Autoreset] = {
    "NextStep": "next_step",
    "SameStep": "same_step",
    "Disabled": "none",
}


def columns_of(env: Any) -> dict[str, Any]:
    """Spaces of one environment, of a single or a vector environment."""
    spaces = {}
    for name, column in (("observation_space", "obs"), ("action_space", "action")):
        space = getattr(env, f"single_{name}", None) or getattr(env, name, None)
        if space is None:
            raise ReplayError(f"{env!r} has no {name}; pass a gymnasium environment")
        spaces[column] = space
    return spaces


def envs_of(env: Any) -> int:
    """Environments that one step steps."""
    return int(getattr(env, "num_envs", 1))


def resets_of(env: Any) -> Autoreset:
    """What resets it, as ``metadata`` says; a single environment is reset by whoever steps it."""
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    if mode is None:
        if hasattr(env, "num_envs"):
            raise ReplayError(
                "the vector environment does not say in metadata['autoreset_mode'] how it resets; "
                "give autoreset='next_step', 'same_step' or 'none'"
            )
        return "none"
    name = getattr(mode, "value", mode)
    if name not in MODES:
        raise ReplayError(f"autoreset mode {mode!r} is none of {list(MODES)}; give autoreset=")
    return MODES[name]
