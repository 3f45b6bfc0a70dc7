"""A CPU as a device, where every call has run when it returns, and what is used like a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class HostEvent:
    """An event that has always passed. Implements `penstock.device.interface.DeviceEvent`."""

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Any, /) -> float:
        return 0.0


class HostStream:
    """A stream that is always empty. Implements `penstock.device.interface.DeviceStream`."""

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


EVENT = HostEvent()
STREAM = HostStream()


class HostDevice:
    """A CPU. Implements `penstock.device.interface.Device`; what has no meaning does nothing."""

    torch_device = torch.device("cpu")
    runs_behind = False

    def enter_thread(self) -> None:
        pass

    def make_stream(self) -> HostStream:
        return STREAM

    def current_stream(self) -> HostStream:
        return STREAM

    def use_stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def make_event(self, *, timed: bool = False) -> HostEvent:
        return EVENT

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def memory_for(self, host: Tensor) -> Tensor:
        return host

    def copy(self, target: Tensor, source: Tensor) -> None:
        if target is not source:
            target.copy_(source)

    def record_use(self, tensor: Tensor, stream: Any) -> None:
        pass

    def free_nbytes(self) -> int:
        raise AssertionError("a CPU shares the memory of its host")

    def identity(self) -> str:
        raise AssertionError("learners share a CPU")

    def synchronize(self) -> None:
        pass

    def random_state(self) -> None:
        return None

    def set_random_state(self, state: Tensor) -> None:
        raise AssertionError("a CPU's generator is the process's")


class OtherDevice(HostDevice):
    """Another device of torch, to which arrays can be copied; the host waits for each copy."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def memory_for(self, host: Tensor) -> Tensor:
        return torch.empty_like(host, device=self.torch_device)
