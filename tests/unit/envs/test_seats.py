"""Games of several seats: how they are made, checked, and refused with options that do not fit."""

from __future__ import annotations

import re
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import VectorEnv

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.configs.sections import EnvConfig
from penstock.envs import make, probe
from penstock.envs.checking.checks import Checker
from penstock.envs.checking.vector import check_vector
from penstock.envs.games.synthetic import SyntheticGames
from penstock.envs.seats import Seating, check_options, keys_of, ranking_note, seating_of
from seat_game import Script

GAMES = "penstock/SyntheticGames-v0"
YES, NO = True, False
ALL = {"playing": [YES, YES]}
NONE = {"playing": [NO, NO], "ended": [YES, YES]}
RESET = {"playing": [YES, YES]}


def config(*options: str) -> Config:
    return resolve(GAMES, ["algo.name=ppo", *options])


def problems(script: list[dict[str, Any]], **options: Any) -> list[str]:
    checker = Checker()
    check_vector(checker, partial(Script, script=script, **options), 40, of_games=True)
    return [f"{problem.kind}: {problem.text}" for problem in checker.problems]


def test_rows_are_the_seats_of_all_games() -> None:
    env = make(EnvConfig(id=GAMES, kwargs={"seats": 3, "rivals": True}), 6)
    assert env.count == 6
    assert env.info.seating == Seating(3, (0, 1, 2))
    env.close()


def test_an_environment_without_seats_has_one() -> None:
    seating = probe(EnvConfig(id="CartPole-v1")).seating
    assert seating == Seating(1, (0,), ())
    assert not seating.has_opponents


def test_rows_that_are_no_whole_games_are_refused() -> None:
    env = EnvConfig(id=GAMES, kwargs={"seats": 3})
    with pytest.raises(UserError, match=r"actors.envs 8 is not divisible by 3.*set actors.envs=9"):
        make(env, 8)
    with closing(make(env, 8, whole_games=True)) as made:
        assert made.count == 9


def test_wrappers_are_refused_for_games_of_several_seats() -> None:
    env = EnvConfig(id=GAMES, wrappers=["gymnasium.wrappers:OrderEnforcing"])
    with pytest.raises(UserError, match="comes as a vector environment only"):
        make(env, 4)


def in_rows(num_envs: int) -> Script:
    return Script(num_envs // 2, [ALL])


def test_seats_of_a_function_that_takes_num_envs_are_refused() -> None:
    with pytest.raises(UserError, match="take num_games instead of num_envs"):
        make(EnvConfig(id=f"{__name__}:in_rows"), 4)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"seats": 0}, "must be the number of seats of a game, 1 or more"),
        ({"seats": 2.0}, "must be the number of seats"),
        ({"seats": 2, "sides": (0, 2)}, r"a side for each of the 2 seats, counted from 0"),
        ({"seats": 2, "sides": (0,)}, r"as in \(0, 1\)"),
        ({"seats": 2, "bots": "random"}, "the names of the scripted players"),
    ],
)
def test_metadata_that_does_not_fit_together_is_refused(
    metadata: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        seating_of("mine", metadata)


NEVER = ("eval.every_steps=null",)
IN_ONE_PROCESS = ("transport.kind=inproc", "actors.count=1")
DUEL = Seating(2, (0, 1), ("random", "minimax2"))
TEAM = Seating(2, (0, 0))


@pytest.mark.parametrize("options", [NEVER, IN_ONE_PROCESS])
def test_stop_return_without_evaluations_is_refused_in_a_game_of_several_sides(
    options: tuple[str, ...],
) -> None:
    cfg = config("stop.return=5", "actors.envs=8", *options)
    with pytest.raises(UserError, match=r"there are no evaluations; set eval.every_steps=100000"):
        check_options(cfg, DUEL)
    check_options(cfg, TEAM)
    check_options(config("stop.return=5", "actors.envs=8"), DUEL)


@pytest.mark.parametrize(
    ("against", "seating", "words"),
    [
        ("bot:randm", DUEL, "no scripted player 'randm'; choose from bot:random, bot:minimax2"),
        ("bot:random", Seating(2, (0, 1)), "name a run or a file, as it has none"),
        ("initial", TEAM, "has one side, against which initial cannot play"),
    ],
)
def test_an_opponent_that_a_game_cannot_have_is_refused(
    against: str, seating: Seating, words: str
) -> None:
    cfg = config(f"eval.against=[{against}]", "actors.envs=8")
    with pytest.raises(UserError, match=words):
        check_options(cfg, seating)


def test_a_note_says_what_ranks_the_checkpoints_of_a_game_of_several_sides() -> None:
    assert "evaluations against initial do" in ranking_note(config(), DUEL)
    bots = config("eval.against=[bot:random, initial]")
    assert "evaluations against bot:random, initial do" in ranking_note(bots, DUEL)
    assert "checkpoints/best is not written" in ranking_note(config(*NEVER), DUEL)
    assert ranking_note(config(), TEAM) == ""


@pytest.mark.parametrize(
    ("metadata", "seat", "words"),
    [
        ({"seats": 2}, 0, "does not say by which keys a person plays it"),
        ({"seats": 2, "keys": ({"a": 0},)}, 0, "a map of keys for each of the 2 seats"),
        ({"seats": 2, "keys": ({"a": 0},) * 2}, 2, "has no seat 2; choose from 0 to 1"),
        ({}, 0, "has one seat"),
    ],
)
def test_keys_that_a_game_does_not_have_are_refused(
    metadata: dict[str, Any], seat: int, words: str
) -> None:
    vector = VectorEnv()
    vector.metadata = metadata
    with pytest.raises(UserError, match=words):
        keys_of("mine", vector, seat)


def test_each_seat_has_keys_of_its_own() -> None:
    vector = VectorEnv()
    vector.metadata = {"seats": 2, "keys": ({"a": 0}, {"b": 1})}
    assert keys_of("mine", vector, 1) == {"b": 1}


DUEL = Seating(2, (0, 1), ("random", "minimax2"))
HUNT = Seating(4, (0, 0, 0, 1))


@pytest.mark.parametrize(
    ("seating", "options", "words"),
    [
        (DUEL, ["league.bots={randm: 1}"], "those of the game are random, minimax2; name one"),
        (HUNT, ["league.bots={random: 1}"], "the game has no scripted players; leave it out"),
        (DUEL, ["league.mirror=0.7"], r"league.mirror 0.7 of actors.envs 8 is 5.6 rows, and they "
         r"must be whole games of 2; set actors.envs=20"),
        (DUEL, ["league.bots={random: 0.1}"], r"league.mirror 0.9 .* is 7.2 rows"),
        (DUEL, ["league.mirror=0.75", "league.bots={random: 0.125}"],
         r"what league.mirror and league.bots leave to the pool, 0.125 of actors.envs 8 is 1 rows, "
         r"and they must be whole games of 1, as many for each of 2 chairs; set actors.envs=16"),
        (DUEL, ["league.mirror=0.333"], "is 2.664 rows, .*choose shares that are"),
        (HUNT, ["league.mirror=0"], r"have 3 and 1 seats, .*set league.seats.* such as .*0, 1, 2"),
        (HUNT, ["league.mirror=0", "league.seats=[4]"], "has seat 4, and the game has 4, counted"),
        (HUNT, ["league.mirror=0", "league.seats=[1, 1]"], "must be different seats"),
        (HUNT, ["league.mirror=0", "league.seats=[0, 1, 2, 3]"], "leave one of 4 to an opponent"),
        (HUNT, ["league.seats=[3]"], r"league.mirror 1 lets the policy play all .*league.mirror=0"),
        (Seating(2, (0, 0)), ["league.mirror=0.5"], "league.mirror is for a game of several sides"),
        (Seating(), ["league.games=3"], "league.games is for a game of several sides, and .* has"),
    ],
)  # fmt: skip
def test_options_of_a_league_that_do_not_fit_the_game_are_refused(
    seating: Seating, options: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check_options(config("actors.envs=8", *options), seating)


def test_options_of_a_league_that_fit_the_game_are_taken() -> None:
    for options in (
        ["league.mirror=0.5"],
        ["league.mirror=0.5", "league.bots={random: 0.25, minimax2: 0.25}"],
        ["league.bots={random: 1.0}", "actors.envs=7"],
        ["league.mirror=0.2", "actors.envs=20"],
    ):
        check_options(config("actors.envs=8", *options), DUEL)
    check_options(config("actors.envs=6", "league.mirror=0", "league.seats=[3]"), HUNT)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"turns": True, "n_actions": 3},
        {"rivals": True},
        {"seats": 3, "ends_apart": True},
        {"seats": 1},
    ],
)
def test_synthetic_games_have_no_problem(kwargs: dict[str, Any]) -> None:
    checker = Checker()
    make_games = partial(SyntheticGames, episode_steps=5, **kwargs)
    check_vector(checker, make_games, 40, of_games=True)
    assert checker.problems == []


@pytest.mark.parametrize(
    "script",
    [
        [ALL, ALL, NONE, RESET],
        [{"ended": [NO, NO]}, {"ended": [YES, YES]}, {}],
        # The first seat is out until the second one has ended.
        [
            {"playing": [NO, YES], "ended": [YES, NO]},
            ALL | {"playing": [NO, NO], "ended": [NO, YES]},
            RESET,
        ],
        # The second seat joins a game that has begun.
        [{"playing": [YES, NO], "ended": [NO, YES]}, NONE | {"ended": [YES, NO]}, RESET],
    ],
)
def test_a_game_that_follows_the_rules_for_seats_has_no_problem(script: Any) -> None:
    assert problems(script) == []


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([{"ended": [YES, NO]}, {"ended": [NO, YES]}, {}], "end apart, and info has no playing"),
        ([ALL | {"ended": [YES, YES]}, RESET], "plays whose episode has just ended"),
        ([{"playing": [NO, YES]}, ALL, NONE, RESET], "ceased to play in a step that did not end"),
        (
            [{"playing": [NO, YES], "ended": [YES, NO]}, ALL, NONE, RESET],
            "began another one before all seats of its game had ended",
        ),
        ([NONE, {"playing": [NO, NO]}, RESET], "next step did not begin the game again"),
        (
            [
                {"playing": [NO, YES], "ended": [YES, NO]},
                {"playing": [NO, NO], "ended": [NO, YES], "reward": [1, 0]},
                RESET,
            ],
            "a row that is out, or that a step only resets, had a reward",
        ),
        ([NONE | {"outcome": [2, -2]}, RESET], r"numbers from -1 \(lost\) to 1 \(won\)"),
        ([{"playing": [1, 1]}, NONE, RESET], "return an array of 4 bools"),
    ],
)
def test_a_game_that_breaks_a_rule_for_seats_has_its_problem(script: Any, words: str) -> None:
    [problem] = problems(script)
    assert problem.startswith("seats: ")
    assert re.search(words, problem)


def test_a_function_of_games_must_make_as_many_rows_as_their_seats() -> None:
    checker = Checker()
    check_vector(checker, lambda games: Script(games + 1, [ALL]), 10, of_games=True)
    [problem] = checker.problems
    assert "num_games=2 made 6 environments, and a game has 2 seats" in problem.text


def test_outcome_is_that_of_the_last_step() -> None:
    script: Any = [ALL, NONE | {"outcome": [1, -1]}, RESET]
    env = make(EnvConfig(id="seat_game:Script", kwargs={"script": script}), 2)
    observations = np.zeros((2, 2), np.float32)
    env.reset_into(0, observations)
    env.step_into(np.zeros(2, np.int32), observations)
    env.step_into(np.zeros(2, np.int32), observations)
    assert env.outcome is not None
    assert env.outcome.tolist() == [1, -1]
    env.close()
