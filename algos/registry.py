"""The algorithms by the names of `algo.name`."""

from __future__ import annotations

from typing import Any

from penstock.algos.base import ReplayAlgorithm, UnrollAlgorithm
from penstock.algos.custom import custom
from penstock.algos.dqn import DQN
from penstock.algos.impala import IMPALA
from penstock.algos.ppo import PPO
from penstock.algos.sac import SAC
from penstock.configs.algorithms import AlgoConfig, CustomConfig

ALGORITHMS: dict[str, UnrollAlgorithm[Any] | ReplayAlgorithm[Any]] = {
    "impala": IMPALA,
    "ppo": PPO,
    "dqn": DQN,
    "sac": SAC,
}


def algorithm(cfg: AlgoConfig) -> UnrollAlgorithm[Any] | ReplayAlgorithm[Any]:
    """The algorithm that a config names; UserError where its own `algo.entry` has none."""
    return custom(cfg.entry) if isinstance(cfg, CustomConfig) else ALGORITHMS[cfg.name]
