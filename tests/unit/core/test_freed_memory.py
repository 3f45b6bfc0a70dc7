"""Freed memory is kept by the allocator until it is returned to the system."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes
from pathlib import Path
from penstock.core.memory import give_back_memory, keep_freed_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
keep_freed_memory()
before = resident()
blocks = [libc.malloc(100_000) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
libc.malloc(100)  # lies above all of these, so that they cannot leave from the end
for block in blocks:
    libc.free(block)
kept = resident()
give_back_memory()
print((kept - before) // 1_000_000, (resident() - before) // 1_000_000)
"""


def test_freed_memory_is_kept_until_returned_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    kept, left = map(int, done.stdout.split())
    assert kept >= 95, "of 100 MB"
    assert left <= 10
