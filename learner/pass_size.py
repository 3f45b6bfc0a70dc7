"""How many observations go through the network at a time (`learner.micro_batch`).

On a CPU: as many as fit the cache, or were timed to be faster (`autotune.forms`). On a GPU small
passes are bound by kernel launches, so a pass is a whole update, if its saved activations fit into
a quarter of the free memory. The first pass, of at most `FEW` observations, measures them. It
slightly overestimates, since saved weights count too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.device.interface import Device
from penstock.models.compute_form import ROWS

FEW = ROWS  # on a processor, by rule
SHARE = 4  # of the free memory; gradients of activations need some, and another learner may


class PassSize:
    """``wanted`` is `learner.micro_batch`."""

    def __init__(self, wanted: int | None, device: Device) -> None:
        self.rows = wanted or FEW
        """Observations in one pass."""
        self.unknown = wanted is None and device.runs_behind
        """Whether a pass must be `measured`."""
        self._device = device

    @contextmanager
    def measured(self, rows: int) -> Iterator[None]:
        """Surrounds the forward pass of ``rows`` observations."""
        kept: dict[tuple[int, int], int] = {}

        def count(tensor: Tensor) -> Tensor:
            place = int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())
            kept[place] = max(kept.get(place, 0), tensor.numel() * tensor.itemsize)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            yield
        self.unknown = False
        each = max(1, sum(kept.values()) // rows)
        self.rows = max(rows, self._device.free_nbytes() // SHARE // each)
