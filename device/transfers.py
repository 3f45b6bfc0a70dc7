"""Transfers between a host and its device, for which neither waits.

    DeviceUploader.send(arrays)   pinned memory ── copied on a stream of its own ── Upload.arrive()
    Download(tensor)              copied on the stream that computes it ─────────── Download.get()

On a CPU nothing is copied: tensors and arrays share their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.device.choice import device_of
from penstock.device.interface import Device, DeviceEvent

Array = npt.NDArray[Any]


class Upload:
    """Tensors on their way to a device."""

    def __init__(
        self, device: Device, tensors: Any, copied: DeviceEvent, fresh: Sequence[Tensor] = ()
    ) -> None:
        """Describe an upload.

        Args:
            device: of the tensors.
            tensors: the result, nested in dicts and tuples.
            copied: the event of the copies.
            fresh: tensors whose memory is freed with them, and then given to others.
        """
        self._device = device
        self._tensors = tensors
        self._copied = copied
        self._fresh = fresh

    def arrive(self) -> Any:
        """Return the tensors, for use on the current stream, which waits for them.

        The host does not wait.
        """
        current = self._device.current_stream()
        current.wait_event(self._copied)
        for tensor in self._fresh:
            self._device.used_on(tensor, current)
        return self._tensors

    def wait(self) -> None:
        """Wait on the host until the host's memory has been read."""
        self._copied.synchronize()


class DeviceUploader:
    """Copies arrays to a device on a stream of its own, while the device computes.

    Arrays pass through pinned memory that is used again: pinning costs more than a copy. One thread
    sends; another may let the uploads arrive.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.make_stream()
        # One is filled while the other is copied.
        self._pinned = [Pinned(device) for _ in range(2)]

    def enter_thread(self) -> None:
        """Make the device that of the calling thread, before that sends."""
        self._device.enter_thread()

    def send(self, arrays: Any) -> Upload:
        """Start to copy the arrays nested in dicts and tuples; they may be overwritten then.

        On a CPU their tensors share their memory. What is a tensor lies on the device, and stays as
        it is, like numbers and strings.
        """
        device = self._device
        if not device.runs_behind:
            return Upload(device, _each_array(arrays, self._shared), device.make_event())
        self._pinned.reverse()
        pinned = self._pinned[0]
        pinned.copied.synchronize()  # the last copy still reads it
        copied = pinned.copied = device.make_event()
        placed: dict[int, tuple[Array, Tensor]] = {}

        def place(name: str, array: Array) -> Tensor:
            """Arrays that overlap, as obs and next_obs of sequences do, are copied once."""
            whole = _memory_of(array)
            if id(whole) not in placed:  # the array is kept, so that its id is not reused
                host = pinned.filled(name, torch.from_numpy(whole))
                placed[id(whole)] = whole, device.memory_for(host)
                device.copy(placed[id(whole)][1], host)
            tensor = placed[id(whole)][1]
            return tensor if whole is array else _part_of(tensor, whole, array)

        with device.on(self._stream):
            tensors = _each_array(arrays, place)
            copied.record(self._stream)
        return Upload(device, tensors, copied, [tensor for _, tensor in placed.values()])

    def fill(self, targets: Mapping[str, Tensor], pinned: Mapping[str, Tensor]) -> Upload:
        """Start to copy ``pinned`` memory to ``targets`` of the same names; both are the caller's.

        The memory must not be changed before `Upload.wait`. Work that reads the targets must have
        been queued before the last `follow`.
        """
        copied = self._device.make_event()
        with self._device.on(self._stream):
            for name, target in targets.items():
                self._device.copy(target, pinned[name])
            copied.record(self._stream)
        return Upload(self._device, targets, copied)

    def follow(self) -> None:
        """Let later copies run after all that is queued on the current stream."""
        self._stream.wait_stream(self._device.current_stream())

    def _shared(self, name: str, array: Array) -> Tensor:
        """Return the tensor of an array on a device that does not run behind its host."""
        host = torch.from_numpy(array)
        tensor = self._device.memory_for(host)
        self._device.copy(tensor, host)
        return tensor


class Pinned:
    """Pinned memory for the arrays of one upload, by name, and the event of its last copy."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: dict[str, Tensor] = {}
        self.copied = device.make_event()

    def filled(self, name: str, values: Tensor) -> Tensor:
        """Return pinned memory with these values; it is that of the last values of this name."""
        memory = self._memory.get(name)
        if memory is None or memory.shape != values.shape or memory.dtype != values.dtype:
            memory = self._device.host_memory(values.shape, values.dtype)
            self._memory[name] = memory
        return memory.copy_(values)


class Download:
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

    def get(self) -> Array:
        """Wait for the values, and return them."""
        self._event.synchronize()
        return self._values.numpy()


def _each_array(value: Any, function: Callable[[str, Array], Any], name: str = "") -> Any:
    """Apply a function to the name and values of each array in nested dicts and tuples."""
    if isinstance(value, np.ndarray):
        return function(name, value)
    if isinstance(value, dict):
        return {k: _each_array(child, function, f"{name}.{k}") for k, child in value.items()}
    if isinstance(value, tuple):
        return tuple(_each_array(v, function, f"{name}.{i}") for i, v in enumerate(value))
    return value


def _memory_of(array: Array) -> Array:
    """Return the contiguous array of which ``array`` is a contiguous part of at least half.

    Returns ``array`` itself where there is none.
    """
    base = array.base
    if not isinstance(base, np.ndarray) or base.dtype != array.dtype:
        return array
    contiguous = base.flags.c_contiguous and array.flags.c_contiguous
    return base if contiguous and base.nbytes <= 2 * array.nbytes else array


def _part_of(tensor: Tensor, whole: Array, array: Array) -> Tensor:
    """Return the part of the tensor of ``whole`` that has the values of ``array``."""
    first = (_address(array) - _address(whole)) // array.itemsize
    return tensor.view(-1)[first : first + array.size].view(array.shape)


def _address(array: Array) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])
