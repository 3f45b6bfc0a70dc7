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
        """Whether the stream has passed the mark."""

    def synchronize(self) -> None:
        """Wait on the host until it has."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this mark to a later one; both must be timed, and have passed."""


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
    """Whether calls return before their work has run. Else streams and events do nothing, and host
    memory is the device's."""

    def enter_thread(self) -> None:
        """Make this the device of the calling thread. Every thread that uses it calls this first:
        a new one begins on the first GPU of the machine, whatever its process uses."""

    def make_stream(self) -> DeviceStream:
        """A new stream, with no order against others."""

    def current_stream(self) -> DeviceStream:
        """The stream on which the calling thread queues its work."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one of this thread."""

    def make_event(self, *, timed: bool = False) -> DeviceEvent:
        """A new event; ``timed`` ones tell times, and cost a little more."""

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of the host that the device can copy while the host continues."""

    def memory_for(self, host: Tensor) -> Tensor:
        """Memory of the device for what ``host`` has; on a CPU it is ``host``."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy on the current stream, without waiting. One of the two may be `host_memory`, which
        nothing may touch before the copy has run. Does nothing where both are one."""

    def used_on(self, tensor: Tensor, stream: Any) -> None:
        """Note that another stream than the one it was made on uses a tensor: its memory is not
        given to others before that stream has come here."""

    def free_nbytes(self) -> int:
        """Free memory of the device, in bytes. Not available on a CPU."""

    def identity(self) -> str:
        """An identifier that no other device has, on any host. Not available on a CPU."""

    def synchronize(self) -> None:
        """Wait until all streams are empty."""

    def random_state(self) -> Tensor | None:
        """State of the device's random generator, uint8 on the host. None where the host's is
        used."""

    def set_random_state(self, state: Tensor) -> None:
        """Continue from a `random_state`."""
