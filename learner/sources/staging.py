"""Staging batches: where slots are gathered to before the learner trains on them.

A batch holds ``slots`` unrolls side by side along the environment axis: ``[unroll(+1), slots *
envs, ...]`` per column. Its memory is allocated once and reused; on a GPU it is pinned, copied on a
side stream, and not written again before that copy has ended. Staging batches, not the store, are
what is pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.specs import SlotSpec
from penstock.learner.sources.copying import Copier
from penstock.transport.shm.store import Slot


class Span(NamedTuple):
    """When the ``steps`` of a slot were played, CLOCK_MONOTONIC."""

    started_s: float
    published_s: float
    steps: int


class StagingBatch:
    """``arrays`` and ``tensors`` share memory on the CPU; on a GPU ``tensors`` lie there."""

    def __init__(
        self, spec: SlotSpec, slots: int, device: torch.device, copier: Copier | None = None
    ) -> None:
        """``copier``: whose threads gather; by default the calling one alone."""
        self._device = device
        self._copy = copier or Copier(1)
        self._envs = spec.envs
        self._per_slot = {c.name for c in spec.columns if c.rows == "slot"}
        pinned = device.type == "cuda"
        host = {
            c.name: torch.empty(
                (*spec.rows_of(c)[:-1], slots * spec.envs, *c.shape),
                dtype=torch_dtype(c.dtype),
                pin_memory=pinned,
            )
            for c in spec.columns
        }
        self.arrays: dict[str, npt.NDArray[Any]] = {
            name: tensor.numpy() for name, tensor in host.items()
        }
        self._host = host
        self.tensors = (
            {k: torch.empty_like(v, device=device) for k, v in host.items()} if pinned else host
        )
        self._stream = torch.cuda.Stream(device) if pinned else None
        self._copied = torch.cuda.Event() if pinned else None
        self.steps = 0  # agent steps held; 0 while the batch is free
        self.started_s = 0.0  # when the oldest slot was begun, CLOCK_MONOTONIC of its writer
        self.spans: list[Span] = []

    def gather(self, slots: Sequence[Slot]) -> None:
        """Copy slots into this batch and start the copy to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy still reads the pinned memory
        copies = []
        for i, slot in enumerate(slots):
            place = slice(i * self._envs, (i + 1) * self._envs)
            for name, array in self.arrays.items():
                target = array[place] if name in self._per_slot else array[:, place]
                copies.append((target, slot.columns[name]))
        self._copy(copies)
        self.steps = sum(int(slot.header["steps"]) for slot in slots)
        self.spans = [Span(*(slot.header[name].item() for name in Span._fields)) for slot in slots]
        self.started_s = min(span.started_s for span in self.spans)
        self._upload()

    def _upload(self) -> None:
        if self._stream is None or self._copied is None:
            return
        with torch.cuda.stream(self._stream):
            for name, tensor in self._host.items():
                self.tensors[name].copy_(tensor, non_blocking=True)
            self._copied.record(self._stream)

    def wait_on_device(self) -> None:
        """Make the current stream wait for the copy, without stopping the host."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def alive(self, envs: slice) -> int:
        """Agent steps of some of the environments."""
        return int(np.count_nonzero(self.arrays["alive"][:, envs]))

    def let_go(self) -> None:
        """The learner has queued its last use; the next upload waits for that."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self.steps = 0


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch type of a numpy type."""
    return torch.from_numpy(np.empty(0, dtype)).dtype
