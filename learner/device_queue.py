"""Keeps a GPU busy between batches: the host queues the next one while the GPU computes.

At most one batch is queued behind the computed one, so that reports, published weights and returned
batches stay current.

Reductions over NCCL are queued like all other work: the host learns that a member has died only
when later updates are queued behind the stuck reduction. After the abort those updates run on
undefined data. So in a group a copy of the state is queued after each batch, and the newest copy
that was complete before the abort is restored. Counters and policy versions do not go back, as in
`learner.nonfinite`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.core.notes import note_logger
from penstock.device.choice import device_of
from penstock.device.interface import DeviceEvent
from penstock.learner.sync.gradient_sync import GroupLostError
from penstock.profiling.ledger import Part, TimeLedger

logger = note_logger(__name__)

# Copies of the state: two batches are queued at most, and one before them is complete.
COPIES = 3
# Seconds between two looks at the device. They cause no delay: the next batch is on the stream.
POLL_S = 1e-4


class DeviceQueue:
    """The batches on the current stream of a GPU; on a CPU nothing waits."""

    def __init__(self, device: torch.device, ledger: TimeLedger) -> None:
        """``ledger`` is the time ledger of the calling thread."""
        self._ledger = ledger
        self._device = device_of(device)
        self._ends: list[DeviceEvent] = []
        """The ends of the last two batches, the later one first; empty on a CPU."""
        if self._device.runs_behind:
            self._ends = [self._device.make_event() for _ in range(2)]

        self._tasks: list[Callable[[], None]] = []
        """What is called while the host waits."""
        self._copies: StateCopies | None = None
        """Copies of the state while the learner is in a group."""
        self._timeout_s = math.inf
        """Longest wait for a batch while the learner is in a group."""
        self.taken_back = 0
        """Number of batches that were undone when the last group was lost."""

    def call_while_waiting(self, task: Callable[[], None]) -> None:
        """Call ``task`` repeatedly whenever the host waits; it may raise `GroupLostError`."""
        self._tasks.append(task)

    def on_batch_queued(self) -> None:
        """Note that a whole batch is on the stream; wait until the batch before it was computed.

        Raises:
            GroupLostError: in a group, that takes longer than its timeout.
        """
        if not self._ends:
            return

        if self._copies is not None:
            self._copies.add()
        self._ends.reverse()
        end, previous_end = self._ends
        end.record()
        self._wait_for(previous_end, self._timeout_s)

    def drain(self, timeout_s: float = math.inf) -> None:
        """Wait until all queued work is complete, for at most ``timeout_s`` seconds.

        Call it before anything that blocks on the device, such as `Tensor.cpu`: that would block
        forever if a member of the group has died during a reduction.

        Raises:
            GroupLostError: it takes longer, or longer than the group's timeout.
        """
        if not self._ends:
            return

        end = self._device.make_event()
        end.record()
        self._wait_for(end, min(timeout_s, self._timeout_s))

    def join_group(self, tensors: Sequence[Tensor], timeout_s: float) -> None:
        """Keep copies of the state ``tensors``, and wait at most ``timeout_s`` for a batch.

        From now on queued reductions may never complete.
        """
        if self._ends:
            self._copies = StateCopies(tensors)
            self._timeout_s = timeout_s

    @contextmanager
    def leave_group(self, settle_s: float) -> Iterator[None]:
        """Surrounds the abort of the group's reductions.

        Before it, queued reductions get ``settle_s`` seconds to complete. After it, the state is
        restored from the newest copy that was complete, and `taken_back` says how old that is.
        """
        copies, self._copies = self._copies, None
        if copies is None:
            yield
            return

        # The tasks would report the loss again.
        tasks, self._tasks = self._tasks, []
        try:
            self.drain(settle_s)
        except GroupLostError as error:
            logger.info("queued reductions are aborted: %s", error)
        finally:
            self._tasks = tasks
            self._timeout_s = math.inf

        # This is read before the abort: after it, copies of undefined data are complete, too.
        complete = copies.newest()
        yield
        self.taken_back = copies.restore(complete)
        if self.taken_back:
            text = "the state before the last %d batches is restored: their reductions were lost"
            logger.info(text, self.taken_back)

    def _wait_for(self, event: DeviceEvent, timeout_s: float) -> None:
        """Wait until ``event`` has taken place. Raises GroupLostError after ``timeout_s``."""
        began_s = time.monotonic()
        self._ledger.switch(Part.DEVICE)
        while not event.query():
            for task in self._tasks:
                task()
            if time.monotonic() - began_s > timeout_s:
                raise GroupLostError(f"a batch was not computed within {timeout_s:g} s")
            time.sleep(POLL_S)


class StateCopies:
    """Copies of ``tensors``, which lie on one device, after each of the last batches."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Make the first copy. No reduction may be queued."""
        self._tensors = tensors
        device = device_of(tensors[0].device)
        self._copies = [[torch.empty_like(tensor) for tensor in tensors] for _ in range(COPIES)]
        """Copy i of the run is at place i % `COPIES`."""
        self._complete = [device.make_event() for _ in range(COPIES)]
        """The end of each copy, at the same place."""
        self._count = 0
        """Number of copies made so far."""
        self.add()
        self._complete[0].synchronize()

    @torch.no_grad()
    def add(self) -> None:
        """Queue a copy of the present state, in the place of the oldest one."""
        place = self._count % COPIES
        for copy, tensor in zip(self._copies[place], self._tensors, strict=True):
            copy.copy_(tensor)
        self._complete[place].record()
        self._count += 1

    def newest(self) -> int:
        """Returns the number of the newest complete copy. Call it before reductions are aborted."""
        for number in reversed(range(max(0, self._count - COPIES), self._count)):
            if self._complete[number % COPIES].query():
                return number
        raise AssertionError("a batch is queued only when the one before the last is complete")

    @torch.no_grad()
    def restore(self, number: int) -> int:
        """Restore a copy, after the abort. Returns the number of copies made since."""
        for copy, tensor in zip(self._copies[number % COPIES], self._tensors, strict=True):
            tensor.copy_(copy)
        return self._count - 1 - number
