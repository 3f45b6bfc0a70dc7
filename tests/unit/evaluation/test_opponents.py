"""Matches of a policy against scripted players, runs and exported files."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import penstock
from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.configs.schema import Config
from penstock.core.params import Float32
from penstock.envs import BatchedEnv, make, probe
from penstock.evaluation.estimates import win_rate
from penstock.evaluation.evaluate import (
    by_opponent,
    describe,
    describe_seeds,
    evaluate,
    evaluate_seeds,
    games_of,
    play_policy,
)
from penstock.evaluation.opponents import MissingInitialError, OpponentSource, find_opponent
from penstock.evaluation.policy_source import PolicySource
from penstock.learner.checkpoints import checkpoint_format, exported
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_history import ENV
from penstock.learner.checkpoints.checkpoint_spaces import SPACES, spaces_as_json
from penstock.learner.pool import PolicyPool
from penstock.models.acting.policy import Policy

RPS = "penstock/RockPaperScissors-v0"
ROCK, PAPER, SCISSORS = range(3)
MASK_FIRST = ("action_mask", "observation")


def config_of(env_id: str = RPS, *options: str) -> Config:
    small = ("algo.name=ppo", "model.hidden=[8]", "actors.inference=numpy")
    return resolve(env_id, [*small, *options])


def always(config: Config, action: int) -> Float32:
    """Weights of a policy that always takes an action."""
    layout = network_shape(config, probe(config.env)).layout
    weights = np.zeros(layout.size, np.float32)
    layout.views(weights)["policy.bias"][action] = 50.0
    return weights


def source(config: Config, action: int) -> PolicySource:
    weights = always(config, action)
    return PolicySource(config, "last", False, lambda env: weights)


def save_run(folder: Path, config: Config, action: int) -> str:
    """A run's folder, as far as an evaluation reads it."""
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(config))
    checkpoint_format.save(folder / "checkpoints" / "last", checkpoint(config, action))
    return str(folder)


def checkpoint(config: Config, action: int) -> Checkpoint:
    info = probe(config.env)
    meta = {SPACES: spaces_as_json(info), ENV: config.env.identity()}
    return Checkpoint(network_shape(config, info).layout, always(config, action), meta=meta)


@pytest.fixture
def env() -> Iterator[BatchedEnv]:
    with closing(make(config_of().env, 8)) as games:
        yield games


def greedy(policy: Policy) -> Any:
    return policy.greedy


def test_each_opponent_gets_the_same_number_of_games_in_each_seat(env: BatchedEnv) -> None:
    cfg = config_of()
    rivals = [OpponentSource(str(move), source(cfg, move)) for move in (ROCK, PAPER, SCISSORS)]
    played = play_policy(env, source(cfg, PAPER), rivals, 22, choose=greedy, seed=0, max_steps=100)
    figures = by_opponent(played)
    assert [each["opponent"] for each in figures] == ["0", "1", "2"]
    assert [each["episodes"] for each in figures] == [8, 8, 8]
    assert [seat["episodes"] for each in figures for seat in each["seats"]] == [4] * 6
    # Paper beats rock in every round, draws with paper and loses to scissors.
    assert [each["won"] for each in figures] == [1, 0, 0]
    assert [each["drawn"] for each in figures] == [0, 1, 0]
    assert [each["lost"] for each in figures] == [0, 0, 1]
    assert [each["win_rate"]["mean"] for each in figures] == [1, 0.5, 0]
    assert [each["return"]["mean"] for each in figures] == [10, 0, -10]
    assert len(games_of(played)) == 24


def test_sides_of_unlike_size_are_played_in_matches_of_their_own() -> None:
    cfg = config_of("penstock/PredatorPrey-v0")
    rival = OpponentSource("bot:random", None)
    with closing(make(cfg.env, 4, whole_games=True)) as games:
        sides = np.array(games.info.seating.sides)
        played = play_policy(games, source(cfg, 0), [rival], 4, choose=greedy, seed=0, max_steps=20)
    seats = [episode.seat for episode in played]
    assert {*seats} == {*range(len(sides))}
    # A game of a side has a row for each of its seats.
    for game in games_of(played):
        [side] = {int(sides[episode.seat]) for episode in game}
        assert len(game) == np.count_nonzero(sides == side)


def test_a_policy_of_another_network_is_an_opponent(env: BatchedEnv) -> None:
    wide = config_of(RPS, "model.hidden=[16, 16]", "model.activation=relu")
    rival = OpponentSource("wide", source(wide, SCISSORS))
    played = play_policy(
        env, source(config_of(), ROCK), [rival], 4, choose=greedy, seed=0, max_steps=100
    )
    assert [episode.outcome for episode in played] == [1.0] * 4


def test_runs_and_exported_files_are_opponents(tmp_path: Path) -> None:
    cfg = config_of()
    info = probe(cfg.env)
    rock = save_run(tmp_path / "rock", cfg, ROCK)
    file = tmp_path / "paper.safetensors"
    exported.write(file, cfg, info.spaces, info, always(cfg, PAPER))

    result = evaluate(rock, 10, "best", None, 0, None, against=[str(file), rock])
    assert [each["lost"] for each in result["against"]] == [1, 0]
    assert [each["drawn"] for each in result["against"]] == [0, 1]
    assert result["sample"]  # as the opponents do
    text = describe(result)
    assert f"against {file}: 5 episodes, mean return -10, won 0%, drawn 0%, lost 100%" in text
    result = evaluate(str(file), 6, "best", None, 0, None, against=["bot:random"])
    assert not result["sample"]
    assert result["against"][0]["episodes"] == 6


def test_the_python_api_plays_an_opponent_or_several(tmp_path: Path) -> None:
    paper = save_run(tmp_path / "paper", config_of(), PAPER)
    rock = Path(save_run(tmp_path / "rock", config_of(), ROCK))
    evaluation = penstock.evaluate(paper, 4, against=[rock, paper])
    assert evaluation.win_rates == {str(rock): 1.0, paper: 0.5}
    assert penstock.evaluate(paper, 4, against="bot:random").win_rates.keys() == {"bot:random"}
    assert penstock.evaluate(paper, 4).win_rates == {}


def test_the_initial_policy_is_the_first_of_the_runs_pool(tmp_path: Path) -> None:
    cfg = config_of()
    folder = save_run(tmp_path / "run", cfg, ROCK)
    with pytest.raises(MissingInitialError, match="no policy of line main from before training"):
        evaluate(folder, 2, "best", None, 0, None, against=["initial"])

    pool = PolicyPool(tmp_path / "run" / "pool")
    pool.add("main", checkpoint(cfg, SCISSORS), steps=0, time_s=0.0, initial=True)
    pool.add("main", checkpoint(cfg, PAPER), steps=9, time_s=1.0)
    result = evaluate(folder, 2, "best", None, 0, None, against=["initial"])
    assert result["against"][0]["won"] == 1


def test_opponents_that_there_are_not_are_refused_in_a_sentence(tmp_path: Path) -> None:
    cfg = config_of()
    folder = save_run(tmp_path / "run", cfg, ROCK)
    four = save_run(tmp_path / "four", config_of("penstock/ConnectFour-v0"), 0)
    alone = save_run(tmp_path / "alone", config_of("CartPole-v1"), 0)
    for against, words in (
        ("nobody", "there is no opponent nobody; give bot:NAME"),
        ("bot:paper", "no scripted player 'paper'; choose from bot:random"),
        (four, "was trained on penstock/ConnectFour-v0, which has other observations or actions"),
    ):
        with pytest.raises(UserError, match=words):
            evaluate(folder, 2, "best", None, 0, None, against=[against])
    with pytest.raises(UserError, match="CartPole-v1 has one side, against which bot:x cannot"):
        evaluate(alone, 2, "best", None, 0, None, against=["bot:x"])
    with pytest.raises(UserError, match="an exported file has none"):
        find_opponent("initial", cfg, None)


def test_each_run_of_several_seeds_plays_the_opponents(tmp_path: Path) -> None:
    cfg = config_of()
    rock = save_run(tmp_path / "rock", cfg, ROCK)
    for seed, action in enumerate((PAPER, SCISSORS)):
        save_run(tmp_path / f"seed-{seed}", cfg, action)
    result = evaluate_seeds(str(tmp_path), 4, "best", None, 0, None, against=[rock])
    assert [run["against"][0]["won"] for run in result["runs"]] == [1, 0]
    header, first, second, *_ = describe_seeds(result).splitlines()[1:]
    assert header.endswith("win rate")
    assert first.endswith(f"100% v {rock}")
    assert second.endswith(f"0% v {rock}")


def test_identity_tells_later_weights_from_earlier_ones(tmp_path: Path, env: BatchedEnv) -> None:
    cfg = config_of()
    folder = save_run(tmp_path / "run", cfg, ROCK)
    rival = find_opponent(folder, cfg, None)
    before = rival.identity(env)
    checkpoint_format.save(tmp_path / "run/checkpoints/last", checkpoint(cfg, PAPER))
    assert rival.identity(env) == before  # it plays on with the weights that it has read
    assert find_opponent(folder, cfg, None).identity(env) != before
    assert OpponentSource("bot:random", None).identity(env) == "bot:random"


def test_an_opponent_that_reads_observations_in_another_order_is_refused() -> None:
    cfg = config_of("penstock/ConnectFour-v0")
    weights = always(cfg, 0)

    def packing(env: BatchedEnv, names: Sequence[str]) -> Float32:
        parts = env.info.spaces[0]
        assert isinstance(parts, spaces.Dict)
        env.pack_as(spaces.Dict(OrderedDict((name, parts[name]) for name in names)))
        return weights

    usual = PolicySource(cfg, "last", False, partial(packing, names=MASK_FIRST))
    other = PolicySource(cfg, "last", False, partial(packing, names=MASK_FIRST[::-1])).read_once()
    rival = OpponentSource("other", other)
    with closing(make(cfg.env, 2)) as games:
        rival.identity(games)
        with pytest.raises(UserError, match="parts of its observations in another order"):
            play_policy(games, usual, [rival], 2, choose=greedy, seed=0, max_steps=100)


def test_the_same_seed_plays_the_same_matches(env: BatchedEnv) -> None:
    cfg = config_of()
    layout = network_shape(cfg, env.info).layout
    undecided = PolicySource(cfg, "last", True, lambda env: np.zeros(layout.size, np.float32))
    rivals = [OpponentSource("run", undecided), OpponentSource("bot:random", None)]

    def returns(seed: int) -> list[float]:
        played = play_policy(
            env, undecided, rivals, 16, choose=lambda policy: policy.act, seed=seed, max_steps=100
        )
        return [episode.episode_return for episode in played]

    first = returns(5)
    assert returns(5) == first
    assert returns(6) != first


@pytest.mark.parametrize(
    ("won", "drawn", "lost", "low", "high"),
    [
        # scipy.stats.binomtest(8, 10).proportion_ci(method="wilson"), and so on; a draw is half a
        # win.
        (8, 0, 2, 0.4901625, 0.9433178),
        (20, 0, 0, 0.8388748, 1.0),
        (0, 0, 20, 0.0, 0.1611252),
        (40, 20, 40, 0.4038315, 0.5961685),
    ],
)
def test_the_interval_of_a_win_rate_is_wilsons(
    won: int, drawn: int, lost: int, low: float, high: float
) -> None:
    rate = win_rate([1.0] * won + [0.0] * drawn + [-1.0] * lost)
    assert rate.mean == (won + drawn / 2) / (won + drawn + lost)
    assert math.isclose(rate.lower, low, abs_tol=2e-5)
    assert math.isclose(rate.upper, high, abs_tol=2e-5)
