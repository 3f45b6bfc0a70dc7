"""The batches on which a learner's ceiling is measured are valid and of the stated size."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.algos.impala import algorithm as impala
from penstock.bench.ceiling import LEARNING_RATE, like, staged, work
from penstock.configs.load import resolve
from penstock.core.observations import MASK, laid_out, row_nbytes, views
from penstock.envs import probe
from penstock.learner.factory import make_trainer
from penstock.learner.trainer import Trainer


@pytest.mark.parametrize("slots", [1, 2])
def test_staged_unrolls_pass_the_checks_of_a_connector(slots: int) -> None:
    config = resolve("cartpole", [f"learner.batch_slots={slots}"])
    info = probe(config.env)
    trainer = make_trainer(config, info)
    assert isinstance(trainer, Trainer)
    batch = staged(trainer, info)
    impala.check(batch.arrays, info)
    assert batch.arrays["obs"].shape == (33, 64 * slots, 4)
    assert batch.steps == np.count_nonzero(batch.arrays["alive"]) == 32 * 64 * slots
    assert set(np.unique(batch.arrays["action"])) == {0, 1}


def test_training_at_the_ceiling_rate_hardly_changes_parameters() -> None:
    config = resolve("cartpole", [f"learner.lr={LEARNING_RATE}"])
    info = probe(config.env)
    trainer = make_trainer(config, info)
    assert isinstance(trainer, Trainer)
    batch, before = staged(trainer, info), trainer.optimizer.values.clone()
    for _ in range(20):
        trainer.step(batch)
    assert trainer.progress.learner_steps == 20
    assert 0 < float((trainer.optimizer.values - before).abs().max()) < 1e-6
    assert trainer.statistics()["grad_norm"] > 0  # and raises for what is not finite


@pytest.mark.parametrize(
    ("target", "override", "amount"),
    [
        ("cartpole", "actors.envs=8", 8 * 32),
        ("cartpole_dqn", "replay.batch_size=64", 64 / 16),  # each step is sampled 16 times
        ("cartpole_dqn", "replay.samples_per_insert=null", 128),
        ("pendulum_sac", "replay.samples_per_insert=2", None),
    ],
)
def test_a_call_counts_the_agent_steps_that_it_trains_on(
    target: str, override: str, amount: float | None
) -> None:
    config = resolve(target, [override])
    made = work(config)
    made.call()
    made.settle()
    assert made.amount == (config.replay.batch_size / 2 if amount is None else amount)


def test_observations_of_several_parts_are_sound_in_each() -> None:
    parts = laid_out([("arm", (3,), "<f4"), ("eye", (2, 2), "|u1"), (MASK, (5,), "|u1")])
    obs = like(np.empty((50, row_nbytes(parts)), np.uint8), np.random.default_rng(0), parts)
    seen = views(parts, obs)
    assert 0.5 < seen["arm"].std() < 2
    assert len(np.unique(seen["eye"])) > 50
    assert (seen[MASK] == 1).all()
