"""What a client has added and its server has not stored yet: slots, sent and sent again.

The slots are those of a store of the client's own, so a step is written once, in place, and a slot
stays as it is until the server says that it has it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.core.specs import SlotSpec
from penstock.replay.writer import Lane, Steps
from penstock.transport import wire
from penstock.transport.shm.slot_writer import SlotWriter
from penstock.transport.shm.store import Slot, SlotStore
from penstock.transport.wire import SlotEncoder

UNSTORED = 4  # slots that may be on their way
RESEND_S = 1.0

Send = Callable[[wire.Parts], bool]


class _OutLane(Lane):
    """A lane whose slots come back when ``pump`` hears that the server has them."""

    def __init__(self, writer: SlotWriter, pump: Callable[[float], None]) -> None:
        super().__init__(writer, 0, lambda: False)
        self._pump = pump
        self.published = 0

    def publish(self, slot: Slot) -> None:
        super().publish(slot)
        self.published += 1

    def _wait(self, timeout_s: float) -> Slot:
        ends_s = time.monotonic() + timeout_s
        while (slot := self._writer.acquire(0)) is None:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"the replay server has not taken what was added before within {timeout_s:g} "
                    "s: its rate limiter holds writers back, or it is gone; see stats()"
                )
            self._pump(min(left_s, 0.1))
        return slot

    def number(self, sequence: int) -> None:
        """What the next slot is called."""
        self._sequence = sequence


class Outbox:
    """``send`` gives parts to the server, or says that it cannot now."""

    def __init__(
        self,
        spec: SlotSpec,
        about: dict[str, Any],
        codec: str,
        send: Send,
        pump: Callable[[float], None],
    ) -> None:
        self._store = SlotStore(spec, UNSTORED + 1, 1, shared=False)
        index = self._store.open_lane(UNSTORED + 1)
        event = self._store.lane_event(index)
        geometry, filled = self._store.geometry, self._store.filled_event
        self._lane = _OutLane(SlotWriter(self._store.arena, geometry, index, event, filled), pump)
        self.steps = Steps(self._lane, about)
        self._encoder = SlotEncoder(spec, codec)
        self._send = send
        self._unstored: deque[Slot] = deque()
        self._sent = 0  # of those, how many are on their way
        self._sent_s = 0.0
        self._shipped = 0
        self.run_id = 0

    def __len__(self) -> int:
        return len(self._unstored)

    @property
    def has_news(self) -> bool:
        """Whether a slot was published since the last `ship`."""
        return self._lane.published > self._shipped

    def ship(self) -> None:
        """Send what was published, and again what has found no answer."""
        self._shipped = self._lane.published
        self._store.collect()
        while self._store.ready:
            self._unstored.append(self._store.slots[self._store.ready.popleft()])
        if self._sent and time.monotonic() - self._sent_s > RESEND_S:
            self._sent = 0
        while self._sent < len(self._unstored):
            slot = self._unstored[self._sent]
            if not self._send(self._parts(slot)):
                return
            self._sent += 1
            self._sent_s = time.monotonic()

    def stored(self, sequence: int) -> None:
        """The server has all slots before ``sequence``."""
        while self._unstored and int(self._unstored[0].header["sequence"]) < sequence:
            self._store.release(self._unstored.popleft().index)
            self._sent = max(0, self._sent - 1)
            self._sent_s = time.monotonic()

    def restart(self, run_id: int) -> None:
        """The server knows nothing of this stream: it begins again with what is not stored."""
        self.run_id = run_id
        for sequence, slot in enumerate(self._unstored):
            slot.header["sequence"] = sequence
        self._lane.number(len(self._unstored))
        self._sent = 0

    def _parts(self, slot: Slot) -> wire.Parts:
        # The generation of a policy means nothing here; the place tells how many rows there are.
        header = slot.header.copy()
        header["generation"] = header["rows"]
        return self._encoder.encode(header, slot.payload, self.run_id)

    def close(self) -> None:
        self._store.close()
