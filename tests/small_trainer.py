"""A trainer of a small network, and slots of random numbers for it."""

from __future__ import annotations

import numpy as np

from penstock.configs.load import resolve
from penstock.core.specs import HEADER
from penstock.envs import probe
from penstock.learner.trainer import Trainer
from penstock.transport.shm.store import Slot


def trainer() -> Trainer:
    config = resolve("cartpole", ["algo.name=ppo", "actors.envs=8", "actors.unroll=6",
                                  "learner.updates_per_batch=2", "learner.device=cpu"])  # fmt: skip
    return Trainer(config, probe(config.env))


def slot(made: Trainer, rng: np.random.Generator) -> Slot:
    payload = made.spec.zeros()
    columns = made.spec.views(payload)
    columns["obs"][...] = rng.normal(size=columns["obs"].shape)
    columns["action"][...] = rng.integers(0, 2, columns["action"].shape)
    columns["reward"][...] = 1.0
    columns["behaviour_logp"][...] = np.log(0.5)
    columns["alive"][...] = True
    header = np.zeros((), HEADER)
    header["steps"] = columns["alive"].size
    return Slot(0, header, tuple(payload), columns)
