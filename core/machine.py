"""The machine and the versions of a measurement or a run: what a reader needs to compare it with
another."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import penstock
from penstock.core.files import write_atomic
from penstock.core.processor import processor

PACKAGES = (
    *("torch", "numpy", "pyzmq", "gymnasium", "ale-py", "cramjam"),
    *("box2d", "envpool", "minatar", "mujoco", "vizdoom"),
)
VERSIONS = "versions.json"  # of a run
CHECKOUT = Path(penstock.__file__).parents[1]
GPUS = Path("/proc/driver/nvidia/gpus")


def machine() -> dict[str, Any]:
    """Processor, the cores that this process may use, GPUs, and versions; ``commit`` is of a
    checkout, and "unknown" for an installed package."""
    return {
        "cpu": processor().model,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_models(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := version_of(name))},
        "penstock": penstock.__version__,
        "commit": commit_of(CHECKOUT),
    }


def gpu_models(folder: Path = GPUS) -> list[str]:
    """The models of NVIDIA's GPUs as their driver names them; none without the driver. torch would
    take seconds to import."""
    found = []
    for path in sorted(folder.glob("*/information")):
        lines = path.read_text().splitlines()
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def version_of(package: str) -> str | None:
    """What is installed; None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit_of(checkout: Path) -> str:
    """The commit of a checkout as `git describe` names it; "unknown" without git."""
    if not (checkout / ".git").exists():  # site-packages may lie in a repository of the user's
        return "unknown"
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=checkout, check=False)
    except OSError:  # no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def record_versions(run_dir: Path) -> None:
    """Add `machine` to `versions.json` of a run, with the time, unless nothing has changed since
    its last start. Raises OSError."""
    known, now = recorded_versions(run_dir), machine()
    if not known or {**known[-1], **now} != known[-1]:
        starts = [*known, {"time": round(time.time(), 3), **now}]
        write_atomic(run_dir / VERSIONS, json.dumps({"starts": starts}, indent=2) + "\n")


def recorded_versions(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has recorded at its starts, the oldest first; empty if nothing can be read."""
    try:
        starts = json.loads((run_dir / VERSIONS).read_text())["starts"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []
    return [start for start in starts if isinstance(start, dict)] if type(starts) is list else []
