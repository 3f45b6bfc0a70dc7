"""Confidence intervals, against figures by hand and by enumeration."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest

from penstock.monitor.intervals import bootstrap, interval, iqm, mean
from penstock.monitor.student_t import half_95, t_95


def test_interval_of_a_mean_matches_figures_by_hand() -> None:
    # 1, 2, 3: deviation 1, error 1 / sqrt 3; Student's t for two degrees of freedom is 4.303.
    found, half = interval([1.0, 2.0, 3.0])
    assert found == 2.0
    assert half == pytest.approx(4.303 / math.sqrt(3))
    assert interval([7.0]) == (7.0, None)


@pytest.mark.parametrize(("count", "t"), [(2, 12.706), (5, 2.776), (31, 2.042), (32, 1.96)])
def test_t_quantiles_match_the_table(count: int, t: float) -> None:
    assert half_95(2.0, count) == 2.0 * t
    assert half_95(0.0, 1) is half_95(None, count) is half_95(2.0, None) is None
    assert t_95(count) == t


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([100.0, 1.0, 7.0, 3.0, 5.0, 6.0, 4.0, 2.0], (3 + 4 + 5 + 6) / 4),
        ([9.0, -50.0, 1.0, 2.0, 3.0], (1 + 2 + 3) / 3),  # a quarter of five is one whole value
        ([4.0, 1.0, 10.0], 5.0),  # and of three none
        ([7.0], 7.0),
    ],
)
def test_interquartile_mean_matches_figures_by_hand(values: list[float], expected: float) -> None:
    assert iqm(np.array(values)) == pytest.approx(expected)


def test_interquartile_mean_is_over_one_axis() -> None:
    values = np.array([[0.0, 8.0, 1.0, 3.0], [100.0, -2.0, 5.0, 7.0]])
    assert iqm(values, 1).tolist() == [2.0, 6.0]
    assert iqm(values, 0).tolist() == [50.0, 3.0, 3.0, 5.0]


def resampled(strata: list[list[float]]) -> list[list[float]]:
    """Every resample of the runs, each as probable as any other."""
    of_each = [list(itertools.product(stratum, repeat=len(stratum))) for stratum in strata]
    return [[x for part in parts for x in part] for parts in itertools.product(*of_each)]


def interquartile(values: list[float]) -> float:
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


@pytest.mark.parametrize(
    ("of_arrays", "of_lists"), [(mean, statistics.fmean), (iqm, interquartile)]
)
def test_bootstrap_agrees_with_all_resamples(of_arrays: object, of_lists: object) -> None:
    strata = [[1.0, 2.0, 4.0, 9.0], [10.0, 13.0, 21.0]]
    every = [of_lists(values) for values in resampled(strata)]  # type: ignore[operator]
    assert len(every) == 4**4 * 3**3
    low, high = bootstrap(
        [np.array(stratum) for stratum in strata],
        of_arrays,  # type: ignore[arg-type]
        share=0.8,
        resamples=40_000,
    )
    exact = np.quantile(every, [0.1, 0.9])
    assert [float(low), float(high)] == pytest.approx(exact.tolist(), abs=0.06)


def test_the_bootstrap_draws_within_each_task() -> None:
    low, high = bootstrap([np.zeros((3, 2)), np.ones((3, 2))], mean)
    assert (low.tolist(), high.tolist()) == ([0.5, 0.5], [0.5, 0.5])


def test_the_interval_of_two_runs_reaches_from_one_to_the_other() -> None:
    low, high = bootstrap([np.array([[1.0, 10.0], [3.0, 0.0]])], mean)
    assert (low.tolist(), high.tolist()) == ([1.0, 0.0], [3.0, 10.0])
