"""A thread that prepares a learner's next batches while it trains.

A learner that finds no batch waits for one of two things: for data, while the thread has nothing to
prepare a batch from, or for the thread, while it prepares one. The ledger of the learner's thread
separates the two, as `Part.WAIT` and `Part.GATHER`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.core.descriptors import wait_readable
from penstock.profiling.ledger import Part, TimeLedger
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import EVENT_FLAGS, drain_event

POLL_S = 0.1
T = TypeVar("T")

# `os.eventfd_write` releases the interpreter lock: the woken thread takes it, and the caller waits.
# The result tells nothing: it fails where 2^64 - 1 wakes are pending, and the thread polls anyway.
_write_event = ctypes.PyDLL(None).eventfd_write
_write_event.argtypes = [ctypes.c_int, ctypes.c_uint64]


class FeederThread(Generic[T]):
    """Prepares batches in a thread, and hands them to the learner's thread.

    It owns what actors write to, store and Unix socket, so neither needs a lock: ``prepare`` and
    ``poll`` are called in the thread alone, until `stop` has returned.
    """

    def __init__(
        self,
        host: ShmHost,
        prepare: Callable[[], T | None],
        poll: Callable[[float], None],
        ledger: TimeLedger,
        learner: TimeLedger,
    ) -> None:
        """Does not start the thread.

        Args:
            host: of the store.
            prepare: returns the next batch; None where there is no room for one, or too little
                data. Called again after `wake`, and after each event of ``host``.
            poll: serves ``host`` for up to the given seconds.
            ledger: of the thread.
            learner: ledger of the thread that takes the batches.
        """
        self._host = host
        self._prepare = prepare
        self._poll = poll
        self._ledger, self._learner = ledger, learner
        self._ready: deque[tuple[T, int]] = deque()  # each with the time when its work began, ns
        self._woken_ns = 0  # when `wake` was called, and the thread has not begun since; else 0
        self._wake_event = os.eventfd(0, EVENT_FLAGS)
        self._ready_event = os.eventfd(0, EVENT_FLAGS)
        self._stop = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="feeder")
        host.watch(self._wake_event, lambda: drain_event(self._wake_event))

    def start(self) -> None:
        self._thread.start()

    @property
    def ready(self) -> int:
        """The number of batches that wait for the learner."""
        return len(self._ready)

    def take(self, timeout_s: float) -> T | None:
        """The oldest batch, or None when there was none within ``timeout_s`` seconds.

        The caller's ledger is in `Part.WAIT`, and stays there without a batch. With one it is in
        `Part.GATHER`: if it had to wait, since the thread could begin to prepare that batch.

        Raises what the thread has failed with.
        """
        waited = not self._ready
        if waited:
            self._wait_until_ready(time.monotonic() + timeout_s)
        if self._error is not None:
            raise self._error
        if not self._ready:
            return None
        batch, began_ns = self._ready.popleft()
        if waited:
            self._learner.switch_at(Part.GATHER, began_ns)
        else:
            self._learner.switch(Part.GATHER)
        return batch

    def wake(self) -> None:
        """Let the thread look again whether there is room.

        It begins when the caller releases the interpreter lock.
        """
        self._woken_ns = time.perf_counter_ns()
        _write_event(self._wake_event, 1)

    def stop(self) -> None:
        """End the thread; from then on what it owned belongs to the caller.

        Raises what the thread has failed with.
        """
        self._end()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._end()
        os.close(self._ready_event)
        self._host.unwatch(self._wake_event)
        os.close(self._wake_event)

    def _end(self) -> None:
        self._stop = True
        if self._thread.is_alive():
            self.wake()
            self._thread.join()

    def _wait_until_ready(self, deadline_s: float) -> None:
        """Wait until a batch is ready or the thread has failed.

        The event may be that of an earlier batch.
        """
        while not self._ready and self._error is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not wait_readable(self._ready_event, left_s):
                return
            drain_event(self._ready_event)

    def _run(self) -> None:
        try:
            while not self._stop:
                # A thread that is woken and gets no core, or not the interpreter lock, is late too.
                began_ns = self._woken_ns or time.perf_counter_ns()
                self._woken_ns = 0
                batch = self._prepare()
                self._ledger.switch(Part.WAIT)
                if batch is not None:
                    self._ready.append((batch, began_ns))
                    os.eventfd_write(self._ready_event, 1)
                self._poll(POLL_S if batch is None else 0.0)
        except BaseException as error:
            self._error = error
            os.eventfd_write(self._ready_event, 1)
