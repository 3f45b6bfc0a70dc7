"""What a user can get wrong about a replay buffer's numbers, as sentences."""

from __future__ import annotations

import numpy as np

from penstock.replay.errors import ReplayError
from penstock.replay.steps import AUTORESETS


def check_numbers(
    capacity: int, n_step: int, discount: float, envs: int, writers: int, autoreset: str
) -> None:
    """Raise ReplayError for what no replay can be made of."""
    for name, value in (
        ("capacity", capacity),
        ("n_step", n_step),
        ("envs", envs),
        ("writers", writers),
    ):
        if not isinstance(value, int | np.integer) or value < 1:
            raise ReplayError(f"{name} {value!r} must be a whole number and at least 1")
    if capacity < envs:
        raise ReplayError(
            f"capacity {capacity} is below the {envs} rows of one step; give at least that"
        )
    if not 0 <= discount <= 1:
        raise ReplayError(f"discount {discount} must lie between 0 and 1")
    if autoreset not in AUTORESETS:
        raise ReplayError(f"autoreset {autoreset!r} must be one of {', '.join(AUTORESETS)}")


def cannot_sample(count: int, stored: int, capacity: int) -> ReplayError:
    """Why a batch of so many rows cannot be had."""
    if not isinstance(count, int | np.integer) or count < 1:
        return ReplayError(f"a batch of {count!r} rows cannot be; give a whole number from 1")
    if count > capacity:
        return ReplayError(
            f"a batch of {count} is larger than the capacity of {capacity}; lower one or raise the "
            "other"
        )
    return ReplayError(f"a batch of {count} was asked for and {stored} rows are stored; add more")
