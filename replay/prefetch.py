"""Batches drawn ahead by a thread, so that the learner finds the next one ready.

    thread:   draw ── to the device (pinned, side stream) ── ready, at most `prefetch` of them
    consumer:                                                ready ── next(batches)

The thread lives as long as the generator: closing or dropping it ends the thread. An error in the
thread is raised in the consumer. torch is imported only where a device is given.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from numbers import Integral, Real
from typing import Any, Protocol

import numpy as np

from penstock.replay.batch import Batch
from penstock.replay.errors import ReplayError

LOOK_S = 0.1  # between two checks that the consumer still exists, while nothing can be drawn
ON_HOST = ("keys",)  # returned to the buffer, so they stay in numpy


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
    place = _placer(device)
    if not prefetch:
        return _drawn(source, place, timeout_s)
    return _ahead(source, place, prefetch, timeout_s)


def _drawn(source: BatchSource, place: _Place, timeout_s: float) -> Generator[Batch, None, None]:
    while True:
        batch = source.draw(timeout_s)
        if batch is None:
            raise _late(timeout_s, source)
        yield place.arrive(place.send(batch))


def _ahead(
    source: BatchSource, place: _Place, prefetch: int, timeout_s: float
) -> Generator[Batch, None, None]:
    ahead = _Ahead(source, place, prefetch)
    thread = threading.Thread(target=ahead.run, name="replay-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            sent = ahead.take(timeout_s)
            if sent is None:
                raise _late(timeout_s, source)
            yield place.arrive(sent)
    finally:
        ahead.stop()
        thread.join()


def _late(timeout_s: float, source: BatchSource) -> ReplayError:
    why = source.missing() or "the buffer was busy"
    return ReplayError(f"no batch could be drawn for {timeout_s:g} s: {why}")


class _Ahead:
    """The state that the thread and the consumer share."""

    def __init__(self, source: BatchSource, place: _Place, most: int) -> None:
        self._source = source
        self._place = place
        self._most = most
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._place.enter_thread()
            while self._await_room():
                batch = self._source.draw(LOOK_S)
                if batch is not None:
                    sent = self._place.send(batch)
                    with self._changed:
                        self._ready.append(sent)
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def take(self, timeout_s: float) -> Any:
        """The oldest batch that is ready; None after ``timeout_s`` seconds without one."""
        ends_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                left_s = ends_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None
            self._changed.notify_all()
            return self._ready.popleft()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _await_room(self) -> bool:
        with self._changed:
            while len(self._ready) >= self._most and not self._stopped:
                self._changed.wait()
            return not self._stopped


class _Place:
    """Where batches are delivered: in host memory, as numpy arrays."""

    def enter_thread(self) -> None:
        """Called first in the thread, if there is one."""

    def send(self, batch: Batch) -> Any:
        """Start the transfer of a batch; called in the thread."""
        return batch

    def arrive(self, sent: Any) -> Batch:
        """The batch, safe to use; called in the consumer."""
        batch: Batch = sent
        return batch


class _Tensors(_Place):
    """Delivers tensors on a torch device. On the CPU they share the arrays' memory."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = device

    def send(self, batch: Batch) -> Any:
        moved: dict[int, Any] = {}
        return Batch(
            {k: v if k in ON_HOST else _leaves(v, self._tensor, moved) for k, v in batch.items()}
        )

    def _tensor(self, array: np.ndarray[Any, Any], moved: dict[int, Any]) -> Any:
        """Arrays that overlap, as obs and next_obs of sequences do, are copied once."""
        whole = array.base if isinstance(array.base, np.ndarray) else array
        if whole.dtype != array.dtype or whole.nbytes > 2 * array.nbytes:
            whole = array
        if not (whole.flags.c_contiguous and array.flags.c_contiguous):
            whole = array = np.ascontiguousarray(array)
        if id(whole) not in moved:  # the array is kept, so that its id is not reused
            moved[id(whole)] = whole, self._bring(self._torch.from_numpy(whole))
        first = (_address(array) - _address(whole)) // array.itemsize
        flat = moved[id(whole)][1].reshape(-1)
        return flat[first : first + array.size].reshape(array.shape)

    def _bring(self, tensor: Any) -> Any:
        return tensor.to(self._device)


class _Behind(_Tensors):
    """Delivers tensors on a device that runs behind its host (`penstock.device.interface`).

    They are copied through pinned memory, on a stream of their own beside the learner's.
    """

    def __init__(self, torch: Any, device: Any) -> None:
        super().__init__(torch, device.torch_device)
        self._seam = device
        self._stream = device.make_stream()

    def enter_thread(self) -> None:
        self._seam.enter_thread()

    def send(self, batch: Batch) -> Any:
        with self._seam.on(self._stream):
            sent = super().send(batch)
            copied = self._seam.make_event()
            copied.record(self._stream)
        return sent, copied

    def arrive(self, sent: Any) -> Batch:
        batch, copied = sent
        current = self._seam.current_stream()
        current.wait_event(copied)
        for key, value in batch.items():
            if key not in ON_HOST:
                _leaves(value, self._used_on, current)
        arrived: Batch = batch
        return arrived

    def _bring(self, tensor: Any) -> Any:
        pinned = self._seam.host_memory(tensor.shape, tensor.dtype).copy_(tensor)
        placed = self._seam.memory_for(pinned)
        self._seam.copy(placed, pinned)
        return placed

    def _used_on(self, tensor: Any, stream: Any) -> None:
        if isinstance(tensor, self._torch.Tensor):
            self._seam.used_on(tensor, stream)


def _placer(device: Any) -> _Place:
    if device is None:
        return _Place()
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
    choice: Any = importlib.import_module("penstock.device.choice")  # which imports torch
    if wanted.type not in choice.DEVICES:
        return _Tensors(torch, wanted)
    if wanted.type == "cuda" and wanted.index is None:
        wanted = torch.device("cuda", torch.cuda.current_device())
    seam = choice.device_of(wanted)
    return _Behind(torch, seam) if seam.runs_behind else _Tensors(torch, wanted)


def _leaves(value: Any, function: Callable[[Any, Any], Any], with_: Any) -> Any:
    """Apply ``function`` to every array in a nested value; other values stay."""
    if isinstance(value, dict):
        return {key: _leaves(child, function, with_) for key, child in value.items()}
    if isinstance(value, tuple):
        return tuple(_leaves(child, function, with_) for child in value)
    return value if isinstance(value, int | float | str) else function(value, with_)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])
