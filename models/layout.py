"""Which network fits a game, and how its parameters lie in the flat vector. Imports no torch.

A net's shape is all that is needed to build it in torch or to compute it in numpy. The order of
``layout`` is the order of the torch module's named parameters, then its buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
from gymnasium import spaces

from penstock.configs.errors import UserError
from penstock.configs.schema import ModelConfig
from penstock.core.params import ParamLayout

TOWERS = 2  # an MLP's policy tower and value tower, stacked along the first axis
POLICY, VALUE = 0, -1  # which tower feeds which head; a CNN has one tower for both
CONVS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # Nature CNN: filters, kernel, stride
FEATURES = 512  # Nature CNN: width of the layer after the convolutions
MIN_PIXELS = 36  # what the convolutions need in each direction

Entry = tuple[str, tuple[int, ...]]


class Spaces(Protocol):
    """What a network needs to know about a game: the spaces of a single environment."""

    @property
    def observation_space(self) -> Any: ...
    @property
    def action_space(self) -> Any: ...


@dataclass(frozen=True)
class MlpShape:
    """Two towers of ``hidden`` layers over ``inputs`` values, for the policy and for the value.

    The weight of a hidden layer is ``[TOWERS, in, out]``: one batched product does both towers, and
    its gradient is several times faster in this order than as torch's ``[out, in]``.
    """

    inputs: int
    actions: int
    hidden: tuple[int, ...]
    activation: Literal["tanh", "relu"]
    obs_scale: float

    @cached_property
    def layout(self) -> ParamLayout:
        entries: list[Entry] = []
        for i, (fan_in, fan_out) in enumerate(pairwise((self.inputs, *self.hidden))):
            entries.append((f"hidden.{i}.weight", (TOWERS, fan_in, fan_out)))
            entries.append((f"hidden.{i}.bias", (TOWERS, fan_out)))
        return ParamLayout((*entries, *_heads(self.hidden[-1], self.actions)))


@dataclass(frozen=True)
class CnnShape:
    """The Nature CNN over ``[channels, height, width]``."""

    channels: int
    height: int
    width: int
    actions: int
    obs_scale: float

    @cached_property
    def flat_features(self) -> int:
        """Values that leave the last convolution."""
        height, width = self.height, self.width
        for _, kernel, stride in CONVS:
            height, width = ((n - kernel) // stride + 1 for n in (height, width))
        return CONVS[-1][0] * height * width

    @cached_property
    def layout(self) -> ParamLayout:
        entries: list[Entry] = []
        channels = self.channels
        for i, (filters, kernel, _) in enumerate(CONVS):
            entries.append((f"convs.{i}.weight", (filters, channels, kernel, kernel)))
            entries.append((f"convs.{i}.bias", (filters,)))
            channels = filters
        entries.append(("linear.weight", (FEATURES, self.flat_features)))
        entries.append(("linear.bias", (FEATURES,)))
        return ParamLayout((*entries, *_heads(FEATURES, self.actions)))


NetShape = MlpShape | CnnShape


def _heads(features: int, actions: int) -> tuple[Entry, ...]:
    return (
        ("policy.weight", (actions, features)),
        ("policy.bias", (actions,)),
        ("value.weight", (1, features)),
        ("value.bias", (1,)),
    )


def param_layout(cfg: ModelConfig, observation_space: Any, action_space: Any) -> ParamLayout:
    """Layout of the flat vector of the network that `net_shape` chooses."""
    return net_shape(cfg, observation_space, action_space).layout


def net_shape(cfg: ModelConfig, observation_space: Any, action_space: Any) -> NetShape:
    """The network for a game's spaces (of a single environment); UserError where none fits."""
    if not isinstance(action_space, spaces.Discrete):
        raise UserError(
            f"action space {action_space} is not Discrete, the only kind that policies support; "
            "wrap the environment so that it takes one whole number"
        )
    if not isinstance(observation_space, spaces.Box):
        raise UserError(
            f"observation space {observation_space} is not a Box, the only kind that networks "
            "read; add gymnasium.wrappers:FlattenObservation to env.wrappers"
        )
    shape, actions = observation_space.shape, int(action_space.n)
    scale = 1 / 255 if observation_space.dtype == np.uint8 else 1.0
    if _takes_cnn(cfg, shape):
        channels, height, width = shape
        return CnnShape(channels, height, width, actions, scale)
    return MlpShape(math.prod(shape), actions, tuple(cfg.hidden), cfg.activation, scale)


def _takes_cnn(cfg: ModelConfig, shape: tuple[int, ...]) -> bool:
    fits = len(shape) == 3 and min(shape[1:]) >= MIN_PIXELS
    channels_last = len(shape) == 3 and min(shape[:2]) >= MIN_PIXELS
    if fits or cfg.kind == "mlp":
        return cfg.kind != "mlp"
    if cfg.kind == "auto" and not channels_last:
        return False
    raise UserError(
        f"observations of shape {list(shape)} do not fit nature_cnn, which reads [channels, "
        f"height, width] of at least {MIN_PIXELS} pixels each way; bring them into that form "
        "with env.wrappers, or set model.kind=mlp"
    )
