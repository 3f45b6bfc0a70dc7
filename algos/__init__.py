"""Algorithms: what actors record, how a filled slot is prepared, the loss. One file each.

Here is what actors and connectors call; none of it imports torch.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from penstock.algos import impala
from penstock.configs.algorithms import AlgoConfig
from penstock.configs.schema import Config
from penstock.core.params import ParamLayout
from penstock.core.specs import SlotSpec
from penstock.models.layout import Spaces, net_shape


def slot_spec(config: Config, spaces: Spaces) -> SlotSpec:
    """The slots of a run; UserError where no network fits the game."""
    net_shape(config.model, spaces.observation_space, spaces.action_space)
    columns = impala.columns(spaces.observation_space, spaces.action_space)
    return SlotSpec(config.actors.unroll, config.actors.envs, columns)


def receive(cfg: AlgoConfig, layout: ParamLayout, columns: dict[str, npt.NDArray[Any]]) -> None:
    """`process` for a slot that came over the wire; ValueError for what would harm a learner.

    ``layout`` is the network's, which tells how many actions there are.
    """
    impala.check(columns, actions=dict(layout.entries)["policy.bias"][0])
    impala.process(cfg, columns)


def process(cfg: AlgoConfig, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Prepare a filled slot for training, in place: raw rewards become what is trained on."""
    impala.process(cfg, columns)
