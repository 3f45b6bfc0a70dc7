"""Parts of a source checkout that an installed package lacks: its commit, and benchmarks/."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import penstock
from penstock.configs.errors import UserError

CHECKOUT = Path(penstock.__file__).parents[1]
BENCHMARKS = CHECKOUT / "benchmarks"


def benchmark(module: str, wanted_by: str) -> ModuleType:
    """Import a module of benchmarks/. Outside a checkout raises UserError with the name of the
    command ``wanted_by``."""
    # Beside an installed package lies site-packages, where others may have left such a folder.
    if not (BENCHMARKS.is_dir() and (CHECKOUT / "pyproject.toml").is_file()):
        raise UserError(
            f"{wanted_by} needs a checkout of Penstock: it is part of benchmarks/, which an "
            "installed package does not contain"
        )
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(module)


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
