"""How many observations go through the network at a time (`learner.micro_batch`).

On a CPU as many as its cache holds. On a GPU small passes wait for the launches of their kernels,
so a pass is a whole update, if what it keeps for the backward pass fits into half of the memory
that is free. The first pass, of at most `FEW` observations, shows how much that is: a little too
much, since it has the weights among it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.device.interface import Device

FEW = 256  # images that a processor's cache holds
SHARE = 2  # of the free memory; gradients of activations need some, too


class PassSize:
    """``wanted`` is `learner.micro_batch`."""

    def __init__(self, wanted: int | None, device: Device) -> None:
        self.rows = wanted or FEW
        """Observations in one pass."""
        self._device = device
        self._unknown = wanted is None and device.runs_behind

    @contextmanager
    def measured(self, rows: int) -> Iterator[None]:
        """Surrounds the forward pass of ``rows`` observations."""
        if not self._unknown:
            yield
            return
        kept: dict[tuple[int, int], int] = {}

        def count(tensor: Tensor) -> Tensor:
            place = int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())
            kept[place] = max(kept.get(place, 0), tensor.numel() * tensor.itemsize)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            yield
        self._unknown = False
        each = max(1, sum(kept.values()) // rows)
        self.rows = max(rows, self._device.free_nbytes() // SHARE // each)
