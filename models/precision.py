"""Whether the processor computes faster in bfloat16. Imports torch only to time it.

Instructions for bfloat16 are not enough: with them a Nature CNN takes 0.6 times as long to train as
in float32 on an EPYC (Zen 4), and 1.5 times as long on a Xeon. So a convolution is timed.
"""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
ROUNDS = 5  # of both formats in turn; the fastest counts, as other work only lengthens times


def cpu_gains_by_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor computes bfloat16 faster than float32."""
    return has_bf16(cpuinfo) and bf16_is_faster()


def has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor has instructions for bfloat16."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not BF16_FLAGS.isdisjoint(flags.split())


@cache
def bf16_is_faster() -> bool:
    """Whether the forward and backward pass of a convolution is faster in bfloat16, in the layout
    that suits both formats. Takes about 0.1 s, once in a process."""
    import torch

    formats = (torch.float32, torch.bfloat16)
    runs = [[_convolution_s(dtype) for dtype in formats] for _ in range(ROUNDS)]
    in_float32, in_bfloat16 = (min(times) for times in zip(*runs, strict=True))
    return bool(in_bfloat16 < in_float32)


def _convolution_s(dtype: torch.dtype) -> float:
    """Seconds of a pass through the Nature CNN's second convolution. No random numbers are drawn,
    as the generator is that of the run."""
    import torch

    frames = torch.ones(32, 32, 20, 20, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(64, 32, 4, 4, dtype=dtype)
    began_s = time.perf_counter()
    with torch.enable_grad():
        out = torch.conv2d(frames.requires_grad_(), weight.requires_grad_(), stride=2)
        out.sum().backward()
    return time.perf_counter() - began_s
