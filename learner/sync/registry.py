"""The registry of paces: what a config needs of each, and how a learner makes one.

A new pace is a file beside this one, with its spec below; one that needs the parameter server goes
into `learner/extras/parameter_server/`, which the core never imports.

Imports no torch, so that configs can be validated with it. Documentation and messages list paces in
the order of registration: those here, then those of `learner.extras.parameter_server`.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from penstock.configs.learner import PACES as PACES
from penstock.configs.learner import PaceSpec

if TYPE_CHECKING:
    from penstock.learner.sync.pace import Pace, PaceContext, PaceFactory


def make_pace(context: PaceContext) -> Pace:
    """Make the pace named by ``learner.pace``."""
    factory: PaceFactory = resolve_name(PACES.specs[context.config.learner.pace].entry_point)
    return factory(context)


for _spec in (
    PaceSpec(
        "bsp",
        "averages gradients in every step",
        "penstock.learner.sync.bsp:BspPace",
        sums_gradients=True,
        codecs=None,
    ),
    PaceSpec(
        "local_sgd",
        "averages parameters every `local_steps`",
        "penstock.learner.sync.local_sgd:LocalSgdPace",
    ),
):
    PACES.register(_spec)
