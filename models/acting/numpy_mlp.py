"""A tower of an MLP in numpy: for a small network several times faster than torch.

Activations are ``[width, envs]`` in memory that is allocated once, each with a last row of ones, so
that a layer with its bias is one product. Pin the threads of numpy's BLAS to one before numpy is
imported (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS): more only wait for each other.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.observations import views
from penstock.core.params import Float32
from penstock.models.general import PlainMlp
from penstock.models.layout import CLIP, EPSILON, NORM_EPSILON, DenseShape, MlpShape


class NumpyMlp:
    """Computes ``outputs`` (float32 ``[outputs, envs]``); `load` comes before `forward`."""

    def __init__(self, shape: MlpShape | DenseShape | PlainMlp, outputs: Float32) -> None:
        self._shape = shape
        self._part = shape.part if isinstance(shape, PlainMlp) else None
        widths = shape.widths
        self._activate = np.tanh if shape.activation == "tanh" else _relu

        # The weights of each layer, with its bias as the last column.
        output_widths = (*widths[1:], len(outputs))
        self._weights = [
            np.empty((output_width, width + 1), np.float32)
            for output_width, width in zip(output_widths, widths, strict=True)
        ]
        # Gains and biases of the normalised outputs of each hidden layer, if they are normalised.
        normalized_widths = widths[1:] if shape.layer_norm else ()
        self._norms = [np.empty((2, width, 1), np.float32) for width in normalized_widths]
        embeddings = shape.embeddings if isinstance(shape, PlainMlp) else ()
        self._tables = [np.empty(size, np.float32) for size in embeddings]
        self._normalize = shape.normalize
        self._shift, self._factor = np.zeros((2, widths[0], 1), np.float32)
        self._allot(outputs)

    def sharing_weights(self, outputs: Float32, state: Float32) -> NumpyMlp:
        network = copy.copy(self)
        network._allot(outputs)
        return network

    def _allot(self, outputs: Float32) -> None:
        """Make the memory of the layers, of which the last one writes ``outputs``."""
        self._outputs = outputs
        envs = outputs.shape[1]

        # The inputs of each layer, with a row of ones. Observations are written through a view
        # ``[envs, width]`` of the first.
        self._inputs = [np.ones((width + 1, envs), np.float32) for width in self._shape.widths]
        self._obs = self._inputs[0][:-1].T

        # Each hidden layer as its weights, its inputs, and the memory of its activations; the last
        # layer writes `outputs` and is not among them.
        hidden = [array[:-1] for array in self._inputs[1:]]
        self._layers = list(zip(self._weights, self._inputs, hidden, strict=False))

    def load(self, flat: Float32, of_value: bool = False) -> None:
        """Copy the parameters of the acting tower from the flat vector, float32 ``[size]``.

        With ``of_value`` the tower is an actor-critic's other one, whose only output is the value.
        """
        named = self._shape.layout.views(flat)
        if of_value:
            assert isinstance(self._shape, MlpShape)
            layers = self._shape.value_layers(named)
        else:
            layers = self._shape.acting_layers(named)
        if isinstance(self._shape, PlainMlp):
            tables = self._shape.acting_tables(named)
            for target, table in zip(self._tables, tables, strict=True):
                np.copyto(target, table)
        if self._normalize:
            self._shift[:, 0] = named["normalizer.mean"]
            self._factor[:, 0] = 1 / np.sqrt(named["normalizer.var"] + np.float32(EPSILON))

        for target, layer in zip(self._weights, layers, strict=True):
            target[:, :-1] = layer.weight
            target[:, -1] = layer.bias

        # Outputs are to have a mean of 0 over the units, and so have those of centred weights.
        for target, norm, layer in zip(self._weights, self._norms, layers, strict=False):
            assert layer.norm is not None
            target -= target.mean(axis=0)
            norm[:, :, 0] = layer.norm

    def forward(self, obs: npt.NDArray[Any]) -> None:
        """Compute the outputs of observations ``[rows, *shape]``.

        ``rows`` is at most the number of environments; the outputs of the others are left without
        meaning.
        """
        rows = len(obs)
        if self._part is not None:
            (obs,) = views((self._part,), obs).values()
        values = obs.reshape(rows, -1)
        if self._tables:
            choices = values.astype(np.intp).T
            vectors = [table[choice] for table, choice in zip(self._tables, choices, strict=True)]
            values = np.concatenate(vectors, axis=1)
        self._obs[:rows] = values
        if self._normalize:
            inputs = self._inputs[0][:-1]
            np.subtract(inputs, self._shift, out=inputs)
            np.multiply(inputs, self._factor, out=inputs)
            np.clip(inputs, -CLIP, CLIP, out=inputs)

        for number, (weight, inputs, hidden) in enumerate(self._layers):
            np.matmul(weight, inputs, out=hidden)
            if self._norms:
                _scale_to_variance_1(hidden)
                gain, bias = self._norms[number]
                np.multiply(hidden, gain, out=hidden)
                np.add(hidden, bias, out=hidden)
            self._activate(hidden, out=hidden)
        np.matmul(self._weights[-1], self._inputs[-1], out=self._outputs)


def _scale_to_variance_1(outputs: Float32) -> None:
    """Scale the outputs ``[units, envs]`` of a layer, whose mean over the units is 0, in place."""
    variance = np.einsum("ue,ue->e", outputs, outputs)
    variance /= len(outputs)
    variance += np.float32(NORM_EPSILON)
    np.sqrt(variance, out=variance)
    np.divide(outputs, variance, out=outputs)


def _relu(values: Float32, out: Float32) -> Float32:
    return np.maximum(values, 0, out=out)
