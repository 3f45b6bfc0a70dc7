"""The instances that an environment is made of, and what is refused of them.

An environment must have its own instances (`claim`), and none of them may keep running statistics,
which end with it (`refuse_statistics`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import gymnasium
from gymnasium import wrappers
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import vector as vector_wrappers

from penstock.configs.errors import UserError

SAME_INSTANCE = (
    "its function returned the same instance for two environments, so that each would play on in "
    "the other's episode; return a new one from every call"
)
NORMALIZES = {
    "model.normalize_observations=true": (
        wrappers.NormalizeObservation,
        vector_wrappers.NormalizeObservation,
    ),
    "algo.normalize_rewards=true (or algo.reward_scale)": (
        wrappers.NormalizeReward,
        vector_wrappers.NormalizeReward,
    ),
}
"""The options to set instead of gymnasium's wrappers."""

_open: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The instances of all open environments of this process, by their `id`."""


def parts_of(env: Any, kind: Any = gymnasium.Env | VectorEnv) -> dict[int, Any]:
    """Returns an environment and those within it, by their `id`.

    Within it are what its wrappers go around, and the members of a vector.

    Args:
        env: a single environment or a vector.
        kind: the class or classes of what is looked for within it.
    """
    parts: dict[int, Any] = {}
    waiting = [env]
    while waiting:
        part = waiting.pop()
        if id(part) in parts:
            continue

        parts[id(part)] = part
        for value in vars(part).values():
            members = value if isinstance(value, list | tuple) else [value]
            if members and isinstance(members[0], kind):
                waiting += [member for member in members if isinstance(member, kind)]
    return parts


def share_instance(envs: Iterable[Any]) -> bool:
    """Returns whether two single environments are the same instance, or have one in common."""
    ids = [part_id for env in envs for part_id in parts_of(env, gymnasium.Env)]
    return len(ids) > len(set(ids))


def members_of(vector: VectorEnv) -> list[Any]:
    """Returns the single environments that a vector steps; an empty list for another form."""
    envs = getattr(vector.unwrapped, "envs", None)
    if not isinstance(envs, list | tuple):
        return []
    return [env for env in envs if isinstance(env, gymnasium.Env)]


def claim(purpose: str, vector: VectorEnv) -> None:
    """Note that a vector is open, until `release`.

    Raises:
        UserError: if two of its environments have an instance in common, or it has one in common
            with another vector that is open. The sentence begins with ``purpose``.
    """
    parts = parts_of(vector)
    if share_instance(members_of(vector)) or any(part_id in _open for part_id in parts):
        raise UserError(f"{purpose}: {SAME_INSTANCE}")
    _open.update(parts)


def release(vector: VectorEnv) -> None:
    """Note that a vector is closed."""
    for part_id in parts_of(vector):
        _open.pop(part_id, None)


def refuse_statistics(purpose: str, env: Any) -> None:
    """Raise UserError if gymnasium's wrappers that normalise are within an environment.

    They are accepted if their statistics are fixed (``update_running_mean``).

    Args:
        purpose: the environment, with which the sentence begins.
        env: a single environment or a vector.
    """
    updating_parts = [
        part for part in parts_of(env).values() if getattr(part, "update_running_mean", False)
    ]
    # The option to set instead of each wrapper, by the wrapper's name.
    options = {
        type(part).__name__: option
        for option, kinds in NORMALIZES.items()
        for part in updating_parts
        if isinstance(part, kinds)
    }
    if options:
        raise UserError(
            f"{purpose} has gymnasium's {' and '.join(options)}, whose statistics belong to one "
            "instance and are saved nowhere, so that a policy would see other numbers wherever it "
            f"plays; leave it out, and set {' and '.join(options.values())}"
        )
