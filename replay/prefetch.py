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
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from penstock.core.descriptors import wait_readable
from penstock.profiling.ledger import Part, TimeLedger
from penstock.replay.batch import Batch
from penstock.replay.errors import ReplayError
from penstock.transport.shm.store import EVENT_FLAGS, drain_event

# At run time this would bring the wire format and its codecs into every use of a replay.
if TYPE_CHECKING:
    from penstock.transport.shm.host import ShmHost

# Longest wait of the thread, and of a draw.
POLL_S = 0.1

# Columns that are given back to the buffer, so they stay in numpy.
ON_HOST = ("keys",)

T = TypeVar("T")

# `os.eventfd_write` releases the interpreter lock: the woken thread takes it, and the caller waits.
# The result tells nothing: it fails where 2^64 - 1 wakes are pending, and the thread polls anyway.
# Only Linux has the function.
_write_event: Any = getattr(ctypes.PyDLL(None), "eventfd_write", None)
if _write_event is not None:
    _write_event.argtypes = [ctypes.c_int, ctypes.c_uint64]


class _ReadyBatch(NamedTuple, Generic[T]):
    """A batch that waits for its consumer."""

    batch: T
    began_ns: int
    """When the thread could begin to prepare it, by `time.perf_counter_ns`."""


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
        """Make the thread; `start` starts it.

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

        self._ready: deque[_ReadyBatch[T]] = deque()
        """The oldest batch is the first."""

        self._woken_ns = 0
        """When `wake` was called, if the thread has not begun since; else 0."""

        self._error: BaseException | None = None
        """What the thread has failed with."""

        self._stop = False
        self._wake_event = os.eventfd(0, EVENT_FLAGS)
        self._ready_event = os.eventfd(0, EVENT_FLAGS)
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
        """Take the oldest batch.

        The consumer's ledger is in `Part.WAIT`, and stays there without a batch. With one it is in
        `Part.GATHER`: if it had to wait, since the thread could begin to prepare that batch.

        Args:
            timeout_s: longest wait for a batch, in seconds.

        Returns:
            The batch; None if there was none in time.

        Raises:
            BaseException: what the thread has failed with, after the batches before that.
        """
        had_to_wait = not self._ready
        if had_to_wait:
            self._wait_until_ready(time.monotonic() + timeout_s)
        if not self._ready:
            if self._error is not None:
                raise self._error
            return None

        ready = self._ready.popleft()
        if self._consumer is not None:
            if had_to_wait:
                self._consumer.switch_at(Part.GATHER, ready.began_ns)
            else:
                self._consumer.switch(Part.GATHER)
        return ready.batch

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
        """Wait until a batch is ready, the thread has failed or the deadline has come."""
        # More than once, since the event may be that of an earlier batch.
        while not self._ready and self._error is None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not wait_readable(self._ready_event, remaining_s):
                return
            drain_event(self._ready_event)

    def _run(self) -> None:
        """Prepare batches until the end; the thread's main function."""
        try:
            while not self._stop:
                # A thread that is woken and gets no core, or not the interpreter lock, is late too.
                began_ns = self._woken_ns or time.perf_counter_ns()
                self._woken_ns = 0
                batch = self._prepare()
                if self._ledger is not None:
                    self._ledger.switch(Part.WAIT)

                if batch is not None:
                    self._ready.append(_ReadyBatch(batch, began_ns))
                    os.eventfd_write(self._ready_event, 1)
                self._poll(POLL_S if batch is None else 0.0)
        except BaseException as error:
            self._error = error
            os.eventfd_write(self._ready_event, 1)


class BatchSource(Protocol):
    """A source of batches for `batches`."""

    def draw(self, timeout_s: float) -> Batch | None:
        """Draw a batch; None if that was not possible within ``timeout_s`` seconds."""

    def why_not(self) -> str:
        """Why no batch can be drawn yet; empty when one can."""


def batches(
    source: BatchSource, *, prefetch: int, device: Any, timeout_s: float
) -> Generator[Batch, None, None]:
    """Yield batches without end.

    Args:
        source: draws them.
        prefetch: batches that a thread holds ready; 0: they are drawn in the calling thread.
        device: of torch, to which batches go as tensors; None: they stay in numpy.
        timeout_s: longest wait for a batch, in seconds.

    Raises:
        ReplayError: an argument is out of range, or no batch could be drawn in time.
    """
    if not isinstance(prefetch, Integral) or prefetch < 0:
        raise ReplayError(f"prefetch {prefetch!r} must be 0 (no thread) or more batches")
    if not isinstance(timeout_s, Real) or not timeout_s > 0:
        raise ReplayError(f"timeout_s {timeout_s!r} must be above 0 seconds")

    uploader = None if device is None else _uploader_to(device)
    if not prefetch:
        return _draw(source, uploader, timeout_s)
    return _draw_ahead(source, uploader, prefetch=int(prefetch), timeout_s=timeout_s)


def _draw(source: BatchSource, uploader: Any, timeout_s: float) -> Generator[Batch, None, None]:
    """Yield batches that are drawn in the calling thread."""
    while True:
        batch = source.draw(timeout_s)
        if batch is None:
            raise _late(timeout_s, source)
        yield _UploadedBatch(batch, uploader).wait()


def _draw_ahead(
    source: BatchSource, uploader: Any, *, prefetch: int, timeout_s: float
) -> Generator[Batch, None, None]:
    """Yield batches that a thread draws and uploads ahead; it ends with the generator."""

    def prepare() -> _UploadedBatch | None:
        batch = source.draw(POLL_S) if thread.ready < prefetch else None
        if batch is None:
            return None
        if uploader is not None:
            uploader.enter_thread()
        return _UploadedBatch(batch, uploader)

    def wait_for_room(timeout_s: float) -> None:
        # Where there is room, the draw itself has waited for data.
        if thread.ready >= prefetch:
            thread.wait_for_wake(timeout_s)

    thread = PrefetchThread(prepare, name="replay-prefetch", poll=wait_for_room)
    thread.start()
    try:
        while True:
            uploaded = thread.take(timeout_s)
            if uploaded is None:
                raise _late(timeout_s, source)
            thread.wake()
            yield uploaded.wait()
    finally:
        thread.close()


def _late(timeout_s: float, source: BatchSource) -> ReplayError:
    """The error for a batch that did not come in time."""
    why = source.why_not() or "the buffer was busy"
    return ReplayError(f"no batch could be drawn for {timeout_s:g} s: {why}")


class _UploadedBatch:
    """A batch on its way to a device, without its keys.

    Args:
        batch: the batch.
        uploader: from `_uploader_to`; None: the batch stays as it is.
    """

    def __init__(self, batch: Batch, uploader: Any) -> None:
        self._batch = batch
        self._upload: Any = None
        if uploader is not None:
            arrays = {name: value for name, value in batch.items() if name not in ON_HOST}
            self._upload = uploader.send(arrays)

    def wait(self) -> Batch:
        """The batch, safe to use in the calling thread."""
        if self._upload is None:
            return self._batch
        tensors = self._upload.tensors_on_current_stream()
        return Batch({name: tensors.get(name, value) for name, value in self._batch.items()})


def _uploader_to(device: Any) -> Any:
    """A `penstock.device.transfers.DeviceUploader` to a device of torch, which is imported here.

    Raises:
        ReplayError: torch or the device is missing.
    """
    try:
        torch: Any = importlib.import_module("torch")
        torch_device = torch.device(device)
    except ImportError as error:
        raise ReplayError(
            f"device={device!r} needs torch, which cannot be imported ({error}); install it, or "
            "leave device out for numpy arrays"
        ) from error
    except (RuntimeError, TypeError) as error:
        raise ReplayError(f"device {device!r} is none that torch knows ({error})") from error

    if torch_device.type == "cuda":
        if not torch.cuda.is_available():
            raise ReplayError(
                f"device {device!r} is not there: torch finds no CUDA; use 'cpu' or None"
            )
        if torch_device.index is None:
            torch_device = torch.device("cuda", torch.cuda.current_device())

    choice: Any = importlib.import_module("penstock.device.choice")
    transfers: Any = importlib.import_module("penstock.device.transfers")
    return transfers.DeviceUploader(choice.any_device(torch_device))
