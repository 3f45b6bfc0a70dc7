"""The feeder: keeps the next batches ready while the learner trains.

It owns the store, the queue and the Unix socket, so none of them needs a lock. As a thread it
gathers into free staging batches and hands them over; with ``prefetch=0`` the same work is done in
the learner's own thread when it asks, which is what shows the cost of not prefetching. Gathering
releases the interpreter lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from penstock.learner.sources.staging import StagingBatch
from penstock.profiling.ledger import Part, TimeLedger
from penstock.replay.queue import SlotQueue
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import EVENT_FLAGS, drain_event
from penstock.transport.wait import wait_readable

POLL_S = 0.1


class Feeder:
    """Use as a context manager; leaving it stops the thread."""

    def __init__(
        self,
        host: ShmHost,
        queue: SlotQueue,
        batches: list[StagingBatch],
        batch_slots: int,
        version: Callable[[], int],
        ledger: TimeLedger,
        *,
        prefetch: bool,
    ) -> None:
        self._host = host
        self._queue = queue
        self._batches = batches
        self._batch_slots = batch_slots
        self._version = version
        self._ledger = ledger  # of the thread that gathers
        self._free = deque(batches)
        self._full: deque[StagingBatch] = deque()
        self._freed_event = os.eventfd(0, EVENT_FLAGS)
        self._full_event = os.eventfd(0, EVENT_FLAGS)
        self._stop = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feeder") if prefetch else None
        host.watch(self._freed_event, lambda: drain_event(self._freed_event))

    def __enter__(self) -> Feeder:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        os.close(self._full_event)
        self._host.unwatch(self._freed_event)
        os.close(self._freed_event)

    def get(self, timeout_s: float) -> StagingBatch | None:
        """The oldest ready batch, or None when none came in time."""
        if self._thread is None:
            self._host.poll(0.0)  # those who come and go are heard also where data never runs out
            if not self._gather():
                self._host.poll(timeout_s)
                self._gather()
        else:
            self._wait_for_full(time.monotonic() + timeout_s)
        if self._error is not None:
            raise self._error
        return self._full.popleft() if self._full else None

    def give_back(self, batch: StagingBatch) -> None:
        """The learner has used a batch."""
        batch.let_go()
        self._free.append(batch)
        os.eventfd_write(self._freed_event, 1)

    def stop(self) -> None:
        """End the thread; from then on store and queue belong to the caller."""
        self._stop = True
        if self._thread and self._thread.is_alive():
            os.eventfd_write(self._freed_event, 1)
            self._thread.join()

    def staged_steps(self) -> int:
        """Agent steps in batches that were gathered and not trained on."""
        return sum(batch.steps for batch in self._batches)

    def _wait_for_full(self, deadline_s: float) -> None:
        """Until a batch is ready or the thread has failed; the event may tell of an earlier one."""
        while not self._full and self._error is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not wait_readable(self._full_event, left_s):
                return
            drain_event(self._full_event)

    def _run(self) -> None:
        try:
            while not self._stop:
                gathered = self._gather()
                self._ledger.switch(Part.WAIT)
                self._host.poll(0.0 if gathered else POLL_S)
        except BaseException as error:
            self._error = error
            os.eventfd_write(self._full_event, 1)

    def _gather(self) -> bool:
        """Fill one free batch; False when there is no free batch or not enough data."""
        self._queue.collect()
        if not self._free:
            return False
        slots = self._queue.take(self._batch_slots, self._version())
        if not slots:
            return False
        batch = self._free.popleft()
        self._ledger.switch(Part.GATHER)
        batch.gather(slots)
        self._queue.release(slots)
        self._full.append(batch)
        self._ledger.switch(Part.WAIT)
        os.eventfd_write(self._full_event, 1)
        return True
