"""A writer's side of one lane of a slot store; see `penstock.transport.shm.store`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from penstock.transport.shm.arena import Arena
from penstock.transport.shm.store import Geometry, Slot, drain_event
from penstock.transport.wait import wait_readable


class SlotWriter:
    """A writer's side of one lane. One thread at a time."""

    def __init__(
        self, arena: Arena, geometry: Geometry, lane: int, lent_event: int, filled_event: int
    ) -> None:
        self.spec = geometry.spec
        self.blocks = geometry.blocks(arena)
        self._words = geometry.lane(arena, lane)
        self.event = lent_event  # readable when slots were lent
        self._filled_event = filled_event
        self._kept: list[int] = []
        self._slot = lru_cache(maxsize=None)(lambda index: geometry.slot(arena, index))

    @property
    def available(self) -> int:
        """Slots that `acquire` would give without waiting."""
        return len(self._kept) + len(self._words.lent)

    @property
    def want(self) -> int:
        """How many slots this writer asks to hold at a time."""
        return self._words.want

    @want.setter
    def want(self, slots: int) -> None:
        self._words.want = slots
        os.eventfd_write(self._filled_event, 1)  # wakes the store to follow

    def acquire(self, timeout_s: float) -> Slot | None:
        """A lent slot to fill, or None when none was lent in time."""
        if self._kept:
            return self._slot(self._kept.pop())
        deadline_s = time.monotonic() + timeout_s
        while (index := self._words.lent.pop()) is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not wait_readable(self.event, left_s):
                return None
            drain_event(self.event)
        return self._slot(index)

    def publish(self, slot: Slot) -> None:
        self._words.filled.push(slot.index)
        os.eventfd_write(self._filled_event, 1)

    def give_back(self, slot: Slot) -> None:
        """Keep an unpublished slot for the next `acquire`."""
        self._kept.append(slot.index)

    @contextmanager
    def slot(self, timeout_s: float) -> Iterator[Slot | None]:
        """A slot to fill, published on leaving the block; an exception publishes nothing."""
        slot = self.acquire(timeout_s)
        if slot is None:
            yield None
            return
        try:
            yield slot
        except BaseException:
            self.give_back(slot)
            raise
        self.publish(slot)
