"""Curves reduced to the points that fit a screen."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.watch.series import as_json, clipped, means, reduced, smooth


@pytest.mark.parametrize("count", [1, 2, 7, 50, 5000])
def test_zoom_shows_part_of_the_smoothed_curve(count: int) -> None:
    xs = np.arange(1000, dtype=float)
    ys = np.random.default_rng(count).normal(size=1000)
    whole = smooth((xs, ys), count, None, None)
    for low, high in ((None, None), (0.0, 3.0), (400.5, 600.0), (990.0, None), (2000.0, 3000.0)):
        found = smooth((xs, ys), count, low, high)
        expected = clipped(*whole, low, high)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_allclose(found[1], expected[1], atol=1e-12)


@pytest.mark.parametrize("length", [1, 10, 599, 600, 601, 1000, 12_345, 100_000])
def test_reduction_keeps_outliers_order_and_the_ends(length: int) -> None:
    rng = np.random.default_rng(length)
    xs, ys = np.arange(length, dtype=float), rng.normal(size=length)
    low, high = int(rng.integers(length)), int(rng.integers(length))
    ys[low], ys[high] = -100, 100
    found, values = reduced(xs, ys, 600)
    assert len(found) <= 601
    assert (np.diff(found) > 0).all()
    assert found[-1] == xs[-1]
    assert values.max() == ys.max()
    assert values.min() == ys.min()
    np.testing.assert_array_equal(values, ys[found.astype(int)])


def test_averaged_shares_still_add_up() -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.ones(4), size=5000).T
    xs = np.arange(5000, dtype=float)
    total = sum(means(xs, share, 160)[1] for share in shares)
    np.testing.assert_allclose(total, 1.0)
    assert len(means(xs, shares[0], 160)[0]) == 160
    np.testing.assert_allclose(means(xs, shares[0], 160)[1].mean(), shares[0].mean(), rtol=1e-2)


def test_range_includes_a_point_beyond_each_end() -> None:
    xs = np.arange(10, dtype=float)
    np.testing.assert_array_equal(clipped(xs, xs, 3.5, 5.5)[0], [3, 4, 5, 6])
    np.testing.assert_array_equal(clipped(xs, xs, None, None)[0], xs)


def test_json_numbers_are_short() -> None:
    found = as_json((np.array([0.0, 1e6]), np.array([1 / 3, 2.0])))
    assert found == {"x": [0, 1_000_000], "y": [0.3333333, 2]}
