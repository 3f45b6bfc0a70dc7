"""Algorithms: what actors record, how a filled slot is prepared, the loss. One file each.

Here is what actors and connectors call; none of it imports torch.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from penstock.algos import dqn, impala, sac, slots
from penstock.configs.algorithms import AlgoConfig, DqnConfig, ImpalaConfig, OffPolicyConfig
from penstock.configs.schema import Config
from penstock.core.params import ParamLayout
from penstock.core.specs import Column, SlotSpec
from penstock.models.fitting import Spaces, net_shape


class Algorithm(Protocol):
    """What the module of an algorithm has."""

    def columns(self, observation_space: Any, action_space: Any) -> tuple[Column, ...]:
        """What one slot holds."""

    def check(self, columns: dict[str, npt.NDArray[Any]], layout: ParamLayout) -> None:
        """Raise ValueError for values that no sound actor of the network ``layout`` records."""

    def process(self, cfg: Any, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Prepare a filled slot for training, in place."""


ALGORITHMS: dict[str, Algorithm] = {"impala": impala, "dqn": dqn, "sac": sac}


def slot_spec(config: Config, spaces: Spaces) -> SlotSpec:
    """The slots of a run; UserError where no network fits the game."""
    net_shape(config, spaces)
    algorithm = ALGORITHMS[config.algo.name]
    columns = algorithm.columns(spaces.observation_space, spaces.action_space)
    if config.replay.frame_stack and not isinstance(config.algo, ImpalaConfig):
        columns = slots.newest_frames(columns, config.replay.frame_stack)
    return SlotSpec(config.actors.unroll, config.actors.envs, columns)


def receive(cfg: AlgoConfig, layout: ParamLayout, columns: dict[str, npt.NDArray[Any]]) -> None:
    """`process` for a slot that came over the wire; ValueError for what would harm a learner.

    ``layout`` is the network's, which tells how many actions there are.
    """
    ALGORITHMS[cfg.name].check(columns, layout)
    process(cfg, columns)


def process(cfg: AlgoConfig, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Prepare a filled slot for training, in place: raw rewards become what is trained on."""
    ALGORITHMS[cfg.name].process(cfg, columns)


def n_step(cfg: OffPolicyConfig) -> int:
    """Rewards that a transition drawn from replay sums up."""
    return cfg.n_step if isinstance(cfg, DqnConfig) else 1
