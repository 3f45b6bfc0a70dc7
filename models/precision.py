"""Whether the processor gains by bfloat16. Imports no torch."""

from __future__ import annotations

from pathlib import Path

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def cpu_gains_by_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies bfloat16 faster than float32."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not BF16_FLAGS.isdisjoint(flags.split())
