"""Passing a lane to another process: the owner's offer, and the writer that results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from penstock.core.specs import SlotSpec
from penstock.transport.shm.arena import Arena
from penstock.transport.shm.attach import close_all
from penstock.transport.shm.store import Geometry, SlotStore, SlotWriter


def offer(store: SlotStore, want: int) -> tuple[int, list[int], dict[str, Any]]:
    """Open a lane of a shared store for another process.

    Returns the lane's index, the descriptors to send, and the lane's geometry as JSON values.
    """
    assert store.arena.fd is not None, "a private store cannot be shared"
    lane = store.open_lane(want)
    where = {"lane": lane, "slots": store.geometry.slots, "lanes": store.geometry.lanes}
    return lane, [store.arena.fd, store.lane_event(lane), store.filled_event], where


@contextmanager
def attached(spec: SlotSpec, reply: dict[str, Any], fds: list[int]) -> Iterator[SlotWriter]:
    """The writer of a lane from `offer`, until the block is left; takes over the descriptors."""
    with ExitStack() as stack:
        stack.callback(close_all, fds)
        geometry = Geometry(spec, reply["slots"], reply["lanes"])
        arena = Arena.attach(fds[0], geometry.nbytes)
        yield SlotWriter(arena, geometry, reply["lane"], *fds[1:])
