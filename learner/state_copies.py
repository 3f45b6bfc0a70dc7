"""Copies of a learner's state on its GPU, to restore after a lost reduction.

Reductions over NCCL are queued: the host learns that a member has died only when later updates are
queued behind the stuck reduction. After the abort those updates run on undefined data. So a copy is
queued after each batch, and the newest copy that was complete before the abort is restored.
Counters and policy versions do not go back, as in `learner.nonfinite`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.device.choice import device_of

COPIES = 3  # two batches are queued at most (`DeviceQueue`), and one before them is complete


class StateCopies:
    """Copies of ``tensors``, which lie on one device, after each of the last batches."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Make the first copy. No reduction may be queued."""
        self._tensors = tensors
        device = device_of(tensors[0].device)
        self._copies = [[torch.empty_like(tensor) for tensor in tensors] for _ in range(COPIES)]
        self._complete = [device.make_event() for _ in range(COPIES)]
        self._made = 0
        self.add()
        self._complete[0].synchronize()

    @torch.no_grad()
    def add(self) -> None:
        """Queue a copy of the present state."""
        place = self._made % COPIES
        for copy, tensor in zip(self._copies[place], self._tensors, strict=True):
            copy.copy_(tensor)
        self._complete[place].record()
        self._made += 1

    def newest(self) -> int:
        """The number of the newest complete copy. Call it before reductions are aborted."""
        for number in reversed(range(max(0, self._made - COPIES), self._made)):
            if self._complete[number % COPIES].query():
                return number
        raise AssertionError("a batch is queued only when the one before the last is complete")

    @torch.no_grad()
    def restore(self, number: int) -> int:
        """Restore a copy, after the abort; returns the number of copies made since."""
        for copy, tensor in zip(self._copies[number % COPIES], self._tensors, strict=True):
            tensor.copy_(copy)
        return self._made - 1 - number
