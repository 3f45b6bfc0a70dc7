"""Penstock feeds learners: a distributed actor-learner system for reinforcement learning.

What is named here is imported when it is first used, so that ``import penstock`` is quick.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as type checkers know it; importing typing would take most of the time
if TYPE_CHECKING:
    from typing import Any

    from penstock.algos.custom.config import CustomConfig as CustomConfig
    from penstock.algos.distill.config import DistillConfig as DistillConfig
    from penstock.algos.dqn.config import DqnConfig as DqnConfig
    from penstock.algos.impala.config import ImpalaConfig as ImpalaConfig
    from penstock.algos.ppo.config import PpoConfig as PpoConfig
    from penstock.algos.pqn.config import PqnConfig as PqnConfig
    from penstock.algos.r2d2.config import R2d2Config as R2d2Config
    from penstock.algos.sac.config import SacConfig as SacConfig
    from penstock.algos.td3.config import Td3Config as Td3Config
    from penstock.configs.errors import UserError as UserError
    from penstock.configs.league import LeagueConfig as LeagueConfig
    from penstock.configs.league import LineConfig as LineConfig
    from penstock.configs.load import dump as dump
    from penstock.configs.model import ModelConfig as ModelConfig
    from penstock.configs.reduce import ReduceConfig as ReduceConfig
    from penstock.configs.run import RunConfig as RunConfig
    from penstock.configs.schema import Config as Config
    from penstock.configs.sections import ActorsConfig as ActorsConfig
    from penstock.configs.sections import CheckpointConfig as CheckpointConfig
    from penstock.configs.sections import EnvConfig as EnvConfig
    from penstock.configs.sections import EvalConfig as EvalConfig
    from penstock.configs.sections import LearnerConfig as LearnerConfig
    from penstock.configs.sections import NonFiniteConfig as NonFiniteConfig
    from penstock.configs.sections import ReplayConfig as ReplayConfig
    from penstock.configs.sections import StopConfig as StopConfig
    from penstock.configs.sections import WeightsConfig as WeightsConfig
    from penstock.configs.transports import TransportConfig as TransportConfig
    from penstock.evaluation.loaded_policy import LoadedPolicy as LoadedPolicy
    from penstock.evaluation.loaded_policy import load_policy as load_policy
    from penstock.launch.api import Evaluation as Evaluation
    from penstock.launch.api import evaluate as evaluate
    from penstock.launch.api import resolve as resolve
    from penstock.launch.api import train as train
    from penstock.launch.callbacks import Callbacks as Callbacks
    from penstock.launch.run_summary import Accounting as Accounting
    from penstock.launch.run_summary import Summary as Summary
    from penstock.launch.run_summary import history as history

__version__ = "0.2.0.dev0"

_HOMES = {
    "Accounting": "penstock.launch.run_summary",
    "ActorsConfig": "penstock.configs.sections",
    "Callbacks": "penstock.launch.callbacks",
    "CheckpointConfig": "penstock.configs.sections",
    "Config": "penstock.configs.schema",
    "CustomConfig": "penstock.algos.custom.config",
    "DistillConfig": "penstock.algos.distill.config",
    "DqnConfig": "penstock.algos.dqn.config",
    "EnvConfig": "penstock.configs.sections",
    "EvalConfig": "penstock.configs.sections",
    "Evaluation": "penstock.launch.api",
    "ImpalaConfig": "penstock.algos.impala.config",
    "LeagueConfig": "penstock.configs.league",
    "LearnerConfig": "penstock.configs.sections",
    "LineConfig": "penstock.configs.league",
    "LoadedPolicy": "penstock.evaluation.loaded_policy",
    "ModelConfig": "penstock.configs.model",
    "NonFiniteConfig": "penstock.configs.sections",
    "PpoConfig": "penstock.algos.ppo.config",
    "PqnConfig": "penstock.algos.pqn.config",
    "R2d2Config": "penstock.algos.r2d2.config",
    "ReduceConfig": "penstock.configs.reduce",
    "ReplayConfig": "penstock.configs.sections",
    "RunConfig": "penstock.configs.run",
    "SacConfig": "penstock.algos.sac.config",
    "StopConfig": "penstock.configs.sections",
    "Summary": "penstock.launch.run_summary",
    "Td3Config": "penstock.algos.td3.config",
    "TransportConfig": "penstock.configs.transports",
    "UserError": "penstock.configs.errors",
    "WeightsConfig": "penstock.configs.sections",
    "dump": "penstock.configs.load",
    "evaluate": "penstock.launch.api",
    "history": "penstock.launch.run_summary",
    "load_policy": "penstock.evaluation.loaded_policy",
    "resolve": "penstock.launch.api",
    "train": "penstock.launch.api",
}

__all__ = ["__version__", *_HOMES]

REGISTRIES = (
    "penstock.algos.registry",
    "penstock.learner.codecs.registry",
    "penstock.learner.optimizers.registry",
    "penstock.learner.sync.registry",
    "penstock.learner.extras.codecs.registry",
    "penstock.learner.extras.optimizers.registry",
    "penstock.learner.extras.parameter_server.registry",
    "penstock.monitor.registry",
    "penstock.transport.registry",
)
"""Modules without torch that register what `configs` validates; it imports no other room by itself,
and these when it first validates a config."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
