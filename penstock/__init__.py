"""Penstock feeds learners: a distributed actor-learner system for reinforcement learning.

What is named here is imported when it is first used, so that ``import penstock`` is quick.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as type checkers know it; importing typing would take most of the time
if TYPE_CHECKING:
    from typing import Any

    from penstock.configs.errors import UserError as UserError
    from penstock.evaluation.loaded_policy import LoadedPolicy as LoadedPolicy
    from penstock.evaluation.loaded_policy import load_policy as load_policy
    from penstock.launch.api import Evaluation as Evaluation
    from penstock.launch.api import StepCounts as StepCounts
    from penstock.launch.api import Summary as Summary
    from penstock.launch.api import evaluate as evaluate
    from penstock.launch.api import history as history
    from penstock.launch.api import train as train
    from penstock.launch.callbacks import Callbacks as Callbacks

__version__ = "0.1.0"

_HOMES = {
    "Accounting": "penstock.launch.api",
    "Callbacks": "penstock.launch.callbacks",
    "Evaluation": "penstock.launch.api",
    "LoadedPolicy": "penstock.evaluation.loaded_policy",
    "Summary": "penstock.launch.api",
    "UserError": "penstock.configs.errors",
    "evaluate": "penstock.launch.api",
    "history": "penstock.launch.api",
    "load_policy": "penstock.evaluation.loaded_policy",
    "train": "penstock.launch.api",
}

__all__ = ["__version__", *_HOMES]

REGISTRIES = (
    "penstock.algos.registry",
    "penstock.learner.codecs.registry",
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
