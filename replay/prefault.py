"""Touches a buffer's memory ahead of its first use, in the background.

The kernel gives a page when it is first touched, at up to 9 us each, which the first round of adds
would pay. A thread has it give them earlier, 4 MiB a call, without changing what is in them and
with the interpreter lock released. It has the lowest priority, and ends early where the kernel is
too old (before 5.14) or where memory has become scarce since the buffer was made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading

from penstock.core import cgroup
from penstock.transport.shm.arena import Arena, available_nbytes

LEAST_NBYTES = 64 << 20  # what is smaller is touched soon enough
PIECE_NBYTES = 4 << 20  # while one is touched, nobody else's memory can be mapped
MADV_POPULATE_WRITE = 23
LOWEST = 19  # niceness


class Prefault:
    """A thread over ``arena`` until all of it was touched, or `stop`; none for a small one."""

    def __init__(self, arena: Arena) -> None:
        self._memory = arena.bytes
        self._taken = arena.fd is not None  # shared memory has its pages, and is only mapped here
        self._stopped = False
        self._thread: threading.Thread | None = None
        if arena.bytes.nbytes >= LEAST_NBYTES:
            self._thread = threading.Thread(target=self._run, name="replay-prefault", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, within the time that a piece takes."""
        self._stopped = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def join(self, timeout_s: float) -> None:
        """Wait until all was touched."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        address, nbytes = self._memory.ctypes.data, self._memory.nbytes
        for start in range(0, nbytes, PIECE_NBYTES):
            left = nbytes - start
            if self._stopped or not (self._taken or left <= _free_nbytes()):
                return
            if madvise(address + start, min(left, PIECE_NBYTES), MADV_POPULATE_WRITE):
                return


def _free_nbytes() -> int:
    allowed = cgroup.memory_left_nbytes()
    free = available_nbytes()
    return free if allowed is None else min(free, allowed)
