"""What numpy alone takes to move the bytes of a replay operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from peers.replay import BATCH, FRAMES, Case, steps
from replay_rates import Calls

RECORD_NBYTES = 56  # observation, next one, action, reward, flags
Array = npt.NDArray[Any]


def calls_of(case: Case) -> Calls:
    """What takes as long as the limit; [] where there is none."""
    rng = np.random.default_rng(0)
    if case.operation == "add":
        return copies(case, rng)
    takes = gather(case, rng)
    if not case.operation.startswith("prioritized"):
        return [takes]
    tree = tree_alone(rng)
    return [lambda: (tree(), takes())] if case.atari else [tree]


def copies(case: Case, rng: np.random.Generator) -> Calls:
    """One copy per column into preallocated memory; of a stack, the newest frame alone."""
    made = steps(case, rng)
    if case.atari:
        for step in made:
            del step["obs"]
            step["next_obs"] = step["next_obs"][:, -1]
    columns: dict[str, Array] = {  # touched: fresh pages cost more than copies
        name: np.ones((case.capacity // case.envs, *array.shape), array.dtype)
        for name, array in made[0].items()
    }
    place = 0

    def copy(step: dict[str, Array]) -> None:
        nonlocal place
        place = (place + 1) % (case.capacity // case.envs)
        for name, array in step.items():
            columns[name][place] = array

    return [partial(copy, step) for step in made]


def gather(case: Case, rng: np.random.Generator) -> Callable[[], object]:
    """Random rows with one `take`: records, and for frames the stack and the frame that follows."""
    if not case.atari:
        table = np.ones((case.capacity, RECORD_NBYTES), np.uint8)
        out = np.empty((BATCH, RECORD_NBYTES), np.uint8)
        return lambda: np.take(
            table, rng.integers(0, case.capacity, BATCH), axis=0, out=out, mode="clip"
        )
    table = np.ones((case.capacity, 84 * 84), np.uint8)
    each = FRAMES + 1 if case.operation.endswith("frames") else 2 * FRAMES
    out = np.empty((BATCH, each, 84 * 84), np.uint8)
    offsets = np.arange(each)

    def take() -> None:
        rows = rng.integers(0, case.capacity - each, BATCH)
        np.take(table, rows[:, None] + offsets, axis=0, out=out, mode="clip")

    return take


class _Tree:
    """A binary sum tree, batched by level, and nothing around it."""

    def __init__(self, leaves: int) -> None:
        self.depth = leaves.bit_length() - 1
        self.sums = np.ones(2 * leaves)
        for level in range(self.depth - 1, -1, -1):
            nodes = np.arange(1 << level, 2 << level)
            self.sums[nodes] = self.sums[2 * nodes] + self.sums[2 * nodes + 1]

    def sample(self, rng: np.random.Generator) -> Array:
        aim = rng.random(BATCH) * self.sums[1]
        node = np.ones(BATCH, np.int64)
        for _ in range(self.depth):
            node *= 2
            left = self.sums[node]
            right = aim >= left
            aim -= left * right
            node += right
        return node

    def update(self, node: Array, values: Array) -> None:
        self.sums[node] = values
        for _ in range(self.depth):
            node = node >> 1
            self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1]


def tree_alone(rng: np.random.Generator) -> Callable[[], object]:
    """Sample and update a tree of 2^20 leaves."""
    tree = _Tree(1 << 20)
    return lambda: tree.update(tree.sample(rng), rng.random(BATCH))
