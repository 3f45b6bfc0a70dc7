"""Statistics summed up on a device and read without stopping it, and the skipped updates.

Each update has a row on the device: its sums over samples, and the norm of its gradient. Where the
norm is not finite the optimizer has skipped the update; it is counted, and is part of no mean. A
GPU is never synchronized for this: rows are read once they have arrived at the host.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.configs.errors import UserError
from penstock.learner.to_host import ToHost

ROWS = 1024  # most updates that are sent to the host together


def kind_of(value: object) -> str:
    """The shape of a tensor or the type of something else, for a message."""
    return (
        f"shape {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"type {type(value).__name__}"
    )


class IntervalStatistics(NamedTuple):
    """Rows on their way to the host, and the number of samples that each sums over."""

    rows: ToHost
    samples: list[int]


class DeviceStatistics:
    """Means of ``names`` over samples, and of the gradient's norm over updates.

    `take` returns what has arrived: on a CPU everything, on a GPU usually all but the last
    interval.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        *,
        source: str = "loss",
        listed: str = "STATISTICS",
    ) -> None:
        """``source`` returns the sums, and ``listed`` has the names; both for messages."""
        self._names = tuple(names)
        self._source, self._listed = source, listed
        self._on_cpu = device.type == "cpu"
        self._sent: deque[IntervalStatistics] = deque()
        self._begin(torch.zeros(len(self._names) + 1, device=device), 0)
        self.skipped = 0
        """Skipped updates among those that have arrived."""
        self.skipped_in_row = 0
        """Updates skipped since the last one that was not."""
        self.last_skipped = ""
        """What was not finite in the last skipped update: `policy_loss nan, grad_norm nan`."""

    def add(self, sums: Tensor) -> None:
        """Add sums over some samples, ``[names]``. Raises UserError for anything else."""
        if not isinstance(sums, Tensor) or tuple(sums.shape) != (len(self._names),):
            raise UserError(
                f"{self._source} returned statistics of {kind_of(sums)}, and {self._listed} has "
                f"{len(self._names)} name{'s' * (len(self._names) != 1)} "
                f"({', '.join(self._names)}); return a tensor with one "
                "sum for each name"
            )
        self._sums += sums.numpy() if self._on_cpu else sums

    def count(self, samples: int) -> None:
        """Add the number of samples of the sums."""
        self._samples[-1] += samples

    def updated(self, norm: Tensor) -> None:
        """Complete an update, whose gradient had the given norm, ``[]``.

        The sums added since the previous update belong to it. The optimizer has skipped it where
        the norm is not finite.
        """
        row = len(self._samples) - 1
        self._view[row, -1] = norm.item() if self._on_cpu else norm
        self._samples.append(0)
        self._sums = self._view[row + 1, :-1]
        if self._on_cpu:  # the norm is there, and later behaviour does not depend on timing
            self._notice(float(self._view[row, -1]), row)
        if row + 1 == ROWS:
            self._send()

    def take(self, *, wait: bool = False) -> dict[str, float]:
        """Means over the updates that arrived since the last call, or, with ``wait``, over all.

        Empty where all of them were skipped. A mean that is not finite is left out.
        """
        if len(self._samples) > 1:
            self._send()
        parts: list[npt.NDArray[np.float64]] = []
        samples: list[int] = []
        while self._sent and (wait or self._sent[0].rows.arrived):
            interval = self._sent.popleft()
            parts.append(interval.rows.get().astype(np.float64))
            samples += interval.samples
        if not parts:
            return {}
        rows = np.concatenate(parts)
        if not self._on_cpu:
            for row, norm in zip(rows, rows[:, -1].tolist(), strict=True):
                self._notice(norm, row)
        taken = np.isfinite(rows[:, -1])
        if not taken.any():
            return {}
        count = int(np.array(samples)[taken].sum())
        means = dict(
            zip(self._names, (rows[taken, :-1].sum(0) / max(1, count)).tolist(), strict=True)
        )
        means["grad_norm"] = float(rows[taken, -1].mean())
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}

    def forget_skipped(self) -> None:
        """Wait for all rows on their way, drop them, and restart the count of updates in a row."""
        self.take(wait=True)
        self.skipped_in_row = 0

    def _notice(self, norm: float, row: Any) -> None:
        """Note an update that has arrived, with its row, or on a CPU the row's number."""
        if math.isfinite(norm):
            self.skipped_in_row = 0
            return
        self.skipped += 1
        self.skipped_in_row += 1
        values = (self._rows[row] if isinstance(row, int) else row).tolist()
        named = zip((*self._names, "grad_norm"), values, strict=True)
        self.last_skipped = ", ".join(f"{k} {v}" for k, v in named if not math.isfinite(v))

    def _send(self) -> None:
        """Start to copy the rows of complete updates to the host; the one in progress stays."""
        done = len(self._samples) - 1
        self._sent.append(IntervalStatistics(ToHost(self._rows[:done]), self._samples[:-1]))
        self._begin(self._rows[done], self._samples[-1])

    def _begin(self, row: Tensor, samples: int) -> None:
        """Make new rows; the first is that of the update in progress."""
        self._rows = torch.zeros(ROWS + 1, len(row), device=row.device)
        self._rows[0] = row
        # On a CPU numpy writes to it: unlike torch it does not release the interpreter lock.
        self._view: Any = self._rows.numpy() if self._on_cpu else self._rows
        self._sums = self._view[0, :-1]
        self._samples: list[int] = [samples]
