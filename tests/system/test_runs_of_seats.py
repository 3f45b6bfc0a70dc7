"""Runs of games of several seats, from the command line to an evaluation of each seat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train_command import SMALL, Penstock, assert_balanced

pytestmark = [pytest.mark.system]

GAMES = "penstock/SyntheticGames-v0"
TURNS = "env.kwargs={turns: true, ends_apart: true, seats: 4, episode_steps: 9}"


@pytest.mark.parametrize("kind", ["shm", pytest.param("zmq", marks=pytest.mark.slow), "inproc"])
def test_games_of_several_seats_are_trained_and_every_step_is_counted(
    penstock: Penstock, tmp_path: Path, kind: str
) -> None:
    options = ("algo.name=ppo", "run.dir=run", "stop.learner_steps=400", "model.hidden=[16]")
    code, summary, err = penstock(
        "train", GAMES, "--json", *SMALL, *options, TURNS, f"transport.kind={kind}"
    ).end()
    assert code == 0, err
    assert "4 seats a game" in err
    assert_balanced(summary)
    assert summary["episodes"] > 100

    code, result, err = penstock("eval", "run", "--json", "--episodes", "8").end()
    assert code == 0, err
    assert [seat["episodes"] for seat in result["seats"]] == [2, 2, 2, 2]
    # Seats end one step apart, the first of them last.
    assert sorted(result["lengths"]) == [6, 6, 7, 7, 8, 8, 9, 9]


def test_games_of_one_side_are_trained_to_their_optimum(penstock: Penstock, tmp_path: Path) -> None:
    options = ("env.kwargs.episode_steps=20", "stop.return=19", "stop.minutes=2", "run.dir=run")
    code, summary, err = penstock(
        "train", "synthetic", f"env.id={GAMES}", *options, "--json", "actors.envs=16"
    ).end()
    assert code == 0, err
    assert summary["exit_reason"] == "return"
    assert (tmp_path / "run/checkpoints/best").is_dir()


def test_a_run_without_evaluations_has_no_best_and_evaluates_wins_and_losses(
    penstock: Penstock, tmp_path: Path
) -> None:
    options = ("env.kwargs.rivals=true", "stop.env_steps=60000", "run.dir=run")
    code, summary, err = penstock(
        "train",
        "synthetic",
        f"env.id={GAMES}",
        "stop.return=null",
        "eval.every_steps=null",
        *options,
        "--json",
    ).end()
    assert code == 0, err
    assert "the game has 2 sides, so the mean return in training does not rank checkpoints" in err
    assert_balanced(summary)
    assert not (tmp_path / "run/checkpoints/best").exists()

    code, result, err = penstock("eval", "run", "--json", "--episodes", "20").end()
    assert code == 0, err
    first, second = result["seats"]
    assert first["return"]["mean"] == -second["return"]["mean"]
    assert (first["won"], first["lost"]) == (second["lost"], second["won"])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("actors.envs=7", "actors.envs 7 is not divisible by 2"),
        ("stop.return=5", "stop.return 5 is reached by evaluations in a game of several sides"),
        ("eval.against=[bot:rndom]", "no scripted player 'rndom'"),
        ("eval.against=[nobody]", "there is no opponent nobody; give bot:NAME"),
        ("league.bots={random: 1}", "the game has no scripted players"),
        ("league.mirror=0.7", "league.mirror 0.7 of actors.envs 8 is 5.6 rows"),
    ],
)
def test_options_that_do_not_fit_a_game_end_a_run_in_one_sentence(
    penstock: Penstock, tmp_path: Path, option: str, words: str
) -> None:
    rivals = "env.kwargs.rivals=true"
    code, _, err = penstock("train", GAMES, "algo.name=ppo", rivals, *SMALL, option, "--json").end()
    assert code == 2
    assert words in err


def test_a_run_against_a_scripted_player_learns_to_beat_it_and_counts_its_own_steps_alone(
    penstock: Penstock, tmp_path: Path
) -> None:
    small = ("actors.envs=128", "model.hidden=[64]", "eval.every_steps=null", "run.interval_s=0.5")
    options = ("league.bots={random: 1.0}", "stop.env_steps=200000", "run.dir=run", *small)
    code, summary, err = penstock("train", "connect_four", *options, "--json").end()
    assert code == 0, err
    assert_balanced(summary)
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    returns = [json.loads(line)["episode_return_mean"] for line in lines]
    assert returns[-1] > 0.45  # an untrained policy has 0
    # A game of connect four ends after 42 moves at most, so a row plays so many steps.
    assert summary["episodes"] > 200_000 / 42


def test_check_env_plays_games_of_several_seats(penstock: Penstock, tmp_path: Path) -> None:
    code, report, err = penstock("check-env", GAMES, TURNS, "--json", "--steps", "200").end()
    assert code == 0, err
    assert report["problems"] == []
    assert json.dumps(report["figures"]["how"]).endswith('4 seats a game"')
    assert report["figures"]["games"] == 2
