"""A trainer of a small network, and slots and batches of random numbers for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.algos.slots import RETURN
from penstock.configs.load import resolve
from penstock.core.specs import HEADER
from penstock.envs import probe
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.trainer import Trainer
from penstock.transport.shm.store import Slot


def trainer() -> Trainer:
    """Makes a PPO trainer for CartPole with eight environments and unrolls of six steps."""
    config = resolve("cartpole", ["algo.name=ppo", "actors.envs=8", "actors.unroll=6",
                                  "learner.updates_per_batch=2", "learner.device=cpu"])  # fmt: skip
    return Trainer(config, probe(config.env))


def weights(made: Trainer) -> npt.NDArray[np.float32]:
    """Returns a copy of a trainer's parameters as one vector."""
    values: npt.NDArray[np.float32] = made.optimizer.values.cpu().numpy().copy()
    return values


def batch(
    made: Trainer, seed: int = 3, reward: float | None = None, alive: float = 0.8, ends: float = 0.0
) -> StagingBatch:
    """Returns a batch of one `slot`."""
    staged = StagingBatch(made.spec, 1, made.device)
    staged.gather([slot(made, np.random.default_rng(seed), reward, alive, ends)])
    return staged


def slot(
    made: Trainer,
    rng: np.random.Generator,
    reward: float | None = 1.0,
    alive: float = 1.0,
    ends: float = 0.0,
) -> Slot:
    """Returns random columns of a slot; ``alive`` and ``ends`` are shares of its rows."""
    payload = made.spec.zeros()
    columns = made.spec.views(payload)
    rows = columns["alive"].shape
    columns["obs"][...] = rng.normal(size=columns["obs"].shape)
    columns["action"][...] = rng.integers(0, 2, columns["action"].shape)
    columns["reward"][...] = rng.normal(size=rows) if reward is None else reward
    columns["behaviour_logp"][...] = np.log(0.5)
    columns["alive"][...] = rng.random(rows) < alive if alive < 1 else True
    if ends:
        columns["terminated"][...] = rng.random(rows) < ends
    if RETURN in columns and reward is None:
        columns[RETURN][...] = rng.normal(3, 2, rows)
    header = np.zeros((), HEADER)
    header["steps"] = np.count_nonzero(columns["alive"])
    return Slot(0, header, tuple(payload), columns)
