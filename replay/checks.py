"""Validation of numbers that a user gives to a replay buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.errors import ReplayError
from penstock.replay.sharing import WRITER_SLOTS
from penstock.replay.steps import AUTORESETS

WHOLE = (int, np.integer)  # a union would be made anew at each use


def whole(name: str, value: Any) -> int:
    """``value`` as an int of at least 1; 1e6 is accepted. Raises ReplayError for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int | np.integer) or value < 1:
        raise ReplayError(f"{name} {value!r} must be a whole number and at least 1")
    return int(value)


def slots_in_hand(given: int | None, writers: int, *, shared: bool) -> int:
    """Slots that ``writers`` hold together: ``given``, by default one each, two if ``shared``."""
    each = WRITER_SLOTS if shared else 1
    return whole("in_hand", writers * each if given is None else given)


def check_numbers(capacity: int, discount: float, envs: int, autoreset: str) -> None:
    """Raise ReplayError for options out of range."""
    if capacity < envs:
        raise ReplayError(
            f"capacity {capacity} is below the {envs} rows of one step; give at least that"
        )
    if not 0 <= discount <= 1:
        raise ReplayError(f"discount {discount} must lie between 0 and 1")
    if autoreset not in AUTORESETS:
        raise ReplayError(f"autoreset {autoreset!r} must be one of {', '.join(AUTORESETS)}")


def is_count(value: Any) -> bool:
    """Whether ``value`` is a whole number of at least 1."""
    return isinstance(value, WHOLE) and bool(value > 0)


def cannot_sample(count: int, stored: int, capacity: int) -> ReplayError:
    """The error for a batch of ``count`` rows that cannot be drawn."""
    if not is_count(count):
        return ReplayError(f"batch size {count!r} must be a whole number and at least 1")
    if count > capacity:
        return ReplayError(
            f"a batch of {count} is larger than the capacity of {capacity}; lower one or raise the "
            "other"
        )
    return ReplayError(
        f"a batch of {count} needs as many rows, and {stored} rows are stored; add more"
    )


def check_priorities(
    keys: npt.ArrayLike, priorities: npt.ArrayLike
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Keys ``[n]`` int64 and magnitudes of priorities ``[n]`` float64.

    Raises ReplayError where the lengths differ, or a priority is not finite.
    """
    names = np.asarray(keys, np.int64).reshape(-1)
    values = np.abs(np.asarray(priorities, np.float64)).reshape(-1)
    if names.shape != values.shape:
        raise ReplayError(f"{len(values)} priorities came for {len(names)} keys; give one each")
    # A byte search takes a tenth of the time that `all` needs to start.
    if 0 in (finite := np.isfinite(values)).tobytes():
        wrong = int(np.argmin(finite))
        raise ReplayError(
            f"priority {values[wrong]} at position {wrong} must be finite; look for what made it "
            "so before it reaches the network"
        )
    return names, values
