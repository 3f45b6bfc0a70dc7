"""Transfers between host and GPU that do not wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class ToHost:
    """A copy of ``values`` on its way to the host.

    On a GPU ``values`` may be overwritten by later work on the stream; on a CPU they must not be.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._event = values, None
        if values.device.type == "cuda":
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether `get` would not wait."""
        return self._event is None or self._event.query()

    def get(self) -> npt.NDArray[Any]:
        """The values on the host; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.numpy()


class ToDevice:
    """Copies arrays to a device on a stream of its own, while the GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, arrays: Mapping[str, npt.NDArray[Any] | Tensor]) -> dict[str, Tensor]:
        """Tensors for the current stream, which waits for them; the arrays may be overwritten then.

        On a CPU the tensors share the arrays' memory.
        """
        given = {
            name: torch.from_numpy(values) if isinstance(values, np.ndarray) else values
            for name, values in arrays.items()
        }
        if self._stream is None:
            return given
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            placed = {
                # Tensors on the device were made on the current stream, and stay.
                name: v if v.is_cuda else v.pin_memory().to(self._device, non_blocking=True)
                for name, v in given.items()
            }
        current.wait_stream(self._stream)
        for name, tensor in placed.items():
            if tensor is not given[name]:
                tensor.record_stream(current)
        return placed
