"""Environments of PettingZoo as games of several seats, against what scripted games do."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.sections import EnvConfig
from penstock.core.notes import notes_to
from penstock.core.observations import views
from penstock.envs import BatchedEnv, make
from penstock.envs.checking.checks import Checker
from penstock.envs.checking.vector import check_vector

pytest.importorskip("pettingzoo")

from penstock.envs.pettingzoo import ZooVectorEnv
from zoo_games import DEATH, PAY, PLIES, Unlike

GAMES = 2


class Played:
    """Steps of an environment whose rows take the first allowed choice, from a reset on."""

    def __init__(self, env: BatchedEnv, steps: int) -> None:
        space = env.info.observation_space
        observations = np.zeros((env.count, *space.shape), np.uint8)
        env.reset_into(3, observations)
        names = "obs", "mask", "playing", "reward", "terminated", "truncated"
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for _ in range(steps):
            parts = views(env.info.parts, observations)
            masks = parts["action_mask"].copy()
            columns["obs"].append(parts["observation"].copy())
            columns["mask"].append(masks)
            assert env.playing is not None
            columns["playing"].append(env.playing)
            actions = masks.argmax(1).astype(np.int32)
            for name, values in zip(names[3:], env.step_into(actions, observations), strict=True):
                columns[name].append(values)
        self.columns = {name: np.stack(rows) for name, rows in columns.items()}

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]


def play(name: str, steps: int, seats: int = 3, **kwargs: Any) -> Played:
    env = make(EnvConfig(id=f"pettingzoo/zoo_games:{name}", kwargs=kwargs), GAMES * seats)
    played = Played(env, steps)
    env.close()
    return played


@pytest.mark.parametrize("masked", [False, True])
def test_a_row_of_an_aec_game_is_paid_in_the_ply_in_which_its_agent_is(masked: bool) -> None:
    plies = len(PLIES)
    played = play("Plies", 2 * plies + 2, masked=masked)
    pay = np.array([*PAY.values()]).T
    pay[DEATH + 1 :, 2] = 0  # the dead are out
    for begin in (0, plies + 1):
        for game in range(GAMES):
            rows = slice(3 * game, 3 * game + 3)
            np.testing.assert_array_equal(played["reward"][begin : begin + plies, rows], pay)
    assert not played["reward"][plies].any()


def test_agents_of_an_aec_game_wait_with_one_choice_until_they_are_selected() -> None:
    plies = len(PLIES)
    played = play("Plies", plies, masked=True)
    for ply, actor in enumerate(PLIES):
        for seat, agent in enumerate(PAY):
            mask = played["mask"][ply, seat].tolist()
            if agent != actor:
                assert mask == [1, 0, 0, 0]
            else:
                assert [*np.flatnonzero(mask)] == [1 + ply % 3]
    plain = play("Plies", plies)
    actors = [[*PAY].index(actor) for actor in PLIES]
    assert plain["mask"][range(plies), actors].all()
    np.testing.assert_array_equal(plain["obs"][:, 0, 0], range(plies))


def test_a_dead_agent_of_an_aec_game_is_out_and_its_steps_are_taken() -> None:
    plies = len(PLIES)
    played = play("Plies", plies + 2)
    assert played["playing"][:, 2].tolist() == [True] * (DEATH + 1) + [False] * (plies - DEATH) + [
        True
    ]
    assert played["playing"][:, 0].tolist() == [True] * plies + [False, True]
    assert np.flatnonzero(played["terminated"][:, 2]).tolist() == [DEATH]
    assert np.flatnonzero(played["terminated"][:, 0]).tolist() == [plies - 1]
    assert np.flatnonzero(played["truncated"][:, 1]).tolist() == [plies - 1]
    # The final observations are those of the last ply, and the next step begins the game again.
    assert played["obs"][plies, 0].tolist() == [plies, 0]
    assert played["obs"][plies + 1, 0].tolist() == [0, 0]
    assert played["obs"][DEATH + 1, 2].tolist() == [DEATH + 1, 2]


def test_an_agent_that_appears_in_an_aec_game_begins_its_episode_there() -> None:
    played = play("Plies", len(PLIES), grows=True)
    assert played["playing"][:, 2].tolist() == [False, False, True, True, False, False, False]
    assert played["reward"][:, 2].tolist() == [0, 0, *PAY["c"][2 : DEATH + 1], 0, 0, 0]
    assert played["mask"][2, 2].all()


def test_agents_of_a_parallel_game_come_and_go() -> None:
    notes: list[str] = []
    with notes_to(notes.append):
        played = play("Together", 7)
    no, yes = False, True
    assert played["playing"][:, :3].tolist() == [
        *([yes, yes, no], [yes, yes, no]),
        [yes, yes, yes],
        [yes, no, yes],
        [no, no, yes],
        [no, no, no],
        [yes, yes, no],
    ]
    assert played["reward"][:, :3].tolist() == [
        *([1, 2, 0], [1, 2, 0], [1, 2, 3], [1, 0, 3], [0, 0, 3], [0, 0, 0], [1, 2, 0])
    ]
    assert [*zip(*np.nonzero(played["terminated"][:, :3]), strict=True)] == [(3, 0)]
    assert [*zip(*np.nonzero(played["truncated"][:, :3]), strict=True)] == [(2, 1), (4, 2)]
    assert played["mask"][0, 0].tolist() == [1, 0, 1]
    assert played["obs"][4, 0].tolist() == [4, 0]  # final
    assert len([note for note in notes if "y of together vanished" in note]) == GAMES


def test_an_agent_that_comes_back_stays_out_until_the_game_begins_again() -> None:
    playing = play("Together", 7, comes_back=True)["playing"]
    assert playing[:, 0].tolist() == [True] * 4 + [False, False, True]


@pytest.mark.parametrize("name", ["Plies", "Together", "Unlike"])
def test_scripted_games_follow_the_rules_for_seats(name: str) -> None:
    checker = Checker()
    check_vector(checker, partial(ZooVectorEnv, f"zoo_games:{name}", {}), 60, of_games=True)
    assert checker.problems == []


def test_unlike_agents_have_padded_observations_and_masked_choices() -> None:
    vector = ZooVectorEnv("zoo_games:Unlike", {}, 1)
    observations, _ = vector.reset(seed=0)
    assert observations["observation"].tolist() == [[1, 2, 0, 0, 1, 0], [3, 4, 5, 6, 0, 1]]
    assert observations["action_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    vector.step(np.array([1, 3]))
    game: Unlike = vector._games[0].env
    assert game.seen == [{"low": 6, "high": 3}]


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        (
            "zoo_games:Unlike",
            {"actions": "mixed"},
            r"actions Discrete\(2, start=5\), Box.*one poli",
        ),
        ("zoo_games:Plies", {"box": True}, r"a Discrete can have; offer .* as a ParallelEnv"),
        ("zoo_games:Plies", {"boks": 1}, r"no option boks; choose from box, grows, masked"),
        ("zoo_games:PLIES", {}, r"has no class or function PLIES"),
        ("seat_game:Pair", {"num_games": 1}, r"must be a ParallelEnv or an AECEnv"),
        ("conect_four", {}, r"have no conect_four; the nearest is connect_four_v3"),
        ("zoo_games:Plies", {"sides": [0, 1]}, r"a side for each of the 3 seats"),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused_in_one_sentence(
    name: str, kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        make(EnvConfig(id=f"pettingzoo/{name}", kwargs=kwargs), 6)


def test_agents_with_continuous_actions_are_played() -> None:
    pytest.importorskip("mpe2")
    kwargs: Any = {"continuous_actions": True, "max_cycles": 3}
    env = make(EnvConfig(id="pettingzoo/simple_push_v3", kwargs=kwargs), 4)
    obs = np.zeros((4, *env.info.observation_space.shape), np.float32)
    env.reset_into(0, obs)
    shape = env.info.action_space.shape or ()
    ends = [env.step_into(np.ones((4, *shape), np.float32), obs)[2].tolist() for _ in range(4)]
    env.close()
    assert ends == [[False] * 4, [False] * 4, [True] * 4, [False] * 4]
    assert np.isfinite(obs).all()


def test_sides_are_those_of_the_options() -> None:
    env = make(EnvConfig(id="pettingzoo/zoo_games:Plies", kwargs={"sides": [0, 1, 0]}), 3)
    assert env.info.seating.sides == (0, 1, 0)
    env.close()
    assert resolve("pettingzoo/rps_v2").env.id == "pettingzoo/rps_v2"


def test_connect_four_is_zero_sum_and_ends_for_both_players_together() -> None:
    pytest.importorskip("pygame")
    env = make(EnvConfig(id="pettingzoo/connect_four_v3"), 8)
    space = env.info.observation_space
    observations = np.zeros((8, *space.shape), np.uint8)
    rng = np.random.default_rng(0)
    env.reset_into(0, observations)
    results = []
    for _ in range(300):
        masks = views(env.info.parts, observations)["action_mask"]
        assert env.playing is not None
        acting = env.playing & (masks.sum(1) > 1)
        assert (acting.reshape(-1, 2).sum(1) <= 1).all()
        actions = (rng.random(masks.shape) * masks).argmax(1).astype(np.int32)
        reward, terminated, _ = env.step_into(actions, observations)
        of_games = reward.reshape(-1, 2)
        np.testing.assert_array_equal(of_games.sum(1), 0)
        ends = terminated.reshape(-1, 2)
        np.testing.assert_array_equal(ends[:, 0], ends[:, 1])
        results += of_games[ends[:, 0], 0].tolist()
    env.close()
    assert {1.0, -1.0} <= {*results}
