"""`penstock bench` as a whole, with short measurements."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.rates import ROUNDS
from penstock.bench.stages import UNITS, learner_rate
from penstock.bench.traffic import receiving
from penstock.bench.whole import train
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.launch.alone import call_in_process

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

COMMAND = [sys.executable, "-m", "penstock", "bench", "--target", "cartpole", "--seconds"]


def bench(*options: str) -> dict[str, Any]:
    done = subprocess.run([*COMMAND, *options, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(line)
    return result


@pytest.mark.slow
def test_all_stages_have_positive_rates_and_the_whole_is_below_their_ideal(tmp_path: Path) -> None:
    result = bench("0.2")
    assert {name: stage["unit"] for name, stage in result["stages"].items()} == UNITS
    for name, stage in result["stages"].items():
        assert len(stage["rates"]) == ROUNDS, name
        assert min(stage["rates"]) <= stage["rate"] <= max(stage["rates"]), name
        assert min(stage["rates"]) > 0, name
    core_ms = [result["stages"][s]["core_ms"] for s in ("environment", "inference", "write")]
    core_ms.append(result["stages"]["learner"]["core_ms"])
    assert result["ideal_steps_per_s"] == pytest.approx(result["cores"] * 1000 / sum(core_ms))
    # What is measured on a machine that others use may be off by much, but not in its order.
    assert 0 < result["achieved_steps_per_s"] < 2 * result["ideal_steps_per_s"]
    assert result["stages"]["reduction"]["learners"] == 2
    assert result["stages"]["encode"]["ratio"] > 1


@pytest.mark.slow
def test_stages_of_a_replay_algorithm_are_measured_and_compared(tmp_path: Path) -> None:
    options = ("0.2", "--target", "pendulum_sac", "--only", "write,replay_add,gather,learner")
    old = bench(*options)
    assert list(old["stages"]) == ["write", "gather", "replay_add", "learner"]
    assert old["achieved_steps_per_s"] is None
    assert old["ideal_steps_per_s"] is None
    for stage in old["stages"].values():  # as if it had been a thousand times as fast
        stage["rates"] = [1000 * stage["rate"]] * ROUNDS
    (tmp_path / "old.json").write_text(json.dumps(old))
    new = bench(*options, "--compare", str(tmp_path / "old.json"))
    assert {c["stage"]: c["verdict"] for c in new["changes"]} == dict.fromkeys(
        old["stages"], "slower"
    )
    assert new["machine"] == old["machine"]
    assert new["elsewhere"] is None


@pytest.mark.slow
def test_learner_ceiling_is_measured_in_its_own_process() -> None:
    assert learner_rate(resolve("cartpole", []), 0.2) > 1000
    assert learner_rate(resolve("cartpole_dqn", []), 0.2) > 10
    assert learner_rate(resolve("memory_r2d2", []), 0.2) > 10


def test_invalid_target_is_refused_in_one_sentence() -> None:
    command = [*COMMAND[:4], "--target", "cartpole_dpn", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "cartpole_dpn" in done.stderr.splitlines()[-1]
    wrong = resolve("CartPole-v1", ["env.kwargs.gravity=1"])
    with pytest.raises(UserError, match="gravity"):
        learner_rate(wrong, 0.1)


def test_failed_training_run_is_reported_in_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"train cartpole env.kwargs.gravity=1` failed with 2;"):
        train("cartpole", "env.kwargs.gravity=1")
    assert "gravity" in capfd.readouterr().err


def test_failure_in_the_measuring_process_is_raised() -> None:
    with pytest.raises(RuntimeError, match="json:loads failed with 1: TypeError: "):
        call_in_process("json:loads", {"text": "[]"})


def test_requested_message_sizes_repeat_in_turn() -> None:
    with receiving([24, 5, 300_000]) as take:
        for _ in range(50):
            take()


@pytest.mark.slow
@pytest.mark.parametrize("only", ["wire", "whole"])
def test_terminated_bench_leaves_no_process(only: str) -> None:
    with subprocess.Popen([*COMMAND, "30", "--only", only], stdout=subprocess.PIPE) as command:
        with pytest.raises(subprocess.TimeoutExpired):
            command.wait(6)
        command.terminate()
        assert command.wait(30) == 128 + signal.SIGTERM  # and the fixture looks for what is left


def test_stages_step_one_game_in_turns_whose_masks_change_with_each_step() -> None:
    stages = ("environment", "bare_environment", "write", "inference")
    result = bench("0.1", "--target", "connect_four", "--only", ",".join(stages))
    assert min(stage["rate"] for stage in result["stages"].values()) > 0
