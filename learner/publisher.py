"""Publishing weights: parameters and buffers, copied one after another and shown to actors.

It is a copy and not views of the network, since other memory layouts and later sharding may move
parameters. On a CPU they are copied straight to the board. On a GPU the copy is one flat vector on
the device, then transferred on a side stream, so that the step never waits; the vector is published
once it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.core.params import Stamp
from penstock.device.choice import device_of
from penstock.transport.shm.weights_board import WeightsBoard


class PendingWeights(NamedTuple):
    """Weights on their way from a GPU."""

    policy_id: int
    stamp: Stamp


class Publisher:
    """Publishes the values of ``tensors`` (in the layout's order) on ``board``."""

    def __init__(self, tensors: Sequence[Tensor], board: WeightsBoard) -> None:
        """Allocate the memory for copies; ``tensors`` are on one device."""
        self._tensors = tensors
        self._board = board
        self._device = device = device_of(tensors[0].device)
        self._pending: PendingWeights | None = None
        if not device.runs_behind:
            return

        self._host = device.host_memory([board.size], torch.float32)
        """The copy on the host."""
        self._flat = device.memory_for(self._host)
        """The copy on the device, one flat vector."""
        self._parts = self._flat.split([tensor.numel() for tensor in tensors])
        """Its part for each tensor."""
        self._stream = device.make_stream()
        self._arrived = device.make_event()
        """Passes when the copy has arrived at the host."""

    def publish(self, policy_id: int, stamp: Stamp) -> None:
        """Take a copy now; on a GPU the first `flush` after its arrival publishes it."""
        if not self._device.runs_behind:
            parts = [tensor.detach().reshape(-1).numpy() for tensor in self._tensors]
            self._board.publish_parts(parts, stamp, policy_id)
            return

        # The previous copy is waited for, even if it was dropped: it still writes to the memory.
        self._arrived.synchronize()
        self.flush()

        with torch.no_grad():
            for part, tensor in zip(self._parts, self._tensors, strict=True):
                part.view(tensor.shape).copy_(tensor)

        # A side stream transfers it, so that the computing stream goes on.
        self._stream.wait_stream(self._device.current_stream())
        with self._device.use_stream(self._stream):
            self._device.copy(self._host, self._flat)
            self._arrived.record(self._stream)
        self._pending = PendingWeights(policy_id, stamp)
        self.flush()

    def drop(self) -> None:
        """Do not publish a copy that is still on its way."""
        self.flush()
        self._pending = None

    def flush(self, *, wait: bool = False) -> None:
        """Publish the copy on its way if it has arrived; with ``wait``, wait for that."""
        if self._pending is None:
            return
        if wait:
            self._arrived.synchronize()
        elif not self._arrived.query():
            return
        self._board.publish(self._host.numpy(), self._pending.stamp, self._pending.policy_id)
        self._pending = None
