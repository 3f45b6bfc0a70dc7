"""A GPU with CUDA as a device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class CudaDevice:
    """A GPU with CUDA. Implements `penstock.device.interface.Device`."""

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        """``device`` must have an index."""
        self.torch_device = device

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def make_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def make_event(self, *, timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timed)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def memory_for(self, host: Tensor) -> Tensor:
        return torch.empty_like(host, device=self.torch_device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        if target is not source:
            target.copy_(source, non_blocking=True)

    def record_use(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def free_nbytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.torch_device).uuid)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)
