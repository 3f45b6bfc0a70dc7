"""The part of a source checkout that an installed package lacks: benchmarks/."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from penstock.configs.errors import UserError
from penstock.core.machine import CHECKOUT

BENCHMARKS = CHECKOUT / "benchmarks"


def benchmark(module: str, wanted_by: str) -> ModuleType:
    """Import a module of benchmarks/.

    Raises:
        UserError: outside a checkout; it names the command ``wanted_by``.
    """
    # Beside an installed package lies site-packages, where others may have left such a folder.
    if not (BENCHMARKS.is_dir() and (CHECKOUT / "pyproject.toml").is_file()):
        raise UserError(
            f"{wanted_by} needs a checkout of Penstock: it is part of benchmarks/, which an "
            "installed package does not contain"
        )

    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(module)
