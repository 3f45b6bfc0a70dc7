"""The machine and the versions of a measurement or a run.

A reader needs them to compare it with another one. The processor's instructions decide how a
network is computed fastest.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import penstock
from penstock.core.files import write_atomic

PACKAGES = (
    *("torch", "numpy", "pyzmq", "gymnasium", "ale-py", "cramjam"),
    *("box2d", "envpool", "minatar", "mujoco", "vizdoom"),
)
# The name of a file in a run's folder.
VERSIONS = "versions.json"
CHECKOUT = Path(penstock.__file__).parents[1]
GPUS = Path("/proc/driver/nvidia/gpus")
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


class Processor(NamedTuple):
    """A processor as the kernel describes it; without `/proc/cpuinfo` it has no flags."""

    model: str
    flags: frozenset[str]

    @property
    def has_bf16(self) -> bool:
        """Whether it has instructions for bfloat16. They may be slower than float32's: time it."""
        return not BF16_FLAGS.isdisjoint(self.flags)


@cache
def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """Returns the processor of this machine.

    The file is read once, as the kernel takes long to describe many cores.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return Processor(platform.processor(), frozenset())

    # Each core has lines with the same names. Backwards, so that the first core's remain.
    fields: dict[str, str] = {}
    for line in reversed(lines):
        name, _, text = line.partition(":")
        fields[name.strip()] = text.strip()

    model = fields.get("model name", platform.processor())
    return Processor(model, flags=frozenset(fields.get("flags", "").split()))


def machine() -> dict[str, Any]:
    """Returns a description of this machine as JSON values.

    They are the processor, the number of cores that this process may use, the GPUs, and versions.
    "commit" is that of a checkout, and "unknown" for an installed package.
    """
    versions = {name: version_of(name) for name in PACKAGES}
    return {
        "cpu": processor().model,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_models(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name, version in versions.items() if version},
        "penstock": penstock.__version__,
        "commit": commit_of(CHECKOUT),
    }


def gpu_models(folder: Path = GPUS) -> list[str]:
    """Returns the models of NVIDIA's GPUs as their driver names them; none without the driver.

    They are read from the driver's files, as torch would take seconds to import.
    """
    models: list[str] = []
    for path in sorted(folder.glob("*/information")):
        lines = path.read_text().splitlines()
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return models


def version_of(package: str) -> str | None:
    """Returns the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit_of(checkout: Path) -> str:
    """Returns the commit of a checkout as `git describe` names it; "unknown" without git."""
    # Without this check git would look in the folders above, and site-packages may lie in a
    # repository of the user's.
    if not (checkout / ".git").exists():
        return "unknown"

    command = ["git", "describe", "--always", "--dirty"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, cwd=checkout, check=False)
    except OSError:  # git is not installed
        return "unknown"
    return process.stdout.strip() or "unknown"


def record_versions(run_dir: Path) -> None:
    """Add a start of a run to its `versions.json`: `machine`, and the time in seconds.

    Nothing is added if the last start had the same machine and versions. Raises OSError.
    """
    starts = recorded_versions(run_dir)
    versions = machine()
    has_changed = not starts or {**starts[-1], **versions} != starts[-1]
    if has_changed:
        starts.append({"time": round(time.time(), 3), **versions})
        write_atomic(run_dir / VERSIONS, json.dumps({"starts": starts}, indent=2) + "\n")


def recorded_versions(run_dir: Path) -> list[dict[str, Any]]:
    """Returns what a run has recorded at its starts, the oldest first; empty if that is damaged."""
    try:
        starts = json.loads((run_dir / VERSIONS).read_text())["starts"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    if type(starts) is not list:
        return []
    return [start for start in starts if isinstance(start, dict)]
