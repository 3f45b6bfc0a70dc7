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
        self._buckets = codec.buckets
        self._ring = ring
        self._thread = thread
        self._ledger = ledger
        self._overlap = overlap
        self._device = device_of(grads.device)
        self._stream = self._device.make_stream()

        # State of the present step.
        self._divisor: float | None = None  # divisor of the gradients; None between two steps
        # Number of parameters whose gradients are not complete, by bucket.
        self._incomplete: list[int] = []
        self._handed_over = 0  # number of buckets that were handed over
        self._pending: list[Future[None]] = []  # reductions in the thread
        self._failed = False  # whether a reduction has failed; only the thread uses it

        # A bucket holds whole parameters. Each of these is known by its first part.
        bucket_of = {
            part: number
            for number, bucket in enumerate(self._buckets)
            for part in bucket.parts
            if part.tower == 0
        }
        self._parameters_in = Counter(bucket_of.values())  # number of parameters, by bucket
        first_parts = sorted(bucket_of, key=lambda part: part.start)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                partial(self._on_gradient, bucket_of[part])
            )
            for part, parameter in zip(first_parts, parameters, strict=True)
        ]

    def prepare_backward(self, update: int, total: float) -> None:
        """Announce that the next backward pass completes the gradients.

        Args:
            update: number of optimizer steps of the run so far.
            total: the divisor of the gradients.
        """
        self.codec.begin(update)
        self._divisor = total
        self._incomplete = [self._parameters_in[number] for number in range(len(self._buckets))]
        self._handed_over = 0

    def finish(self, update: int, total: float) -> None:
        """Return when ``grads`` are the mean over all samples, the same on every learner.

        The arguments are those of `prepare_backward`, for a step without a backward pass.
        """
        if self._divisor is None:  # no backward pass: there were no samples
            self.prepare_backward(update, total)
        while self._handed_over < len(self._buckets):
            self._hand_over()

        pending = deque(self._pending)
        self._pending = []
        self._divisor = None
        # No name for a future: with its error, which refers to this frame, it would be a cycle, and
        # the connections of a lost group would stay open until it is collected.
        while pending:
            pending.popleft().result()
        self._device.current_stream().wait_stream(self._stream)

    def close(self) -> None:
        """Detach from the parameters; an unfinished pass is lost."""
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, bucket_number: int, _: Tensor) -> None:
        """Count that the gradient of one more parameter of a bucket is complete.

        Buckets are handed over in their order, so a complete one may wait for those before it.
        """
        if self._divisor is None or not self._overlap:
            return
        self._incomplete[bucket_number] -= 1
        while self._handed_over < len(self._buckets) and self._incomplete[self._handed_over] <= 0:
            self._hand_over()

    def _hand_over(self) -> None:
        """Let the thread reduce the next bucket; without overlap, reduce it here."""
        bucket = self._buckets[self._handed_over]
        self._handed_over += 1
        assert self._divisor is not None
        gradients_ready = self._device.make_event()
        gradients_ready.record()

        reduce_bucket = partial(self._reduce, bucket, self._divisor, gradients_ready)
        if self._overlap:
            self._pending.append(self._thread.submit(reduce_bucket))
        else:
            reduce_bucket()

    @torch.no_grad()
    def _reduce(self, bucket: Bucket, divisor: float, gradients_ready: DeviceEvent) -> None:
        """Replace the gradients of a bucket by their mean over all samples."""
        if self._failed:  # this bucket would wait for ranks that have given up
            return

        self._failed = True  # until this reduction has succeeded
        self._ledger.switch(Part.REDUCE)
        grads = self._grads[bucket.start : bucket.stop]
        self._device.enter_thread()
        with self._device.use_stream(self._stream):
            self._stream.wait_event(gradients_ready)
            self.codec.reduce(bucket, grads.div_(divisor), self._ring)
        self._ledger.switch(Part.WAIT)
        self._failed = False
