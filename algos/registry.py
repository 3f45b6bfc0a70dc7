"""The algorithms: what a config knows of each, and the algorithm that a config names.

Imports neither torch nor numpy, so that configs can be validated with it. Documentation and
messages list algorithms in this order.
"""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from penstock.algos.custom.config import CustomConfig
from penstock.algos.distill.config import DistillConfig
from penstock.algos.dqn.config import DqnConfig
from penstock.algos.impala.config import ImpalaConfig
from penstock.algos.ppo.config import PpoConfig
from penstock.algos.pqn.config import PqnConfig
from penstock.algos.r2d2.config import R2d2Config
from penstock.algos.sac.config import SacConfig
from penstock.algos.td3.config import Td3Config
from penstock.configs.algorithms import ALGORITHMS as ALGORITHMS
from penstock.configs.algorithms import AlgoConfig, AlgorithmSpec

if TYPE_CHECKING:
    from penstock.algos.base import AlgorithmFactory, ReplayAlgorithm, UnrollAlgorithm


HERE = Path(__file__).resolve().parent


def algorithm(cfg: AlgoConfig) -> UnrollAlgorithm[AlgoConfig] | ReplayAlgorithm[AlgoConfig]:
    """Returns the algorithm that a config names; UserError if `algo.entry` names none."""
    factory: AlgorithmFactory[AlgoConfig] = resolve_name(ALGORITHMS.specs[cfg.name].entry_point)
    return factory.for_config(cfg)


for _spec in (
    AlgorithmSpec(
        ImpalaConfig, "penstock.algos.impala.algorithm:IMPALA", HERE / "impala" / "defaults.yaml"
    ),
    AlgorithmSpec(PpoConfig, "penstock.algos.ppo.algorithm:PPO", HERE / "ppo" / "defaults.yaml"),
    AlgorithmSpec(CustomConfig, "penstock.algos.custom.algorithm:CUSTOM"),
    AlgorithmSpec(DqnConfig, "penstock.algos.dqn.algorithm:DQN", HERE / "dqn" / "defaults.yaml"),
    AlgorithmSpec(PqnConfig, "penstock.algos.pqn.algorithm:PQN", HERE / "pqn" / "defaults.yaml"),
    AlgorithmSpec(
        R2d2Config, "penstock.algos.r2d2.algorithm:R2D2", HERE / "r2d2" / "defaults.yaml"
    ),
    AlgorithmSpec(SacConfig, "penstock.algos.sac.algorithm:SAC", HERE / "sac" / "defaults.yaml"),
    AlgorithmSpec(Td3Config, "penstock.algos.td3.algorithm:TD3", HERE / "td3" / "defaults.yaml"),
    AlgorithmSpec(
        DistillConfig,
        "penstock.algos.distill.algorithm:DISTILL",
        HERE / "distill" / "defaults.yaml",
    ),
):
    ALGORITHMS.register(_spec)
