"""What a reader of a measurement must know to compare it with one of their own."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import penstock
from penstock.bench.checkout import CHECKOUT, commit_of

PACKAGES = ("torch", "numpy", "pyzmq", "gymnasium", "ale-py", "cramjam")


def machine() -> dict[str, Any]:
    """Processor, the cores that this process may use, and versions; ``commit`` is of a checkout,
    and "unknown" for an installed package."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := version_of(name))},
        "penstock": penstock.__version__,
        "commit": commit_of(CHECKOUT),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def version_of(package: str) -> str | None:
    """What is installed; None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
