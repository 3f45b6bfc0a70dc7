"""A lane passed through a door: what the store's owner gives, and the writer that comes of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.core.specs import SlotSpec
from penstock.transport.shm.arena import Arena
from penstock.transport.shm.slot_writer import SlotWriter
from penstock.transport.shm.store import Geometry, SlotStore


def offer(store: SlotStore, want: int) -> tuple[int, list[int], dict[str, Any]]:
    """Open a lane of a shared store for another process: lane, descriptors, and where it lies."""
    assert store.arena.fd is not None, "a private store cannot be shared"
    lane = store.open_lane(want)
    where = {"lane": lane, "slots": store.geometry.slots, "lanes": store.geometry.lanes}
    return lane, [store.arena.fd, store.lane_event(lane), store.filled_event], where


@contextmanager
def attached(spec: SlotSpec, reply: dict[str, Any], fds: list[int]) -> Iterator[SlotWriter]:
    """The writer of a lane that `offer` gave; takes over the descriptors."""
    store_fd, lent_event, filled_event = fds
    arena = Arena.attach(store_fd)
    try:
        geometry = Geometry(spec, reply["slots"], reply["lanes"])
        yield SlotWriter(arena, geometry, reply["lane"], lent_event, filled_event)
    finally:
        arena.close()
        os.close(lent_event)
        os.close(filled_event)
