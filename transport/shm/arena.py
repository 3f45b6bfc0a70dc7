"""Memory for slots: private with huge pages within a process, a memfd between them.

A memfd has no name to leak, survives the death of processes that map it and is refused at creation
when memory is short; `multiprocessing.SharedMemory` fails all three (docs/architecture.md, Memory).

`Prefault` touches a large arena ahead of its first use. The kernel allocates a page when it is
first touched, at up to 9 us each, which the first writes would pay.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.core import cgroup

HUGE_PAGE_NBYTES = 2 << 20
MEMINFO = Path("/proc/meminfo")
# Smaller arenas are touched soon enough without `Prefault`.
LEAST_NBYTES = 64 << 20
# `Prefault` touches so many bytes a call; meanwhile no other mapping can be changed.
PIECE_NBYTES = 4 << 20
# An advice of linux/mman.h for which Python has no name.
MADV_POPULATE_WRITE = 23
LOWEST_NICENESS = 19
_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
_fence_lock = threading.Lock()


class Arena:
    """A piece of memory, zeroed when it is made by `private` or `shared`."""

    def __init__(self, mapping: mmap.mmap, fd: int | None) -> None:
        self.fd = fd
        """The descriptor by which other processes may map the memory; None if it is private."""
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        """All bytes."""
        self.words = memoryview(mapping).cast("q")
        """The same as int64 words; a load or store takes 40 ns."""

    @classmethod
    def private(cls, nbytes: int) -> Arena:
        """Make memory of this process, in huge pages where it is large enough for one."""
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return cls(mapping, None)

    @classmethod
    def shared(
        cls, nbytes: int, name: str, first: Sequence[tuple[int, int]] | None = None
    ) -> Arena:
        """Make memory that other processes can map.

        Args:
            nbytes: its size.
            name: what it holds, for an error.
            first: starts and sizes, in bytes, of the ranges that are allocated now; `commit`
                allocates others. None: all.

        Raises:
            UserError: the host lacks the memory of ``first``.
        """
        ranges = [(0, nbytes)] if first is None else first
        needed_nbytes = sum(size for _, size in ranges)
        with _shortage(needed_nbytes, name):
            # This size may be that of a learner of another host, which may ask for any.
            _check_available(needed_nbytes)
            fd = os.memfd_create(f"penstock-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(fd, nbytes)
                arena = cls(mmap.mmap(fd, nbytes), fd)
                for start, size in ranges:
                    arena.commit(start, size)
                # Actors of release 0.1 refuse memory that is not sealed.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            except OSError:
                os.close(fd)
                raise
        return arena

    def commit(self, start: int, nbytes: int) -> None:
        """Allocate a range. Raises OSError when the host lacks the memory."""
        assert self.fd is not None
        _check_available(nbytes)
        os.posix_fallocate(self.fd, start, nbytes)

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map a descriptor received from the owner; takes over the descriptor."""
        return cls(mmap.mmap(fd, 0), fd)

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last array over it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def available_nbytes() -> int:
    """Return the memory of this host that is available without swapping, in bytes."""
    lines = MEMINFO.read_text().splitlines()
    line = next(line for line in lines if line.startswith("MemAvailable:"))
    kibibytes = int(line.split()[1])
    return kibibytes << 10


def _check_available(nbytes: int) -> None:
    """Raise OSError where the host has less memory than ``nbytes``.

    Requesting more than is available does not fail: it triggers the kernel's out-of-memory killer.
    """
    available = available_nbytes()
    if nbytes > available:
        raise OSError(errno.ENOMEM, f"{available / 1e9:.2f} GB are free")


@contextmanager
def _shortage(nbytes: int, name: str) -> Iterator[None]:
    """Turn an OSError in the block into a UserError about ``nbytes`` of memory for ``name``."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{nbytes / 1e9:.2f} GB of shared memory for {name} cannot be had ({error.strerror}); "
            "use fewer or smaller slots: transport.slots, actors.envs, actors.unroll"
        ) from error


def fence() -> None:
    """Order the stores before it and the loads after it, where the processor does not.

    On x86-64 stores become visible in order; other processors get a fence from an uncontended lock
    on each side.
    """
    if not _ORDERED_STORES:
        with _fence_lock:
            pass


class Prefault:
    """Touches all pages of ``arena`` in a background thread, until done or `stop`.

    A small arena gets no thread. The thread touches 4 MiB a call, without changing the content and
    with the interpreter lock released. It has the lowest priority, and ends early where the kernel
    is too old (before 5.14) or where memory has become scarce since the arena was made.
    """

    def __init__(self, arena: Arena) -> None:
        self._memory = arena.bytes
        # Shared memory is allocated already, and is only mapped here.
        self._allocated = arena.fd is not None
        self._stopped = False
        self._thread: threading.Thread | None = None
        if arena.bytes.nbytes >= LEAST_NBYTES:
            self._thread = threading.Thread(target=self._run, name="replay-prefault", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, within the time that one piece takes."""
        self._stopped = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        """Touch piece after piece, in a thread of the lowest priority."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_NICENESS)
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

        address = self._memory.ctypes.data
        nbytes = self._memory.nbytes
        for start in range(0, nbytes, PIECE_NBYTES):
            remaining = nbytes - start
            if self._stopped or not (self._allocated or remaining <= _free_nbytes()):
                return
            error = madvise(address + start, min(remaining, PIECE_NBYTES), MADV_POPULATE_WRITE)
            if error:
                return


def _free_nbytes() -> int:
    """The memory that this process may still take, in bytes, of its host and of its cgroup."""
    cgroup_nbytes = cgroup.memory_left_nbytes()
    host_nbytes = available_nbytes()
    return host_nbytes if cgroup_nbytes is None else min(host_nbytes, cgroup_nbytes)
