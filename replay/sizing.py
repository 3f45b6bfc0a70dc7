"""Whether a replay's memory is there, asked before any of it is taken."""

from __future__ import annotations

from penstock.core import cgroup
from penstock.core.specs import SlotSpec
from penstock.replay.errors import ReplayError
from penstock.replay.table import LANES_PRIVATE, LANES_SHARED
from penstock.transport.shm.arena import available_nbytes
from penstock.transport.shm.store import Geometry


def nbytes_of(spec: SlotSpec, slots: int, *, shared: bool) -> int:
    """Bytes of a table: its slots, and what says which rows count."""
    geometry = Geometry(spec, slots, LANES_SHARED if shared else LANES_PRIVATE)
    return geometry.nbytes + slots * spec.unroll * spec.envs


def refuse_what_cannot_fit(spec: SlotSpec, slots: int, *, shared: bool, capacity: int) -> None:
    """Raise ReplayError where the host, or the control group, has not that much memory left."""
    needed = nbytes_of(spec, slots, shared=shared)
    free, where = available_nbytes(), "this host"
    allowed = cgroup.memory_left_nbytes()
    if allowed is not None and allowed < free:
        free, where = allowed, "its control group"
    if needed > free:
        fits = max(0, int(capacity * free / needed))
        raise ReplayError(
            f"capacity {capacity} needs {needed / 1e9:.2f} GB and {where} has {free / 1e9:.2f} GB "
            f"left; lower capacity to about {fits}"
        )
