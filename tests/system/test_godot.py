"""clients/godot in Debian's `godot3-server`, and the project of examples/godot_game."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from javascript import ROOT
from penstock.serving.service import Service
from served_games import random_policy, served
from train_command import Penstock, address_of, assert_balanced
from waiting import free_port, wait_until

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("godot3-server") is None, reason="no godot3-server: Debian's package"
    ),
]

CLIENT = ROOT / "clients" / "godot" / "penstock_game.gd"
GAME = ROOT / "examples" / "godot_game"
TOKEN = "a-token-of-many-characters"

SCRIPT = """
extends SceneTree
const PenstockGame = preload("penstock_game.gd")
var game = PenstockGame.new()
var told = []

func _on_faulted(seat, field, _error):
	told.append(["faulted", seat, field])

func _on_lost(_reason):
	told.append(["lost"])

func _on_refused(field, _error):
	told.append(["refused", field])

func _initialize():
	for name in ["faulted", "lost", "refused"]:
		var _ok = game.connect(name, self, "_on_" + name)
	var port = int(Array(OS.get_cmdline_args()).back())
	print(JSON.print(play(port)))
	quit()

func begin(port, options):
	game.open("127.0.0.1", port, options)
	while told.empty() and not game.poll():
		OS.delay_msec(1)
"""


def run_godot(folder: Path, program: str, port: int) -> tuple[Any, str]:
    """Run a function ``play(port)`` with the client in Godot.

    Returns what it returns, and the errors that were pushed.
    """
    shutil.copy(CLIENT, folder)
    (folder / "play.gd").write_text(SCRIPT + program)
    command = ["godot3-server", "--path", str(folder), "-s", "play.gd", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_parts_are_written_by_their_names_and_an_episode_ends_and_begins_in_one_tick(
    tmp_path: Path,
) -> None:
    # 5 to 7 are the actions, and the mask allows one of them.
    program = """
func play(port):
	begin(port, {"seats": 2})
	var actions = []
	var flags = [PenstockGame.FIRST, 0, PenstockGame.TERMINATED, PenstockGame.FIRST]
	for i in flags.size():
		for seat in 2:
			var mask = [0, 0, 0]
			mask[(seat + i) % 3] = 1
			game.write(seat, {
				"place": 3, "inner.speed": [0.5, -0.5, 0], "flags": PoolByteArray([1, 0, 1, 0, 1]),
				"lamps": [1, 0, 1], "ways": [2, 1], "action_mask": mask,
			}, flags[i], 1.0)
		game.send()
		game.wait()
		for seat in 2:
			actions.append(game.action_of(seat) if game.has_action(seat) else null)
	game.close()
	return [actions, told]
"""
    with served(Service(random_policy(tmp_path / "run", "parts"))) as port:
        (actions, told), errors = run_godot(tmp_path, program, port)
    assert told == [], errors
    assert actions == [5, 6, 6, 7, None, None, 5, 6]


def test_rows_that_cannot_be_written_are_errors_and_the_seat_stays_as_it_is(
    tmp_path: Path,
) -> None:
    program = """
func play(port):
	begin(port, {"seats": 2})
	var first = PenstockGame.FIRST
	var written = [
		game.write(0, [0, 0]),
		game.write(0, [0, 0], first),
		game.write(0, {"seen": [0, 0, 0]}, first),
		game.write(0, [0, 0, 0], first),
		game.write(0, [0, 0, 0]),
	]
	game.send()
	game.wait()
	return [written, game.has_action(0), game.is_idle(1), told]
"""
    with served(Service(random_policy(tmp_path / "run", "bounded"))) as port:
        (written, acts, is_idle, told), errors = run_godot(tmp_path, program, port)
    assert written == [False, False, False, True, False]
    assert [acts, is_idle, told] == [True, True, []]
    for sentence in (
        "seat 0 is in no episode; begin one by a row with FIRST",
        "obs has 2 numbers where 3 belong",
        "the observation has no obs",
        "seat 0 waits for its action",
    ):
        assert sentence in errors


def test_a_row_with_nan_makes_its_seat_idle_and_no_other(tmp_path: Path) -> None:
    program = """
func play(port):
	begin(port, {"seats": 2})
	game.write(0, [0, 0, NAN], PenstockGame.FIRST)
	game.write(1, [0, 0, 0], PenstockGame.FIRST)
	game.send()
	game.wait()
	return [told, game.is_idle(0), game.has_action(1), game.action_of(1)]
"""
    with served(Service(random_policy(tmp_path / "run", "bounded"))) as port:
        (told, is_idle, acts, action), errors = run_godot(tmp_path, program, port)
    assert told == [["faulted", 0, "observation"]], errors
    assert [is_idle, acts] == [True, True]
    assert 0 <= action[0] <= 10
    assert -4 <= action[1] <= 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        pytest.param('{"token": "another-token-of-characters"}', "token", id="token"),
        pytest.param(
            f'{{"token": "{TOKEN}", "action": {{"Discrete": [2, 0]}}}}', "action", id="space"
        ),
    ],
)
def test_a_game_that_is_refused_does_not_try_again(
    tmp_path: Path, options: str, field: str
) -> None:
    program = f"""
func play(port):
	begin(port, {options})
	OS.delay_msec(300)
	return [told, game.poll()]
"""
    service = Service(random_policy(tmp_path / "run", "bounded"))
    with served(service, token=TOKEN) as port:
        (told, plays), errors = run_godot(tmp_path, program, port)
    assert told == [["refused", field]], errors
    assert not plays
    assert service.figures.faults[field] == 1


OPTIONS = (
    *("algo.name=ppo", "algo.discount=0.98", "learner.lr=2e-3", "learner.updates_per_batch=4"),
    *("run.seed=1", "run.dir=run", "stop.return=8.5", "stop.env_steps=600_000"),
)
BEST_RETURN = 10  # bounces


@contextmanager
def juggling(output: Path, port: int) -> Iterator[None]:
    """Run the project of the example, which writes the means of its episodes to ``output``."""
    command = ["godot3-server", "--fixed-fps", "60", "--path", str(GAME), f"--port={port}"]
    with output.open("w") as file:
        game = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            game.kill()
            game.wait()


def means_of(output: Path) -> list[float]:
    """Returns the mean returns that the project has written so far."""
    return [float(text) for text in re.findall(r"^([\d.]+) bounces", output.read_text(), re.M)]


@pytest.mark.timeout(400)
def test_the_project_trains_without_a_target_and_goes_on_with_the_trained_policy(
    tmp_path: Path, penstock: Penstock
) -> None:
    port = free_port()
    run = penstock("serve-env", *OPTIONS, "--bind", f"tcp://127.0.0.1:{port}", "--json")
    output = tmp_path / "godot.txt"
    with juggling(output, port):
        out, errors = run.process.communicate(timeout=300)
        assert run.process.returncode == 0, errors
        summary = json.loads(out.splitlines()[-1])
        assert summary["exit_reason"] == "return", summary
        assert_balanced(summary)

        # The game waits for a service, and finds the trained policy at the same port.
        trained = len(means_of(output))
        assert means_of(output)[0] < 2
        address_of(penstock("serve", "run", "--greedy", "--port", str(port), "--json"))
        wait_until(lambda: len(means_of(output)) > trained + 1, timeout_s=60)
    assert 8.5 < means_of(output)[-1] <= BEST_RETURN
