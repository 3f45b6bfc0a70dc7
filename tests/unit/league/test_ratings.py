"""The Bradley-Terry fit, against closed forms and against a fit by another method."""

from typing import Any

import numpy as np
import pytest

from penstock.league.ratings import ELO, Floats, fit


def test_two_members_have_the_odds_of_their_games() -> None:
    # 75 wins of 100 and a draw: log-odds and the binomial error of them.
    ratings = fit(np.array([[0, 25.0], [75.0, 0]]))
    share = 75.5 / 101
    assert ratings.values == pytest.approx([0, 400 * np.log10(share / (1 - share))])
    assert ratings.errors == pytest.approx([0, ELO / np.sqrt(101 * share * (1 - share))])


def test_three_members_are_rated_as_by_a_general_optimizer() -> None:
    optimize: Any = pytest.importorskip("scipy.optimize")
    wins = np.array([[0, 30, 10.5], [70, 0, 45], [39.5, 55, 0]])

    def negative_log_likelihood(strengths: Floats) -> float:
        rated = np.append(0, strengths)
        # Each is given a draw, half of it against each of the others, who give it as much.
        counted = wins + 0.25 * (1 - np.eye(3))
        return float((counted * np.log1p(np.exp(rated[None] - rated[:, None]))).sum())

    best = optimize.minimize(negative_log_likelihood, [0, 0], method="BFGS", options={"gtol": 1e-9})
    ratings = fit(wins)
    assert ratings.values[1:] == pytest.approx(ELO * best.x, abs=0.01)
    # The errors are the diagonal of the inverse of a Hessian by finite differences.
    assert ratings.errors[1:] == pytest.approx([33.2478, 38.4404], abs=0.01)


def test_another_anchor_moves_all_ratings_alike() -> None:
    wins = np.array([[0, 30, 10.5], [70, 0, 45], [39.5, 55, 0]])
    values = fit(wins).values
    assert fit(wins, anchor=2).values == pytest.approx(values - values[2])


def test_a_member_that_won_all_games_has_a_finite_rating() -> None:
    ratings = fit(np.array([[0, 0], [200.0, 0]]))
    assert 400 * np.log10(200) < ratings.values[1] < 400 * np.log10(1000)
    assert ratings.errors[1] > 100


def test_a_member_without_games_has_no_rating() -> None:
    wins = np.array([[0, 5, 0], [5, 0, 0], [0, 0, 0]], float)
    ratings = fit(wins)
    assert list(np.isnan(ratings.values)) == [False, False, True]
    assert list(np.isnan(ratings.errors)) == [False, False, True]


def test_a_chain_of_games_rates_members_that_have_not_met() -> None:
    # Each beats the one before it three times as often as not.
    wins = np.zeros((5, 5))
    for member in range(1, 5):
        wins[member, member - 1] = 7500
        wins[member - 1, member] = 2500
    assert fit(wins).values == pytest.approx(np.arange(5) * 400 * np.log10(3), rel=0.001)


def test_a_ladder_of_forty_members_is_rated() -> None:
    # Members far apart never lose to each other, and the curvature vanishes.
    truth = np.arange(40) * 200 / ELO
    shares = 1 / (1 + np.exp(truth[None] - truth[:, None]))
    ratings = fit(np.round(1000 * shares * (1 - np.eye(40))))
    assert ratings.values == pytest.approx(ELO * truth, rel=0.05, abs=10)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    truth = np.array([0, 0.5, 1.0, -0.5])
    shares = 1 / (1 + np.exp(truth[None] - truth[:, None]))
    covered = []
    for _ in range(400):
        upper = np.triu(random.binomial(60, shares), 1)
        wins = upper + np.tril(60 - upper.T, -1)
        ratings = fit(wins.astype(float))
        inside = np.abs(ratings.values - ELO * truth) <= 1.96 * ratings.errors
        covered += list(inside[1:])
    # 95 % of 1,200 within three standard deviations, and a bit for the prior.
    assert np.mean(covered) == pytest.approx(0.95, abs=0.025)
