"""Names of actions, for displays: an environment's own, or those of gymnasium's documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium.vector import VectorEnv

# A method of Atari's environments, which others have adopted.
MEANINGS = "get_action_meanings"
# The names in gymnasium's documentation, by the name of the environment.
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
    # The environment's own method comes first, also of one that the vector steps.
    get_meanings: Any = getattr(vector, MEANINGS, None)
    envs: Sequence[Any] = getattr(vector, "envs", ())
    if get_meanings is None and envs:
        get_meanings = getattr(envs[0].unwrapped, MEANINGS, None)

    if callable(get_meanings):
        names = tuple(str(name) for name in get_meanings())
    else:
        env_name = env_id.rpartition(":")[2].rpartition("-v")[0]
        names = DOCUMENTED.get(env_name, ())
        # The environment may be set to continuous actions.
        if len(names) != count:
            names = DOCUMENTED.get(f"{env_name}Continuous", ())
    return names if len(names) == count else ()
