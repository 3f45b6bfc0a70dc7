"""Observations that are given in memory which is written over: caught, not stored wrong.

An environment that writes each observation into the same array has overwritten obs by the time
that next_obs is there. Both then lie at one address, which shows at the first step. That they
overlap is no mistake: stacks of frames may be views of one history.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.replay.errors import ReplayError


def refuse_one_memory(obs: Any, next_obs: Any, name: str = "obs") -> None:
    """Raise ReplayError where an array of ``obs`` is its counterpart too, naming the column."""
    if isinstance(obs, np.ndarray) and isinstance(next_obs, np.ndarray):
        if obs is next_obs or _address(obs) == _address(next_obs):
            raise ReplayError(
                f"{name} and next_{name} are the same memory, so the environment has written over "
                "the first of them; give add a copy of it that was made before the step"
            )
    elif isinstance(obs, Mapping) and isinstance(next_obs, Mapping):
        for key in obs.keys() & next_obs.keys():
            refuse_one_memory(obs[key], next_obs[key], f"{name}.{key}")
    elif isinstance(obs, tuple) and isinstance(next_obs, tuple):
        for i, (before, after) in enumerate(zip(obs, next_obs, strict=False)):
            refuse_one_memory(before, after, f"{name}.{i}")


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])
