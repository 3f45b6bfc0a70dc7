"""Memory for slots: private with huge pages within a process, a sealed-size memfd between them.

A memfd has no name to leak, survives the death of those who map it and is refused at creation when
memory is short; `multiprocessing.SharedMemory` fails all three (docs/architecture.md, Memory).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError

HUGE_PAGE_NBYTES = 2 << 20
MEMINFO = Path("/proc/meminfo")


class Arena:
    """``nbytes`` of zeroed memory; ``fd`` is its descriptor when other processes may map it."""

    def __init__(self, mapping: mmap.mmap, fd: int | None) -> None:
        self.fd = fd
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.words = memoryview(mapping).cast("q")  # int64 loads and stores, 40 ns each

    @classmethod
    def private(cls, nbytes: int) -> Arena:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= HUGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return cls(mapping, None)

    @classmethod
    def shared(cls, nbytes: int, name: str) -> Arena:
        """Raises UserError when the host has not that much memory left."""
        # Asking for more than there is does not fail: it wakes the kernel's out-of-memory killer.
        available = available_nbytes()
        if nbytes > available:
            raise _no_memory(nbytes, name, f"{available / 1e9:.2f} GB are free")
        fd = os.memfd_create(f"penstock-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            os.close(fd)
            raise _no_memory(nbytes, name, error.strerror) from error
        # Nobody can shrink it under those who have mapped it, which would end them with SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return cls(mmap.mmap(fd, nbytes), fd)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Arena:
        """Map a descriptor received from the owner, of which ``nbytes`` are used; takes over the
        descriptor. Raises ValueError where it holds less: reading on would be SIGBUS."""
        size = os.fstat(fd).st_size
        if size < nbytes or nbytes <= 0:
            raise ValueError(f"a memory of {size} bytes for {nbytes}")
        return cls(mmap.mmap(fd, size), fd)

    def close(self) -> None:
        """Give the descriptor back; the memory goes when the last array over it does."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def available_nbytes() -> int:
    """Memory of this host that can be had without pushing anything out."""
    lines = MEMINFO.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _no_memory(nbytes: int, name: str, why: str | None) -> UserError:
    return UserError(
        f"{nbytes / 1e9:.2f} GB of shared memory for {name} cannot be had ({why}); use fewer or "
        "smaller slots: transport.slots, actors.envs, actors.unroll"
    )
