"""A task that shows nothing but what an action was paid is solved by a core that reads that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from train_command import train

pytestmark = [pytest.mark.learning, pytest.mark.system, pytest.mark.timeout(240)]

BEST = 9.5
"""Return of the best policy; one that knows nothing of its last step has 5."""
OPTIONS = (
    *("algo.name=ppo", "algo.discount=0.9", "algo.epochs=4", "algo.normalize_rewards=false"),
    *("model.core=lstm", "model.core_size=32", "model.hidden=[32]"),
    *("transport.kind=inproc", "actors.count=1", "actors.envs=64", "actors.unroll=33"),
    *("learner.lr=3e-3", "learner.updates_per_batch=4", "learner.micro_batch=4096"),
    *("learner.batch_slots=1", "transport.slots=1", "learner.device=cpu"),
)


def trained(folder: Path, seed: int, inputs: str, *options: str) -> dict[str, Any]:
    return train(
        folder,
        "penstock/HiddenArm-v0",
        *OPTIONS,
        f"run.seed={seed}",
        f"model.core_inputs={inputs}",
        "stop.minutes=3",
        *options,
    )


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (2, 3))])
def test_a_core_that_reads_action_and_reward_finds_the_hidden_arm(
    tmp_path: Path, seed: int
) -> None:
    summary = trained(tmp_path, seed, "[action,reward]", "stop.return=9.3")
    assert summary["exit_reason"] == "return"
    assert summary["trained_steps"] < 150_000
    assert 9.3 <= summary["episode_return_mean"] <= BEST + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["[]", "[action]"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_core_that_does_not_read_the_reward_guesses(
    tmp_path: Path, seed: int, inputs: str
) -> None:
    """The mean of 100 returns deviates by 0.5 at most from 5: this allows for four of it."""
    summary = trained(tmp_path, seed, inputs, "stop.env_steps=150000")
    assert summary["exit_reason"] == "env_steps"
    assert abs(summary["episode_return_mean"] - 5) <= 2
