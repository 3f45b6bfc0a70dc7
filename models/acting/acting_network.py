"""The network of an actor's policy, in numpy or in torch."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from penstock.core.params import Float32


class ActingNetwork(Protocol):
    """Computes a network into the memory of a decider's outputs."""

    def load(self, flat: Float32) -> None:
        """Copy parameters from the flat vector, float32 ``[size]``."""

    def forward(self, obs: npt.NDArray[Any]) -> None:
        """Compute the outputs of observations ``[rows, *shape]``, for the first environments.

        There is a row for each environment, or for fewer.
        """

    def sharing_weights(self, outputs: Float32, state: Float32) -> ActingNetwork:
        """Returns a network with the same parameters in memory, for as many environments as it
        gets memory for.

        Args:
            outputs: that it writes, float32 ``[outputs, envs]``.
            state: its recurrent state, float32 ``[envs, size]``, which each `forward` reads and
                writes; size 0 without memory.
        """
