"""`penstock` as a user runs it: real roles, from the command line to the run folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.system

SMALL = ("actors.envs=8", "actors.unroll=8", "run.interval_s=0.1", "stop.return=null")
WAIT_S = 40.0

METRICS = {
    "time_s", "env_steps", "env_frames", "learner_steps", "steps_per_s", "trained_steps_per_s",
    "episode_return_mean", "episodes", "policy_lag_mean", "policy_lag_max", "queue_fill", "dropped",
    "actors_alive", "actors_restarted", "learner_wait_fraction", "learner_compute_fraction",
}  # fmt: skip
SUMMARY = METRICS | {"solved_at_s", "accounting", "exit_reason"}


class Command:
    """``penstock`` with arguments, in the folder of the test."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Exit code, the object on the last line of standard output, standard error."""
        out, err = self.process.communicate(timeout=WAIT_S)
        lines = out.splitlines()
        return self.process.returncode, json.loads(lines[-1]) if lines else {}, err

    def wait_until(self, condition: Callable[[], object]) -> None:
        ends_s = time.monotonic() + WAIT_S
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < ends_s
            time.sleep(0.05)

    def pid_of(self, name: str) -> int:
        """The process of a role; 0 while there is none."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                parts = (process / "cmdline").read_bytes().split(b"\0")
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended meanwhile
                continue
            if name.encode() in parts and parent == self.process.pid:
                return int(process.name)
        return 0


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trained(run_dir: Path) -> bool:
    return any(m["learner_steps"] > 0 and m["actors_alive"] == 2 for m in metrics(run_dir))


def assert_balanced(summary: dict[str, Any]) -> None:
    a = summary["accounting"]
    went = a["trained"] + sum(a["dropped"].values()) + sum(a["lost"].values()) + a["in_flight"]
    assert a["produced"] == went
    assert a["trained"] > 0


@pytest.fixture
def penstock(tmp_path: Path, nothing_left_behind: None) -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield start
    for command in started:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()


Penstock = Callable[..., Command]


@pytest.mark.parametrize("kind", ["shm", "zmq", "inproc"])
def test_a_run_ends_at_its_limit_with_all_its_files(
    penstock: Penstock, tmp_path: Path, kind: str
) -> None:
    options = ("run.dir=run", "stop.learner_steps=50", f"transport.kind={kind}")
    code, answer, err = penstock("train", "cartpole", "--json", *SMALL, *options).end()
    assert code == 0, err
    run_dir = tmp_path / "run"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert answer == {"run_dir": "run", "exit_code": 0, **summary}
    assert summary["exit_reason"] == "learner_steps"
    assert summary["learner_steps"] >= 50
    assert summary.keys() >= SUMMARY
    assert all(m.keys() >= METRICS for m in metrics(run_dir))
    assert_balanced(summary)
    roles = {
        "shm": {"learner-0", "actor-0", "actor-1"},
        "zmq": {"learner-0", "actor-0", "actor-1", "connector-0", "relay-0"},
        "inproc": {"lockstep-0"},
    }
    assert {path.stem for path in (run_dir / "logs").iterdir()} == roles[kind]
    assert (run_dir / "config.yaml").is_file()
    assert (run_dir / "checkpoints" / "last").is_dir()


def test_ctrl_c_saves_and_a_resumed_run_goes_on_where_it_was(
    penstock: Penstock, tmp_path: Path
) -> None:
    run = penstock("train", "cartpole", "--json", *SMALL, "run.dir=run")
    run.wait_until(lambda: trained(tmp_path / "run"))
    run.process.send_signal(signal.SIGINT)
    code, first, err = run.end()
    assert (code, first["exit_reason"], err.count("Traceback")) == (130, "interrupted", 0)
    assert_balanced(first)

    again = penstock("train", "cartpole", *SMALL, "run.dir=run")
    assert again.end()[0] == 2  # never over a run that is there

    options = (*SMALL, "run.dir=run", f"stop.learner_steps={first['learner_steps'] + 10}")
    code, second, err = penstock("train", "cartpole", "--json", "--resume", "must", *options).end()
    assert code == 0, err
    assert second["env_steps"] > first["env_steps"]
    assert second["time_s"] > first["time_s"]
    assert_balanced(second)


def test_an_actor_that_is_killed_is_replaced_while_training_goes_on(
    penstock: Penstock, tmp_path: Path
) -> None:
    run = penstock("train", "cartpole", "--json", *SMALL, "run.dir=run")
    run.wait_until(lambda: trained(tmp_path / "run"))
    os.kill(run.pid_of("actor-1"), signal.SIGKILL)
    run.wait_until(
        lambda: any(
            m["actors_restarted"] == 1 and m["actors_alive"] == 2 for m in metrics(tmp_path / "run")
        )
    )
    before = metrics(tmp_path / "run")[-1]["learner_steps"]
    run.wait_until(lambda: metrics(tmp_path / "run")[-1]["learner_steps"] > before)
    run.process.send_signal(signal.SIGTERM)
    code, summary, err = run.end()
    assert (code, summary["actors_restarted"]) == (143, 1)
    assert "actor-1: was killed by SIGKILL" in err
    assert_balanced(summary)


def test_a_learner_that_is_killed_ends_the_run_and_leaves_its_checkpoint(
    penstock: Penstock, tmp_path: Path
) -> None:
    run = penstock("train", "cartpole", "--json", *SMALL, "run.dir=run", "checkpoint.every_s=0.1")
    run.wait_until(lambda: (tmp_path / "run" / "checkpoints" / "last").is_dir())
    os.kill(run.pid_of("learner-0"), signal.SIGKILL)
    code, summary, err = run.end()
    assert (code, summary["exit_reason"]) == (1, "fault")
    assert "penstock: learner-0: was killed by SIGKILL" in err
    assert penstock("eval", "run", "--episodes", "2", "--json").end()[0] == 0


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("env.id=CartPole-v7", "the nearest is CartPole-v1"),
        ("env.id=no_such_module:make", "no_such_module"),
        ("env.kwargs={sutton_barto: 1}", "sutton_barto"),
    ],
)
def test_an_environment_that_cannot_be_made_is_the_users_mistake(
    penstock: Penstock, option: str, sentence: str
) -> None:
    start_s = time.monotonic()
    code, answer, err = penstock("train", "cartpole", "--json", option).end()
    assert (code, answer["exit_reason"]) == (2, "user_error")
    assert sentence in err
    assert sentence in answer["error"]
    assert "Traceback" not in err
    assert time.monotonic() - start_s < 20


def test_actors_by_hand_wait_for_a_learner_and_join_the_next(
    penstock: Penstock, tmp_path: Path
) -> None:
    address = f"ipc://{os.environ['TMPDIR']}/wire"
    actors = penstock("actor", "--connect", address, "--count", "2", "--dir", "actors", "--json")
    for resume in ("no", "must"):
        learner = penstock(
            "learner", "cartpole", "--bind", address, *SMALL, "run.dir=run", "--json",
            "--resume", resume,
        )  # fmt: skip
        seen = len(metrics(tmp_path / "run"))
        learner.wait_until(partial(_learns, tmp_path / "run", seen))
        learner.process.send_signal(signal.SIGINT)
        code, summary, err = learner.end()
        assert code == 130, err
        assert_balanced(summary)
    actors.process.send_signal(signal.SIGINT)
    code, answer, _ = actors.end()
    assert (code, answer) == (130, {"exit_code": 130, "exit_reason": "interrupted", "error": None})


def _learns(run_dir: Path, seen: int) -> bool:
    """Whether learner steps grow in the lines after the first ``seen``."""
    lines = metrics(run_dir)[seen:]
    return len(lines) > 1 and lines[-1]["learner_steps"] > lines[0]["learner_steps"]
