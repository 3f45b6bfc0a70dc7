"""Final observations that SAME_STEP environments hand over in `info`.

Two layouts exist: gymnasium's vector environments give an object array with an observation for each
environment that ended, and a mask ``_final_obs``; ale-py gives one dense array, without a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.columns import Array, Nest, checked, flatten
from penstock.replay.errors import ReplayError
from penstock.replay.layout import Layout

Flags = npt.NDArray[np.bool_]


def final_observations(
    layout: Layout, info: Mapping[str, Any] | None, done: Flags
) -> dict[str, Array]:
    """By column, ``[n, *shape]`` for the n environments that are done. Raises ReplayError."""
    ended = np.flatnonzero(done)
    finals = None if info is None else info.get("final_obs")
    if finals is None:
        raise ReplayError(
            f"environment {ended[0]} ended and autoreset is same_step, but info has no final_obs; "
            "pass info= as the environment gave it"
        )
    given = info.get("_final_obs") if info is not None else None
    if given is not None and not np.asarray(given)[ended].all():
        missing = ended[~np.asarray(given)[ended]][0]
        raise ReplayError(
            f"environment {missing} ended, but info['_final_obs'] says that it gave no final "
            "observation; pass the info of the same step"
        )
    if isinstance(finals, np.ndarray) and finals.dtype == object:
        parts = [_leaves(layout.obs, finals[env]) for env in ended]
        columns = {name: [part[name] for part in parts] for name in parts[0]}
    else:
        dense = _leaves(layout.obs, finals)
        columns = {name: [np.asarray(array)[env] for env in ended] for name, array in dense.items()}
    leaves = {o.name: o.leaf for o in layout.observations}
    return {
        name: np.concatenate([checked(leaves[name], value, 1, f"final_{name}") for value in values])
        for name, values in columns.items()
    }


def refuse_finals(info: Mapping[str, Any] | None, autoreset: str) -> None:
    """An episode ended elsewhere than in SAME_STEP: there can be no final observations."""
    if info is not None and info.get("final_obs") is not None:
        raise ReplayError(
            f"info has final_obs, which environments give that reset in the same step, but "
            f"autoreset is {autoreset}; make the replay with autoreset='same_step'"
        )


def _leaves(nest: Nest, value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    flatten(nest, value, "final_obs", found)
    return found
