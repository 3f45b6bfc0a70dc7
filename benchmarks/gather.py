"""Gathering slots into a batch: small slots of a store together, against each column of each slot.

The columns are those of CartPole's PPO, and frames. Both ways gather the same slots in turns, in
another order each time. `summary` is the part of either that counts what was gathered (returns,
versions), `copying` is the rest, and `memcpy` copies as many bytes in one piece. Times are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from gymnasium.spaces import Box

from common import finish, parser
from penstock.algos.slots import UnrollSummary, columns
from penstock.core.specs import Column, SlotSpec
from penstock.learner.sources import staging
from penstock.learner.sources.staging import StagingBatch
from penstock.transport.shm.store import SlotStore

ROUNDS = 200
CPU = torch.device("cpu")
POLE = Box(-1.0, 1.0, (4,), np.float32)
FRAMES = Box(0, 255, (4, 84, 84), np.uint8)


class Case(NamedTuple):
    """The shape of a batch."""

    name: str
    space: Any
    slots: int
    envs: int
    unroll: int


CASES = (
    Case("pole", POLE, slots=64, envs=1, unroll=16),
    Case("pole", POLE, slots=64, envs=1, unroll=32),
    Case("pole", POLE, slots=4, envs=16, unroll=32),
    Case("pole", POLE, slots=1, envs=64, unroll=16),
    Case("frames", FRAMES, slots=16, envs=1, unroll=16),
    Case("frames", FRAMES, slots=2, envs=16, unroll=16),
)


def measure(case: Case) -> dict[str, Any]:
    """Returns times in us of one case, and their ratio."""
    spec = SlotSpec(
        case.unroll,
        case.envs,
        columns(case.space, Column("action", "|u1"), Column("behaviour_logp", "<f4")),
    )
    store = SlotStore(spec, 2 * case.slots)
    for slot in store.slots:
        for raw in slot.payload:
            raw[...] = 1

    together = StagingBatch(spec, case.slots, CPU, store=store)
    with patch.object(staging, "SMALL_BLOCK_NBYTES", 0):
        one_by_one = StagingBatch(spec, case.slots, CPU, store=store)
    nbytes = spec.payload_nbytes * case.slots
    source = np.ones(nbytes, np.uint8)
    target = np.ones(nbytes, np.uint8)
    order = np.random.default_rng(0)
    slots = list(store.slots)
    ways: dict[str, Callable[[], object]] = {
        "one_by_one_us": lambda: one_by_one.gather(slots[: case.slots]),
        "together_us": lambda: together.gather(slots[: case.slots]),
        "summary_us": lambda: UnrollSummary.of(together.arrays),
        "memcpy_us": lambda: np.copyto(target, source),
    }
    times_us: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        order.shuffle(slots)
        for name, copy in ways.items():
            began_s = time.perf_counter()
            copy()
            times_us[name].append((time.perf_counter() - began_s) * 1e6)
    store.close()

    medians = {name: statistics.median(times) for name, times in times_us.items()}
    medians["copying_us"] = medians["together_us"] - medians["summary_us"]
    gain = medians["one_by_one_us"] / medians["together_us"]
    return {**case._asdict(), "space": str(case.space), "nbytes": nbytes, **medians, "gain": gain}


def main() -> None:
    args = parser(__doc__).parse_args()
    results = [measure(case) for case in CASES]
    shown = ["name", "slots", "envs", "unroll", "nbytes", "one_by_one_us", "together_us"]
    shown += ["gain", "summary_us", "copying_us", "memcpy_us"]
    rows = [shown, *([result[key] for key in shown] for result in results)]
    finish("gather", {"cases": results}, rows, args)


if __name__ == "__main__":
    main()
