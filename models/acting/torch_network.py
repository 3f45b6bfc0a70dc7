"""A network in torch on an actor, for those too large for numpy.

The weights are prepared in the precision that computes actions, and what is recorded comes from
these too. The head, and what is decided by it, are float32 whatever the trunk computes in.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.params import Float32
from penstock.models.general import GeneralShape
from penstock.models.layout import NetShape
from penstock.models.torch_general import GeneralNet, general_net
from penstock.models.torch_nets import build_net


class TorchNetwork:
    """Computes ``outputs`` (float32 ``[shape.outputs, envs]``); `load` comes before `forward`."""

    def __init__(
        self, shape: NetShape, outputs: Float32, dtype: torch.dtype = torch.float32
    ) -> None:
        self.dtype = dtype
        # The initial weights are replaced, so they take no numbers of the caller's generator.
        with torch.random.fork_rng(devices=[]):
            self._net = build_net(shape, dtype).requires_grad_(False)
        tensors = dict(self._net.named_parameters()) | dict(self._net.named_buffers())
        self._targets = [(name, tensor.numpy()) for name, tensor in tensors.items()]
        self._layout = shape.layout
        self._outputs = torch.from_numpy(outputs)
        self._weights: list[Tensor] = []

    def sharing_weights(self, outputs: Float32, state: Float32) -> TorchNetwork:
        network = copy.copy(self)
        network._outputs = torch.from_numpy(outputs)
        return network

    def load(self, flat: Float32) -> None:
        """Copy parameters from the flat vector, float32 ``[size]``, and prepare them."""
        source = self._layout.views(flat)
        for name, target in self._targets:
            np.copyto(target, source[name])
        with torch.inference_mode():
            self._weights[:] = self._net.acting_weights()

    @torch.inference_mode()
    def forward(self, obs: npt.NDArray[Any]) -> None:
        """Compute the outputs of observations ``[rows, *shape]``, at most ``envs`` of them."""
        outputs = self._outputs
        rows = len(obs)
        if rows < outputs.shape[1]:
            outputs = outputs[:, :rows]
        outputs.copy_(self._net.acting_outputs(torch.from_numpy(obs), self._weights).t())


class GeneralNetwork:
    """Computes ``outputs`` (float32 ``[shape.outputs, envs]``) of any network, recurrent or not.

    ``state``, float32 ``[envs, size]``, is the recurrent state: each `forward` reads it and writes
    the next one. `load` comes before `forward`.
    """

    def __init__(
        self,
        shape: GeneralShape[Any],
        outputs: Float32,
        state: Float32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        # The initial weights are replaced, so they take no numbers of the caller's generator.
        with torch.random.fork_rng(devices=[]):
            self._net: GeneralNet = general_net(shape, dtype).requires_grad_(False).eval()
        tensors = (*self._net.named_parameters(), *self._net.named_buffers())
        self._targets = [tensor.numpy() for _, tensor in tensors]
        self._outputs = torch.from_numpy(outputs)
        self._state = torch.from_numpy(state)

    def sharing_weights(self, outputs: Float32, state: Float32) -> GeneralNetwork:
        network = copy.copy(self)
        network._outputs = torch.from_numpy(outputs)
        network._state = torch.from_numpy(state)
        return network

    def load(self, flat: Float32) -> None:
        """Copy parameters from the flat vector, float32 ``[size]``.

        Raises ValueError for a vector of another size.
        """
        size = sum(target.size for target in self._targets)
        if flat.size != size:
            raise ValueError(f"flat vector has {flat.size} values; this network needs {size}")

        offset = 0
        for target in self._targets:
            np.copyto(target, flat[offset : offset + target.size].reshape(target.shape))
            offset += target.size

    @torch.inference_mode()
    def forward(self, obs: npt.NDArray[Any]) -> None:
        """Compute the outputs of observations ``[rows, *shape]``, at most ``envs`` of them."""
        outputs = self._outputs
        state = self._state
        rows = len(obs)
        if rows < len(state):
            outputs = outputs[:, :rows]
            state = state[:rows]

        next_outputs, next_state = self._net.act(torch.from_numpy(obs)[None], state)
        assert next_state is not None
        outputs.copy_(next_outputs.t())
        state.copy_(next_state)
