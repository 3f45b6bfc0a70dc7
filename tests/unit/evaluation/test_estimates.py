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
    lower_end,
    out_of_reach,
    pooled,
    reaches,
    spread_of,
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


def test_pooled_estimates_are_those_of_all_episodes() -> None:
    one, other = [200.0, 220.0, 180.0], [240.0, 160.0, 300.0, 100.0]
    found = pooled(estimate(one), estimate(other))
    assert found == pytest.approx(estimate(one + other))
    assert pooled(estimate([7.0]), estimate([9.0])) == pytest.approx((8.0, 1.0, 2))


def test_lower_bound_of_few_episodes_includes_the_spread_in_training() -> None:
    """Five of five succeed: variance (4 * 0 + 10 * 0.16) / 14, standard error sqrt(0.022857). Of
    many most do: variance (119 * 0.0475 + 10 * 0.16) / 129, standard error sqrt(0.00046851)."""
    spread = spread_of([0.0] * 20 + [1.0] * 80)
    assert spread == pytest.approx(0.402015)
    lucky = Estimate(1.0, 0.0, 5)
    assert lower_end(lucky, 0.4) == pytest.approx(1 - 1.96 * 0.151186, abs=1e-5)
    good = Estimate(0.95, (0.0475 / 120) ** 0.5, 120)
    assert lower_end(good, 0.4) == pytest.approx(0.95 - 1.96 * 0.021645, abs=1e-5)
    assert (lower_end(lucky, None), lower_end(good, None)) == (1.0, good.lower)
    assert spread_of([3.0] * 9) is None
    assert lower_end(Estimate(1.0, 0.0, 1), 0.4) == pytest.approx(1 - 1.96 * 0.4)


def test_better_way_has_the_higher_lower_bound_and_a_tie_is_greedy() -> None:
    assert better_way(ways((-20.0, 9.0), (255.0, 5.0)), 50.0).way == "sampled"
    assert better_way(ways((255.0, 5.0), (240.0, 5.0)), 50.0).way == "greedy"
    assert better_way(ways((500.0, 0.0), (500.0, 0.0)), 30.0).way == "greedy"
    narrow = better_way(ways((0.85, 0.05), (0.83, 0.02)), None)
    assert (narrow.way, narrow.estimate, narrow.informed) == ("sampled", (0.83, 0.02, 20), False)
    assert narrow.lower == pytest.approx(0.83 - 1.96 * 0.02)


def test_choice_without_a_training_spread_is_beaten_by_any_later_one() -> None:
    """Two of two episodes succeed at first, and later 16 of 20."""
    lucky = better_way(ways((1.0, 0.0), (1.0, 0.0)), spread_of([1.0] * 9))
    later = better_way(ways((0.8, 0.09), (0.7, 0.1)), spread_of([0.0, 1.0] * 5))
    assert later.beats(lucky)
    assert not lucky.beats(later)
    assert not later.beats(later)


def test_refuting_episodes_switch_to_the_other_way() -> None:
    found: dict[Way, Estimate] = {
        "greedy": Estimate(0.86, 0.03, 20),
        "sampled": Estimate(0.829, 0.03, 20),
    }
    assert better_way(found, 0.15).way == "greedy"
    found["greedy"] = pooled(found["greedy"], Estimate(0.70, 0.02, 100))
    assert found["greedy"].mean == pytest.approx(0.72667, abs=1e-5)
    assert better_way(found, 0.15).way == "sampled"


def test_goal_above_the_upper_bound_is_out_of_reach() -> None:
    assert out_of_reach(Estimate(150.0, 20.0, 20), 200.0)  # at most 189.2
    assert not out_of_reach(Estimate(150.0, 26.0, 20), 200.0)  # up to 200.96
    for episodes in (9, 10):  # fewer say little about the spread
        assert out_of_reach(Estimate(100.0, 1.0, episodes), 200.0) == (episodes == 10)


@pytest.mark.slow
def test_false_confirmations_stay_at_one_in_forty() -> None:
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
        biased += reaches(better_way(played, None).estimate, goal)
        confirmed += reaches(estimate(rng.normal(goal, 50, 100).tolist()), goal)
    assert 0.018 < confirmed / trials < 0.034
    assert biased / trials > 0.04


def test_way_to_play_is_read_from_the_evidence_or_greedy() -> None:
    found = ways((-20.0, 9.0), (255.0, 5.0))
    about = evidence(found, "sampled", 350_000, Estimate(250.0, 4.0, 100))
    assert about == {
        "way": "sampled",
        "episodes": 20,
        "trained_steps": 350_000,
        "greedy": {"mean": -20.0, "se": 9.0, "episodes": 20},
        "sampled": {"mean": 255.0, "se": 5.0, "episodes": 20},
        "closing": {"mean": 250.0, "se": 4.0, "episodes": 100},
    }
    assert way_of(about) == "sampled"
    assert "closing" not in evidence(found, "sampled", 350_000)
    for nothing in (None, {}, {"way": "greedy"}, {"way": 3}, "sampled"):
        assert way_of(nothing) == "greedy"
