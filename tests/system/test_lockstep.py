"""The lockstep mode is deterministic, and a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.configs.load import resolve
from penstock.launch import run
from penstock.learner.checkpoints import checkpoint_format
from penstock.replay import Prioritized, Replay

pytestmark = [pytest.mark.system, pytest.mark.timeout(150)]  # a run syncs many files to disk

SMALL = ["transport.kind=inproc", "actors.envs=8", "actors.unroll=8", "checkpoint.every_steps=20"]


def train(
    folder: Path, steps: int, *options: str, resume: str = "no", target: str = "cartpole"
) -> checkpoint_format.Checkpoint:
    overrides = [*SMALL, f"stop.learner_steps={steps}", "stop.return=null", f"run.dir={folder}"]
    overrides.append("run.grace_s=60")
    assert run.train(target, [*overrides, *options], resume, False) == 0  # type: ignore[arg-type]
    return checkpoint_format.load(folder / "checkpoints" / "last")


def same(a: checkpoint_format.Checkpoint, b: checkpoint_format.Checkpoint) -> bool:
    """Whether the learners are equal; environments may have shown the same in another form."""
    names = a.arrays.keys() - {"team/lockstep"}
    arrays = all(np.array_equal(a.arrays[name], b.arrays[name]) for name in names)
    counters = ("env_steps", "trained_steps", "learner_steps", "episodes", "version", "returns")
    equal = all(a.meta["progress"][name] == b.meta["progress"][name] for name in counters)
    return arrays and equal and np.array_equal(a.weights, b.weights)


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path: Path, every: int) -> None:
    option = f"learner.publish_every={every}"
    whole = train(tmp_path / "whole", 40, option, "checkpoint.every_steps=null")
    train(tmp_path / "parts", 20, option)
    parts = train(tmp_path / "parts", 40, option, resume="must")
    assert same(whole, parts)
    assert parts.meta["progress"]["generation"] == 1


@pytest.mark.slow
def test_resumed_ppo_with_epochs_and_normalisation_equals_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    options = (
        *("algo.epochs=2", "learner.updates_per_batch=2", "algo.normalize_rewards=true"),
        *("algo.value_clip=0.2", "algo.target_kl=1", "model.normalize_observations=true"),
        "algo.reward_scale=1",
    )
    whole = train(tmp_path / "whole", 40, *options, target="cartpole_ppo")
    half = train(tmp_path / "parts", 20, *options, target="cartpole_ppo")
    parts = train(tmp_path / "parts", 40, *options, target="cartpole_ppo", resume="must")
    assert same(whole, parts)
    assert not np.array_equal(half.weights, parts.weights)
    assert half.arrays["rewards/sums"][0] == half.meta["progress"]["trained_steps"]
    assert parts.meta["progress"]["learner_steps"] == 40


def test_resumed_ppo_with_step_minibatches_and_schedules_equals_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    options = (
        *("actors.count=1", "actors.envs=7", "learner.updates_per_batch=5", "algo.epochs=2"),
        *("algo.minibatches=steps", "learner.lr={from: 5e-3, to: 0, steps: 400}"),
        *("learner.lr_end_fraction=1", "learner.lr_decay_steps=null"),
        *("algo.clip={from: 0.2, to: 0.1, steps: 300}", "algo.entropy_cost={from: 0.1, to: 0}"),
        "stop.env_steps=1e6",
    )
    whole = train(tmp_path / "whole", 40, *options, target="cartpole_ppo")
    train(tmp_path / "parts", 20, *options, target="cartpole_ppo")
    parts = train(tmp_path / "parts", 40, *options, target="cartpole_ppo", resume="must")
    assert same(whole, parts)
    again = train(tmp_path / "again", 40, *options, target="cartpole_ppo")
    assert same(whole, again), "the same run every time"
    other = (*options, "learner.lr={from: 5e-3, to: 1e-3, steps: 400}")
    assert not same(whole, train(tmp_path / "other", 40, *other, target="cartpole_ppo"))


@pytest.mark.slow
def test_resumed_recurrent_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 40, target="memory")
    train(tmp_path / "parts", 20, target="memory")
    assert same(whole, train(tmp_path / "parts", 40, target="memory", resume="must"))


STACKED = "env.wrappers=[{'gymnasium.wrappers:FrameStackObservation': {stack_size: 4}}]"


@pytest.mark.parametrize(
    ("target", "steps", "options"),
    [
        pytest.param(
            "pong",
            16,
            ("env.kwargs.max_num_frames_per_episode=36", "env.kwargs.noop_max=0"),
            marks=pytest.mark.slow,
        ),
        ("cartpole", 40, (STACKED, "model.core=gru", "model.core_size=8")),
        pytest.param(
            "cartpole_ppo",
            40,
            (STACKED, "algo.epochs=2", "algo.target_kl=1", "model.normalize_observations=true"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_storing_frames_once_gives_the_same_weights(
    tmp_path: Path, target: str, steps: int, options: tuple[str, ...]
) -> None:
    if target == "pong":
        pytest.importorskip("ale_py")
    runs = []
    for stack in ("null", "4"):
        option = f"transport.frame_stack={stack}"
        runs.append(train(tmp_path / stack, steps, option, *options, target=target))
    assert same(*runs)
    assert runs[0].meta["progress"]["learner_steps"] == steps


@pytest.mark.parametrize(
    ("target", "option"),
    [
        ("cartpole_dqn", "algo.target_every=8"),
        pytest.param("pendulum_sac", "algo.tau=0.1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow  # the next one is the same and more
def test_resumed_replay_run_equals_an_uninterrupted_one(
    tmp_path: Path, target: str, option: str
) -> None:
    small = ("replay.min_size=64", "replay.batch_size=32", "replay.samples_per_insert=1")
    options = (option, *small, "replay.checkpoint=true")
    whole = train(tmp_path / "whole", 40, *options, target=target)
    half = train(tmp_path / "parts", 20, *options, target=target)
    parts = train(tmp_path / "parts", 40, *options, target=target, resume="must")
    assert same(whole, parts)
    assert not np.array_equal(half.weights, parts.weights)


def test_resumed_run_explores_with_the_same_noise_and_the_same_rate(tmp_path: Path) -> None:
    """Actors load weights again, with a noise that depends on their version."""
    options = (
        *("replay.min_size=64", "replay.batch_size=32", "replay.samples_per_insert=1"),
        *("replay.checkpoint=true", "algo.target_every=8", "algo.quantiles=3", "algo.noisy=true"),
        *("algo.epsilon={from: 0.5, to: 0.1, steps: 800}", "algo.epsilon_alpha=1"),
    )
    whole = train(tmp_path / "whole", 40, *options, target="cartpole_dqn")
    half = train(tmp_path / "parts", 20, *options, target="cartpole_dqn")
    parts = train(tmp_path / "parts", 40, *options, target="cartpole_dqn", resume="must")
    assert same(whole, parts)
    rates = [stored.weights[-1] for stored in (half, parts)]
    assert 0.5 > rates[0] > rates[1] >= np.float32(0.1)


KEPT = (
    *("replay.checkpoint=true", "replay.min_size=512", "replay.batch_size=32"),
    *("replay.samples_per_insert=1", "algo.target_every=8"),
)


@pytest.mark.parametrize(
    "capacity",
    [pytest.param(10_000, id="growing", marks=pytest.mark.slow), pytest.param(1030, id="full")],
)
def test_resumed_run_continues_with_the_stored_replay_bit_for_bit(
    tmp_path: Path, capacity: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """It goes on with the stored steps: at 20 more optimizer steps it has played 640 more, where an
    empty replay would have had to be filled with 512 first."""
    options = (*KEPT, f"replay.capacity={capacity}", "replay.beta_steps=60")
    whole = train(tmp_path / "whole", 40, *options, target="cartpole_dqn")
    half = train(tmp_path / "parts", 20, *options, target="cartpole_dqn")
    stored = Replay.load(tmp_path / "parts/checkpoints/last/replay/0", sampler=Prioritized())
    capfd.readouterr()
    parts = train(tmp_path / "parts", 40, *options, target="cartpole_dqn", resume="must")
    assert same(whole, parts)
    assert f"the replay continues with {len(stored)} stored steps" in capfd.readouterr().out
    assert 512 <= len(stored) <= half.meta["progress"]["env_steps"]
    more = parts.meta["progress"]["env_steps"] - half.meta["progress"]["env_steps"]
    assert more == pytest.approx(20 * 32, abs=200)


@pytest.mark.slow
def test_resume_without_a_stored_replay_begins_empty_with_a_note(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    half = train(tmp_path, 20, *KEPT, target="cartpole_dqn")
    off = (*KEPT, "replay.checkpoint=false")
    whole = train(tmp_path, 40, *off, target="cartpole_dqn", resume="must")
    assert "the replay begins empty, as replay.checkpoint is false" in capfd.readouterr().out
    more = whole.meta["progress"]["env_steps"] - half.meta["progress"]["env_steps"]
    assert more >= 512 + 20 * 32 - 300
    assert not (tmp_path / "checkpoints/last/replay/0").exists(), "that was of another moment"


def test_resume_with_another_capacity_keeps_the_newest_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, 40, *KEPT, target="cartpole_dqn")
    small = (*KEPT, "replay.capacity=1030")
    train(tmp_path, 60, *small, target="cartpole_dqn", resume="must")
    told = re.search(r"the replay continues with (\d+) stored steps", capfd.readouterr().out)
    assert told is not None
    assert 1030 <= int(told[1]) < 512 + 40 * 32


def test_replay_run_stops_exactly_at_its_learner_steps(tmp_path: Path) -> None:
    """Although one turn would allow it a thousand steps more."""
    options = ("replay.min_size=128", "replay.batch_size=8", "replay.samples_per_insert=32")
    stored = train(tmp_path, 30, *options, target="cartpole_dqn")
    assert stored.meta["progress"]["learner_steps"] == 30


def test_signal_ends_a_lockstep_turn(tmp_path: Path) -> None:
    """One that would take far longer than the time in which a run must end."""
    options = ["replay.min_size=3000", "replay.batch_size=1024", "replay.samples_per_insert=1e5"]
    options += ["model.hidden=[512,512]", "run.interval_s=0.05", "run.grace_s=20", "run.dir=run"]
    command = [sys.executable, "-m", "penstock", "train", "cartpole_dqn", "--json"]
    process = subprocess.Popen(
        [*command, *SMALL, *options, "checkpoint.every_steps=null", "replay.capacity=100000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    ends_s = time.monotonic() + 30
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < ends_s:
        time.sleep(0.05)
    time.sleep(2.5)  # it is full by now, and learns from it
    process.send_signal(signal.SIGINT)
    start_s = time.monotonic()
    out, _ = process.communicate(timeout=30)
    assert time.monotonic() - start_s < 15
    assert json.loads(out.splitlines()[-1])["exit_reason"] == "interrupted", out
    assert checkpoint_format.exists(tmp_path / "run" / "checkpoints" / "last")


@pytest.mark.slow
def test_only_another_seed_changes_the_weights(tmp_path: Path) -> None:
    first = train(tmp_path / "a", 20)
    assert same(first, train(tmp_path / "b", 20))
    assert not same(first, train(tmp_path / "c", 20, "run.seed=1"))


def test_steps_balance_with_batches_of_several_slots(tmp_path: Path) -> None:
    config = resolve("cartpole", [*SMALL, "learner.batch_slots=2"])
    stored = train(tmp_path / "run", 20, "learner.batch_slots=2")
    per_update = config.actor_envs * config.actors.unroll * 2
    progress = stored.meta["progress"]
    assert progress["env_steps"] == progress["trained_steps"]
    assert 0.9 * per_update * 20 < progress["trained_steps"] <= per_update * 20
