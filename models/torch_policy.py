"""A network in torch on an actor, for those too large for numpy.

The prepared weights are what acts: what is recorded comes from the same precision that chose the
action. The head, and what is decided by it, are float32 whatever the trunk computes in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.params import Float32
from penstock.models.layout import NetShape
from penstock.models.torch_nets import build_net


class TorchNetwork:
    """Computes ``outputs`` (float32 ``[shape.outputs, envs]``); `load` comes before `forward`."""

    def __init__(
        self, shape: NetShape, outputs: Float32, dtype: torch.dtype = torch.float32
    ) -> None:
        self.dtype = dtype
        self._net = build_net(shape, dtype).requires_grad_(False)
        named = dict(self._net.named_parameters()) | dict(self._net.named_buffers())
        self._targets = [(name, tensor.numpy()) for name, tensor in named.items()]
        self._layout = shape.layout
        self._outputs = torch.from_numpy(outputs)
        self._weights: list[Tensor] = []

    def load(self, flat: Float32) -> None:
        """Copy parameters from the flat vector, float32 ``[size]``, and prepare them."""
        source = self._layout.views(flat)
        for name, target in self._targets:
            np.copyto(target, source[name])
        with torch.inference_mode():
            self._weights = self._net.acting_weights()

    @torch.inference_mode()
    def forward(self, obs: npt.NDArray[Any]) -> None:
        """Compute the outputs of observations ``[envs, *shape]``."""
        self._outputs.copy_(self._net.acting_outputs(torch.from_numpy(obs), self._weights).t())
