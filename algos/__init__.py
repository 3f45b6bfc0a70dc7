"""Algorithms: what actors record, how a filled slot is prepared, the loss. One file each.

Here is what actors and connectors call; none of it imports torch.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from penstock.algos import dqn, impala, ppo, sac, slots
from penstock.algos.custom import custom
from penstock.configs.algorithms import (
    AlgoConfig,
    CustomConfig,
    DqnConfig,
    OffPolicyConfig,
    OnPolicyConfig,
)
from penstock.configs.schema import Config
from penstock.core.params import ParamLayout
from penstock.core.specs import Column, SlotSpec
from penstock.models.actions import Spaces
from penstock.models.fitting import net_shape
from penstock.models.general import GeneralShape


class Algorithm(Protocol):
    """What the module of an algorithm has."""

    def columns(self, observation_space: Any, action_space: Any) -> tuple[Column, ...]:
        """What one slot holds."""

    def check(self, columns: dict[str, npt.NDArray[Any]], layout: ParamLayout) -> None:
        """Raise ValueError for values that no sound actor of the network ``layout`` records."""

    def process(self, cfg: Any, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Prepare a filled slot for training, in place."""


ALGORITHMS: dict[str, Algorithm] = {"impala": impala, "ppo": ppo, "dqn": dqn, "sac": sac}


def algorithm(cfg: AlgoConfig) -> Algorithm:
    """The module of an algorithm, or one's own; UserError where there is no such."""
    return custom(cfg.entry) if isinstance(cfg, CustomConfig) else ALGORITHMS[cfg.name]


def slot_spec(config: Config, spaces: Spaces) -> SlotSpec:
    """The slots of a run; UserError where no network fits the game."""
    shape = net_shape(config, spaces)
    columns = algorithm(config.algo).columns(spaces.observation_space, spaces.action_space)
    if records_returns(config.algo):
        columns = slots.with_returns(columns)
    if (stack := config.transport.frame_stack) and stack > 1:
        fresh = isinstance(config.algo, OnPolicyConfig)
        columns = (slots.frames_of_unroll if fresh else slots.newest_frames)(columns, stack)
    if isinstance(shape, GeneralShape) and shape.state_size:
        columns = (*columns, Column("core_state", "<f4", (shape.state_size,), rows="slot"))
    return SlotSpec(config.actors.unroll, config.actors.envs, columns)


def records_returns(cfg: AlgoConfig) -> bool:
    """Whether slots have a column of discounted returns, by whose deviation rewards are scaled."""
    return isinstance(cfg, OnPolicyConfig) and cfg.normalize_rewards


def receive(cfg: AlgoConfig, layout: ParamLayout, columns: dict[str, npt.NDArray[Any]]) -> None:
    """`process` for a slot that came over the wire; ValueError for what would harm a learner.

    ``layout`` is the network's, which tells how many actions there are.
    """
    algorithm(cfg).check(columns, layout)
    process(cfg, columns)


def process(cfg: AlgoConfig, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Prepare a filled slot for training, in place: raw rewards become what is trained on."""
    algorithm(cfg).process(cfg, columns)


def n_step(cfg: OffPolicyConfig) -> int:
    """Rewards that a transition drawn from replay sums up."""
    return cfg.n_step if isinstance(cfg, DqnConfig) else 1
