"""Statistics summed up on a device and read without stopping it, and the skipped updates.

Each update has a row on the device: its sums over samples, and the norm of its gradient; the row of
a batch's first update has sums over the batch, too. Where the norm is not finite the optimizer has
skipped the update; it is counted, and is part of no mean. A GPU is never synchronized for this:
rows are read once they have arrived at the host.
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

from penstock.algos.diagnostics import figures
from penstock.configs.errors import UserError
from penstock.device.choice import device_of
from penstock.device.transfers import Download

# Most updates that are sent to the host together.
ROWS = 1024


def kind_of(value: object) -> str:
    """Returns the shape of a tensor or the type of something else, for a message."""
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)}"
    return f"type {type(value).__name__}"


class IntervalStatistics(NamedTuple):
    """The updates of an interval, whose rows are on their way to the host."""

    rows: Download
    """A row of each update: sums over samples, sums over its batch, the gradient's norm."""
    samples: list[int]
    """The number of samples that each row sums over."""
    positions: list[int]
    """The number of each update in its batch, from 0."""


class DeviceStatistics:
    """Means of ``names`` over samples, and of the gradient's norm over updates.

    For each update call `add` with its sums, `count` with the number of their samples, and then
    `on_update`; before the first one of a batch, `add_batch`. `take` returns what has arrived: on a
    CPU everything, on a GPU usually all but the last interval.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        *,
        source: str = "loss",
        listed: str = "STATISTICS",
        moments: Sequence[str] = (),
        by_epoch: Sequence[str] = (),
        epoch_updates: int = 1,
        grad_clip: float | None = None,
    ) -> None:
        """Allocate the rows on the device.

        Args:
            names: of the sums of each update, over samples.
            device: on which the sums are.
            source: what returns the sums, for messages.
            listed: what lists ``names``, for messages.
            moments: names of sums over a batch, the first of which is its number of samples.
            by_epoch: names whose means are also taken over the batches' first updates, as
                ``NAME_first_minibatch``, and over each epoch, as ``NAME_epoch_1``.
            epoch_updates: updates of an epoch.
            grad_clip: bound on the gradient's norm.
        """
        self._names = tuple(names)
        self._moments = tuple(moments)
        self._source = source
        self._listed = listed
        self._by_epoch = tuple(by_epoch)
        self._epoch_updates = epoch_updates
        self._grad_clip = grad_clip
        self._on_cpu = not device_of(device).runs_behind
        self._sent: deque[IntervalStatistics] = deque()
        """The intervals before the present rows."""
        width = len(self._names) + len(self._moments) + 1
        self._begin(torch.zeros(width, dtype=torch.float64, device=device), 0)

        self.skipped = 0
        """Skipped updates among those that have arrived."""
        self.skipped_in_row = 0
        """Updates skipped since the last one that was not."""
        self.last_skipped = ""
        """What was not finite in the last skipped update: `policy_loss nan, grad_norm nan`."""

    def add(self, sums: Tensor) -> None:
        """Add sums over some samples, ``[names]``. Raises UserError for anything else."""
        if not isinstance(sums, Tensor) or tuple(sums.shape) != (len(self._names),):
            plural = "s" if len(self._names) != 1 else ""
            raise UserError(
                f"{self._source} returned statistics of {kind_of(sums)}, and {self._listed} has "
                f"{len(self._names)} name{plural} ({', '.join(self._names)}); return a tensor with "
                "one sum for each name"
            )
        self._sums += sums.numpy() if self._on_cpu else sums

    def add_batch(self, sums: Tensor) -> None:
        """Add sums over a batch, ``[moments]``, before its first update."""
        row = self._view[len(self._samples) - 1]
        row[len(self._names) : -1] += sums.numpy() if self._on_cpu else sums

    def count(self, samples: int) -> None:
        """Add the number of samples of the sums."""
        self._samples[-1] += samples

    def on_update(self, norm: Tensor, position: int = 0) -> None:
        """Complete an update; the sums added since the previous one belong to it.

        Args:
            norm: of its gradient, ``[]``. If it is not finite, the optimizer has skipped the
                update.
            position: number of the update in the batch, from 0.
        """
        row = len(self._samples) - 1
        self._view[row, -1] = norm.item() if self._on_cpu else norm

        # The next row begins.
        self._samples.append(0)
        self._positions.append(position)
        self._sums = self._view[row + 1, : len(self._names)]
        if self._on_cpu:  # the norm is there, and later behaviour does not depend on timing
            self._note_norm(float(self._view[row, -1]), self._view[row])
        if row + 1 == ROWS:
            self._send()

    def take(self, *, wait: bool = False) -> dict[str, float]:
        """Returns means over the updates that arrived since the last call, or, with ``wait``, over
        all.

        Empty if all of them were skipped. A mean that is not finite is left out.
        """
        if len(self._samples) > 1:
            self._send()

        arrived: list[npt.NDArray[np.float64]] = []
        samples: list[int] = []
        positions: list[int] = []
        while self._sent and (wait or self._sent[0].rows.is_ready):
            interval = self._sent.popleft()
            arrived.append(interval.rows.get().astype(np.float64))
            samples += interval.samples
            positions += interval.positions
        if not arrived:
            return {}

        rows = np.concatenate(arrived)
        norms = rows[:, -1]
        if not self._on_cpu:
            for row, norm in zip(rows, norms.tolist(), strict=True):
                self._note_norm(norm, row)
        is_taken = np.isfinite(norms)
        if not is_taken.any():
            return {}
        means = self._means(
            rows[is_taken], np.array(samples)[is_taken], np.array(positions)[is_taken]
        )
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}

    def _means(
        self, rows: npt.NDArray[Any], samples: npt.NDArray[Any], positions: npt.NDArray[Any]
    ) -> dict[str, float]:
        """Returns means over updates that were taken, by their names in metrics.jsonl.

        Args:
            rows: of the updates, float64 ``[updates, names + moments + 1]``.
            samples: of each, int ``[updates]``.
            positions: of each in its batch, int ``[updates]``.
        """
        names = len(self._names)
        means = self._sample_means(rows[:, :names], samples)
        batch_sums = rows[:, names:-1].sum(0)
        if self._moments and batch_sums[0]:
            moments = (batch_sums / batch_sums[0]).tolist()
            means |= zip(self._moments, moments, strict=True)
        means = figures(means)

        norms = rows[:, -1]
        means["grad_norm"] = float(norms.mean())
        if self._grad_clip is not None:
            means["grad_norm_clipped"] = float(norms.clip(max=self._grad_clip).mean())
        if not self._by_epoch or not positions.any():
            return means

        # Some means are also taken over the first minibatches, and over each epoch.
        selections = {"first_minibatch": positions == 0}
        epochs = positions // self._epoch_updates
        if epochs.any():
            selections |= {f"epoch_{epoch + 1}": epochs == epoch for epoch in np.unique(epochs)}
        for suffix, selected in selections.items():
            selected_means = self._sample_means(rows[selected, :names], samples[selected])
            if selected_means:
                means |= {f"{name}_{suffix}": selected_means[name] for name in self._by_epoch}
        return means

    def _sample_means(self, sums: npt.NDArray[Any], samples: npt.NDArray[Any]) -> dict[str, float]:
        """Returns the means of sums over samples, ``[updates, names]``; empty without samples.

        (If only other learners had samples, their means are those of the run.)
        """
        count = samples.sum()
        if not count:
            return {}
        means = sums.sum(0) / count
        return dict(zip(self._names, means.tolist(), strict=True))

    def forget_skipped(self) -> None:
        """Wait for all rows on their way, drop them, and restart the count of updates in a row."""
        self.take(wait=True)
        self.skipped_in_row = 0

    def on_regroup(self) -> None:
        """Drop the sums of an update that was not completed.

        On a GPU also what is on its way is dropped, which may be of reductions that were lost.
        """
        if self._on_cpu:
            self._view[len(self._positions)] = 0
            self._samples[-1] = 0
            return
        self._sent.clear()
        self._begin(torch.zeros_like(self._rows[0]), 0)

    def _note_norm(self, norm: float, row: npt.NDArray[np.float64]) -> None:
        """Count an update that has arrived as skipped, if its norm is not finite."""
        if math.isfinite(norm):
            self.skipped_in_row = 0
            return
        self.skipped += 1
        self.skipped_in_row += 1
        names = (*self._names, *self._moments, "grad_norm")
        named_values = zip(names, row.tolist(), strict=True)
        self.last_skipped = ", ".join(
            f"{name} {value}" for name, value in named_values if not math.isfinite(value)
        )

    def _send(self) -> None:
        """Start to copy the rows of complete updates to the host; the one in progress stays."""
        complete = len(self._samples) - 1
        rows = Download(self._rows[:complete])
        self._sent.append(IntervalStatistics(rows, self._samples[:-1], self._positions))
        self._begin(self._rows[complete], self._samples[-1])

    def _begin(self, row: Tensor, samples: int) -> None:
        """Make new rows. The first is that of the update in progress, with its samples so far."""
        self._rows = torch.zeros(ROWS + 1, len(row), dtype=row.dtype, device=row.device)
        self._rows[0] = row
        # On a CPU numpy writes to it: unlike torch it does not release the interpreter lock.
        self._view: Any = self._rows.numpy() if self._on_cpu else self._rows
        self._sums = self._view[0, : len(self._names)]
        """The sums over samples of the update in progress."""
        self._samples: list[int] = [samples]
        """Samples of each row, and last of the update in progress."""
        self._positions: list[int] = []
        """Positions in their batches, of complete updates only."""
