"""How a policy's weights make it explore: by noise in its layers, and by a rate of random actions.

Both come with the flat vector of weights. The sigmas of noisy layers are parameters, and a rate
that changes during a run is a buffer, which the learner sets. So an actor explores as its newest
weights say, wherever it is and whenever it joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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


class ExploringWeights:
    """The weights of a policy that explores by them, and what of them the network has loaded.

    The noise is a function of a seed and of the number of the weights, one for all environments of
    the policy. So a resumed policy, which loads its weights again, plays on with the same noise.
    """

    def __init__(self, layout: ParamLayout, head: SingleHead, seed: int) -> None:
        """``seed`` is that of the noise, which belongs to one policy."""
        self._layout = layout
        self._head = head
        self._seed = seed
        self._flat: Float32 | None = None
        self._number = 0
        self._loaded_noise: bool | None = None
        """Whether the network has loaded the weights with noise; None if it has not loaded them."""

    def take(self, network: ActingNetwork, flat: Float32, number: int) -> float | None:
        """Copy other weights, float32 ``[size]``, of a ``number``.

        Returns the rate of exploration among them, None if it does not change. Noisy weights are
        loaded by the next `prepare`.
        """
        if self._head.noisy:
            self._flat = flat.copy()
            self._number = number
            self._loaded_noise = None
        else:
            network.load(flat)

        if not self._head.shows_epsilon:
            return None
        return float(self._layout.views(flat)[EPSILON_RATE][0])

    def prepare(self, network: ActingNetwork, *, explores: bool) -> None:
        """Load the weights with noise if the policy ``explores``, and without it otherwise."""
        if self._flat is None or explores == self._loaded_noise:
            return
        network.load(self._with_noise(self._flat) if explores else self._flat)
        self._loaded_noise = explores

    def _with_noise(self, flat: Float32) -> Float32:
        """Returns a copy of weights, float32 ``[size]``, with the noise of their number."""
        weights = flat.copy()
        named = self._layout.views(weights)
        rng = np.random.default_rng([self._seed, self._number])

        for name in named:
            layer, _, kind = name.rpartition(".")
            if kind == WEIGHT_SIGMA:
                _add_noise(named, layer, rng)
        return weights

    def state_dict(self) -> dict[str, int]:
        """Returns the seed of the noise; nothing without noise."""
        return {NOISE_SEED: self._seed} if self._head.noisy else {}

    def load_state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take over the entries of `state_dict` in a state; returns the others."""
        others = dict(state)
        if self._head.noisy:
            self._seed = int(others.pop(NOISE_SEED))
            self._loaded_noise = None
        return others


def exploring_weights(shape: AnyShape, seed: int) -> ExploringWeights | None:
    """Makes the weights of a network that explores by them; None if it does not.

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
    if not (head.noisy or head.shows_epsilon):
        return None
    return ExploringWeights(shape.layout, head, seed)


def _add_noise(named: Mapping[str, Float32], layer: str, rng: np.random.Generator) -> None:
    """Add noise to weight and bias of a layer, in place, as `models.torch_noise.Noisy` does.

    ``named`` are the parameters by name.
    """
    weight = named[f"{layer}.weight"]
    bias = named[f"{layer}.bias"]
    *towers, outputs = bias.shape
    of_inputs = _scaled(rng, (*towers, weight.shape[1]))
    of_outputs = _scaled(rng, (*towers, outputs))
    rows, columns = (of_inputs, of_outputs) if towers else (of_outputs, of_inputs)

    noise = named[f"{layer}.{WEIGHT_SIGMA}"] * rows[..., :, None]
    noise *= columns[..., None, :]
    np.add(weight, noise, out=weight)
    np.add(bias, named[f"{layer}.{BIAS_SIGMA}"] * of_outputs, out=bias)


def _scaled(rng: np.random.Generator, shape: tuple[int, ...]) -> Float32:
    """Returns normal numbers, of whose size the root is taken."""
    numbers: npt.NDArray[np.float32] = rng.standard_normal(shape, dtype=np.float32)
    return np.sign(numbers) * np.sqrt(np.abs(numbers))
