"""Several learners under the real supervisor train one agent, even when one of them dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from train_command import SMALL, Command, Penstock, assert_balanced, last, metrics, updates

pytestmark = pytest.mark.system

THREE = (*SMALL, "learner.count=3", "actors.count=3", "run.dir=run")
AGAIN_S = 20.0  # within which the others train again; on a quiet machine it is 1 or 2


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("transport.kind=shm",), id="shm"),
        pytest.param(
            ("transport.kind=zmq", "learner.reduce.codec=int8"),
            id="zmq-int8",
            marks=pytest.mark.slow,
        ),
        pytest.param(("learner.pace=local_sgd",), id="local_sgd", marks=pytest.mark.slow),
        pytest.param(("learner.pace=ssp",), id="ssp", marks=pytest.mark.slow),
        pytest.param(
            (
                "learner.reduce.codec=onebit",
                "learner.optimizer=sgd",
                "learner.reduce.overlap=false",
            ),
            id="onebit",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_learners_train_one_agent_and_resume_from_their_checkpoint(
    penstock: Penstock, tmp_path: Path, options: tuple[str, ...]
) -> None:
    command = ("train", "cartpole", "--json", *THREE, *options)
    code, answer, err = penstock(*command, "stop.learner_steps=40").end()
    assert code == 0, err
    assert answer["exit_reason"] == "learner_steps"
    assert answer["learner_steps"] >= 40
    assert_balanced(answer)
    code, again, err = penstock(*command, "stop.learner_steps=80", "--resume", "must").end()
    assert code == 0, err
    assert 80 <= again["learner_steps"] < 120
    assert again["trained_steps"] > answer["trained_steps"]
    assert_balanced(again)


@pytest.mark.slow
def test_learners_train_several_epochs_with_shared_normalisation(
    penstock: Penstock, tmp_path: Path
) -> None:
    options = (
        *("algo.epochs=3", "algo.target_kl=0.05", "algo.normalize_rewards=true"),
        *("model.normalize_observations=true", "learner.reduce.check_every=10"),
        "algo.reward_scale=1",
    )
    command = ("train", "cartpole_ppo", "--json", *THREE, *options, "learner.count=2")
    code, answer, err = penstock(*command, "stop.learner_steps=120", "actors.count=2").end()
    assert code == 0, err
    assert answer["exit_reason"] == "learner_steps"
    assert answer["learner_steps"] >= 120
    assert_balanced(answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pace", "more"),
    [
        ("tap", ()),
        ("asp", ()),
        ("backup", ()),
        ("ssp", ("learner.server_shards=3", "learner.reduce.codec=bf16")),
        ("asp", ("learner.server_shards=2",)),
    ],
    ids=["tap", "asp", "backup", "ssp, three shards, bf16", "asp, two shards"],
)
def test_learners_train_with_a_parameter_server(
    penstock: Penstock, tmp_path: Path, pace: str, more: tuple[str, ...]
) -> None:
    """Each sees the steps of all at once, and so the number to publish at is passed, not met."""
    limits = ("stop.learner_steps=300", "learner.publish_every=7")
    options = (f"learner.pace={pace}", *more, *limits)
    code, answer, err = penstock("train", "cartpole", "--json", *THREE, *options).end()
    assert code == 0, err
    assert answer["exit_reason"] == "learner_steps"
    assert answer["learner_steps"] >= 300
    assert 0 < max(m["policy_lag_max"] or 0 for m in metrics(tmp_path / "run")) < 100
    assert_balanced(answer)


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["cartpole_dqn", "pendulum_sac"])
def test_off_policy_learners_have_a_shard_of_the_replay_each(penstock: Penstock, algo: str) -> None:
    options = ("replay.min_size=500", "replay.capacity=10000", "replay.samples_per_insert=null")
    limits = ("stop.learner_steps=60", "stop.return=null", "actors.envs=4")
    count = ("learner.count=2", "actors.count=2", "run.dir=run")
    code, answer, err = penstock("train", algo, "--json", *options, *limits, *count).end()
    assert code == 0, err
    assert answer["exit_reason"] == "learner_steps"
    assert_balanced(answer)


@pytest.mark.parametrize(
    ("rank", "killed"), [(0, "learner"), pytest.param(2, "keeper", marks=pytest.mark.slow)]
)
def test_killed_learner_interrupts_the_others_only_briefly(
    penstock: Penstock, tmp_path: Path, rank: int, killed: str
) -> None:
    run_dir = tmp_path / "run"
    run = penstock("train", "cartpole", "--json", *THREE, "stop.minutes=5")
    run.wait_until(lambda: updates(run_dir) > 20)
    run.wait_until(lambda: last(run_dir)["learners_alive"] == 3)
    learner = psutil.Process(run.pid_of(f"learner-{rank}"))
    (learner if killed == "learner" else learner.parents()[0]).kill()
    killed_s, before = time.monotonic(), updates(run_dir)
    run.wait_until(lambda: updates(run_dir) > before)
    assert time.monotonic() - killed_s < AGAIN_S
    run.wait_until(lambda: _whole(run, run_dir))
    reached = updates(run_dir)
    run.wait_until(lambda: updates(run_dir) > reached + 20)
    os.kill(run.process.pid, signal.SIGTERM)
    code, answer, err = run.end()
    assert code == 143, err
    assert_balanced(answer)
    assert answer["accounting"]["lost"]["learner"] > 0
    assert answer["actors_restarted"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["bsp", "local_sgd"])
def test_stopped_learner_rejoins_the_group_when_it_continues(
    penstock: Penstock, tmp_path: Path, pace: str
) -> None:
    """All live, so that nobody but the learners can tell that their group has broken, and nothing
    that one of them has counted is forgotten or counted twice."""
    run_dir = tmp_path / "run"
    options = (f"learner.pace={pace}", "learner.reduce.timeout_s=2", "stop.minutes=5")
    run = penstock("train", "cartpole", "--json", *THREE, *options)
    run.wait_until(lambda: updates(run_dir) > 20)
    stopped = run.pid_of("learner-1")
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(stopped, signal.SIGCONT)
    before = updates(run_dir)
    run.wait_until(lambda: updates(run_dir) > before + 20)
    assert run.pid_of("learner-1") == stopped
    os.kill(run.process.pid, signal.SIGTERM)
    code, answer, err = run.end()
    assert code == 143, err
    assert "group 1 of learners" in err  # with where each rank was
    assert_balanced(answer)
    a = answer["accounting"]
    assert answer["env_steps"] == a["produced"]
    assert answer["trained_steps"] == a["trained"] + a["dropped"].get("group_lost", 0)


def _whole(run: Command, run_dir: Path) -> bool:
    """Whether the dead learner is back, with actors of its own."""
    now = last(run_dir)
    return bool(now["learners_restarted"] == 1 and now["learners_alive"] == 3)
