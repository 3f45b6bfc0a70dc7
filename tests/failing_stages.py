"""`benchmarks/gpu.py` with stages that fail: ``python failing_stages.py OPTIONS``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import gpu
from gpu_stages.finding import Finding, Options


def raises(options: Options) -> Iterator[Finding]:
    yield Finding("before the error", 1.0)
    raise ValueError("no such kernel")


def dies(options: Options) -> Iterator[Finding]:
    yield Finding("before the crash", 1.0)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(options: Options) -> Iterator[Finding]:
    print("looks for a GPU", flush=True)
    yield Finding("before the hang", 1.0)
    with subprocess.Popen(["sleep", "1000"]):
        time.sleep(1000)


def works(options: Options) -> Iterator[Finding]:
    yield Finding("is all right", options.small, data=[1, 2])


if __name__ == "__main__":
    gpu.STAGES = tuple(
        gpu.Stage(stage.__name__, f"failing_stages:{stage.__name__}", limit_s)
        for stage, limit_s in ((raises, 60), (dies, 60), (hangs, 5), (works, 60))
    )
    gpu.main()
