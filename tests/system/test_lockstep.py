"""The lockstep mode gives the same run every time, and a resumed one the same as a whole one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.configs.load import resolve
from penstock.launch import run
from penstock.learner import checkpoint

pytestmark = pytest.mark.system

SMALL = ["transport.kind=inproc", "actors.envs=8", "actors.unroll=8", "checkpoint.every_steps=20"]


def train(
    folder: Path, steps: int, *options: str, resume: str = "no", target: str = "cartpole"
) -> checkpoint.Checkpoint:
    overrides = [*SMALL, f"stop.learner_steps={steps}", "stop.return=null", f"run.dir={folder}"]
    assert run.train(target, [*overrides, *options], resume, False) == 0  # type: ignore[arg-type]
    return checkpoint.load(folder / "checkpoints" / "last")


def same(a: checkpoint.Checkpoint, b: checkpoint.Checkpoint) -> bool:
    arrays = all(np.array_equal(a.arrays[name], b.arrays[name]) for name in a.arrays)
    counters = ("env_steps", "trained_steps", "learner_steps", "episodes", "version", "returns")
    equal = all(a.meta["progress"][name] == b.meta["progress"][name] for name in counters)
    return arrays and equal and np.array_equal(a.weights, b.weights)


def test_a_resumed_run_equals_a_whole_one_bit_for_bit(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 40)
    train(tmp_path / "parts", 20)
    parts = train(tmp_path / "parts", 40, resume="must")
    assert same(whole, parts)
    assert parts.meta["progress"]["generation"] == 1


@pytest.mark.parametrize(
    ("target", "option"),
    [("cartpole_dqn", "algo.target_every=8"), ("pendulum_sac", "algo.tau=0.1")],
)
def test_so_does_one_that_learns_from_replay(tmp_path: Path, target: str, option: str) -> None:
    small = ("replay.min_size=64", "replay.batch_size=32", "replay.samples_per_insert=1")
    options = (option, *small)
    whole = train(tmp_path / "whole", 40, *options, target=target)
    half = train(tmp_path / "parts", 20, *options, target=target)
    parts = train(tmp_path / "parts", 40, *options, target=target, resume="must")
    assert same(whole, parts)
    assert not np.array_equal(half.weights, parts.weights)


def test_the_seed_is_what_differs(tmp_path: Path) -> None:
    first = train(tmp_path / "a", 20)
    assert same(first, train(tmp_path / "b", 20))
    assert not same(first, train(tmp_path / "c", 20, "run.seed=1"))


def test_it_balances_with_batches_of_several_slots(tmp_path: Path) -> None:
    config = resolve("cartpole", [*SMALL, "learner.batch_slots=2"])
    stored = train(tmp_path / "run", 20, "learner.batch_slots=2")
    per_update = config.actors.envs * config.actors.unroll * 2
    progress = stored.meta["progress"]
    assert progress["env_steps"] == progress["trained_steps"]
    assert 0.9 * per_update * 20 < progress["trained_steps"] <= per_update * 20
