"""Publishing weights: parameters and buffers, copied into one flat vector and shown to actors.

It is a copy and not views of the network, since other memory layouts and later sharding may move
parameters. On a GPU the copy is made on the device, then transferred on a side stream, so that the
step never waits; the vector is published once it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.core.params import Stamp
from penstock.transport.shm.weights_board import WeightsBoard


class Publisher:
    """Publishes the values of ``tensors`` (in the layout's order) on ``board``."""

    def __init__(self, tensors: Sequence[Tensor], board: WeightsBoard) -> None:
        self._tensors = tensors
        self._board = board
        device = tensors[0].device
        self._flat = torch.empty(board.size, dtype=torch.float32, device=device)
        self._parts = self._flat.split([t.numel() for t in tensors])
        self._on_gpu = device.type == "cuda"
        self._host = torch.empty(board.size, pin_memory=True) if self._on_gpu else self._flat
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._arrived = torch.cuda.Event() if self._on_gpu else None
        self._pending: tuple[int, Stamp] | None = None

    @torch.no_grad()
    def publish(self, policy_id: int, stamp: Stamp) -> None:
        """Take a copy now; on a GPU the next `flush` after its arrival publishes it."""
        self.flush(wait=True)
        for part, tensor in zip(self._parts, self._tensors, strict=True):
            part.view(tensor.shape).copy_(tensor)
        if self._stream is None or self._arrived is None:
            self._board.publish(self._host.numpy(), stamp, policy_id)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._flat.device))
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._flat, non_blocking=True)
            self._arrived.record(self._stream)
        self._pending = policy_id, stamp

    def flush(self, *, wait: bool = False) -> None:
        """Publish the copy on its way, if it has arrived or with ``wait``."""
        if self._pending is None or self._arrived is None:
            return
        if wait:
            self._arrived.synchronize()
        elif not self._arrived.query():
            return
        policy_id, stamp = self._pending
        self._board.publish(self._host.numpy(), stamp, policy_id)
        self._pending = None
