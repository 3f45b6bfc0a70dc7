"""The reducer: sums one optimizer's gradients over the learners during the backward pass.

The flat gradient vector is cut into buckets of whole parameters, the last parameters first, since
their gradients are ready first. When the gradients of a bucket are complete, and all buckets before
it have been handed over, a separate thread reduces it: so buckets are sent in the same order
everywhere, whatever order a backward pass takes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from penstock.core.interfaces import Bucket, Codec, Collective
from penstock.device.choice import device_of
from penstock.device.interface import DeviceEvent
from penstock.profiling.ledger import Part, TimeLedger


class Reducer:
    """Sums the gradients of one optimizer over learners, bucket by bucket.

    For each optimizer step call `prepare_backward`, compute the backward pass, and call `finish`.
    """

    def __init__(
        self,
        grads: Tensor,
        parameters: Sequence[nn.Parameter],
        codec: Codec,
        ring: Collective,
        thread: ThreadPoolExecutor,
        ledger: TimeLedger,
        *,
        overlap: bool,
    ) -> None:
        """Attach to the parameters.

        Args:
            grads: the flat gradient vector, float32 ``[size]``.
            parameters: in the order of the vector; their gradients are views of it.
            codec: sums a bucket.
            ring: the group of learners.
            thread: runs one call at a time, in order.
            ledger: where the time of that thread is counted.
            overlap: whether to reduce during the backward pass; else all is reduced in `finish`.
        """
        self.codec = codec
        self._grads = grads
        self._buckets = buckets = codec.buckets
        self._ring = ring
        self._thread = thread
        self._ledger = ledger
        self._overlap = overlap
        self._device = device_of(grads.device)
        self._stream = self._device.make_stream()
        self._total: float | None = None
        self._missing: list[int] = []
        self._handed = 0
        self._failed = False
        self._pending: list[Future[None]] = []
        # The first part of each parameter, and the bucket that holds all of its parts.
        owner = {
            part: i for i, bucket in enumerate(buckets) for part in bucket.parts if part.tower == 0
        }
        self._parameters_of = Counter(owner.values())
        parts = sorted(owner, key=lambda part: part.start)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, owner[part]))
            for part, parameter in zip(parts, parameters, strict=True)
        ]

    def prepare_backward(self, update: int, total: float) -> None:
        """Announce that the next backward pass completes the gradients.

        Args:
            update: number of optimizer steps of the run so far.
            total: the divisor of the gradients.
        """
        self.codec.begin(update)
        self._total = total
        self._missing = [self._parameters_of[i] for i in range(len(self._buckets))]
        self._handed = 0

    def finish(self, update: int, total: float) -> None:
        """Return when ``grads`` are the mean over all samples, the same on every learner.

        The arguments are those of `prepare_backward`, for a step without a backward pass.
        """
        if self._total is None:  # no backward pass: there were no samples
            self.prepare_backward(update, total)
        while self._handed < len(self._buckets):
            self._hand_over()
        pending, self._pending, self._total = deque(self._pending), [], None
        # No name for a future: with its error, which refers to this frame, it would be a cycle, and
        # the connections of a lost group would stay open until it is collected.
        while pending:
            pending.popleft().result()
        self._device.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        """Detach from the parameters; an unfinished pass is lost."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, bucket: int, _: Tensor) -> None:
        """Note that the gradient of one more parameter of a bucket is complete."""
        if self._total is None or not self._overlap:
            return
        self._missing[bucket] -= 1
        while self._handed < len(self._buckets) and self._missing[self._handed] <= 0:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the thread reduce the next bucket; without overlap, reduce it here."""
        bucket = self._buckets[self._handed]
        self._handed += 1
        assert self._total is not None
        ready = self._device.make_event()
        ready.record()
        call = partial(self._reduce, bucket, self._total, ready)
        if self._overlap:
            self._pending.append(self._thread.submit(call))
        else:
            call()

    @torch.no_grad()
    def _reduce(self, bucket: Bucket, total: float, ready: DeviceEvent) -> None:
        if self._failed:  # the next bucket would wait for ranks that have given up
            return
        self._failed = True
        self._ledger.switch(Part.REDUCE)
        grads = self._grads[bucket.start : bucket.stop]
        self._device.enter_thread()
        with self._device.on(self._stream):
            self._stream.wait_event(ready)
            self.codec.reduce(bucket, grads.div_(total), self._ring)
        self._ledger.switch(Part.WAIT)
        self._failed = False
