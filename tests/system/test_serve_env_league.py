"""Games of two sides that drive their own loop, and play against a pool of earlier policies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from league_checks import assert_pool_grew, league_state, pool_ids
from train_command import Command, Penstock, assert_balanced, last, metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

ROUNDS = 10  # of a game of rock, paper, scissors
GAMES = 8
LEAGUE = (
    *("actors.unroll=8", "actors.envs=16", "league.mirror=0", "league.chairs=3", "league.games=10"),
    *("league.snapshot_steps=500", "league.snapshot_win_rate=null", "checkpoint.every_steps=3"),
    *("run.interval_s=0.2", "run.grace_s=30", "run.max_restarts=100", "run.start_timeout_s=150"),
)


@pytest.fixture
def port() -> int:
    """A free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def results(tmp_path: Path, port: int) -> Iterator[Path]:
    """Duels that play as long as the test runs; their results are the lines of the file."""
    program = Path(__file__).parents[1] / "duel_games.py"
    path = tmp_path / "results.txt"
    with path.open("w") as out:
        games = subprocess.Popen([sys.executable, str(program), str(port), str(GAMES)], stdout=out)
        try:
            yield path
            assert games.poll() is None, "the games have ended"
        finally:
            games.kill()
            games.wait()


def serve_env(penstock: Penstock, port: int, *arguments: str) -> Command:
    """Starts a run that duels play."""
    target = "penstock/RockPaperScissors-v0"
    bind = ("--bind", f"tcp://127.0.0.1:{port}")
    return penstock("serve-env", target, *bind, "--json", *LEAGUE, *arguments)


def played(results: Path) -> int:
    """Returns the number of games that the program has finished."""
    return len(results.read_text().split())


def test_each_game_against_the_pool_is_counted_once(
    penstock: Penstock, tmp_path: Path, port: int, results: Path
) -> None:
    folder = tmp_path / "run"
    command = serve_env(penstock, port, f"run.dir={folder}", "stop.env_steps=2500")
    code, summary, err = command.end()
    assert code == 0, err
    assert_balanced(summary)

    # One seat of a game learns, so a game is one episode; no game is in two rows, or in none.
    counts = last(folder)
    assert counts["league_games"] == counts["episodes"] > 100
    assert 0 <= counts["trained_steps"] - ROUNDS * counts["league_games"] <= 2 * GAMES * ROUNDS
    missing_steps = summary["accounting"]["in_flight"] + 2 * GAMES * ROUNDS
    assert 0 <= played(results) - counts["league_games"] <= missing_steps / ROUNDS
    assert counts["league_members"] > 2
    state = league_state(folder)
    assert state is not None
    assert state["drawn"] > 5


def test_games_and_league_go_on_after_the_service_and_the_learner_were_killed(
    penstock: Penstock, tmp_path: Path, port: int, results: Path
) -> None:
    folder = tmp_path / "run"
    command = serve_env(penstock, port, f"run.dir={folder}")
    wait_for_games(command, folder, 50)
    for role in ("connector-0", "learner-0", "connector-0"):
        kill(command, role)
        wait_for_games(command, folder, 50)

    command.process.send_signal(signal.SIGTERM)
    _, summary, err = command.end()
    assert summary["exit_reason"] == "terminated", err
    assert_balanced(summary)
    counts = last(folder)
    assert ROUNDS * counts["league_games"] <= counts["trained_steps"]
    assert counts["league_games"] == counts["episodes"]


def kill(command: Command, role: str) -> None:
    """Kills a role, and waits for its next process."""
    pid = command.pid_of(role)
    os.kill(pid, signal.SIGKILL)
    command.wait_until(lambda: command.pid_of(role) not in (0, pid))


def wait_for_games(command: Command, folder: Path, count: int) -> None:
    """Waits until so many further games were counted."""
    lines = metrics(folder)
    counted = lines[-1]["league_games"] if lines else 0

    # A learner that was killed goes on with the count of its checkpoint.
    def is_further() -> bool:
        further = [line["league_games"] for line in metrics(folder)[len(lines) :]]
        return any(games >= min(counted, *further) + count for games in further)

    command.wait_until(is_further)


def test_a_resumed_run_goes_on_with_its_pool_and_results(
    penstock: Penstock, tmp_path: Path, port: int, results: Path
) -> None:
    folder = tmp_path / "run"
    code, _, err = serve_env(penstock, port, f"run.dir={folder}", "stop.env_steps=1500").end()
    assert code == 0, err
    saved = league_state(folder)
    assert saved is not None
    assert saved["games"] > 50
    members = pool_ids(folder / "pool")

    arguments = ("--resume", "must", f"run.dir={folder}", "stop.env_steps=3000")
    code, summary, err = serve_env(penstock, port, *arguments).end()
    assert code == 0, err
    assert_balanced(summary)
    resumed = league_state(folder)
    assert resumed is not None
    assert resumed["games"] > saved["games"] + 50
    assert resumed["session"] > saved["session"]
    assert_pool_grew(members, folder / "pool")


def test_a_run_without_a_target_takes_the_sides_from_its_first_game(
    penstock: Penstock, tmp_path: Path, port: int, results: Path
) -> None:
    folder = tmp_path / "run"
    bind = ("--bind", f"tcp://127.0.0.1:{port}")
    options = (f"run.dir={folder}", "algo.name=ppo", "stop.env_steps=1500")
    code, summary, err = penstock("serve-env", *bind, "--json", *LEAGUE, *options).end()
    assert code == 0, err
    assert_balanced(summary)
    assert last(folder)["league_games"] == last(folder)["episodes"] > 50


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("league.bots.random=0.5",), "league.bots random are scripted players of an environment"),
        (("league.seats=[5]",), "league.seats [5] has seat 5, and the game has 2"),
        (("stop.return=3",), "set stop.return=null with stop.minutes"),
    ],
)
def test_options_that_do_not_fit_games_are_refused_in_a_sentence(
    penstock: Penstock, tmp_path: Path, port: int, arguments: tuple[str, ...], sentence: str
) -> None:
    command = serve_env(penstock, port, f"run.dir={tmp_path / 'run'}", *arguments)
    _, err = command.process.communicate(timeout=60)
    assert command.process.returncode == 2, err
    assert sentence in err
