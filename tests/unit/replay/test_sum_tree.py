"""The sum trees against cumulative sums of all leaves, which are exact where weights are whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chi_square import assert_drawn_as, critical_value
from penstock.replay.samplers import make_tree
from penstock.replay.sum_tree import SumTree

Make = Callable[[int], SumTree]
CAPACITIES = [1, 7, 8, 9, 1000, 4096, 4097, 100_003, 131_072, 2_100_001]


def fast(capacity: int) -> SumTree:
    pytest.importorskip("numba", reason="the extra 'fast' is not installed")
    return make_tree(capacity, True)


both = pytest.mark.parametrize("make", [SumTree, fast])


def expected_draw(
    leaves: npt.NDArray[np.float64], fractions: npt.NDArray[np.float64]
) -> npt.NDArray[Any]:
    sums: npt.NDArray[Any] = np.cumsum(leaves)
    drawn: npt.NDArray[Any] = np.searchsorted(sums, fractions * sums[-1], side="right")
    return drawn


@both
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_draws_match_the_cumulative_sums(make: Make, capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    leaves = rng.integers(0, 1000, capacity).astype(np.float64)
    leaves[rng.random(capacity) < 0.3] = 0
    leaves[0] = 1
    tree = make(capacity)
    tree.write(0, capacity, leaves)
    rows = rng.integers(0, capacity, 500)
    weights = rng.integers(0, 1000, 500).astype(np.float64)
    for row, weight in zip(rows, weights, strict=True):  # the last of a row that comes twice
        leaves[row] = weight
    tree.set(rows, weights)
    fractions = rng.random(1000)
    assert tree.total == leaves.sum()
    np.testing.assert_array_equal(tree.draw(fractions), expected_draw(leaves, fractions))
    np.testing.assert_array_equal(tree.leaves, leaves)


@both
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sequence_of_changes_matches_the_reference(make: Make, data: st.DataObject) -> None:
    capacity = data.draw(st.integers(4097, 5000), label="capacity")
    tree, leaves = make(capacity), np.zeros(capacity)
    row = st.integers(0, capacity - 1)
    for step in range(data.draw(st.integers(1, 12), label="steps")):
        weight = float(data.draw(st.integers(0, 5), label="weight"))
        if data.draw(st.booleans(), label="range"):
            start = data.draw(row, label="start")
            stop = min(capacity, start + data.draw(st.integers(0, 300), label="length"))
            tree.write(start, stop, weight)
            leaves[start:stop] = weight
        else:
            rows = np.array(data.draw(st.lists(row, max_size=5), label="rows"), np.int64)
            tree.set(rows, weight)
            leaves[rows] = weight
        if step % 3 == 0:
            assert tree.total == leaves.sum()
    if leaves.any():
        fractions = np.random.default_rng(0).random(200)
        np.testing.assert_array_equal(tree.draw(fractions), expected_draw(leaves, fractions))


@both
def test_many_separate_ranges_are_summed_in_between(make: Make) -> None:
    tree = make(20_000)
    for start in range(0, 20_000, 8):
        tree.write(start, start + 4, 1.0)
    assert tree.total == 10_000
    assert len(tree._written) == 0


@both
def test_a_leaf_of_weight_zero_is_never_drawn(make: Make) -> None:
    """Weights of 30 orders of magnitude and zeros between, and fractions at the very edges."""
    rng = np.random.default_rng(3)
    leaves = 10.0 ** rng.uniform(-20, 10, 50_000)
    leaves[rng.random(50_000) < 0.9] = 0
    leaves[-40:] = 0
    tree = make(50_000)
    tree.write(0, 50_000, leaves)
    sums = np.cumsum(leaves)
    edges = (sums / sums[-1])[leaves > 0]
    fractions = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, 2), [0.0]])
    fractions = np.append(fractions[fractions < 1], np.nextafter(1.0, 0.0))
    assert (leaves[tree.draw(fractions)] > 0).all()


@both
def test_sums_do_not_drift_after_many_changes(make: Make) -> None:
    """After many changes of widely different size the sums are those of a new tree."""
    rng = np.random.default_rng(4)
    tree, fresh = make(10_000), make(10_000)
    for _ in range(300):
        tree.set(rng.integers(0, 10_000, 64), 10.0 ** rng.uniform(-8, 8, 64))
    tree.write(0, 9_999, 1e-8)
    tree.write(9_999, 10_000, 0.0)
    fresh.load(tree.leaves.copy())
    assert tree.total == fresh.total
    assert tree.total == pytest.approx(9_999e-8, rel=1e-12)
    fractions = rng.random(5000)
    np.testing.assert_array_equal(tree.draw(fractions), fresh.draw(fractions))


@pytest.mark.parametrize("capacity", [100, 9_001, 200_000])
def test_the_fast_tree_draws_the_same_leaves_bit_for_bit(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    ours, theirs = SumTree(capacity), fast(capacity)
    for _ in range(20):
        rows, weights = rng.integers(0, capacity, 256), 10.0 ** rng.uniform(-9, 9, 256)
        start = int(rng.integers(0, capacity - 50))
        fractions = rng.random(256)
        for tree in (ours, theirs):
            tree.set(rows, weights)
            tree.write(start, start + 50, weights[:50])
        assert ours.total == theirs.total
        np.testing.assert_array_equal(ours.draw(fractions), theirs.draw(fractions))


@both
@pytest.mark.parametrize("capacity", [50, 8_200, 140_000])
def test_widely_different_weights_are_drawn_in_proportion(make: Make, capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    leaves = np.zeros(capacity)
    chosen = rng.choice(capacity, 40, replace=False)
    leaves[chosen] = 10.0 ** rng.uniform(-3, 3, 40)
    tree = make(capacity)
    tree.set(chosen, leaves[chosen])
    assert_drawn_as(tree.draw(rng.random(400_000)), leaves / leaves.sum())


@both
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_node_sums_do_not_depend_on_the_number_updated_together(make: Make, count: int) -> None:
    """Bit for bit, though numpy adds up a single column in another order than several."""
    weights = 10.0 ** np.random.default_rng(5).uniform(-9, 9, 6016)
    together, apart = make(6016), make(6016)
    together.load(weights)
    for start in range(0, 6016, count):
        rows = np.arange(start, min(start + count, 6016))
        apart.set(rows, weights[rows])
    assert together.total == apart.total
    np.testing.assert_array_equal(together._values, apart._values)


@pytest.mark.parametrize(("degrees", "value"), [(3, 21.108), (10, 35.564), (100, 161.319)])
def test_critical_values_of_the_chi_square_test_are_correct(degrees: int, value: float) -> None:
    """Against the integral of the density."""
    assert critical_value(degrees) == pytest.approx(value, rel=0.04)
