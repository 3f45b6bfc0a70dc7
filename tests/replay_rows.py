"""Steps to add to a replay in tests."""

from __future__ import annotations

from typing import Any

import numpy as np


def stacks(count: int, envs: int = 1, frame: int = 8, seed: int = 0) -> np.ndarray[Any, Any]:
    """Returns stacks of consecutive random frames, ``[count, envs, 4, frame]``."""
    frames = np.random.default_rng(seed).integers(0, 255, (count + 3, envs, frame), np.uint8)
    return np.ascontiguousarray([frames[i : i + 4].swapaxes(0, 1) for i in range(count)])


def row(obs: Any, after: Any, envs: int = 1, **changes: Any) -> dict[str, Any]:
    """Returns the arguments of `Replay.add` for one step."""
    flags = np.zeros(envs, bool)
    return {
        "obs": obs, "next_obs": after, "action": np.arange(envs), "reward": np.zeros(envs),
        "terminated": flags, "truncated": flags,
    } | changes  # fmt: skip
