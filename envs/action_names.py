"""Names of actions, for displays: an environment's own, or those of gymnasium's documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium.vector import VectorEnv

MEANINGS = "get_action_meanings"  # a method of Atari's environments, which others have adopted
DOCUMENTED = {
    "Acrobot": ("-1", "0", "+1"),
    "BipedalWalker": ("hip 1", "knee 1", "hip 2", "knee 2"),
    "CartPole": ("left", "right"),
    "LunarLander": ("nothing", "left engine", "main engine", "right engine"),
    "LunarLanderContinuous": ("main engine", "side engines"),
    "MountainCar": ("left", "nothing", "right"),
    "Pendulum": ("torque",),
}


def action_names(env_id: str, vector: VectorEnv, count: int) -> tuple[str, ...]:
    """Returns the names of the choices of an action, or of its numbers.

    Args:
        env_id: id of the environment.
        vector: the environments.
        count: number of choices, or of the action's numbers.

    Returns:
        ``count`` names; empty if none are known.
    """
    own: Any = getattr(vector, MEANINGS, None)
    envs: Sequence[Any] = getattr(vector, "envs", ())
    if own is None and envs:
        own = getattr(envs[0].unwrapped, MEANINGS, None)
    if callable(own):
        found = tuple(str(name) for name in own())
    else:
        name = env_id.rpartition(":")[2].rpartition("-v")[0]
        found = DOCUMENTED.get(name, ())
        if len(found) != count:  # of its continuous form
            found = DOCUMENTED.get(f"{name}Continuous", ())
    return found if len(found) == count else ()
