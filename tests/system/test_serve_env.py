"""`penstock serve-env` as a command: programs play, a learner learns, processes die."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("websockets")

import httpx2

import penstock as library
from game_client import END, FIRST, GameClient
from penstock.transport.addresses import address_of_rank
from pole_games import ACTION, OBSERVATION
from train_command import (
    WAIT_S,
    Command,
    Penstock,
    assert_balanced,
    json_lines,
    metrics,
    updates,
)

pytestmark = pytest.mark.system

POLE_GAMES = "pole_games"
SEATS = "16"
TOKEN = "0123456789abcdef"
SMALL = ("run.dir=run", "run.interval_s=0.5", "stop.return=null")
BACK_S = 0.1  # within it a role has noticed what happened


@pytest.fixture
def port() -> int:
    """A port that is free now."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def serve_env(penstock: Penstock, port: int) -> Callable[..., Command]:
    """Starts the command at that port."""

    def start(*arguments: str) -> Command:
        return penstock("serve-env", "--bind", f"tcp://127.0.0.1:{port}", "--json", *arguments)

    return start


@pytest.fixture
def games(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Command]:
    """Starts a program of games that connect there."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)

    def start() -> Command:
        return Command(tmp_path, str(port), SEATS, module=POLE_GAMES)

    return start


def train_further(run: Command, more: int = 5) -> None:
    """Wait until the run has taken so many further optimizer steps."""
    folder = run.folder / "run"
    target = updates(folder) + more
    run.wait_until(lambda: updates(folder) >= target)


def test_games_train_a_run_to_its_return(
    serve_env: Callable[..., Command], games: Callable[[], Command], tmp_path: Path
) -> None:
    run = serve_env("CartPole-v1", "run.dir=run", "run.interval_s=0.5", "stop.return=60")
    programs = [games(), games()]
    run.wait_until(lambda: any(m.get("games") == 2 for m in metrics(tmp_path / "run")))
    code, summary, _ = run.end()
    assert code == 0
    assert summary["exit_reason"] == "return"
    assert_balanced(summary)
    assert summary["received"]["steps"] == summary["accounting"]["produced"]
    assert all(program.process.poll() is None for program in programs)

    policy = library.load_policy(tmp_path / "run")
    action, _ = policy(np.zeros(4, np.float32))
    assert action in (0, 1)


def test_the_first_game_says_the_spaces_and_a_resumed_run_has_them(
    serve_env: Callable[..., Command],
    games: Callable[[], Command],
    penstock: Penstock,
    tmp_path: Path,
    port: int,
) -> None:
    run = serve_env(*SMALL, "stop.learner_steps=20")
    assert run.process.stderr is not None
    assert "first game" in run.process.stderr.readline()
    with pytest.raises(AssertionError, match="this run takes its spaces from its first game"):
        GameClient(port)
    with pytest.raises(AssertionError, match=r'"field": "action", "error": ".*of Tuple'):
        GameClient(port, observation=OBSERVATION, action={"Tuple": [ACTION]})
    games()
    code, summary, _ = run.end()
    assert (code, summary["exit_reason"]) == (0, "learner_steps")
    assert_balanced(summary)

    further = serve_env("run", "--resume", "must", "stop.learner_steps=40")
    code, summary, _ = further.end()
    assert (code, summary["learner_steps"]) == (0, 40)
    assert_balanced(summary)

    code, refusal, _ = penstock("eval", "run", "--json").end()
    assert code == 2
    assert "penstock serve RUN" in refusal["error"]
    code, refusal, _ = penstock("train", "run", "--resume", "must", "--json").end()
    assert code == 2
    assert "penstock serve-env" in refusal["error"]


def test_games_go_on_after_the_service_and_the_learner_were_killed(
    serve_env: Callable[..., Command], games: Callable[[], Command], tmp_path: Path
) -> None:
    run = serve_env("CartPole-v1", *SMALL, "run.max_restarts=100", "checkpoint.every_steps=5")
    program = games()
    train_further(run)
    for name in ("connector-0", "learner-0", "connector-0"):
        os.kill(run.pid_of(name), signal.SIGKILL)
        time.sleep(BACK_S)
        train_further(run)

    run.process.send_signal(signal.SIGTERM)
    code, summary, _ = run.end()
    assert (code, summary["exit_reason"]) == (143, "terminated")
    assert_balanced(summary)
    assert program.process.poll() is None
    restarted = [e["role"] for e in events(tmp_path) if e["kind"] == "restart"]
    assert restarted.count("connector-0") >= 2


def events(folder: Path) -> list[dict[str, Any]]:
    """The events of the run."""
    return json_lines(folder / "run" / "logs" / "events.jsonl")


def test_a_game_is_told_that_the_run_ends_and_its_last_steps_count(
    serve_env: Callable[..., Command], tmp_path: Path, port: int
) -> None:
    run = serve_env("CartPole-v1", *SMALL, "--token", TOKEN)
    game = connected(run, port)
    assert game.welcome["learns"]
    observations = np.zeros((2, 4), np.float32)
    game.act(observations, [FIRST] * 2)
    for _ in range(4):
        game.act(observations, [0] * 2, rewards=[1.0] * 2)

    run.process.send_signal(signal.SIGTERM)
    kind, body = game.receive()
    assert kind == END
    assert json.loads(body) == {"reason": "the run ends"}
    game.close()
    _, summary, _ = run.end()
    assert summary["accounting"]["produced"] == 8


def connected(run: Command, port: int, **hello: Any) -> GameClient:
    """A game of two seats, as soon as the service listens."""
    ends_s = time.monotonic() + WAIT_S
    while True:
        try:
            return GameClient(port, seats=2, token=TOKEN, **hello)
        except ConnectionError:
            assert run.process.poll() is None, run.process.communicate()
            assert time.monotonic() < ends_s
            time.sleep(0.1)


def test_other_spaces_and_a_wrong_token_are_refused_and_the_token_is_nowhere(
    serve_env: Callable[..., Command], tmp_path: Path, port: int
) -> None:
    run = serve_env("CartPole-v1", *SMALL, "--token", TOKEN)
    connected(run, port, observation=OBSERVATION, action=ACTION).close()
    with pytest.raises(AssertionError, match="the actions of the game are Discrete"):
        connected(run, port, action={"Discrete": [3, 0]})
    with pytest.raises(AssertionError, match="the token is missing or wrong"):
        GameClient(port)
    with httpx2.Client(headers={"authorization": f"Bearer {TOKEN}"}) as client:
        figures = client.get(f"http://127.0.0.1:{port}/figures").json()
    assert figures["faults"] == {"action": 1, "token": 1}
    assert figures["learns"] == {"slots": 0, "steps": 0, "playing": 0, "held": 0}

    run.wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    pid = run.pid_of("learner-0")
    run.process.terminate()
    run.end()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert pid


def test_a_taken_port_is_a_sentence(serve_env: Callable[..., Command], port: int) -> None:
    with closing(socket.create_server(("127.0.0.1", port))):
        code, refusal, _ = serve_env("CartPole-v1", *SMALL).end()
    assert code == 2
    assert refusal["error"] == (
        f"nothing can be served at 127.0.0.1:{port} (Address already in use); give another --bind"
    )


@pytest.mark.slow
def test_each_of_two_learners_has_games_at_a_port_of_its_own(
    serve_env: Callable[..., Command], tmp_path: Path, port: int
) -> None:
    run = serve_env("CartPole-v1", *SMALL, "learner.count=2", "stop.learner_steps=10")
    path = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])
    for rank in range(2):
        second = address_of_rank(f"tcp://127.0.0.1:{port}", rank).rpartition(":")[2]
        Command(tmp_path, second, SEATS, module=POLE_GAMES)
    code, summary, _ = run.end()
    assert (code, summary["exit_reason"]) == (0, "learner_steps")
    assert_balanced(summary)
