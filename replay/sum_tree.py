"""Draws leaves in proportion to their weights: a sum tree of 8 children a node, in numpy.

A binary tree of a million leaves has twenty levels, each a handful of numpy calls over the batch.
Here a node sums 8 children, and there are no further levels above one of at most `TOP` nodes, which
a cumulative sum covers: three levels and this top hold a million leaves.

To draw a leaf, a fraction of the total becomes a *target*, a distance from the first leaf on a line
on which each leaf is as long as its weight. From the top down, the node that contains the target is
found by the *prefix sums* of its parent's children: the sum of the first child, of the first two,
and so on. An update sums the children of the nodes above its leaves. Invariants:

- A node is the sum of its children, added in order. It is computed anew, never by adding a
  difference. So nothing drifts, and the whole tree is a function of its leaves, bit for bit.
- A leaf of weight 0 is never drawn. Prefix sums never fall, because weights are not negative. A
  target is kept below its node's sum, which is the last prefix sum, so some prefix sum lies above
  it. The first that does exceeds the one before it, and only a positive weight makes it so.
- Ranges written through `write` become part of the sums at the next draw, adjoining ones together.

`FastSumTree` has the same tree compiled by numba, which is not installed by default: sampling 256
rows and updating their priorities takes 89 us with it and 154 us without.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

# A node has 2**SHIFT children, so that the parent of node i is i >> SHIFT.
SHIFT = 3
FANOUT = 1 << SHIFT
# One more level costs as much as the cumulative sum of about this many nodes.
TOP = 4096
# So many written ranges are entered into the sums at once, also if nothing is drawn.
MANY_RANGES = 1024
# x * BELOW < x for every normal x; four times as fast as np.nextafter.
BELOW = 1 - 2.0**-52


class SumTree:
    """``capacity`` float64 weights, at first 0; the capacity is at least 1.

    `leaves` [capacity] may be read; change it only through the methods. The caller ensures that
    rows are in range, and that weights are 0 or normal positive numbers with a finite sum.
    """

    def __init__(self, capacity: int) -> None:
        # The number of leaves, and of the nodes of each level above; the last is the top.
        sizes = [capacity]
        while sizes[-1] > TOP:
            sizes.append(-(-sizes[-1] // FANOUT))

        # One array holds all levels, the leaves first, each padded with zeros to whole families of
        # children. Level i lies between the offsets i and i + 1.
        padded_sizes = [-(-size // FANOUT) * FANOUT for size in sizes]
        self._offsets = np.concatenate([[0], np.cumsum(padded_sizes)]).astype(np.int64)
        self._values: Floats = np.zeros(self._offsets[-1])
        self._levels = [self._values[start:stop] for start, stop in pairwise(self._offsets)]
        self.leaves = self._levels[0][:capacity]
        # The values of each level but the top by their parent nodes, [parents, children].
        self._children = [level.reshape(-1, FANOUT) for level in self._levels[:-1]]

        # The cumulative sum of the top, which begins with 0, and whether the top has changed since.
        self._cumulated: Floats = np.zeros(len(self._levels[-1]) + 1)
        self._top_changed = False
        # The ranges of leaves that are not yet part of the sums, as stop -> start.
        self._written: dict[int, int] = {}

    @property
    def total(self) -> float:
        """The sum of all weights."""
        self._refresh()
        return float(self._cumulated[-1])

    def write(self, start: int, stop: int, weights: Floats | float) -> None:
        """Set the leaves ``start`` to ``stop``; they enter the sums at the next draw."""
        if start == stop:
            return
        self.leaves[start:stop] = weights

        # A range that ends where this one starts is joined with it.
        start = self._written.pop(start, start)
        self._written[stop] = min(start, self._written.get(stop, start))
        if len(self._written) > MANY_RANGES:
            self._enter_written()

    def set(self, rows: Rows, weights: Floats | float) -> None:
        """Set single leaves, rows [n]; if a row occurs twice, its last weight counts."""
        self.leaves[rows] = weights
        self._top_changed = True
        nodes = rows
        for level in range(len(self._children)):
            nodes = nodes >> SHIFT
            self._sum_children(level, nodes)

    def draw(self, fractions: Floats) -> Rows:
        """Returns the leaves [n] in whose share of the total the fractions [n] fall.

        Each fraction lies in [0, 1), and the total must be above 0.
        """
        self._refresh()
        # Of the total itself, rounding might raise a fraction below 1 to the total.
        targets = fractions * (self._cumulated[-1] * BELOW)

        # The nodes of the top that contain the targets; targets become distances within them.
        nodes: Rows = self._cumulated[1:].searchsorted(targets, "right")
        targets -= self._cumulated.take(nodes)

        # The memory for the prefix sums of all levels, [children + 1, n]: a row of 0 comes first.
        count = len(targets)
        sums = np.zeros((FANOUT + 1, count))
        prefix_sums = sums[1:]
        neighbours = list(pairwise(prefix_sums))
        columns = np.arange(count)
        add = np.add
        for level in range(len(self._children) - 1, -1, -1):
            prefix_sums[...] = self._children[level].take(nodes, axis=0).T
            for previous_sum, prefix_sum in neighbours:
                add(previous_sum, prefix_sum, prefix_sum)

            # The child that contains the target is the first whose prefix sum lies above it.
            np.minimum(targets, prefix_sums[-1] * BELOW, out=targets)
            child = np.add.reduce(prefix_sums <= targets, axis=0)
            nodes <<= SHIFT
            nodes += child

            # Subtract the prefix sum of the children before it, row `child` of `sums`.
            if level:
                child *= count
                child += columns
                targets -= sums.ravel().take(child)
        return nodes

    def load(self, leaves: Floats) -> None:
        """Replace all weights by ``leaves`` [capacity]."""
        self.write(0, len(self.leaves), leaves)

    def _sum_children(self, level: int, nodes: Rows) -> None:
        """Sum the children at ``level`` of ``nodes`` [n] of the level above."""
        # Of a single column, numpy would add the numbers in another order: there is always one of
        # zeros besides.
        children = np.zeros((FANOUT, len(nodes) + 1))
        children[:, :-1] = self._children[level].take(nodes, axis=0).T
        self._levels[level + 1][nodes] = np.add.reduce(children, axis=0)[:-1]

    def _refresh(self) -> None:
        """Bring all sums up to date with the leaves."""
        if self._written:
            self._enter_written()
        if self._top_changed:
            np.cumsum(self._levels[-1], out=self._cumulated[1:])
            self._top_changed = False

    def _enter_written(self) -> None:
        """Make the written ranges part of all sums but the cumulative one of the top."""
        stops = np.fromiter(self._written.keys(), np.int64, len(self._written))
        starts = np.fromiter(self._written.values(), np.int64, len(self._written))
        self._written.clear()
        self._top_changed = True

        # At each level, from the first to the last parent of a range.
        for level in range(len(self._children)):
            starts = starts >> SHIFT
            stops = ((stops - 1) >> SHIFT) + 1
            self._sum_children(level, _numbers_of_ranges(starts, stops))


def _numbers_of_ranges(starts: Rows, stops: Rows) -> Rows:
    """Returns the numbers from start to stop of each range, one range after the other."""
    lengths = stops - starts
    ends = np.cumsum(lengths)
    return np.repeat(stops - ends, lengths) + np.arange(ends[-1])
