"""Networks and slots as the algorithm of a config needs them, for actors and connectors.

Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from penstock.algos import slots
from penstock.algos.recorded import columns_of
from penstock.algos.registry import algorithm
from penstock.configs.algorithms import AlgoConfig
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.interfaces import SlotProcessor, Unrolls
from penstock.core.observations import Spaces
from penstock.core.specs import Column, SlotSpec
from penstock.models.fitting import AnyShape, scales_of
from penstock.models.general import GeneralShape


def network_shape(config: Config, spaces: Spaces) -> AnyShape:
    """Returns the shape of the network that actors get; UserError if none fits the environment."""
    return algorithm(config.algo).network(config, spaces)


def scales(config: Config, spaces: Spaces) -> list[list[float]]:
    """Returns `scales_of` the network, or an empty list where `model.scale` has no effect on it."""
    bytes_model = config.model.model_copy(update={"scale": "bytes"})
    bytes_config = config.model_copy(update={"model": bytes_model})
    byte_scales = scales_of(network_shape(bytes_config, spaces))

    configured_scales = scales_of(network_shape(config, spaces))
    return [] if configured_scales == byte_scales else configured_scales


def has_small_images(config: Config, spaces: Spaces) -> bool:
    """Returns whether `model.filters` has an effect on the network."""
    shape = network_shape(config, spaces)
    return isinstance(shape, GeneralShape) and shape.has_small_images


def slot_spec(config: Config, spaces: Spaces) -> SlotSpec:
    """Returns the spec of a run's slots.

    Raises:
        UserError: if no network fits the environment, if `transport.frame_stack` does not fit its
            observations, or if two columns would have the same name.
    """
    shape = network_shape(config, spaces)
    algo = algorithm(config.algo)
    trains_on_unrolls = isinstance(algo.data(config.algo), Unrolls)
    columns = algo.columns(spaces.observation_space, spaces.action_space)

    # A network with memory starts a sequence at any row from the state that the actor had.
    state_size = shape.state_size if isinstance(shape, GeneralShape) else 0
    if state_size and not trains_on_unrolls:
        columns = (*columns, Column(slots.STATE, "<f4", (state_size,)))
    columns = (*columns, *_unique(columns_of(config, spaces), columns))

    # Each frame of a stack is written once. Unrolls are trained on alone and keep all their frames;
    # a replay finds older frames in other slots.
    stack = config.transport.frame_stack
    if stack and stack > 1:
        store_frames = slots.frames_of_unroll if trains_on_unrolls else slots.newest_frames
        columns = store_frames(columns, stack)

    # It starts an unroll from that before the first row.
    if state_size and trains_on_unrolls:
        columns = (*columns, Column(slots.CORE_STATE, "<f4", (state_size,), rows="slot"))
    return SlotSpec(config.actors.unroll, config.actor_envs, columns)


def _unique(recorded: tuple[Column, ...], columns: tuple[Column, ...]) -> tuple[Column, ...]:
    """Returns ``recorded``; UserError if one has the name of another or of one of ``columns``."""
    names = [column.name for column in (*columns, *recorded)]
    for column in recorded:
        if names.count(column.name) > 1:
            raise UserError(
                f"two columns of a slot would be called {column.name}; give the one that the "
                "environment or a recorder adds another name"
            )
    return recorded


def make_receive(cfg: AlgoConfig, spaces: Spaces) -> SlotProcessor:
    """Returns the function that checks and processes slots which came over the network.

    It raises ValueError for values that would harm a learner.
    """
    algo = algorithm(cfg)

    def receive(columns: dict[str, npt.NDArray[Any]]) -> None:
        algo.check(columns, spaces)
        algo.process(cfg, columns)

    return receive


def process(cfg: AlgoConfig, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Prepare a filled slot for training, in place; raw rewards become those of training."""
    algorithm(cfg).process(cfg, columns)
