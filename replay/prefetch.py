"""Batches prepared ahead by a thread, so that their consumer finds the next one ready.

`PrefetchThread` is the thread, of a learner as well as of `batches`, which draws from a replay:

    thread:   draw ── to the device (pinned, side stream) ── ready, at most `prefetch` of them
    consumer:                                                ready ── next(batches)

The thread of `batches` lives as long as the generator: closing or dropping it ends the thread.
torch is imported only where a device is given.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from penstock.core.descriptors import wait_readable
from penstock.profiling.ledger import Part, TimeLedger
from penstock.replay.batch import Batch
from penstock.replay.errors import ReplayError
from penstock.transport.shm.store import EVENT_FLAGS, drain_event

if TYPE_CHECKING:  # it would bring the wire format and its codecs into every use of a replay
    from penstock.transport.shm.host import ShmHost

POLL_S = 0.1  # longest wait of the thread, and of a draw
ON_HOST = ("keys",)  # returned to the buffer, so they stay in numpy
T = TypeVar("T")

# `os.eventfd_write` releases the interpreter lock: the woken thread takes it, and the caller waits.
# The result tells nothing: it fails where 2^64 - 1 wakes are pending, and the thread polls anyway.
_write_event: Any = getattr(ctypes.PyDLL(None), "eventfd_write", None)  # only Linux has it
if _write_event is not None:
    _write_event.argtypes = [ctypes.c_int, ctypes.c_uint64]


class PrefetchThread(Generic[T]):
    """Prepares batches in a thread, and hands them to their consumer's thread.

    ``prepare`` and ``poll`` are called in the thread alone, until `stop` has returned: what they
    use needs no lock. How many batches are ready at most is decided by ``prepare``.

    A consumer that finds no batch waits for one of two things: for data, while the thread has
    nothing to prepare a batch from, or for the thread, while it prepares one. The consumer's ledger
    separates the two, as `Part.WAIT` and `Part.GATHER`.
    """

    def __init__(
        self,
        prepare: Callable[[], T | None],
        *,
        name: str,
        host: ShmHost | None = None,
        poll: Callable[[float], None] | None = None,
        ledger: TimeLedger | None = None,
        consumer: TimeLedger | None = None,
    ) -> None:
        """Does not start the thread.

        Args:
            prepare: returns the next batch; None where there is no room for one, or too little
                data. Called again after `wake`, after each event of ``host``, and every `POLL_S`.
            name: of the thread.
            host: what else than `wake` ends a ``poll``.
            poll: waits for up to the given seconds; by default until `wake`.
            ledger: of the thread.
            consumer: ledger of the thread that takes the batches.
        """
        self._prepare = prepare
        self._host = host
        self._poll = poll or self.wait_for_wake
        self._ledger = ledger
        self._consumer = consumer
        self._ready: deque[tuple[T, int]] = deque()  # each with the time when its work began, ns
        self._woken_ns = 0  # when `wake` was called, and the thread has not begun since; else 0
        self._wake_event = os.eventfd(0, EVENT_FLAGS)
        self._ready_event = os.eventfd(0, EVENT_FLAGS)
        self._stop = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        if host is not None:
            host.watch(self._wake_event, lambda: drain_event(self._wake_event))

    def start(self) -> None:
        self._thread.start()

    @property
    def ready(self) -> int:
        """The number of batches that wait for their consumer."""
        return len(self._ready)

    def take(self, timeout_s: float) -> T | None:
        """The oldest batch, or None when there was none within ``timeout_s`` seconds.

        The consumer's ledger is in `Part.WAIT`, and stays there without a batch. With one it is in
        `Part.GATHER`: if it had to wait, since the thread could begin to prepare that batch.

        Raises what the thread has failed with, after the batches before that.
        """
        waited = not self._ready
        if waited:
            self._wait_until_ready(time.monotonic() + timeout_s)
        if not self._ready:
            if self._error is not None:
                raise self._error
            return None
        batch, began_ns = self._ready.popleft()
        if self._consumer is None:
            return batch
        if waited:
            self._consumer.switch_at(Part.GATHER, began_ns)
        else:
            self._consumer.switch(Part.GATHER)
        return batch

    def wake(self) -> None:
        """Let the thread look again whether there is room.

        It begins when the caller releases the interpreter lock.
        """
        self._woken_ns = time.perf_counter_ns()
        _write_event(self._wake_event, 1)

    def wait_for_wake(self, timeout_s: float) -> None:
        """Wait for up to ``timeout_s`` seconds; only in the thread, and without a host."""
        if wait_readable(self._wake_event, timeout_s):
            drain_event(self._wake_event)

    def stop(self) -> None:
        """End the thread; from then on what it used belongs to the caller.

        Raises:
            BaseException: what the thread has failed with.
        """
        self._end()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread, whatever it has failed with, and release everything."""
        self._end()
        self._ready.clear()
        os.close(self._ready_event)
        if self._host is not None:
            self._host.unwatch(self._wake_event)
        os.close(self._wake_event)

    def _end(self) -> None:
        """End the thread, if it runs, and wait for it."""
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
                if self._ledger is not None:
                    self._ledger.switch(Part.WAIT)
                if batch is not None:
                    self._ready.append((batch, began_ns))
                    os.eventfd_write(self._ready_event, 1)
                self._poll(POLL_S if batch is None else 0.0)
        except BaseException as error:
            self._error = error
            os.eventfd_write(self._ready_event, 1)


class BatchSource(Protocol):
    """A source of batches for `batches`."""

    def draw(self, timeout_s: float) -> Batch | None:
        """Draw a batch; None if that was not possible within ``timeout_s`` seconds."""

    def missing(self) -> str:
        """Why no batch can be drawn yet; empty when one can."""


def batches(
    source: BatchSource, *, prefetch: int, device: Any, timeout_s: float
) -> Generator[Batch, None, None]:
    """Yield batches without end, as tensors on ``device``, or in numpy where it is None.

    Raises ReplayError where none could be drawn for ``timeout_s`` seconds. With ``prefetch`` 0
    batches are drawn in the calling thread.
    """
    if not isinstance(prefetch, Integral) or prefetch < 0:
        raise ReplayError(f"prefetch {prefetch!r} must be 0 (no thread) or more batches")
    if not isinstance(timeout_s, Real) or not timeout_s > 0:
        raise ReplayError(f"timeout_s {timeout_s!r} must be above 0 seconds")
    uploader = None if device is None else _uploader_to(device)
    if not prefetch:
        return _drawn(source, uploader, timeout_s)
    return _drawn_ahead(source, uploader, int(prefetch), timeout_s)


def _drawn(source: BatchSource, uploader: Any, timeout_s: float) -> Generator[Batch, None, None]:
    while True:
        batch = source.draw(timeout_s)
        if batch is None:
            raise _late(timeout_s, source)
        yield _Sent(batch, uploader).arrive()


def _drawn_ahead(
    source: BatchSource, uploader: Any, prefetch: int, timeout_s: float
) -> Generator[Batch, None, None]:
    def prepare() -> _Sent | None:
        batch = source.draw(POLL_S) if thread.ready < prefetch else None
        if batch is None:
            return None
        if uploader is not None:
            uploader.enter_thread()
        return _Sent(batch, uploader)

    def wait_for_room(timeout_s: float) -> None:
        if thread.ready >= prefetch:  # else the draw itself has waited for data
            thread.wait_for_wake(timeout_s)

    thread = PrefetchThread(prepare, name="replay-prefetch", poll=wait_for_room)
    thread.start()
    try:
        while True:
            sent = thread.take(timeout_s)
            if sent is None:
                raise _late(timeout_s, source)
            thread.wake()
            yield sent.arrive()
    finally:
        thread.close()


def _late(timeout_s: float, source: BatchSource) -> ReplayError:
    """The error for a batch that did not come in time."""
    why = source.missing() or "the buffer was busy"
    return ReplayError(f"no batch could be drawn for {timeout_s:g} s: {why}")


class _Sent:
    """A batch on its way to its consumer: as it is, or uploaded but for its keys."""

    def __init__(self, batch: Batch, uploader: Any) -> None:
        self._batch = batch
        self._upload: Any = None
        if uploader is not None:
            arrays = {name: value for name, value in batch.items() if name not in ON_HOST}
            self._upload = uploader.send(arrays)

    def arrive(self) -> Batch:
        """The batch, safe to use in the calling thread."""
        if self._upload is None:
            return self._batch
        tensors = self._upload.arrive()
        return Batch({name: tensors.get(name, value) for name, value in self._batch.items()})


def _uploader_to(device: Any) -> Any:
    """A `penstock.device.transfers.DeviceUploader` to a device of torch, which is imported here."""
    try:
        torch: Any = importlib.import_module("torch")
        wanted = torch.device(device)
    except ImportError as error:
        raise ReplayError(
            f"device={device!r} needs torch, which cannot be imported ({error}); install it, or "
            "leave device out for numpy arrays"
        ) from error
    except (RuntimeError, TypeError) as error:
        raise ReplayError(f"device {device!r} is none that torch knows ({error})") from error
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ReplayError(f"device {device!r} is not there: torch finds no CUDA; use 'cpu' or None")
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", torch.cuda.current_device())
    choice: Any = importlib.import_module("penstock.device.choice")
    transfers: Any = importlib.import_module("penstock.device.transfers")
    return transfers.DeviceUploader(choice.any_device(wanted))
