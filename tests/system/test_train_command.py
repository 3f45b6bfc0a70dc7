"""`penstock` as a user runs it: real roles, from the command line to the run folder."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from penstock.learner.checkpoints import checkpoint_format
from train_command import (
    SMALL,
    Command,
    Penstock,
    assert_balanced,
    metrics,
    stop_commands,
    trained,
)

pytestmark = pytest.mark.system

METRICS = {
    "time_s", "env_steps", "env_frames", "learner_steps", "steps_per_s", "trained_steps_per_s",
    "episode_return_mean", "episodes", "policy_lag_mean", "policy_lag_max", "queue_fill", "dropped",
    "actors_alive", "actors_restarted", "learner_wait_fraction", "learner_compute_fraction",
    "learner_ceiling_steps_per_s", "ledgers", "cpu",
}  # fmt: skip
OF_A_MOMENT = {"queue_fill", "actors_alive", "learner_ceiling_steps_per_s", "ledgers", "cpu"}
SUMMARY = METRICS - OF_A_MOMENT | {
    "solved_at_s", "accounting", "accounting_complete", "exit_reason", "utilization",
}  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["shm", pytest.param("zmq", marks=pytest.mark.slow), "inproc"])
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
    assert summary["last_interval"].keys() >= OF_A_MOMENT
    assert summary["steps_per_s"] == pytest.approx(summary["env_steps"] / summary["time_s"])
    assert all(m.keys() >= METRICS for m in metrics(run_dir))
    assert all(m["env_steps"] >= m["trained_steps"] for m in metrics(run_dir))
    assert all(m["cpu"].keys() <= m["ledgers"].keys() for m in metrics(run_dir))
    assert_balanced(summary)
    if kind == "zmq":  # what connectors say last is in it
        assert summary["received"]["steps"] == summary["accounting"]["produced"]
    roles = {
        "shm": {"learner-0", "actor-0", "actor-1"},
        "zmq": {"learner-0", "actor-0", "actor-1", "connector-0", "relay-0"},
        "inproc": {"lockstep-0"},
    }
    logs = {path.stem for path in (run_dir / "logs").iterdir()}  # of a role that wrote something
    assert {"events"} <= logs <= roles[kind] | {"events"}
    assert (run_dir / "config.yaml").is_file()
    assert (run_dir / "checkpoints" / "last").is_dir()


@pytest.mark.smoke
def test_ctrl_c_saves_and_a_resume_continues_from_there(penstock: Penstock, tmp_path: Path) -> None:
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


def test_killed_actor_is_replaced_while_training_continues(
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
    options = ("run.dir=run", "checkpoint.every_s=0.1", "run.restarts=0")
    run = penstock("train", "cartpole", "--json", *SMALL, *options)
    saved = tmp_path / "run" / "checkpoints" / "last" / "checkpoint.safetensors"
    run.wait_until(saved.is_file)
    os.kill(run.pid_of("learner-0"), signal.SIGKILL)
    code, summary, err = run.end()
    assert (code, summary["exit_reason"]) == (1, "fault")
    assert "penstock: learner-0: was killed by SIGKILL" in err
    assert penstock("eval", "run", "--episodes", "2", "--json").end()[0] == 0


@pytest.mark.parametrize(("kind", "killed"), [("shm", "learner"), ("zmq", "guard")])
def test_a_run_continues_by_itself_from_the_checkpoint_of_a_learner_that_was_killed(
    penstock: Penstock, tmp_path: Path, kind: str, killed: str
) -> None:
    """A learner whose guard was killed has still written one."""
    every_s = 0.1 if killed == "learner" else 3600
    options = ("run.dir=run", f"checkpoint.every_s={every_s}", f"transport.kind={kind}")
    run = penstock("train", "cartpole", "--json", *SMALL, *options)
    saved = tmp_path / "run" / "checkpoints" / "last" / "checkpoint.safetensors"
    run.wait_until(saved.is_file if killed == "learner" else lambda: trained(tmp_path / "run"))
    actors = [run.pid_of(f"actor-{i}") for i in range(2)]
    learner = psutil.Process(run.pid_of("learner-0"))
    (learner if killed == "learner" else learner.parents()[1]).kill()

    def trains_again() -> bool:
        restarted = [m for m in metrics(tmp_path / "run") if m.get("learners_restarted")]
        return len(restarted) > 1 and restarted[-1]["steps_per_s"] > 0

    run.wait_until(trains_again)
    assert [run.pid_of(f"actor-{i}") for i in range(2)] == actors  # with their environments
    run.process.send_signal(signal.SIGTERM)
    code, summary, err = run.end()
    assert (code, summary["learners_restarted"], summary["actors_restarted"]) == (143, 1, 0), err
    assert "the run continues from its newest checkpoint" in err
    assert_balanced(summary)
    generation = checkpoint_format.load(saved.parent).meta["progress"]["generation"]
    assert generation == 1


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("env.id=CartPole-v7", "the nearest is CartPole-v1"),
        ("env.id=no_such_module:make", "no_such_module"),
        ("env.kwargs={sutton_barto: 1}", "sutton_barto"),
    ],
)
def test_environment_that_cannot_be_constructed_is_a_user_error(
    penstock: Penstock, tmp_path: Path, option: str, sentence: str
) -> None:
    start_s = time.monotonic()
    code, answer, err = penstock("train", "cartpole", "--json", option).end()
    assert (code, answer["exit_reason"]) == (2, "user_error")
    assert sentence in err
    assert sentence in answer["error"]
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()
    assert time.monotonic() - start_s < 20


def test_config_too_large_for_a_message_is_a_user_error(penstock: Penstock, tmp_path: Path) -> None:
    """Before its roles would wait for it in vain, at every restart until `run.start_timeout_s`."""
    long = f"env: {{id: CartPole-v1, kwargs: {{a: {'x' * 300_000}}}}}\n"
    (tmp_path / "long.yaml").write_text(long)
    code, _, err = penstock("train", "long.yaml", "--json", *SMALL, "run.dir=run").end()
    assert code == 2, err
    assert "move the longest values, such as those in env.kwargs, to a file" in err
    assert "Traceback" not in err
    assert "will be started again" not in err


def test_refused_resume_leaves_the_run_unchanged(penstock: Penstock, tmp_path: Path) -> None:
    options = (*SMALL, "run.dir=run", "stop.learner_steps=5")
    assert penstock("train", "cartpole", "--json", *options).end()[0] == 0
    before = _files(tmp_path / "run")
    for target, sentence in (("Acrobot-v1", "of another network"), ("gird:make", "no module gird")):
        code, _, err = penstock("train", target, "--json", "run.dir=run", "--resume", "auto").end()
        assert (code, sentence in err) == (2, True), err
        assert _files(tmp_path / "run") == before
    code, _, err = penstock("eval", "run", "--episodes", "1", "--json").end()
    assert code == 0, err


def _files(run_dir: Path) -> dict[Path, bytes]:
    """What a run leaves, without its logs."""
    files = (path for path in run_dir.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if path.parent.name != "logs"}


# Ends the run once two actors play.
BOTH = """
class Both:
    every_steps = 1
    def on_steps(self, run, metrics):
        return metrics["actors_alive"] == 2
"""


@pytest.mark.timeout(200)
def test_actors_started_by_hand_wait_for_a_learner_and_join_its_successor(
    penstock: Penstock, tmp_path: Path
) -> None:
    """They wait while it is interrupted, and end with the run, in shared memory or not."""
    address = f"ipc://{os.environ['TMPDIR']}/wire"
    played = [
        penstock("actor", f"--connect={address}", f"--transport={kind}", f"--dir={kind}", "--json")
        for kind in ("auto", "zmq")
    ]

    def learner(*options: str) -> Command:
        command = ("learner", "cartpole", "--bind", address, *SMALL, "run.dir=run", "--json")
        return penstock(*command, *options)

    first = learner()
    first.wait_until(partial(_learns, tmp_path / "run", 0))
    first.process.send_signal(signal.SIGINT)
    code, summary, err = first.end()
    assert code == 130, err
    assert f"start actors with: penstock actor --connect {address}" in err
    assert_balanced(summary)
    (tmp_path / "both.py").write_text(BOTH)
    code, summary, err = learner("--resume=must", "run.callbacks=[both:Both]").end()
    assert (code, summary["exit_reason"]) == (0, "callback"), err
    assert_balanced(summary)
    for actors in played:
        code, answer, err = actors.end()
        assert (code, answer["exit_reason"], answer["error"]) == (0, "learner", None), err


def test_actors_started_by_hand_give_up_after_their_wait_option(penstock: Penstock) -> None:
    address = f"ipc://{os.environ['TMPDIR']}/nobody"
    code, answer, _ = penstock("actor", "--connect", address, "--wait", "0.5", "--json").end()
    assert (code, answer["exit_reason"]) == (1, "lost")
    assert answer["error"] == (
        f"actor-0: no learner answered at {address} for 0.5 s; start it, or raise --wait"
    )


def _learns(run_dir: Path, seen: int) -> bool:
    """Whether learner steps grow in the lines after the first ``seen``."""
    lines = metrics(run_dir)[seen:]
    return len(lines) > 1 and lines[-1]["learner_steps"] > lines[0]["learner_steps"]


def test_run_that_a_test_leaves_behind_is_stopped_with_its_folder(
    penstock: Penstock, tmp_path: Path
) -> None:
    run = penstock("train", "cartpole", "--json", *SMALL, "run.dir=run")
    run.wait_until(lambda: trained(tmp_path / "run"))
    assert list(Path(tempfile.gettempdir()).glob("penstock-run-*"))
    stop_commands()
    assert run.process.returncode == 143
    assert not list(Path(tempfile.gettempdir()).glob("penstock-run-*"))
