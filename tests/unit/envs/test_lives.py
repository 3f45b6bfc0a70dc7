"""Atari's lives as episodes, against a second emulator that plays the same actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ale_py import AtariVectorEnv
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import VectorEnv

from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.envs import BatchedEnv, atari, make
from penstock.envs.lives import LIFE_LOST, LivesAsEpisodes
from penstock.evaluation.evaluate import play

FIRE, STEPS = 1, 900
OPTIONS: dict[str, Any] = {"repeat_action_probability": 0.0, "noop_max": 1}


def breakout(count: int, **kwargs: Any) -> BatchedEnv:
    options = {**OPTIONS, "episodic_life": True, **kwargs}
    return make(EnvConfig(id="ALE/Breakout-v5", kwargs=options), count)


def run(game: BatchedEnv, actions: list[int]) -> list[tuple[Any, float, bool, bool, bool]]:
    """Observation, reward, terminated, truncated and life lost of each step of game 0."""
    out = np.zeros((game.count, 4, 84, 84), np.uint8)
    game.reset_into(3, out)
    found = []
    for action in actions:
        reward, terminated, truncated = game.step_into(np.full(game.count, action, np.int32), out)
        assert game.life_lost is not None
        flags = (terminated[0], truncated[0], game.life_lost[0])
        found.append((out[0].copy(), float(reward[0]), *map(bool, flags)))
    game.close()
    return found


@pytest.mark.slow
def test_lives_are_episodes_of_one_continuing_game() -> None:
    actions = np.random.default_rng(0).choice([0, 2, 3], STEPS).tolist()
    steps = run(breakout(2), actions)
    lost = [t for t, step in enumerate(steps) if step[4]]
    ends = [t for t, step in enumerate(steps) if step[2]]
    games = [t for t in ends if t not in lost]
    assert len(games) >= 2
    assert sum(t < games[0] for t in lost) == 4  # five lives: the fifth ends the game
    # A plain emulator that is told to fire in the steps that only reset plays the same game.
    plain = AtariVectorEnv("breakout", 1, reward_clipping=False, num_threads=1, **OPTIONS)
    observations, _ = plain.reset(seed=3)
    begun = -1  # the first row of this life
    for t, action in enumerate(actions):
        told = FIRE if t - 1 in lost else action
        observations, reward, terminated, truncated, _ = plain.step(np.array([told]))
        shown, paid, ended, cut, life = steps[t]
        assert (float(reward[0]), bool(terminated[0]), bool(truncated[0])) == (
            paid,
            ended > life,
            cut,
        )
        begun = t if t - 1 in lost else (-1 if t - 1 in games else begun)
        older = 0 if begun < 0 else max(0, 3 - (t - begun))
        assert not shown[:older].any()
        np.testing.assert_array_equal(shown[older:], observations[0, older:])


def test_life_without_fire_starts_where_the_game_waits() -> None:
    steps = run(breakout(1, use_fire_reset=False), [FIRE, *[0] * 100])
    assert sum(step[4] for step in steps) == 1  # the second ball is never served


class Scripted(VectorEnv):
    """One game of the given steps: lives, reward, and whether the game is over."""

    num_envs = 1
    metadata: dict[str, Any] = {}  # noqa: RUF012 - as gymnasium declares it
    render_mode = None
    single_observation_space = observation_space = Box(0, 255, (1, 4, 2, 2), np.uint8)
    single_action_space = action_space = Discrete(2)

    def __init__(self, *steps: tuple[int, int, bool]) -> None:
        self._steps = iter(steps)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.ones((1, 4, 2, 2), np.uint8), {"lives": np.array([2])}

    def step(self, actions: Any) -> Any:
        lives, reward, over = next(self._steps)
        observations, flags = np.ones((1, 4, 2, 2), np.uint8), (np.array([over]), np.array([False]))
        return observations, np.array([reward]), *flags, {"lives": np.array([lives])}


def scripted(*steps: tuple[int, int, bool]) -> list[tuple[float, bool, bool, int]]:
    """Reward, terminated, life lost and the number of frames shown, of each step."""
    env = LivesAsEpisodes(Scripted(*steps), {**atari.OPTIONS, "game": "breakout"})
    env.reset()
    shown = []
    for _ in steps:
        observations, reward, terminated, _, info = env.step(np.array([0]))
        frames = int(observations[0, :, 0, 0].sum())
        shown.append((float(reward[0]), bool(terminated[0]), bool(info[LIFE_LOST][0]), frames))
    return shown


def test_reward_of_a_reset_step_is_added_to_the_next_step() -> None:
    assert scripted((2, 1, False), (1, 2, False), (1, 30, False), (0, 4, True)) == [
        (1, False, False, 4),
        (2, True, True, 4),
        (0, False, False, 1),
        (34, True, False, 2),
    ]


def test_game_that_ends_in_a_reset_step_terminates_one_step_later() -> None:
    """The emulator resets in the step after, and has begun the next game by then."""
    assert scripted((1, 2, False), (0, 30, True), (2, 0, False), (2, 1, False), (2, 5, False)) == [
        (2, True, True, 4),
        (0, False, False, 1),
        (30, True, False, 1),
        (0, False, False, 1),  # the reset that follows any end
        (6, False, False, 2),
    ]


def test_life_lost_in_a_reset_step_ends_no_episode() -> None:
    assert scripted((5, 0, False), (4, 0, False), (3, 0, False), (3, 1, False)) == [
        (0, False, False, 4),
        (0, True, True, 4),
        (0, False, False, 1),
        (1, False, False, 2),
    ]


def test_last_life_ends_the_game_only_with_the_games_own_flag() -> None:
    """Some games show their end for a while."""
    assert scripted((2, 0, False), (0, 0, False), (0, 1, True)) == [
        (0, False, False, 4),
        (0, False, False, 4),
        (1, True, False, 4),
    ]


def test_reset_discards_pending_ends_and_rewards() -> None:
    """After a lost life, the step that only resets, and a game that ended in such a step."""
    lost = (1, 2, False)
    for pending in ([lost], [lost, (1, 30, False)], [lost, (0, 30, True)]):
        env = LivesAsEpisodes(
            Scripted(*pending, (2, 5, False)), {**atari.OPTIONS, "game": "breakout"}
        )
        env.reset()
        for _ in pending:
            env.step(np.array([0]))
        env.reset()
        observations, reward, terminated, _, info = env.step(np.array([0]))
        assert (float(reward[0]), bool(terminated[0]), bool(info[LIFE_LOST][0])) == (
            5,
            False,
            False,
        )
        assert observations.all()


@pytest.mark.slow
def test_an_evaluation_counts_whole_games() -> None:
    game = breakout(2)
    rng = np.random.default_rng(0)
    episodes = play(game, lambda obs: rng.choice([0, 2, 3], 2), 4, 3, 27_000)
    game.close()
    # A life without a hit lasts about 20 steps.
    assert len(episodes) == 4
    assert all(episode.length > 90 and not episode.cut for episode in episodes)


def test_wrappers_of_single_games_are_refused() -> None:
    env = EnvConfig(
        id="ALE/Breakout-v5",
        kwargs={"episodic_life": True},
        wrappers=["gymnasium.wrappers:RecordEpisodeStatistics"],
    )
    with pytest.raises(UserError, match=r"not possible with env\.wrappers"):
        make(env, 1)
