"""What a learner on a GPU returns to when a reduction is never completed.

Reductions over NCCL are queued like any other work: the host learns only later that a member has
died, and by then updates stand behind the reduction that waits for it. Once that is aborted they
run with arbitrary numbers. So a copy of the state is queued behind each batch, on the device, and
the newest one that was seen to be complete before the abort is the last state that all members
agree on. Counters and policy versions do not go back, as in `learner.nonfinite`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.device.choice import device_of

COPIES = 3  # two batches are queued at most (`DeviceQueue`), and one before them is complete


class ProvenState:
    """Copies of ``tensors``, which lie on one device, after each of the last batches."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Makes the first copy; nothing may be queued that can be lost."""
        self._tensors = tensors
        device = device_of(tensors[0].device)
        self._copies = [[torch.empty_like(tensor) for tensor in tensors] for _ in range(COPIES)]
        self._complete = [device.make_event() for _ in range(COPIES)]
        self._made = 0
        self.add()
        self._complete[0].synchronize()

    @torch.no_grad()
    def add(self) -> None:
        """Queue a copy of the present state, behind a batch."""
        place = self._made % COPIES
        for copy, tensor in zip(self._copies[place], self._tensors, strict=True):
            copy.copy_(tensor)
        self._complete[place].record()
        self._made += 1

    def newest(self) -> int:
        """The number of the newest complete copy; asked before a reduction is aborted."""
        for number in reversed(range(max(0, self._made - COPIES), self._made)):
            if self._complete[number % COPIES].query():
                return number
        raise AssertionError("a batch is queued only when the one before the last is complete")

    @torch.no_grad()
    def restore(self, number: int) -> int:
        """Return to a copy, after the abort; how many batches that takes back."""
        for copy, tensor in zip(self._copies[number % COPIES], self._tensors, strict=True):
            tensor.copy_(copy)
        return self._made - 1 - number
