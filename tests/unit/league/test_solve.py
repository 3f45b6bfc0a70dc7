"""Equilibria of symmetric zero-sum games."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.league.payoffs import Meeting, Payoffs
from penstock.league.results import GameCounts
from penstock.league.solve import Floats, nash_weights, symmetric_nash


def random_game(count: int, seed: int, ladder: float = 0.0) -> Floats:
    """Returns payoffs from -1 to 1, with members that become stronger by ``ladder``."""
    noise = np.random.default_rng(seed).normal(size=(count, count))
    strength = np.linspace(0, ladder, count)
    return np.asarray(np.tanh(noise - noise.T + strength[:, None] - strength))


def test_rock_paper_scissors_with_unequal_stakes_has_its_known_equilibrium() -> None:
    # Rock beats scissors for 1, paper beats rock for 2, scissors beat paper for 3. Each is played
    # in proportion to the stake of the other two.
    payoffs = np.array([[0, -2, 1], [2, 0, -3], [-1, 3, 0]], float)
    assert symmetric_nash(payoffs) == pytest.approx([3 / 6, 1 / 6, 2 / 6], abs=1e-3)


def test_a_member_that_beats_all_others_is_played_alone() -> None:
    payoffs = np.array([[0, -0.2, -0.4], [0.2, 0, -0.1], [0.4, 0.1, 0]])
    assert symmetric_nash(payoffs) == pytest.approx([0, 0, 1], abs=1e-4)


def test_one_member_is_played_alone() -> None:
    assert list(symmetric_nash(np.zeros((1, 1)))) == [1]


@pytest.mark.parametrize(("count", "ladder"), [(5, 0), (30, 0), (200, 0), (30, 4), (200, 4)])
def test_no_member_gains_against_the_mixture(count: int, ladder: float) -> None:
    payoffs = random_game(count, seed=count, ladder=ladder)
    mixture = symmetric_nash(payoffs)
    assert mixture.sum() == pytest.approx(1)
    assert mixture.min() >= 0
    assert (payoffs @ mixture).max() < 1e-3


def test_the_mixture_equals_that_of_a_linear_program() -> None:
    optimize: Any = pytest.importorskip("scipy.optimize")
    payoffs = random_game(9, seed=3)
    program = optimize.linprog(
        np.zeros(9), A_ub=payoffs, b_ub=np.zeros(9), A_eq=np.ones((1, 9)), b_eq=[1]
    )
    assert symmetric_nash(payoffs) == pytest.approx(program.x, abs=1e-3)


def test_the_unit_of_payoffs_does_not_matter() -> None:
    payoffs = random_game(6, seed=1)
    assert symmetric_nash(1000 * payoffs) == pytest.approx(symmetric_nash(payoffs), abs=1e-6)


def test_members_that_have_not_met_the_others_have_no_weight(tmp_path: Path) -> None:
    payoffs = Payoffs(tmp_path)
    for row, column in [("rock", "scissors"), ("paper", "rock"), ("scissors", "paper")]:
        payoffs.append(row, column, Meeting(GameCounts(10, 0, 0), 10.0))
    payoffs.append("newest", "rock", Meeting(GameCounts(10, 0, 0), 10.0))

    weights = nash_weights(payoffs, ["rock", "paper", "newest", "scissors"])
    assert weights == pytest.approx({"rock": 1 / 3, "paper": 1 / 3, "scissors": 1 / 3}, abs=1e-3)


def test_a_pool_without_members_has_no_equilibrium(tmp_path: Path) -> None:
    assert nash_weights(Payoffs(tmp_path), []) == {}
