"""Estimates of a mean return, and the decisions that follow from them."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.evaluation.estimates import (
    Estimate,
    Way,
    better_way,
    estimate,
    evidence,
    out_of_reach,
    reaches,
    spacing,
    way_of,
)


def test_an_estimate_is_the_mean_with_its_standard_error() -> None:
    """Deviations 0, 20, -20, 40, -40: variance 4000 / 4, standard error sqrt(1000 / 5)."""
    found = estimate([200.0, 220.0, 180.0, 240.0, 160.0])
    assert found == pytest.approx((200.0, 14.142135623730951, 5))
    assert found.lower == pytest.approx(200 - 27.718585822512662)
    assert found.upper == pytest.approx(200 + 27.718585822512662)
    assert estimate([7.0]) == (7.0, 0.0, 1)


def test_equal_returns_have_no_spread() -> None:
    capped = estimate([500.0] * 100)
    assert (capped.se, capped.lower) == (0.0, 500.0)
    assert reaches(capped, 475.0)
    assert reaches(capped, 500.0)
    assert not reaches(capped, 500.1)


def test_a_mean_at_the_goal_does_not_reach_it_with_confidence() -> None:
    assert not reaches(Estimate(200.0, 1.0, 100), 200.0)
    assert not reaches(Estimate(201.9, 1.0, 100), 200.0)
    assert reaches(Estimate(202.0, 1.0, 100), 200.0)


def ways(greedy: tuple[float, float], sampled: tuple[float, float]) -> dict[Way, Estimate]:
    return {"greedy": Estimate(*greedy, 20), "sampled": Estimate(*sampled, 20)}


def test_the_better_way_has_the_higher_mean_and_greedy_wins_a_tie() -> None:
    assert better_way(ways((-20.0, 9.0), (255.0, 5.0))) == "sampled"
    assert better_way(ways((255.0, 5.0), (240.0, 5.0))) == "greedy"
    assert better_way(ways((500.0, 0.0), (500.0, 0.0))) == "greedy"


def test_out_of_reach_is_what_even_the_upper_bound_of_the_better_way_misses() -> None:
    assert out_of_reach(ways((100.0, 10.0), (150.0, 20.0)), 200.0)  # at most 189.2
    few: dict[Way, Estimate] = {
        "greedy": estimate([100.0, 101.0, 102.0]),
        "sampled": estimate([90.0, 91.0, 92.0]),
    }
    assert not out_of_reach(few, 200.0)  # three episodes say little about the spread
    assert not out_of_reach(ways((100.0, 10.0), (150.0, 26.0)), 200.0)  # up to 200.96
    for episodes in (9, 10):  # ten are enough
        low = Estimate(100.0, 1.0, episodes)
        assert out_of_reach({"greedy": low, "sampled": low}, 200.0) == (episodes == 10)


@pytest.mark.slow
def test_choosing_the_better_way_does_not_confirm_too_often() -> None:
    """Both ways are exactly at the goal. A bound by further episodes confirms one in forty, as a
    lower bound of 95 % intervals should; by the episodes that chose it would be twice as many."""
    rng = np.random.default_rng(0)
    trials, goal = 4000, 200.0
    confirmed = biased = 0
    for _ in range(trials):
        played: dict[Way, Estimate] = {
            "greedy": estimate(rng.normal(goal, 50, 100).tolist()),
            "sampled": estimate(rng.normal(goal, 50, 100).tolist()),
        }
        biased += reaches(played[better_way(played)], goal)
        confirmed += reaches(estimate(rng.normal(goal, 50, 100).tolist()), goal)
    assert 0.018 < confirmed / trials < 0.034
    assert biased / trials > 0.04


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("cost_s", [0.001, 0.06, 3.0, 140.0])
@pytest.mark.parametrize("rate", [2_000.0, 30_000.0, 400_000.0])
def test_the_distance_is_the_first_doubled_one_that_is_cheap_enough(
    share: float, cost_s: float, rate: float
) -> None:
    every = 100_000
    while cost_s > share * every / rate:
        every *= 2
    assert spacing(100_000, cost_s, share, rate) == every


def test_without_a_limit_every_point_is_evaluated() -> None:
    assert spacing(100_000, 1e6, None, 1e6) == 100_000


def test_the_way_is_read_from_the_evidence_and_greedy_without_any() -> None:
    found = ways((-20.0, 9.0), (255.0, 5.0))
    about = evidence(found, 350_000, Estimate(250.0, 4.0, 100))
    assert about == {
        "way": "sampled",
        "episodes": 20,
        "trained_steps": 350_000,
        "greedy": {"mean": -20.0, "se": 9.0},
        "sampled": {"mean": 255.0, "se": 5.0},
        "closing": {"mean": 250.0, "se": 4.0, "episodes": 100},
    }
    assert way_of(about) == "sampled"
    assert "closing" not in evidence(found, 350_000)
    for nothing in (None, {}, {"way": "greedy"}, {"way": 3}, "sampled"):
        assert way_of(nothing) == "greedy"
