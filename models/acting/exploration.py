"""How a policy's weights make it explore: by noise in its layers, and by a rate of random actions.

Both come with the flat vector of weights. The sigmas of noisy layers are parameters, and a rate
that changes during a run is a buffer, which the learner sets. So an actor explores as its newest
weights say, wherever it is and whenever it joined.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.params import Float32, ParamLayout
from penstock.models.acting.acting_network import ActingNetwork
from penstock.models.fitting import AnyShape
from penstock.models.general import GeneralShape
from penstock.models.layout import (
    BIAS_SIGMA,
    EPSILON_RATE,
    WEIGHT_SIGMA,
    DenseShape,
    QCnnShape,
    SingleHead,
)

NOISE_SEED = "noise_seed"  # entry of a policy's state


class NoisyLayer(NamedTuple):
    """The parameters of a noisy layer, as views of a flat vector."""

    weight: Float32
    bias: Float32
    weight_sigma: Float32
    bias_sigma: Float32

    def add_noise(self, rng: np.random.Generator) -> None:
        """Add noise to weight and bias, as `models.torch_noise.Noisy` does."""
        *towers, outputs = self.bias.shape
        of_inputs = _scaled(rng, (*towers, self.weight.shape[1]))
        of_outputs = _scaled(rng, (*towers, outputs))
        rows, columns = (of_inputs, of_outputs) if towers else (of_outputs, of_inputs)

        noise = self.weight_sigma * rows[..., :, None]
        noise *= columns[..., None, :]
        np.add(self.weight, noise, out=self.weight)
        np.add(self.bias, self.bias_sigma * of_outputs, out=self.bias)


class Exploration:
    """Reads noise and rate of exploration from the weights of one network."""

    def __init__(self, layout: ParamLayout, head: SingleHead, seed: int) -> None:
        """``seed`` is that of the noise, which belongs to one policy."""
        self.is_noisy = head.noisy
        """Whether the network has noisy layers."""
        self.seed = seed
        self._layout = layout
        self._shows_epsilon = head.shows_epsilon

    def epsilon(self, flat: Float32) -> float | None:
        """Returns the rate of exploration among weights, float32 ``[size]``; None if it does not
        change."""
        if not self._shows_epsilon:
            return None
        return float(self._layout.views(flat)[EPSILON_RATE][0])

    def noisy(self, flat: Float32, number: int) -> Float32:
        """Returns a copy of weights, float32 ``[size]``, with the noise of their ``number``."""
        weights = flat.copy()
        named = self._layout.views(weights)
        rng = np.random.default_rng([self.seed, number])

        for name, weight_sigma in named.items():
            layer, _, kind = name.rpartition(".")
            if kind == WEIGHT_SIGMA:
                NoisyLayer(
                    weight=named[f"{layer}.weight"],
                    bias=named[f"{layer}.bias"],
                    weight_sigma=weight_sigma,
                    bias_sigma=named[f"{layer}.{BIAS_SIGMA}"],
                ).add_noise(rng)
        return weights


class ExploringWeights:
    """The weights of a policy that explores by them, and what of them the network has loaded.

    The noise is a function of a seed and of the number of the weights, one for all environments of
    the policy. So a resumed policy, which loads its weights again, plays on with the same noise.
    """

    def __init__(self, exploration: Exploration) -> None:
        self._exploration = exploration
        self._flat: Float32 | None = None
        self._number = 0
        self._loaded_noise: bool | None = None
        """Whether the network has loaded the weights with noise; None if it has not loaded them."""

    def take(self, network: ActingNetwork, flat: Float32, number: int) -> float | None:
        """Copy other weights, float32 ``[size]``, of a ``number``.

        Returns the rate of exploration among them, None if it does not change. Noisy weights are
        loaded by the next `prepare`.
        """
        if self._exploration.is_noisy:
            self._flat = flat.copy()
            self._number = number
            self._loaded_noise = None
        else:
            network.load(flat)
        return self._exploration.epsilon(flat)

    def prepare(self, network: ActingNetwork, *, explores: bool) -> None:
        """Load the weights with noise if the policy ``explores``, and without it otherwise."""
        if self._flat is None or explores == self._loaded_noise:
            return
        weights = self._exploration.noisy(self._flat, self._number) if explores else self._flat
        network.load(weights)
        self._loaded_noise = explores

    def state_dict(self) -> dict[str, int]:
        """Returns the seed of the noise; nothing without noise."""
        return {NOISE_SEED: self._exploration.seed} if self._exploration.is_noisy else {}

    def load_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take over the entries of `state_dict` in a state; returns the others."""
        others = dict(state)
        if self._exploration.is_noisy:
            self._exploration.seed = int(others.pop(NOISE_SEED))
            self._loaded_noise = None
        return others


def exploration_of(shape: AnyShape, seed: int) -> Exploration | None:
    """Returns how the weights of a network make it explore; None if they do not.

    ``seed`` is that of the noise.
    """
    match shape:
        case DenseShape() | QCnnShape():
            head = shape.head
        case GeneralShape(heads=SingleHead() as general_head):
            head = general_head
        case _:
            return None
    # The layout of a general network imports torch, so it is made only where it is needed.
    return Exploration(shape.layout, head, seed) if head.noisy or head.shows_epsilon else None


def _scaled(rng: np.random.Generator, shape: tuple[int, ...]) -> Float32:
    """Returns normal numbers, of whose size the root is taken."""
    numbers: npt.NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32)
    return np.sign(numbers) * np.sqrt(np.abs(numbers))
