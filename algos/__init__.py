"""Algorithms: what actors record, how a filled slot is prepared, the loss. One file each.

Here is what the other rooms call; the algorithm is chosen by the class of its config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from penstock.algos import impala
from penstock.configs.algorithms import AlgoConfig
from penstock.configs.schema import Config
from penstock.core.specs import SlotSpec
from penstock.models.layout import Spaces

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models.torch_nets import Net


class Loss(Protocol):
    """``loss, statistics = loss(net, batch, cfg, envs)``; see `penstock.algos.impala.loss`."""

    def __call__(
        self, net: Net, batch: dict[str, Tensor], cfg: AlgoConfig, envs: slice = ...
    ) -> tuple[Tensor, Tensor]: ...


def slot_spec(config: Config, spaces: Spaces) -> SlotSpec:
    """The slots of a run."""
    columns = impala.columns(spaces.observation_space, spaces.action_space)
    return SlotSpec(config.actors.unroll, config.actors.envs, columns)


def process(cfg: AlgoConfig, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Prepare a filled slot for training, in place: raw rewards become what is trained on."""
    impala.process(cfg, columns)


def loss_function(cfg: AlgoConfig) -> Loss:
    """The loss of an algorithm."""
    return impala.loss


def statistics(cfg: AlgoConfig) -> tuple[str, ...]:
    """Names of the statistics that the loss gives."""
    return impala.STATISTICS
