"""An MLP's acting tower in numpy: for a small network several times faster than torch.

Activations are ``[width, envs]`` in memory that is allocated once, each with a last row of ones, so
that a layer with its bias is one product. Pin the threads of numpy's BLAS to one before numpy is
imported (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS): more only wait for each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.observations import views
from penstock.core.params import Float32
from penstock.models.general import PlainMlp
from penstock.models.layout import CLIP, EPSILON, DenseShape, MlpShape


class NumpyMlp:
    """Computes ``outputs`` (float32 ``[shape.outputs, envs]``); `load` comes before `forward`."""

    def __init__(self, shape: MlpShape | DenseShape | PlainMlp, outputs: Float32) -> None:
        self._shape = shape
        self._part = shape.part if isinstance(shape, PlainMlp) else None
        self._outputs = outputs
        envs = outputs.shape[1]
        widths = shape.widths
        self._activate = np.tanh if shape.activation == "tanh" else _relu

        # The inputs of each layer with a row of ones, and the weights of each with its bias as the
        # last column.
        self._inputs = [np.ones((width + 1, envs), np.float32) for width in widths]
        output_widths = (*widths[1:], len(outputs))
        self._weights = [
            np.empty((output_width, width + 1), np.float32)
            for output_width, width in zip(output_widths, widths, strict=True)
        ]

        # Observations are written through a view ``[envs, width]`` of the first inputs.
        self._obs = self._inputs[0][:-1].T
        self._normalize = shape.normalize
        self._shift, self._factor = np.zeros((2, widths[0], 1), np.float32)

        # Each hidden layer as its weights, its inputs, and the memory of its activations; the last
        # layer writes `outputs` and is not among them.
        hidden = [array[:-1] for array in self._inputs[1:]]
        self._layers = list(zip(self._weights, self._inputs, hidden, strict=False))

    def load(self, flat: Float32) -> None:
        """Copy parameters from the flat vector, float32 ``[size]``."""
        named = self._shape.layout.views(flat)
        layers = self._shape.acting_layers(named)
        if self._normalize:
            self._shift[:, 0] = named["normalizer.mean"]
            self._factor[:, 0] = 1 / np.sqrt(named["normalizer.var"] + np.float32(EPSILON))

        for target, (weight, bias) in zip(self._weights, layers, strict=True):
            target[:, :-1] = weight
            target[:, -1] = bias

    def forward(self, obs: npt.NDArray[Any]) -> None:
        """Compute the outputs of observations ``[envs, *shape]``."""
        if self._part is not None:
            (obs,) = views((self._part,), obs).values()
        self._obs[:] = obs.reshape(self._obs.shape)
        if self._normalize:
            rows = self._inputs[0][:-1]
            np.subtract(rows, self._shift, out=rows)
            np.multiply(rows, self._factor, out=rows)
            np.clip(rows, -CLIP, CLIP, out=rows)

        for weight, inputs, hidden in self._layers:
            np.matmul(weight, inputs, out=hidden)
            self._activate(hidden, out=hidden)
        np.matmul(self._weights[-1], self._inputs[-1], out=self._outputs)


def _relu(values: Float32, out: Float32) -> Float32:
    return np.maximum(values, 0, out=out)
