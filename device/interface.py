"""What the learner uses of a device.

A GPU runs behind its host: a kernel or a copy is queued on a *stream*, and the call returns before
it has run. Work on one stream runs in the order of its calls. Between streams, and between a stream
and the host, only *events* give an order: memory that one of them writes must not be read or
written by another before an event says so. Memory that is copied to or from a GPU without waiting
is *pinned* host memory.

`HostDevice` is a CPU, where every call has run when it returns. `CudaDevice` is a GPU. Contract
tests run all that uses this seam on a third one, which delays its work and checks every access.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A mark in a stream. One that was never recorded has passed."""

    def record(self, stream: Any = None) -> None:
        """Mark the end of the work queued so far, by default on the current stream."""

    def query(self) -> bool:
        """Return whether the stream has passed the mark."""

    def synchronize(self) -> None:
        """Wait on the host until the stream has passed the mark."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this mark to a later one.

        Both events must be timed, and must have passed.
        """


class DeviceStream(Protocol):
    """An order of work."""

    def wait_event(self, event: Any) -> None:
        """Let what is queued from now on run after an event, without stopping the host."""

    def wait_stream(self, stream: Any) -> None:
        """Let what is queued from now on run after all that is queued on another stream."""


class Device(Protocol):
    """One device of this process."""

    torch_device: torch.device
    runs_behind: bool
    """Whether calls return before their work has run. If not, streams and events do nothing, and
    the memory of the host is that of the device."""

    def enter_thread(self) -> None:
        """Make this the device of the calling thread.

        Every thread that uses the device calls this first: a new thread begins on the first GPU of
        the machine, whatever its process uses.
        """

    def make_stream(self) -> DeviceStream:
        """Make a stream, with no order against others."""

    def current_stream(self) -> DeviceStream:
        """Return the stream on which the calling thread queues its work."""

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one of this thread, within a block."""

    def make_event(self, *, timed: bool = False) -> DeviceEvent:
        """Make an event. A ``timed`` one has `elapsed_time`, and costs a little more."""

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory of the host that the device can copy while the host continues.

        Its values are not initialised.
        """

    def memory_for(self, host: Tensor) -> Tensor:
        """Return memory of the device with the shape and dtype of ``host``; on a CPU, ``host``."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the current stream, without waiting; do nothing if both tensors are one.

        One of the two may be `host_memory`, which nothing may touch before the copy has run.
        """

    def record_use(self, tensor: Tensor, stream: Any) -> None:
        """Note that a tensor is used on another stream than the one on which it was made.

        Its memory is not given to others before that stream has passed this point.
        """

    def free_nbytes(self) -> int:
        """Return the free memory of the device, in bytes. Not available on a CPU."""

    def identity(self) -> str:
        """Return an identifier that no other device has, on any host. Not available on a CPU."""

    def synchronize(self) -> None:
        """Wait until all streams are empty."""

    def random_state(self) -> Tensor | None:
        """Return the state of the device's random generator, uint8 on the host.

        None where the device uses the generator of the host.
        """

    def set_random_state(self, state: Tensor) -> None:
        """Continue from a `random_state`."""
