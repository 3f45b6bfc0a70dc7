"""What playing an environment costs: time, and memory that is not given back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from penstock.envs.checking.checks import Checker

READINGS = 30  # of the memory
LEAK_NBYTES = 100  # a step: 1 GB in ten million


def cost(found: Checker, played: Iterator[object], steps: int) -> dict[str, Any]:
    """Figures of a play of up to `steps`, which this goes through: steps, episodes, and what a step
    takes and keeps. Adds to `found` where memory grows."""
    process, resident, count = psutil.Process(), [0] * 0, 0
    while taken := sum(1 for _ in islice(played, max(steps // READINGS, 1))):
        count += taken
        resident.append(process.memory_info().rss)
    grown = growth_nbytes(resident, count) if len(resident) > READINGS // 2 else 0.0
    if grown > LEAK_NBYTES:
        found.add(
            "memory",
            f"memory grows by {grown:,.0f} bytes a step, {grown * 1e7 / 1e9:,.0f} GB in ten "
            "million steps; do not keep what a step made, and let go of it in reset",
        )
    times_ms = np.array(found.times_s or [0.0]) * 1e3
    return {
        "steps": count,
        "episodes": len(found.returns),
        "step_ms": {
            "p50": float(np.percentile(times_ms, 50)),
            "p99": float(np.percentile(times_ms, 99)),
            "max": float(times_ms.max()),
        },
        "grown_nbytes": grown,
    }


def growth_nbytes(resident_nbytes: list[int], steps: int) -> float:
    """Bytes that a process grows by in a step, by its memory at equal distances over `steps`; 0
    where it does not grow all the time, as when a cache fills."""
    sizes: npt.NDArray[np.int64] = np.array(resident_nbytes[len(resident_nbytes) // 3 :])
    grown = np.diff(sizes)
    if len(grown) < 4 or (grown > 0).mean() < 0.8:
        return 0.0
    return float(sizes[-1] - sizes[0]) / (steps * len(grown) / (len(resident_nbytes) - 1))
