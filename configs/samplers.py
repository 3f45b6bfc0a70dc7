"""The samplers of replay buffers, by the names that runs, commands and snapshots give them."""

from __future__ import annotations

SAMPLERS: dict[str, str] = {
    "uniform": "penstock.replay.samplers:Uniform",
    "prioritized": "penstock.replay.samplers:Prioritized",
}
"""``module:class`` of each, a `penstock.replay.samplers.NamedSampler`."""


def validated_sampler(name: str) -> str:
    """Returns ``name``. Raises ValueError if no sampler has it."""
    if name not in SAMPLERS:
        raise ValueError(f"no sampler is called {name}; choose from {', '.join(SAMPLERS)}")
    return name
