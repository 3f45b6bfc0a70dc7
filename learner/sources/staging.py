"""Staging batches: slots are gathered into them before the learner trains.

A batch holds ``slots`` unrolls side by side along the environment axis: ``[unroll(+1), slots *
envs, ...]`` per column. Its memory is allocated once and reused; on a GPU it is pinned, copied on a
side stream, and not written again before that copy has ended. Only staging batches are pinned, not
the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.algos.slots import UnrollSummary
from penstock.core.cores import usable_cores
from penstock.core.specs import HEADER, Column, SlotSpec
from penstock.device.choice import device_of
from penstock.device.transfers import DeviceUploader, Upload
from penstock.transport.shm.store import Slot, SlotStore

Array = npt.NDArray[Any]
ArrayCopy = tuple[Array, Array]
"""A target and its source, of one shape. A tuple, as a batch needs one for each slot and column."""

# Blocks of at most so many bytes a slot are taken for all slots at once, as a small copy takes
# numpy about 1 us, whatever its size. Of larger blocks, copying the bytes twice costs more.
SMALL_BLOCK_NBYTES = 1 << 14
# A smaller copy is done before another thread has woken up.
LARGE_NBYTES = 1 << 18
# Most threads that gather for a GPU, and cores for each of them.
MOST_THREADS = 4
CORES_PER_THREAD = 4


class StagingBatch:
    """A batch of unrolls."""

    def __init__(
        self,
        spec: SlotSpec,
        slots: int,
        device: torch.device,
        copier: Copier | None = None,
        record: Sequence[str] = (),
        store: SlotStore | None = None,
    ) -> None:
        """Allocate the batch.

        Args:
            spec: of a slot.
            slots: number of slots in the batch.
            device: on which the learner computes.
            copier: its threads gather; by default only the calling one.
            record: the keys of `env.record`.
            store: in which all slots lie, so that small ones are gathered together; None where
                each slot has its own memory.
        """
        self._device = device_of(device)
        self._copier = copier or Copier(1)
        self._envs = spec.envs
        self._record = record
        self._store = store
        self._slots: npt.NDArray[np.int64] = np.empty(0, np.int64)
        """Indices of the slots that it was gathered from, ``[slots]``."""

        self._host = {
            c.name: self._device.host_memory(_batch_shape(spec, c, slots), torch_dtype(c.dtype))
            for c in spec.columns
        }
        """The columns in the host's memory, which is pinned on a GPU."""
        self.arrays: dict[str, Array] = {name: host.numpy() for name, host in self._host.items()}
        """The same memory, as arrays."""
        self.tensors = {name: self._device.memory_for(host) for name, host in self._host.items()}
        """The columns on the device; on a CPU they share memory with ``arrays``."""

        self._targets = {
            c.name: _split_by_slot(self.arrays[c.name], spec, c, slots) for c in spec.columns
        }
        """The arrays by slot, ``[slots, *]`` before the axes of `Column`."""
        self._small_blocks = {
            block.name: np.empty((slots, *block.shape), block.dtype)
            for block in spec.blocks
            if store is not None and block.nbytes <= SMALL_BLOCK_NBYTES
        }
        """Memory for the small blocks of all slots, ``[slots, *block.shape]`` each."""
        small_columns = spec.columns_of(self._small_blocks)
        self._small_copies = [
            (self._targets[name], column) for name, column in small_columns.items()
        ]
        self._large_columns = [name for name in self.arrays if name not in small_columns]

        self._uploader = DeviceUploader(self._device)
        self._uploader.follow()  # the current stream may use this memory until now
        self._upload: Upload | None = None
        """The last copy to the device."""

        self.weights = np.ones(slots * spec.envs, np.float32)
        self.steps = 0
        """Agent steps in the batch; 0 while it is free."""
        self.version = 0
        """Policy version of the learner when the batch was gathered."""
        self.started_s = 0.0
        """When its oldest slot was begun (CLOCK_MONOTONIC of its writer)."""
        self.headers: npt.NDArray[np.void] = np.empty(0, HEADER)
        """The HEADER records of its slots, ``[slots]``."""
        self.summary: UnrollSummary
        """Returns and versions of the unrolls, after the first `gather`."""

    def gather(self, slots: Sequence[Slot]) -> None:
        """Copy slots into this batch and start the copy to the device."""
        self._device.enter_thread()
        if self._upload is not None:
            self._upload.wait()  # it still reads the pinned memory

        self._slots = np.array([slot.index for slot in slots], np.int64)
        self._copy_columns(slots)

        self.headers = self._headers_of(slots)
        self.steps = sum(self.headers["steps"].tolist())
        self.started_s = float(self.headers["started_s"].min())
        self._upload = self._uploader.fill(self.tensors, self._host)
        self.summary = UnrollSummary.of(self.arrays, self._record)

    def _copy_columns(self, slots: Sequence[Slot]) -> None:
        """Copy the columns of slots: those of small blocks together, the others one by one."""
        copies = [
            (self._targets[name][i], slot.columns[name])
            for i, slot in enumerate(slots)
            for name in self._large_columns
        ]
        self._copier(copies)

        if self._small_blocks:
            assert self._store is not None, "without a store each slot has its own memory"
            for name, taken in self._small_blocks.items():
                # With a mode that changes no valid index, numpy needs no further copy.
                self._store.blocks[name].take(self._slots, axis=0, out=taken, mode="clip")
            _copy(self._small_copies)

    def _headers_of(self, slots: Sequence[Slot]) -> npt.NDArray[np.void]:
        """Returns copies of the HEADER records of slots, ``[slots]``."""
        if self._store is not None:
            return self._store.headers[self._slots]
        return np.stack([slot.header for slot in slots])

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        """The slot and environment of each unroll in the store, int64 ``[slots * envs]``.

        The slots are free again, as unrolls are trained on once.
        """
        first_keys = self._slots * self._envs
        keys: npt.NDArray[np.int64] = np.add.outer(first_keys, np.arange(self._envs)).reshape(-1)
        return keys

    @property
    def versions(self) -> npt.NDArray[np.integer[Any]]:
        return self.arrays["policy_version"]

    def wait_on_device(self) -> None:
        """Make the current stream wait for the copy, without stopping the host."""
        assert self._upload is not None, "the batch was not gathered"
        self._upload.tensors_on_current_stream()

    def on_last_use(self) -> None:
        """Note that the learner has queued its last use; the next upload waits for that."""
        self._uploader.follow()
        self.steps = 0


def _batch_shape(spec: SlotSpec, column: Column, slots: int) -> tuple[int, ...]:
    """Returns the shape of a column in a batch, whose last axis of rows has those of all slots."""
    *rows, last = spec.rows_of(column)
    return (*rows, slots * last, *column.shape)


def _split_by_slot(array: Array, spec: SlotSpec, column: Column, slots: int) -> Array:
    """Returns a column of a batch as ``[slots, *]`` before the axes of `Column`, without a copy."""
    *rows, last = spec.rows_of(column)
    split = array.reshape(*rows, slots, last, *column.shape)
    return np.moveaxis(split, len(rows), 0)


def torch_dtype(dtype: str) -> torch.dtype:
    """Returns the torch type of a numpy type."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


class Copier:
    """Copies many arrays with several threads.

    numpy releases the interpreter lock for a large copy, and one core reaches only a part of a
    machine's memory bandwidth. The threads start with the first large copy; end them with `close`.
    """

    def __init__(self, threads: int) -> None:
        """``threads`` includes the calling one."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "copier") if threads > 1 else None

    def __call__(self, copies: Sequence[ArrayCopy]) -> None:
        """Make all copies; each thread copies an equal share of the rows of large arrays.

        An exception of a thread is raised here, after all threads have ended.
        """
        if self._pool is None:
            _copy(copies)
            return

        large = [(target, source) for target, source in copies if target.nbytes >= LARGE_NBYTES]
        small = [(target, source) for target, source in copies if target.nbytes < LARGE_NBYTES]
        shares = [self._share(large, number) for number in range(self._threads)]
        futures = [self._pool.submit(_copy, share) for share in shares[1:] if share]
        try:
            _copy(shares[0])
            _copy(small)
        finally:
            for future in futures:  # the memory may not be used before they are done
                future.exception()
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _share(self, copies: Sequence[ArrayCopy], number: int) -> list[ArrayCopy]:
        """Returns the copies of the rows that belong to thread ``number``."""
        share = []
        for target, source in copies:
            first = len(target) * number // self._threads
            stop = len(target) * (number + 1) // self._threads
            share.append((target[first:stop], source[first:stop]))
        return share


def gather_threads(wanted: int | None, device: torch.device) -> int:
    """Returns the number of threads that gather for a learner on a device.

    ``wanted`` is `learner.gather_threads`. If that is null, a CPU learner uses one thread.
    """
    if wanted is not None:
        return wanted
    if not device_of(device).runs_behind:
        return 1
    return max(1, min(MOST_THREADS, int(usable_cores()) // CORES_PER_THREAD))


def _copy(copies: Sequence[ArrayCopy]) -> None:
    for target, source in copies:
        np.copyto(target, source)
