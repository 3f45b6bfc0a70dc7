"""Transfers between a host and its device, for which neither waits.

    DeviceUploader.send(arrays)   pinned memory ── copied on a stream of its own ── Upload
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

    def tensors_on_current_stream(self) -> Any:
        """Return the tensors, for use on the current stream, which waits for them.

        The host does not wait.
        """
        current = self._device.current_stream()
        current.wait_event(self._copied)
        for tensor in self._fresh:
            self._device.record_use(tensor, current)
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
        """Start to copy arrays, which may be overwritten when this returns.

        On a CPU nothing is copied: the tensors share the memory of the arrays.

        Args:
            arrays: nested in dicts and tuples. A tensor among them lies on the device already, and
                stays as it is, like numbers and strings.

        Returns:
            The upload of tensors, nested in the same way.
        """
        device = self._device
        if not device.runs_behind:
            return Upload(device, _each_array(arrays, self._shared), device.make_event())

        # Take the pinned memory of the upload before the last, once its copies have run.
        self._pinned.reverse()
        pinned = self._pinned[0]
        pinned.copied.synchronize()
        copied = device.make_event()
        pinned.copied = copied

        copies = _DeviceCopies(device, pinned)
        with device.use_stream(self._stream):
            tensors = _each_array(arrays, copies.tensor_of)
            copied.record(self._stream)
        return Upload(device, tensors, copied, fresh=copies.tensors)

    def fill(self, targets: Mapping[str, Tensor], pinned: Mapping[str, Tensor]) -> Upload:
        """Start to copy ``pinned`` memory to ``targets`` of the same names; both are the caller's.

        The memory must not be changed before `Upload.wait`. Work that reads the targets must have
        been queued before the last `follow`.
        """
        copied = self._device.make_event()
        with self._device.use_stream(self._stream):
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
        self.copied = device.make_event()
        """Passed when the device has read the memory."""
        self._device = device
        self._memory: dict[str, Tensor] = {}

    def filled(self, name: str, values: Tensor) -> Tensor:
        """Return pinned memory with these values; it is that of the last values of this name."""
        memory = self._memory.get(name)
        if memory is None or memory.shape != values.shape or memory.dtype != values.dtype:
            memory = self._device.host_memory(values.shape, values.dtype)
            self._memory[name] = memory
        return memory.copy_(values)


class _DeviceCopies:
    """The copies of one upload."""

    def __init__(self, device: Device, pinned: Pinned) -> None:
        self._device = device
        self._pinned = pinned
        # By the id of an array in memory of its own. The array is kept too, so that its id is not
        # used again.
        self._copies: dict[int, tuple[Array, Tensor]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all memory that was copied."""
        return [tensor for _, tensor in self._copies.values()]

    def tensor_of(self, name: str, array: Array) -> Tensor:
        """Start to copy an array, and return its tensor.

        Arrays that overlap, as obs and next_obs of sequences do, are copied once.
        """
        memory = _memory_of(array)
        if id(memory) in self._copies:
            _, tensor = self._copies[id(memory)]
        else:
            host = self._pinned.filled(name, torch.from_numpy(memory))
            tensor = self._device.memory_for(host)
            self._copies[id(memory)] = memory, tensor
            self._device.copy(tensor, host)
        return tensor if memory is array else _part_of(tensor, memory, array)


class Download:
    """A copy of ``values`` on its way to the host.

    On a GPU ``values`` may be overwritten by later work on the stream; on a CPU they must not be.
    """

    def __init__(self, values: Tensor) -> None:
        """Start to copy ``values`` on the current stream."""
        device = device_of(values.device)
        self._host_values = values
        self._copied = device.make_event()
        if device.runs_behind:
            self._host_values = device.host_memory(values.shape, values.dtype)
            device.copy(self._host_values, values)
            self._copied.record()

    @property
    def is_ready(self) -> bool:
        """Whether `get` would not wait."""
        return self._copied.query()

    def get(self) -> Array:
        """Wait for the values, and return them."""
        self._copied.synchronize()
        return self._host_values.numpy()


def _each_array(value: Any, function: Callable[[str, Array], Any], name: str = "") -> Any:
    """Replace each array in nested dicts and tuples by the result of a function.

    The function is called with the array's name, its keys and indices after dots, and the array.
    """
    if isinstance(value, np.ndarray):
        return function(name, value)
    if isinstance(value, dict):
        return {key: _each_array(child, function, f"{name}.{key}") for key, child in value.items()}
    if isinstance(value, tuple):
        return tuple(_each_array(child, function, f"{name}.{i}") for i, child in enumerate(value))
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


def _part_of(tensor: Tensor, memory: Array, array: Array) -> Tensor:
    """Return the part of the tensor of ``memory`` that has the values of ``array``."""
    first = (_address(array) - _address(memory)) // array.itemsize
    return tensor.view(-1)[first : first + array.size].view(array.shape)


def _address(array: Array) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])
