"""Slime volley: the port against recorded games of the published program.

`tests/fixtures/record_slime_volley.py` has recorded them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.envs.games.slime_volley import SlimeVolley

RECORDED = np.load(Path(__file__).parents[2] / "fixtures" / "slime_volley.npz")
SEED = int(RECORDED["seed"])
ROWS = np.arange(2)


def test_a_game_equals_that_of_the_published_program() -> None:
    """A random player on the right; the built-in one on the left also chooses the same buttons."""
    games = SlimeVolley(1)
    observations, _ = games.reset(seed=SEED)
    np.testing.assert_array_equal(observations, RECORDED["observations"][0])

    for step, (actions, reward) in enumerate(
        zip(RECORDED["actions"], RECORDED["rewards"], strict=True), 1
    ):
        np.testing.assert_array_equal(games.bot("baseline", ROWS[1:])[0], actions[1])
        observations, rewards, terminated, truncated, info = games.step(actions)
        np.testing.assert_array_equal(observations, RECORDED["observations"][step])
        assert rewards.tolist() == [reward, -reward]
        assert (terminated == (step == len(RECORDED["rewards"]))).all()
        assert not truncated.any()

    # The program ends a game when one has lost five points.
    assert terminated.all()
    result = np.sign(RECORDED["rewards"].sum())
    assert info["outcome"].tolist() == [result, -result]


def test_a_long_game_of_the_built_in_player_equals_that_of_the_published_program() -> None:
    games = SlimeVolley(1)
    observations, _ = games.reset(seed=SEED)
    rewards_of_right = []
    for step in range(len(RECORDED["baseline_rewards"])):
        if step % 50 == 0:
            expected = RECORDED["baseline_observations"][step // 50]
            np.testing.assert_array_equal(observations, expected)
        actions = games.bot("baseline", ROWS)
        observations, rewards, terminated, truncated, _ = games.step(actions)
        rewards_of_right.append(rewards[0])

    np.testing.assert_array_equal(rewards_of_right, RECORDED["baseline_rewards"])
    # Nobody has lost five points after 3000 steps.
    assert truncated.all()
    assert not terminated.any()


def random_against_baseline(games: int) -> npt.NDArray[np.float64]:
    """Returns the returns of a random player on the right, of one episode in each game."""
    vector = SlimeVolley(games)
    vector.reset(seed=7)
    right = np.arange(0, 2 * games, 2)
    actions = np.zeros((2 * games, 3), np.int64)
    returns = np.zeros(games)
    open_games = np.ones(games, np.bool_)
    while open_games.any():
        actions[right] = vector.bot("random", right)
        actions[right + 1] = vector.bot("baseline", right + 1)
        _, rewards, terminated, truncated, _ = vector.step(actions)
        returns += rewards[right] * open_games
        open_games &= ~(terminated | truncated)[right]
    return returns


def test_random_play_loses_to_the_built_in_player_as_published() -> None:
    """The published mean is -4.866, with a standard deviation of 0.372, over 1000 episodes."""
    returns = random_against_baseline(1000)
    assert returns.mean() == pytest.approx(-4.87, abs=0.05)
    assert returns.std() == pytest.approx(0.372, abs=0.05)


def test_each_seat_sees_the_field_from_its_own_side() -> None:
    """Mirrored buttons of both seats from a mirrored start give the same observations."""
    games = SlimeVolley(1)
    first, _ = games.reset(seed=0)
    # Before the ball flies sideways both see the same, except its speed along the field.
    mirrored = np.array([1, 1, 1, 1, 1, 1, -1, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(first[0], first[1] * mirrored)
    for _ in range(20):
        seen, *_ = games.step(np.array([[1, 0, 1], [1, 0, 1]]))
        np.testing.assert_array_equal(seen[0], seen[1] * mirrored)
    assert (seen[:, 0] < first[:, 0]).all()


def test_pictures_show_what_moves() -> None:
    games: Any = SlimeVolley(2, render_mode="rgb_array")
    games.reset(seed=0)
    before = games.render()
    for _ in range(10):
        games.step(np.array([[1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]))
    after = games.render()
    assert [picture.shape for picture in after] == [(160, 384, 3)] * 2
    assert after[0].dtype == np.uint8
    changed_columns = np.flatnonzero((before[0] != after[0]).any((0, 2)))
    # Only the right slime has moved, and the ball is still held above the fence.
    assert changed_columns.min() > 384 // 2 + 24
    np.testing.assert_array_equal(before[1], after[1])
