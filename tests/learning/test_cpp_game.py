"""A game in C++ that drives its own loop is learned to its optimum, and shipped."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from c_games import POLE_GAME, build, needs_compilers
from pages import code
from penstock.configs.yaml_text import parse
from train_command import Command, Penstock, assert_balanced, stop_commands

pytestmark = [
    pytest.mark.learning,
    pytest.mark.system,
    pytest.mark.timeout(240),
    needs_compilers,
]


@pytest.fixture
def penstock(tmp_path: Path) -> Iterator[Penstock]:
    """Start a command in the folder of the test, at whose end it is stopped."""
    yield partial(Command, tmp_path)
    stop_commands()


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def options_of(path: Path) -> list[str]:
    """The options of a YAML file as KEY=VALUE, but those of the environment."""
    sections, _ = parse(path.read_text(), path.name)
    return [
        f"{section}.{key}={json.dumps(value)}"
        for section, content in sections.items()
        if section != "env"
        for key, value in content.items()
    ]


def test_carts_with_poles_train_a_policy_from_the_spaces_of_their_hello(
    tmp_path: Path, penstock: Penstock
) -> None:
    pole = build(tmp_path, POLE_GAME / "pole.cpp", "-O2")
    port = free_port()
    options = options_of(POLE_GAME / "pole.yaml")
    bind = ("--bind", f"tcp://127.0.0.1:{port}")
    run = penstock("serve-env", *options, "run.dir=run", "run.seed=1", *bind, "--json")
    with subprocess.Popen([pole, "--port", port, "--carts", "32"], stdout=subprocess.PIPE) as game:
        try:
            status, summary, errors = run.end()
        finally:
            game.kill()
    assert status == 0, errors
    assert_balanced(summary)
    assert summary["exit_reason"] == "return"
    assert summary["episode_return_mean"] >= 475, "of 500; random pushes last about 20 steps"
    # Alone on two cores that is a few seconds; seeds 1, 2 and 3 took 93,000 to 180,000.
    assert summary["env_steps"] < 500_000

    # The same game, played by the trained policy.
    service = penstock("serve", "run", "--port", port, "--json")
    played = subprocess.run(
        [pole, "--port", port, "--carts", "8", "--episodes", "100"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    service.stop()
    assert float(played.stdout.split()[-2]) >= 475


def test_the_tutorial_of_an_engine_trains_its_game_and_ships_it(
    tmp_path: Path, penstock: Penstock
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    port = free_port()
    (tmp_path / "drone.hpp").write_text(code("tutorial-your-engine.md", "cpp", 0))
    source = tmp_path / "train.cpp"
    source.write_text(code("tutorial-your-engine.md", "cpp", 1).replace("8900", port))
    train = build(tmp_path, source, "-O2")
    options = ("run.dir=run", "algo.name=ppo", "stop.return=95", "stop.minutes=3")
    run = penstock("serve-env", *options, "--bind", f"tcp://127.0.0.1:{port}", "--json")
    with subprocess.Popen([train], stdout=subprocess.PIPE) as game:
        try:
            status, summary, errors = run.end()
        finally:
            game.kill()
    assert status == 0, errors
    assert summary["exit_reason"] == "return"

    status, _, errors = penstock("export", "run", "hover.onnx", "--json").end()
    assert status == 0, errors
    session = onnxruntime.InferenceSession(tmp_path / "hover.onnx")
    # It falls fast, or rises fast: the engine is on, or off.
    (actions,) = session.run(["action"], {"obs": [[0.6, -1.0], [1.4, 1.0]]})
    assert actions.tolist() == [1, 0]
