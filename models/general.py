"""The network family: an encoder of the observation, a core with memory if configured, and heads.

It reads observations of several parts, and a custom network may replace the encoder. The
heads are the algorithm's: `ActorCriticHeads`, or a `SingleHead`. No torch here.

The parameters' layout is that of the torch module, which `torch_general.layout` builds without
memory for it. So torch is imported where the layout is asked for, and not before. The layout of a
`PlainMlp`, such as the network of a game with an action mask, is written down here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.configs.model import ModelConfig
from penstock.configs.value_types import MemoryFormat
from penstock.core.observations import ObservationPart
from penstock.core.params import Float32, ParamLayout
from penstock.models.actions import ActionSpec
from penstock.models.core_inputs import CoreInputs
from penstock.models.layout import (
    POLICY,
    TOWERS,
    Activation,
    Entry,
    Layer,
    Scaling,
    SingleHead,
    actor_critic,
    norm_entries,
    normalizer_entries,
    policy_head,
)

LEAST_SMALL = 5
"""Least height and width, in pixels, of an image that `model.kind` auto reads by `small_cnn`."""
LEAST_LARGE = 36
"""Least height and width, in pixels, of an image that `model.kind` auto reads by `nature_cnn`."""


@dataclass(frozen=True)
class Input:
    """One array of an observation, which networks read as ``(x - low) / span``."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    part: ObservationPart | None
    """Place of the array in a row of bytes; None where the array is the observation itself."""
    is_image: bool
    """Whether the array goes through convolutions; if not it is flattened."""
    choices: tuple[int, ...] = ()
    """The number of choices for each number of the array, which is embedded; else empty."""
    low: float = 0.0
    span: float = 1.0


@dataclass(frozen=True)
class ActorCriticHeads:
    """Policy and value, of PPO and IMPALA."""

    actions: ActionSpec

    @property
    def outputs(self) -> int:
        """Numbers that decide an action."""
        return self.actions.outputs


H = TypeVar("H", bound=ActorCriticHeads | SingleHead, covariant=True)


@dataclass(frozen=True)
class GeneralShape(Generic[H]):
    """The shape of a `penstock.models.torch_general.GeneralNet`."""

    inputs: tuple[Input, ...]
    mask: ObservationPart | None
    """The action mask among the parts of an observation."""
    heads: H
    model: ModelConfig
    make_layout: Callable[[GeneralShape[Any]], ParamLayout] = field(compare=False, repr=False)
    """Computes `layout`; `models.fitting` sets it, so that this file needs no torch."""
    memory_format: MemoryFormat = "auto"
    """Order of the frames in memory; it changes no parameter."""
    core_inputs: CoreInputs | None = None
    """What the core reads besides the features."""

    @property
    def outputs(self) -> int:
        return self.heads.outputs

    @property
    def convolutional(self) -> bool:
        return any(part.is_image for part in self.inputs)

    @property
    def has_small_images(self) -> bool:
        """Whether an image goes through the convolutions of `model.filters`."""
        return any(part.is_image and is_small(self.model, part.shape) for part in self.inputs)

    @property
    def has_large_images(self) -> bool:
        """Whether an image goes through the layers of `nature_cnn` or `impala_cnn`."""
        return any(part.is_image and not is_small(self.model, part.shape) for part in self.inputs)

    @property
    def is_separate(self) -> bool:
        """Whether the value of an actor-critic has a network of its own."""
        if not isinstance(self.heads, ActorCriticHeads):
            return False
        if self.model.critic != "auto":
            return self.model.critic == "separate"

        is_plain = self.model.core == "none" and self.model.entry is None
        return is_plain and not self.convolutional

    @property
    def state_size(self) -> int:
        """Number of float32 values in the memory of one environment.

        Those of the cores come first, then the core's inputs.
        """
        vectors = {"none": 0, "gru": 1, "lstm": 2}[self.model.core]
        core_size = vectors * self.model.core_size
        cores_size = 2 * core_size if self.is_separate else core_size
        return cores_size + (self.core_inputs.width if self.core_inputs else 0)

    @cached_property
    def layout(self) -> ParamLayout:
        return self.make_layout(self)


class PlainMlp:
    """The network of a `GeneralShape` that is an MLP over a single array of numbers.

    It is one that numpy can compute, whatever else an observation has that it does not read: an
    action mask. The parameters have the names and the order of the general network's.
    """

    part: ObservationPart
    """Place of the array in the row of bytes of an observation."""
    widths: tuple[int, ...]
    """Widths of the inputs and of each layer of a tower."""
    activation: Activation
    normalize: bool
    """Whether observations are normalised by their statistics."""
    layer_norm: bool
    """Whether the outputs of each hidden layer are normalised."""
    layout: ParamLayout
    embeddings: tuple[tuple[int, int], ...]
    """Choices and width of the embedding of each number of the array, which are the inputs; empty
    if the numbers are."""

    def __init__(self, shape: GeneralShape[ActorCriticHeads], part: ObservationPart) -> None:
        """Describe a ``shape`` whose only array lies at ``part``; `plain_mlp` finds it."""
        model = shape.model
        [array] = shape.inputs
        self.part = part
        self.embeddings = tuple((n, embedding_width(n, model)) for n in array.choices)
        inputs = sum(width for _, width in self.embeddings) or math.prod(array.shape)
        self.widths = (inputs, *model.hidden)
        self.activation = model.activation
        self.normalize = model.normalize_observations and not array.choices
        self.layer_norm = model.layer_norm
        self._actions = shape.heads.actions
        # Numbers that are normalised are not scaled as well.
        self._factor = np.float32(1.0 if self.normalize else 1 / array.span)

        towers: list[Entry] = []
        for body in range(TOWERS if shape.is_separate else 1):
            for i, size in enumerate(self.embeddings):
                towers.append((_table(body, i), size))
            for i, (fan_in, fan_out) in enumerate(pairwise(self.widths)):
                towers.append((f"{_layer(body, i)}.weight", (fan_out, fan_in)))
                towers.append((f"{_layer(body, i)}.bias", (fan_out,)))
                if model.layer_norm:
                    towers += norm_entries(_layer(body, i), (fan_out,))
        statistics = normalizer_entries(self.widths[0]) if self.normalize else ()
        self.layout = ParamLayout(actor_critic(towers, self.widths[-1], self._actions, statistics))

    def acting_layers(self, named: Mapping[str, Float32]) -> list[Layer]:
        """Returns the policy's layers, given the parameters by name."""
        layers = []
        for i in range(len(self.widths) - 1):
            name = _layer(POLICY, i)
            norm = None
            if self.layer_norm:
                norm = Scaling(named[f"{name}.norm.weight"], named[f"{name}.norm.bias"])
            layers.append(Layer(named[f"{name}.weight"], named[f"{name}.bias"], norm))

        layers[0] = layers[0]._replace(weight=layers[0].weight * self._factor)
        return [*layers, policy_head(named, self._actions)]

    def acting_tables(self, named: Mapping[str, Float32]) -> list[Float32]:
        """Returns the policy's embeddings ``[choices, width]``, given the parameters by name."""
        return [named[_table(POLICY, i)] for i in range(len(self.embeddings))]


def plain_mlp(shape: GeneralShape[Any]) -> PlainMlp | None:
    """Returns the MLP that a general network is; None if it is another network."""
    model = shape.model
    array = shape.inputs[0]
    is_one_array = len(shape.inputs) == 1 and array.part is not None
    is_mlp = model.core == "none" and model.entry is None and not shape.convolutional
    if not (is_one_array and is_mlp and isinstance(shape.heads, ActorCriticHeads)):
        return None
    # What is subtracted from the numbers would have to be part of a bias.
    if array.low != 0 and not model.normalize_observations:
        return None
    assert array.part is not None
    return PlainMlp(shape, array.part)


def _layer(body: int, index: int) -> str:
    """Returns the name of a layer of a body, as `torch_encoders.Encoder` has it."""
    return f"bodies.{body}.layers.linears.{index}"


def _table(body: int, index: int) -> str:
    """Returns the name of an embedding of a body's first array, as `torch_encoders.Encoder` has
    it."""
    return f"bodies.{body}.embeddings.0.tables.{index}.weight"


def embedding_width(choices: int, model: ModelConfig) -> int:
    """Returns the number of values that stand for one of so many choices.

    It is that of fastai (`emb_sz_rule` of fastai.tabular): 1.6 times the 0.56th power of the
    choices, at most 600. More than the layer behind it would be redundant: one-hot inputs have no
    more than its width.
    """
    by_rule: int = round(1.6 * float(choices) ** 0.56)
    return min(by_rule, 600, model.hidden[0])


def channels_last(shape: tuple[int, ...]) -> bool:
    """Returns whether an image's channels are its last axis rather than its first.

    Channels are the shorter axis of the two. In a small image that is square without them, they are
    the axis that is not a side.
    """
    first, middle, last = shape
    if middle < LEAST_LARGE and first != last and middle in (first, last):
        return middle == first
    return last < first


def sides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns height and width of an image, in pixels."""
    return shape[:2] if channels_last(shape) else shape[1:]


def is_small(model: ModelConfig, shape: tuple[int, ...]) -> bool:
    """Returns whether an image is read by `small_cnn`."""
    if model.kind == "auto" and model.entry is None:
        return max(sides(shape)) < LEAST_LARGE
    return model.kind == "small_cnn" and model.entry is None
