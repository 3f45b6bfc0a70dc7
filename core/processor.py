"""The model of the processor, and its instructions, by `/proc/cpuinfo`."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


class Processor(NamedTuple):
    """A processor as the kernel names it; without `/proc/cpuinfo` it has no flags."""

    model: str
    flags: frozenset[str]

    @property
    def has_bf16(self) -> bool:
        """Whether it has instructions for bfloat16. They may be slower than float32's: time it."""
        return not BF16_FLAGS.isdisjoint(self.flags)


@cache
def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """The processor of this machine. It is read once, as the kernel takes long to describe many."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return Processor(platform.processor(), frozenset())
    pairs = [line.partition(":") for line in lines]
    found = {name.strip(): text.strip() for name, _, text in reversed(pairs)}
    return Processor(
        found.get("model name", platform.processor()), frozenset(found.get("flags", "").split())
    )
