"""The sum tree compiled by numba, which the extra "fast" installs.

It adds the same numbers in the same order as `SumTree`, without fused multiply-add, and therefore
draws the same leaves, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.replay.sum_tree import BELOW, FANOUT, SHIFT, Floats, Rows, SumTree


def _numba() -> Any:
    """Returns the module numba; None if it is not installed."""
    try:
        import numba
    except ImportError:
        return None
    return numba


_NUMBA = _numba()
AVAILABLE = _NUMBA is not None


class FastSumTree(SumTree):
    """A `SumTree` with compiled loops that release the interpreter lock."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # Compiled now or read from numba's cache: not while a learner waits for its first batch.
        self.set(np.zeros(1, np.int64), 1.0)
        self.draw(np.zeros(1))
        self.write(0, 1, 0.0)
        self._refresh()

    def set(self, rows: Rows, weights: Floats | float) -> None:
        self.leaves[rows] = weights
        self._top_changed = True
        _sum_above_rows(self._values, self._offsets, rows)

    def draw(self, fractions: Floats) -> Rows:
        self._refresh()
        nodes = np.empty(len(fractions), np.int64)
        _draw(self._values, self._offsets, self._cumulated, fractions.copy(), nodes)
        return nodes

    def _refresh(self) -> None:
        """Bring all sums up to date with the leaves."""
        if self._written:
            self._enter_written()
        if self._top_changed:
            _cumulate(self._levels[-1], self._cumulated)
            self._top_changed = False

    def _enter_written(self) -> None:
        """Make the written ranges part of all sums but the cumulative one of the top."""
        for stop, start in self._written.items():
            _sum_above_range(self._values, self._offsets, start, stop)
        self._written.clear()
        self._top_changed = True


def _compiled(function: Any) -> Any:
    """Compile a function by numba, whose cache keeps the result; without numba, return it as is."""
    return _NUMBA.njit(cache=True, nogil=True)(function) if AVAILABLE else function


@_compiled
def _sum_children(values: Floats, first: int) -> float:
    """Returns the sum of the children from position ``first`` on."""
    total = 0.0
    for child in range(first, first + FANOUT):
        total += values[child]
    return total


@_compiled
def _sum_above_rows(values: Floats, offsets: Rows, rows: Rows) -> None:
    """Sum the children of the nodes above ``rows``.

    This is done level by level, so that the loads of different rows overlap.

    Args:
        values: of all levels.
        offsets: of the levels in ``values``, as in `SumTree`.
        rows: leaves.
    """
    shift = 0
    for level in range(len(offsets) - 2):
        shift += SHIFT
        children = offsets[level]
        parents = offsets[level + 1]
        for row in rows:
            node = row >> shift
            values[parents + node] = _sum_children(values, children + (node << SHIFT))


@_compiled
def _sum_above_range(values: Floats, offsets: Rows, start: int, stop: int) -> None:
    """Sum the children of the nodes above the leaves ``start`` to ``stop``."""
    for level in range(len(offsets) - 2):
        start = start >> SHIFT
        stop = ((stop - 1) >> SHIFT) + 1
        children = offsets[level]
        parents = offsets[level + 1]
        for node in range(start, stop):
            values[parents + node] = _sum_children(values, children + (node << SHIFT))


@_compiled
def _cumulate(top: Floats, cumulated: Floats) -> None:
    """Write the cumulative sum of ``top`` [n] to ``cumulated`` [n + 1], after its first 0."""
    total = 0.0
    for index in range(len(top)):
        total += top[index]
        cumulated[index + 1] = total


@_compiled
def _draw(values: Floats, offsets: Rows, cumulated: Floats, targets: Floats, nodes: Rows) -> None:
    """Draw leaves, as `SumTree.draw` describes it, level by level.

    Args:
        values: of all levels.
        offsets: of the levels in ``values``, as in `SumTree`.
        cumulated: the cumulative sum of the top.
        targets: ``[n]``, the fractions; overwritten.
        nodes: ``[n]``, for the leaves that are drawn.
    """
    # The nodes of the top that contain the targets; targets become distances within them. Where
    # targets are sorted, the search goes on from the node of the previous target.
    total = cumulated[-1] * BELOW
    last_node = len(cumulated) - 2
    node = 0
    for index in range(len(targets)):
        target = targets[index] * total
        if target < cumulated[node]:
            node = 0
        while node < last_node and cumulated[node + 1] <= target:
            node += 1
        targets[index] = target - cumulated[node]
        nodes[index] = node

    for level in range(len(offsets) - 3, -1, -1):
        children = offsets[level]
        parents = offsets[level + 1]
        for index in range(len(targets)):
            node = nodes[index]
            target = min(targets[index], values[parents + node] * BELOW)
            first_child = children + (node << SHIFT)

            # The child that contains the target is the first whose prefix sum lies above it. The
            # loop goes on to the end, because a jump out of it would be hard to predict.
            child = 0
            prefix_sum = 0.0
            passed_sum = 0.0
            for position in range(FANOUT):
                prefix_sum += values[first_child + position]
                is_passed = prefix_sum <= target
                child += is_passed
                passed_sum = prefix_sum if is_passed else passed_sum
            nodes[index] = (node << SHIFT) + child
            targets[index] = target - passed_sum
