"""The contract of a game of several seats, over every one that Penstock has."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import pytest

import penstock.envs  # noqa: F401  registers the ids
from penstock.configs.sections import EnvConfig
from penstock.core.loading import load, parameters
from penstock.core.observations import MASK, views
from penstock.envs import BatchedEnv, make
from penstock.envs.checking.checks import Checker
from penstock.envs.checking.vector import check_vector, draw_for
from penstock.envs.make import makers

GAMES = 3
STEPS = 150


def ids() -> Iterator[str]:
    """The ids of all games that are registered, and of some of PettingZoo's."""
    for name, spec in gymnasium.registry.items():
        maker: Any = spec.vector_entry_point
        is_own = name.startswith("penstock/") and isinstance(maker, str)
        if is_own and "num_games" in parameters(load(maker, name)):
            yield name
    if find_spec("pettingzoo") and find_spec("pygame"):
        yield from ("pettingzoo/connect_four_v3", "pettingzoo/rps_v2")
    if find_spec("mpe2"):
        yield from ("pettingzoo/simple_spread_v3", "pettingzoo/simple_tag_v3")


CASES = [
    *(EnvConfig(id=name) for name in ids()),
    EnvConfig(id="penstock/SyntheticGames-v0", kwargs={"turns": True, "seats": 3}),
    EnvConfig(
        id="penstock/SyntheticGames-v0",
        kwargs={"ends_apart": True, "turns": True, "seats": 3, "episode_steps": 6},
    ),
]
of_every_game = pytest.mark.parametrize("env", CASES, ids=lambda env: f"{env.id}{env.kwargs}")


class Play:
    """Random legal steps of an environment: what each row was shown, did, and was paid."""

    def __init__(self, env: BatchedEnv, seed: int, steps: int = STEPS) -> None:
        rng = np.random.default_rng(seed)
        space = env.info.observation_space
        observations = np.zeros((env.count, *space.shape), space.dtype)
        env.reset_into(seed, observations)
        columns: dict[str, list[Any]] = {
            name: [] for name in ("obs", "alive", "action", "reward", "ended", "outcome")
        }
        alive = np.ones(env.count, np.bool_) if env.playing is None else env.playing.copy()
        for _ in range(steps):
            columns["obs"].append(observations.copy())
            columns["alive"].append(alive)
            actions = draw_for(env, observations, rng)
            reward, terminated, truncated = env.step_into(actions, observations)
            ended = terminated | truncated
            alive = ~ended if env.playing is None else env.playing.copy()
            outcome = np.zeros(env.count) if env.outcome is None else env.outcome
            for name, values in (
                ("action", actions),
                ("reward", reward),
                ("ended", ended),
                ("outcome", outcome),
            ):
                columns[name].append(np.array(values))
        self.columns = {name: np.stack(values) for name, values in columns.items()}

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]


@of_every_game
def test_check_env_finds_no_problem(env: EnvConfig) -> None:
    made = makers(env)
    assert made.of_games
    assert made.vector is not None
    checker = Checker()
    check_vector(checker, made.vector, STEPS, of_games=True)
    assert checker.problems == []


@of_every_game
def test_a_row_without_a_decision_has_no_reward_and_no_end(env: EnvConfig) -> None:
    game = make(env, 1, whole_games=True)
    played = Play(game, 1, steps=1500)  # a game of slime volley takes several hundred
    game.close()
    assert played["ended"].any(), "no episode has ended"
    assert not played["reward"][~played["alive"]].any()
    assert not played["ended"][~played["alive"]].any()
    # An ended row does not play in the next step, and all seats begin again together.
    assert not played["alive"][1:][played["ended"][:-1]].any()
    assert (np.abs(played["outcome"][played["ended"]]) <= 1).all()


@of_every_game
def test_every_seat_that_plays_has_a_legal_choice_and_takes_one(env: EnvConfig) -> None:
    """And a seat that acts has at least one; none takes a choice that its mask forbids."""
    game = make(env, GAMES, whole_games=True)
    mask_parts = tuple(part for part in game.info.parts if part.name == MASK)
    if not mask_parts:
        pytest.skip("all seats may act in every step")
    played = Play(game, 2)
    game.close()
    masks = views(mask_parts, played["obs"])[MASK]
    allowed = (masks != 0).sum(-1)
    assert (allowed[played["alive"]] >= 1).all()
    chosen = np.take_along_axis(masks, played["action"][..., None], -1)[..., 0]
    assert (chosen[played["alive"]] != 0).all()


@of_every_game
def test_equal_seeds_play_equal_rows_whatever_was_played_before(env: EnvConfig) -> None:
    first, second = (make(env, GAMES, whole_games=True) for _ in range(2))
    Play(second, 5, steps=20)
    one, other = Play(first, 7), Play(second, 7)
    first.close()
    second.close()
    for name, values in one.columns.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


@of_every_game
def test_a_vector_has_a_row_for_each_seat_of_its_games(env: EnvConfig) -> None:
    make_games = makers(env).vector
    assert make_games is not None
    for games in (1, 4):
        vector = make_games(games)
        seats = vector.metadata["seats"]
        assert vector.num_envs == games * seats
        assert len(vector.metadata.get("sides", range(seats))) == seats
        vector.close()
