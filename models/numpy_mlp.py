"""The MLP's policy tower in numpy: for a small network several times faster than torch.

Activations are kept as ``[width, envs]`` in memory allocated once, each with a last row of ones, so
that a layer with its bias is one product. Pin the threads of numpy's BLAS to one before numpy is
imported (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS): more only wait for each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.models.layout import POLICY, MlpShape
from penstock.models.sampling import Float32, Int32, Sampler


class NumpyMlp:
    """A policy over ``envs`` environments; `load` must be called before `act`."""

    def __init__(self, shape: MlpShape, envs: int, seed: int) -> None:
        self._shape = shape
        self._sampler = Sampler(shape.actions, envs, np.random.default_rng(seed))
        widths = (shape.inputs, *shape.hidden)
        self._inputs = [np.ones((width + 1, envs), np.float32) for width in widths]
        outputs = (*shape.hidden, shape.actions)
        self._weights = [
            np.empty((out, width + 1), np.float32)
            for out, width in zip(outputs, widths, strict=True)
        ]
        self._activate = np.tanh if shape.activation == "tanh" else _relu
        self._obs = self._inputs[0][:-1].T
        hidden = [array[:-1] for array in self._inputs[1:]]
        self._layers = list(zip(self._weights, self._inputs, hidden, strict=False))

    def load(self, flat: Float32) -> None:
        """Copy parameters from the flat vector, float32 ``[size]``."""
        named = self._shape.layout.views(flat)
        for i, weight in enumerate(self._weights[:-1]):
            weight[:, :-1] = named[f"hidden.{i}.weight"][POLICY].T
            weight[:, -1] = named[f"hidden.{i}.bias"][POLICY]
        self._weights[0][:, :-1] *= np.float32(self._shape.obs_scale)
        self._weights[-1][:, :-1] = named["policy.weight"]
        self._weights[-1][:, -1] = named["policy.bias"]

    def act(self, obs: npt.NDArray[Any]) -> tuple[Int32, Float32]:
        """Sampled actions int32 ``[envs]`` and their log-probabilities float32 ``[envs]``.

        ``obs`` is ``[envs, *shape]``. The arrays returned are reused by the next call.
        """
        self._forward(obs)
        return self._sampler.sample()

    def greedy(self, obs: npt.NDArray[Any]) -> Int32:
        """The likeliest actions, int32 ``[envs]``; reused by the next call."""
        self._forward(obs)
        return self._sampler.greedy()

    def logits(self, obs: npt.NDArray[Any]) -> Float32:
        """Logits float32 ``[envs, actions]``; reused by the next call."""
        self._forward(obs)
        return self._sampler.logits.T

    def state_dict(self) -> dict[str, Any]:
        """State of the random generator, JSON-ready."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)

    def _forward(self, obs: npt.NDArray[Any]) -> None:
        self._obs[:] = obs.reshape(self._obs.shape)
        for weight, inputs, hidden in self._layers:
            np.matmul(weight, inputs, out=hidden)
            self._activate(hidden, out=hidden)
        np.matmul(self._weights[-1], self._inputs[-1], out=self._sampler.logits)


def _relu(values: Float32, out: Float32) -> Float32:
    return np.maximum(values, 0, out=out)
