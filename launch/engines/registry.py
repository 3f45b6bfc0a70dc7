"""The engines by name.

To add one, write its folder or file here, and a line to `ENGINES` (docs/extending/engine.md).
"""

from __future__ import annotations

from penstock.core.interfaces import Engine, EngineContext, EngineFactory
from penstock.launch.engines.local import LocalEngine

LOCAL = "local"


def _ray(context: EngineContext) -> Engine:
    """Make the Ray engine, whose module needs Ray."""
    from penstock.launch.engines.ray_engine import RayEngine

    return RayEngine(context)


ENGINES: dict[str, EngineFactory] = {LOCAL: LocalEngine, "ray": _ray}


def make_engine(name: str, context: EngineContext) -> Engine:
    """Make the engine of that name for one run."""
    return ENGINES[name](context)
