"""Transfers between host and GPU that do not wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.device.choice import device_of
from penstock.device.interface import Device


class ToHost:
    """A copy of ``values`` on its way to the host.

    On a GPU ``values`` may be overwritten by later work on the stream; on a CPU they must not be.
    """

    def __init__(self, values: Tensor) -> None:
        device = device_of(values.device)
        self._values, self._event = values, device.make_event()
        if device.runs_behind:
            self._values = device.host_memory(values.shape, values.dtype)
            device.copy(self._values, values)
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether `get` would not wait."""
        return self._event.query()

    def get(self) -> npt.NDArray[Any]:
        """The values on the host; waits for them."""
        self._event.synchronize()
        return self._values.numpy()


class ToDevice:
    """Copies arrays to a device on a stream of its own, while the device computes.

    They pass through pinned memory that is kept: pinning costs more than a copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._stream = self._device.make_stream()
        self._pinned = [Pinned(self._device) for _ in range(2)]  # one is filled, one is copied

    def __call__(self, arrays: Mapping[str, npt.NDArray[Any] | Tensor]) -> dict[str, Tensor]:
        """Tensors for the current stream, which waits for them; the arrays may be overwritten then.

        On a CPU the tensors share the arrays' memory. What are tensors before lie on the device,
        and stay.
        """
        given = {
            name: torch.from_numpy(values) if isinstance(values, np.ndarray) else values
            for name, values in arrays.items()
        }
        if not self._device.runs_behind:
            return given
        self._pinned.reverse()
        pinned, current = self._pinned[0], self._device.current_stream()
        pinned.copied.synchronize()  # the last copy still reads it
        with self._device.on(self._stream):
            for name, tensor in given.items():
                if isinstance(arrays[name], Tensor):
                    continue
                host = pinned.filled(name, tensor)
                given[name] = placed = self._device.memory_for(host)
                self._device.copy(placed, host)
                self._device.used_on(placed, current)
            pinned.copied.record(self._stream)
        current.wait_event(pinned.copied)
        return given


class Pinned:
    """Pinned memory for one batch, and the event of its copy."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}
        self.copied = device.make_event()

    def filled(self, name: str, values: Tensor) -> Tensor:
        """Pinned memory with these values."""
        memory = self._memory.get(name)
        if memory is None or memory.shape != values.shape or memory.dtype != values.dtype:
            memory = self._device.host_memory(values.shape, values.dtype)
            self._memory[name] = memory
        return memory.copy_(values)
