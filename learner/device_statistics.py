"""Statistics that a device sums up, read without stopping it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.learner.to_host import ToHost


class Interval(NamedTuple):
    """Sums on their way to the host, the norms' the last."""

    sums: ToHost
    samples: int
    updates: int


class DeviceStatistics:
    """Means over samples of ``names``, and over updates of the gradient's norm.

    `take` gives what has arrived: on a CPU all of it, on a GPU as a rule all but the last interval.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names = tuple(names)
        self._device = device
        self._sent: deque[Interval] = deque()
        self._clear()

    def add(self, sums: Tensor) -> None:
        """Sums over some samples, ``[names]``."""
        self._sums[:-1] += sums

    def count(self, samples: int) -> None:
        """So many samples were in what was added."""
        self._samples += samples

    def updated(self, norm: Tensor) -> None:
        """An optimizer step was taken by a gradient of this norm, ``[]``."""
        self._sums[-1] += norm
        self._updates += 1

    def take(self, *, wait: bool = False) -> dict[str, float]:
        """Means over what has arrived since the last call, all of it with ``wait``; nothing where
        that is no update."""
        if self._updates:
            self._sent.append(Interval(ToHost(self._sums), self._samples, self._updates))
            self._clear()
        sums, samples, updates = torch.zeros(len(self._names) + 1, dtype=torch.float64), 0, 0
        while self._sent and (wait or self._sent[0].sums.arrived):
            interval = self._sent.popleft()
            sums += interval.sums.get()
            samples += interval.samples
            updates += interval.updates
        if not updates:
            return {}
        means = dict(zip(self._names, (sums[:-1] / max(1, samples)).tolist(), strict=True))
        means["grad_norm"] = float(sums[-1]) / updates
        return means

    def _clear(self) -> None:
        self._sums = torch.zeros(len(self._names) + 1, device=self._device)
        self._samples = self._updates = 0
