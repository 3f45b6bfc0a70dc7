"""The policy in torch, for networks too large for numpy.

The prepared weights are what acts: log-probabilities come from the same precision that chose the
action. Logits, softmax and sampling are float32 whatever the trunk computes in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.models.layout import POLICY, NetShape
from penstock.models.sampling import Float32, Int32, Sampler
from penstock.models.torch_nets import build_net


class TorchPolicy:
    """A policy over ``envs`` environments; `load` must be called before `act`."""

    def __init__(
        self, shape: NetShape, envs: int, seed: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.dtype = dtype
        self._net = build_net(shape, dtype).requires_grad_(False)
        named = dict(self._net.named_parameters()) | dict(self._net.named_buffers())
        self._targets = [(name, tensor.numpy()) for name, tensor in named.items()]
        self._layout = shape.layout
        self._sampler = Sampler(shape.actions, envs, np.random.default_rng(seed))
        self._logits = torch.from_numpy(self._sampler.logits)
        self._weights: list[Tensor] = []

    def load(self, flat: Float32) -> None:
        """Copy parameters from the flat vector, float32 ``[size]``, and prepare them."""
        source = self._layout.views(flat)
        for name, target in self._targets:
            np.copyto(target, source[name])
        with torch.inference_mode():
            self._weights = self._net.policy_weights()

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

    @torch.inference_mode()
    def _forward(self, obs: npt.NDArray[Any]) -> None:
        features = self._net.features(torch.from_numpy(obs), self._weights)
        self._logits.copy_(self._net.logits(features[POLICY]).t())
