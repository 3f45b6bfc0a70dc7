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

WEIGHT_SIGMA = "weight_sigma"  # entry of a noisy layer: deviations of its weight
BIAS_SIGMA = "bias_sigma"  # entry of a noisy layer: deviations of its bias
EPSILON_RATE = "epsilon"  # entry of the rate of exploration, where it is a schedule

Activation = Literal["tanh", "relu"]
Entry = tuple[str, tuple[int, ...]]


class Scaling(NamedTuple):
    """What normalised outputs of a layer are multiplied by, and what is added; each ``[out]``."""

    weight: Float32
    bias: Float32


class Layer(NamedTuple):
    """A layer of an MLP."""

    weight: Float32
    """``[out, in]``."""
    bias: Float32
    """``[out]``."""
    norm: Scaling | None = None
    """Of normalised outputs (`model.layer_norm`); None where they are not normalised."""


@dataclass(frozen=True)
class SingleHead:
    """One head: Q-values of actions (DQN), or means and logarithms of deviations (SAC)."""

    outputs: int
    """Numbers that decide an action."""
    duelling: bool = False
    """Whether the outputs are a value of the state plus advantages of the actions (Wang et al.
    2016), each of a last layer of its own."""
    quantiles: int = 1
    """Quantiles of the return that are learned for each output, whose mean decides (Dabney et al.
    2017). With 1 it is the expected return."""
    noisy: bool = False
    """Whether linear layers have noise in their weights (Fortunato et al. 2017)."""
    counts: tuple[int, ...] = ()
    """Number of actions of each choice, where an action is several choices; the outputs of the
    first choice come first."""
    shows_epsilon: bool = False
    """Whether the present rate of exploration travels with the weights."""

    @property
    def branches(self) -> tuple[int, ...]:
        """Number of outputs of each choice; one number where an action is a single choice."""
        return self.counts or (self.outputs,)

    def entries(self, features: int) -> tuple[Entry, ...]:
        """Returns the entries of the head's parameters, for so many features."""
        rows = self.outputs * self.quantiles
        head = layer_entries("head", (rows, features), (rows,), noisy=self.noisy)
        if not self.duelling:
            return head
        value_shape = (self.quantiles, features)
        return head + layer_entries("value", value_shape, value_shape[:1], noisy=self.noisy)

    @property
    def buffers(self) -> tuple[Entry, ...]:
        """Returns the entries of the head's buffers, which come before those of the statistics."""
        return ((EPSILON_RATE, (1,)),) if self.shows_epsilon else ()


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
        return [*_tower(self, named, POLICY), policy_head(named, self.actions)]

    def value_layers(self, named: Mapping[str, Float32]) -> list[Layer]:
        """Returns the value's layers, given the parameters by name."""
        head = Layer(named["value.weight"], named["value.bias"])
        return [*_tower(self, named, VALUE), head]


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
    features: ClassVar[int] = FEATURES

    @property
    def outputs(self) -> int:
        return self.actions.outputs

    @property
    def pixels(self) -> int:
        """Number of values in an observation."""
        return self.channels * self.height * self.width

    @cached_property
    def layout(self) -> ParamLayout:
        trunk = _conv_entries(self)
        statistics = normalizer_entries(self.pixels) if self.normalize else ()
        return ParamLayout(actor_critic(trunk, FEATURES, self.actions, statistics))


@dataclass(frozen=True)
class DenseShape:
    """One tower of ``hidden`` layers over ``inputs`` values, with one head.

    If that is duelling, the last hidden layer is two of them side by side, the first for the value
    of the state, the second for the advantages of the actions.
    """

    inputs: int
    head: SingleHead
    hidden: tuple[int, ...]
    """Width of each hidden layer."""
    activation: Activation
    obs_scale: float
    """Factor on the observations."""
    normalize: bool = False
    """Whether observations are normalised by their statistics."""
    layer_norm: bool = False
    """Whether the outputs of each hidden layer are normalised."""
    convolutional: ClassVar[bool] = False

    @property
    def outputs(self) -> int:
        return self.head.outputs

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the inputs and of each layer."""
        last = 2 * self.hidden[-1] if self.head.duelling else self.hidden[-1]
        return (self.inputs, *self.hidden[:-1], last)

    @cached_property
    def layout(self) -> ParamLayout:
        noisy = self.head.noisy
        tower = tower_entries(1, self.widths, noisy=noisy, layer_norm=self.layer_norm)
        head = self.head.entries(self.hidden[-1])
        statistics = normalizer_entries(self.inputs) if self.normalize else ()
        return ParamLayout((*tower, *head, *self.head.buffers, *statistics))

    def acting_layers(self, named: Mapping[str, Float32]) -> list[Layer]:
        """Returns the layers, given the parameters by name; the head becomes one product."""
        return [*_tower(self, named, 0), acting_head(self.head, named)]


@dataclass(frozen=True)
class QCnnShape:
    """The Nature CNN over ``[channels, height, width]`` with a Q-value of each action.

    If the head is duelling, the layer after the convolutions is two of them side by side, as the
    last one of `DenseShape`.
    """

    channels: int
    height: int
    width: int
    head: SingleHead
    obs_scale: float
    """Factor on the observations."""
    normalize: bool = False
    """Whether observations are normalised by their statistics."""
    memory_format: MemoryFormat = "auto"
    """Order of the frames in memory; it changes no parameter."""
    layer_norm: bool = False
    """Whether the outputs of each convolution, and of the layer after them, are normalised."""
    convolutional: ClassVar[bool] = True

    @property
    def outputs(self) -> int:
        return self.head.outputs

    @property
    def pixels(self) -> int:
        """Number of values in an observation."""
        return self.channels * self.height * self.width

    @property
    def features(self) -> int:
        """Width of the layer after the convolutions."""
        return 2 * FEATURES if self.head.duelling else FEATURES

    @cached_property
    def layout(self) -> ParamLayout:
        trunk = _conv_entries(self, noisy=self.head.noisy)
        head = self.head.entries(FEATURES)
        statistics = normalizer_entries(self.pixels) if self.normalize else ()
        return ParamLayout((*trunk, *head, *self.head.buffers, *statistics))


FusedActorCriticShape = MlpShape | CnnShape
NetShape = FusedActorCriticShape | DenseShape | QCnnShape


def flat_features(height: int, width: int) -> int:
    """Returns how many values leave the last convolution for frames of a height and a width."""
    for _, kernel, stride in CONVS:
        height = (height - kernel) // stride + 1
        width = (width - kernel) // stride + 1
    filters = CONVS[-1][0]
    return filters * height * width


def tower_entries(
    towers: int, widths: tuple[int, ...], *, noisy: bool = False, layer_norm: bool
) -> list[Entry]:
    """Returns the entries of the hidden layers of ``towers`` networks side by side."""
    entries: list[Entry] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        weight_shape = (towers, fan_in, fan_out)
        entries += layer_entries(f"hidden.{i}", weight_shape, (towers, fan_out), noisy=noisy)
        if layer_norm:
            entries += norm_entries(f"hidden.{i}", (towers, fan_out))
    return entries


def layer_entries(
    name: str, weight_shape: tuple[int, ...], bias_shape: tuple[int, ...], *, noisy: bool
) -> tuple[Entry, ...]:
    """Returns the entries of a linear layer, with those of its noise if it is ``noisy``."""
    means = ((f"{name}.weight", weight_shape), (f"{name}.bias", bias_shape))
    if not noisy:
        return means
    return (*means, (f"{name}.{WEIGHT_SIGMA}", weight_shape), (f"{name}.{BIAS_SIGMA}", bias_shape))


def norm_entries(layer: str, shape: tuple[int, ...]) -> list[Entry]:
    """Returns the entries that normalise the outputs of a layer, whose bias has a ``shape``."""
    return [(f"{layer}.norm.weight", shape), (f"{layer}.norm.bias", shape)]


def _conv_entries(shape: CnnShape | QCnnShape, *, noisy: bool = False) -> list[Entry]:
    """Returns the entries of the convolutions, and of the layer after them."""
    entries: list[Entry] = []
    channels = shape.channels
    for i, (filters, kernel, _) in enumerate(CONVS):
        entries.append((f"convs.{i}.weight", (filters, channels, kernel, kernel)))
        entries.append((f"convs.{i}.bias", (filters,)))
        if shape.layer_norm:
            entries += norm_entries(f"convs.{i}", (filters,))
        channels = filters

    bias_shape = (shape.features,)
    weight_shape = (shape.features, flat_features(shape.height, shape.width))
    entries += layer_entries("linear", weight_shape, bias_shape, noisy=noisy)
    if shape.layer_norm:
        entries += norm_entries("linear", bias_shape)
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


def acting_head(head: SingleHead, named: Mapping[str, Float32]) -> Layer:
    """Returns the layer that gives the outputs of a head, from the parameters by name.

    `models.torch_heads.HeadNet` says how a duelling head and quantiles become one product.
    """
    weight = named["head.weight"]
    bias = named["head.bias"]
    if head.duelling:
        value = np.tile(named["value.weight"], (head.outputs, 1))
        weight = np.concatenate([value, weight - _means(head, weight)], 1)
        bias = np.tile(named["value.bias"], head.outputs) + bias - _means(head, bias)

    if head.quantiles > 1:
        weight = weight.reshape(head.outputs, head.quantiles, -1).mean(1)
        bias = bias.reshape(head.outputs, head.quantiles).mean(1)
    return Layer(weight, bias)


def _means(head: SingleHead, rows: Float32) -> Float32:
    """Returns for each row of a head the mean over the actions of its choice, in ``rows``."""
    by_output = rows.reshape(head.outputs, head.quantiles, -1)
    parts = np.split(by_output, np.cumsum(head.branches[:-1], dtype=np.intp))
    means = [np.broadcast_to(part.mean(0), part.shape) for part in parts]
    return np.concatenate(means).reshape(rows.shape)


def _tower(shape: MlpShape | DenseShape, named: Mapping[str, Float32], tower: int) -> list[Layer]:
    """Returns the hidden layers of one tower; the first includes the factor on observations."""
    layers = []
    for i in range(len(shape.hidden)):
        weight = named[f"hidden.{i}.weight"][tower].T
        if i == 0:
            weight = weight * np.float32(shape.obs_scale)

        norm = None
        if shape.layer_norm:
            gains = named[f"hidden.{i}.norm.weight"][tower]
            norm = Scaling(gains, named[f"hidden.{i}.norm.bias"][tower])
        layers.append(Layer(weight, named[f"hidden.{i}.bias"][tower], norm))
    return layers
