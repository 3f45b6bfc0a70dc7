"""The fused networks, and how the parameters of each lie in one flat vector. Imports no torch.

A shape is all that is needed to build a network in torch or to compute it in numpy. The order of
``layout`` is the order of the torch module's named parameters, then its buffers. Actions are
decided by ``outputs`` values for each observation: logits, Q-values, or means and logarithms of
deviations.

    MlpShape, CnnShape       policy and value, for actor-critics
    DenseShape, QCnnShape    one head: Q-values (duelling or not), or a Gaussian policy

These are fast implementations for observations of one array, which most environments have. Every
other network is a `penstock.models.general.GeneralShape`, with the same heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from penstock.configs.value_types import MemoryFormat
from penstock.core.params import Float32, ParamLayout
from penstock.models.actions import ActionSpec, Numbers

TOWERS = 2  # an MLP's policy tower and value tower, stacked along the first axis
# Index of the tower that feeds a head, among the towers of a network; a CNN has one for both heads.
POLICY = 0
VALUE = -1
CONVS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # Nature CNN: filters, kernel, stride
CLIP = 10.0  # bound of normalised observations
EPSILON = 1e-8  # is added to variances of observations
NORM_EPSILON = 1e-6  # is added to variances of a layer's outputs (`model.layer_norm`), as in flax
FEATURES = 512  # Nature CNN: width of the layer after the convolutions

Activation = Literal["tanh", "relu"]
Entry = tuple[str, tuple[int, ...]]


class Layer(NamedTuple):
    """A layer of an MLP, and how its outputs are normalised (`model.layer_norm`)."""

    weight: Float32
    """``[out, in]``."""
    bias: Float32
    """``[out]``."""
    norm_weight: Float32 | None = None
    """The gains of normalised outputs, ``[out]``; None where they are not normalised."""
    norm_bias: Float32 | None = None
    """What is added to normalised outputs afterwards, ``[out]``."""


@dataclass(frozen=True)
class MlpShape:
    """Two towers of ``hidden`` layers over ``inputs`` values, for the policy and for the value.

    The weight of a hidden layer is ``[TOWERS, in, out]``: one batched product computes both towers,
    and its gradient is several times faster in this order than as torch's ``[out, in]``.
    """

    inputs: int
    actions: ActionSpec
    hidden: tuple[int, ...]
    """Width of each hidden layer."""
    activation: Activation
    obs_scale: float
    """Factor on the observations."""
    normalize: bool = False
    """Whether observations are normalised by their statistics."""
    log_std_init: float = 0.0
    layer_norm: bool = False
    """Whether the outputs of each hidden layer are normalised."""
    convolutional: ClassVar[bool] = False

    @property
    def outputs(self) -> int:
        return self.actions.outputs

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the inputs and of each layer of a tower."""
        return (self.inputs, *self.hidden)

    @cached_property
    def layout(self) -> ParamLayout:
        towers = tower_entries(TOWERS, self.widths, layer_norm=self.layer_norm)
        statistics = normalizer_entries(self.inputs) if self.normalize else ()
        return ParamLayout(actor_critic(towers, self.hidden[-1], self.actions, statistics))

    def acting_layers(self, named: Mapping[str, Float32]) -> list[Layer]:
        """Returns the policy's layers, given the parameters by name."""
        return [*self._tower(named, POLICY), policy_head(named, self.actions)]

    def value_layers(self, named: Mapping[str, Float32]) -> list[Layer]:
        """Returns the value's layers, given the parameters by name."""
        head = Layer(named["value.weight"], named["value.bias"])
        return [*self._tower(named, VALUE), head]

    def _tower(self, named: Mapping[str, Float32], tower: int) -> list[Layer]:
        return _tower(named, layers=len(self.hidden), tower=tower, obs_scale=self.obs_scale)


@dataclass(frozen=True)
class CnnShape:
    """The Nature CNN over ``[channels, height, width]``, with heads for policy and value."""

    channels: int
    height: int
    width: int
    actions: ActionSpec
    obs_scale: float
    """Factor on the observations."""
    log_std_init: float = 0.0
    normalize: bool = False
    """Whether observations are normalised by their statistics."""
    memory_format: MemoryFormat = "auto"
    """Order of the frames in memory; it changes no parameter."""
    layer_norm: bool = False
    """Whether the outputs of each convolution, and of the layer after them, are normalised."""
    convolutional: ClassVar[bool] = True

    @property
    def outputs(self) -> int:
        return self.actions.outputs

    @cached_property
    def layout(self) -> ParamLayout:
        trunk = _conv_entries(self, features=FEATURES)
        pixels = self.channels * self.height * self.width
        statistics = normalizer_entries(pixels) if self.normalize else ()
        return ParamLayout(actor_critic(trunk, FEATURES, self.actions, statistics))


@dataclass(frozen=True)
class DenseShape:
    """One tower of ``hidden`` layers over ``inputs`` values, and a head of ``outputs`` values."""

    inputs: int
    outputs: int
    hidden: tuple[int, ...]
    """Width of each hidden layer."""
    activation: Activation
    obs_scale: float
    """Factor on the observations."""
    duelling: bool = False
    """Whether the last hidden layer is two of them side by side, the first for the value of the
    state, the second for the advantages of the actions."""
    normalize: bool = False
    """Whether observations are normalised by their statistics."""
    layer_norm: bool = False
    """Whether the outputs of each hidden layer are normalised."""
    convolutional: ClassVar[bool] = False

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the inputs and of each layer."""
        last = 2 * self.hidden[-1] if self.duelling else self.hidden[-1]
        return (self.inputs, *self.hidden[:-1], last)

    @cached_property
    def layout(self) -> ParamLayout:
        tower = tower_entries(1, self.widths, layer_norm=self.layer_norm)
        head = _heads(self.hidden[-1], self.outputs, self.duelling)
        statistics = normalizer_entries(self.inputs) if self.normalize else ()
        return ParamLayout((*tower, *head, *statistics))

    def acting_layers(self, named: Mapping[str, Float32]) -> list[Layer]:
        """Returns the layers, given the parameters by name; a duelling head becomes one product."""
        weight = named["head.weight"]
        bias = named["head.bias"]
        if self.duelling:
            # Q = V + A - mean(A), with V of the first half of the features and A of the second.
            value = np.broadcast_to(named["value.weight"], weight.shape)
            weight = np.concatenate([value, weight - weight.mean(0)], 1)
            bias = named["value.bias"] + bias - bias.mean()

        tower = _tower(named, layers=len(self.hidden), tower=0, obs_scale=self.obs_scale)
        return [*tower, Layer(weight, bias)]


@dataclass(frozen=True)
class QCnnShape:
    """The Nature CNN over ``[channels, height, width]`` with a Q-value of each action."""

    channels: int
    height: int
    width: int
    outputs: int
    obs_scale: float
    """Factor on the observations."""
    duelling: bool = False
    """Whether the layer after the convolutions is two of them side by side, the first for the value
    of the state, the second for the advantages of the actions (Wang et al. 2016)."""
    normalize: bool = False
    """Whether observations are normalised by their statistics."""
    memory_format: MemoryFormat = "auto"
    """Order of the frames in memory; it changes no parameter."""
    layer_norm: bool = False
    """Whether the outputs of each convolution, and of the layer after them, are normalised."""
    convolutional: ClassVar[bool] = True

    @property
    def features(self) -> int:
        """Width of the layer after the convolutions."""
        return 2 * FEATURES if self.duelling else FEATURES

    @cached_property
    def layout(self) -> ParamLayout:
        trunk = _conv_entries(self, features=self.features)
        head = _heads(FEATURES, self.outputs, self.duelling)
        pixels = self.channels * self.height * self.width
        statistics = normalizer_entries(pixels) if self.normalize else ()
        return ParamLayout((*trunk, *head, *statistics))


ActorCriticShape = MlpShape | CnnShape
NetShape = ActorCriticShape | DenseShape | QCnnShape


def flat_features(height: int, width: int) -> int:
    """Returns how many values leave the last convolution for frames of a height and a width."""
    for _, kernel, stride in CONVS:
        height = (height - kernel) // stride + 1
        width = (width - kernel) // stride + 1
    filters = CONVS[-1][0]
    return filters * height * width


def tower_entries(towers: int, widths: tuple[int, ...], *, layer_norm: bool) -> list[Entry]:
    """Returns the entries of the hidden layers of ``towers`` networks side by side."""
    entries: list[Entry] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        entries.append((f"hidden.{i}.weight", (towers, fan_in, fan_out)))
        entries.append((f"hidden.{i}.bias", (towers, fan_out)))
        if layer_norm:
            entries += norm_entries(f"hidden.{i}", (towers, fan_out))
    return entries


def norm_entries(layer: str, shape: tuple[int, ...]) -> list[Entry]:
    """Returns the entries that normalise the outputs of a layer, given those of its bias."""
    return [(f"{layer}.norm.weight", shape), (f"{layer}.norm.bias", shape)]


def _conv_entries(shape: CnnShape | QCnnShape, *, features: int) -> list[Entry]:
    """Returns the entries of the convolutions, and of the layer of ``features`` after them."""
    entries: list[Entry] = []
    channels = shape.channels
    for i, (filters, kernel, _) in enumerate(CONVS):
        entries.append((f"convs.{i}.weight", (filters, channels, kernel, kernel)))
        entries.append((f"convs.{i}.bias", (filters,)))
        if shape.layer_norm:
            entries += norm_entries(f"convs.{i}", (filters,))
        channels = filters

    entries.append(("linear.weight", (features, flat_features(shape.height, shape.width))))
    entries.append(("linear.bias", (features,)))
    if shape.layer_norm:
        entries += norm_entries("linear", (features,))
    return entries


def actor_critic(
    trunk: Sequence[Entry],
    features: int,
    actions: ActionSpec,
    statistics: Sequence[Entry] = (),
) -> tuple[Entry, ...]:
    """Returns the entries of an actor-critic, in the order of its torch module.

    Args:
        trunk: entries of the trunk.
        features: width of its last layer.
        actions: what the policy decides.
        statistics: entries of the buffers.
    """
    log_std: list[Entry] = []
    if isinstance(actions, Numbers):
        log_std = [("log_std", (actions.size,))]

    return (
        *log_std,
        *trunk,
        ("policy.weight", (actions.head, features)),
        ("policy.bias", (actions.head,)),
        ("value.weight", (1, features)),
        ("value.bias", (1,)),
        *statistics,
    )


def policy_head(named: Mapping[str, Float32], actions: ActionSpec) -> Layer:
    """Returns the policy's last layer, which gives all outputs, from the parameters by name."""
    weight = named["policy.weight"]
    bias = named["policy.bias"]
    if isinstance(actions, Numbers):
        # Deviations do not depend on the observation: their weights are 0.
        weight = np.concatenate([weight, np.zeros_like(weight)])
        bias = np.concatenate([bias, named["log_std"]])
    return Layer(weight, bias)


def normalizer_entries(inputs: int) -> tuple[Entry, ...]:
    """Returns the entries of the buffers of `penstock.models.normalizer.Normalizer`."""
    return (
        ("normalizer.mean", (inputs,)),
        ("normalizer.var", (inputs,)),
        ("normalizer.count", (1,)),
    )


def _heads(features: int, outputs: int, duelling: bool) -> tuple[Entry, ...]:
    """Returns the entries of the head, and of the value's if it is duelling."""
    head: tuple[Entry, ...] = (("head.weight", (outputs, features)), ("head.bias", (outputs,)))
    if not duelling:
        return head
    return (*head, ("value.weight", (1, features)), ("value.bias", (1,)))


def _tower(
    named: Mapping[str, Float32], *, layers: int, tower: int, obs_scale: float
) -> list[Layer]:
    """Returns the hidden layers of one tower; the first includes the factor on observations."""
    tower_layers = []
    for i in range(layers):
        weight = named[f"hidden.{i}.weight"][tower].T
        if i == 0:
            weight = weight * np.float32(obs_scale)
        layer = Layer(weight, named[f"hidden.{i}.bias"][tower])

        if f"hidden.{i}.norm.weight" in named:
            layer = layer._replace(
                norm_weight=named[f"hidden.{i}.norm.weight"][tower],
                norm_bias=named[f"hidden.{i}.norm.bias"][tower],
            )
        tower_layers.append(layer)
    return tower_layers
