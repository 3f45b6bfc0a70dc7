"""Slots that a client has filled and its server has not stored yet: sent, and sent again.

The slots lie in a store of the client's own, so a step is written once, in place, and a slot stays
unchanged until the server confirms that it has stored it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.core.specs import SlotSpec
from penstock.replay.errors import ReplayError
from penstock.replay.writer import Lane, Steps
from penstock.transport import wire
from penstock.transport.shm.arena import available_nbytes
from penstock.transport.shm.store import Slot, SlotStore, SlotWriter
from penstock.transport.wire import SlotEncoder, WireError

# Slots that may be on their way.
UNSTORED = 4

# Slots are sent again if the server has confirmed none for so long.
RESEND_S = 1.0

Send = Callable[[wire.Parts], bool]


class _OutLane(Lane):
    """A lane whose slots return when ``pump`` receives the server's confirmation."""

    def __init__(self, writer: SlotWriter, pump: Callable[[float], None]) -> None:
        super().__init__(writer, 0, lambda: False)
        self._pump = pump

        self.published = 0
        """Slots that were published so far."""

    def publish(self, slot: Slot) -> None:
        """Number and publish a slot."""
        super().publish(slot)
        self.published += 1

    def _wait(self, timeout_s: float) -> Slot:
        """Wait for a free slot, and exchange messages meanwhile. Raises TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        while (slot := self._writer.acquire(0)) is None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError(
                    f"the replay server has not taken what was added before within {timeout_s:g} "
                    "s: its rate limiter holds writers back, or it is gone; see stats()"
                )
            self._pump(min(remaining_s, 0.1))
        return slot

    def continue_from(self, sequence: int) -> None:
        """Set the sequence number of the next slot."""
        self._sequence = sequence


class Outbox:
    """The slots of a client: writes steps into them, sends them, and frees the stored ones.

    Args:
        spec: of the server's slots.
        about: what the server tells of its buffer; see `Steps`.
        codec: by which slots are compressed.
        send: hands a message to the server; returns False if it cannot now.
        pump: waits for messages of the server for up to the given seconds and handles them.
    """

    def __init__(
        self,
        spec: SlotSpec,
        about: dict[str, Any],
        *,
        codec: str,
        send: Send,
        pump: Callable[[float], None],
    ) -> None:
        # One slot is filled while the others are on their way.
        self._store = SlotStore(spec, UNSTORED + 1, 1, shared=False)
        writer = self._store.local_writer(self._store.open_lane(UNSTORED + 1))
        self._lane = _OutLane(writer, pump)
        self.steps = Steps(self._lane, about)
        self._encoder = SlotEncoder(spec, codec)
        self._send = send

        self._unstored: deque[Slot] = deque()
        """Published slots that the server has not confirmed, the oldest first."""

        self._sent = 0
        """How many of `_unstored`, from the first on, are on their way."""

        self._progress_s = 0.0
        """When a slot was last sent or confirmed."""

        self._shipped = 0
        """`_OutLane.published` at the last `ship`."""

        self._stored_rows = 0
        """Rows of this stream that the server is known to have."""

        self.run_id = 0
        """Of the server, which each message carries."""

    def __len__(self) -> int:
        """The number of published slots that the server has not confirmed."""
        return len(self._unstored)

    @property
    def has_news(self) -> bool:
        """Whether a slot was published since the last `ship`."""
        return self._lane.published > self._shipped

    def ship(self) -> None:
        """Send published slots, and again those that were not confirmed."""
        self._shipped = self._lane.published
        self._store.collect()
        while self._store.ready:
            self._unstored.append(self._store.slots[self._store.ready.popleft()])

        if self._sent and time.monotonic() - self._progress_s > RESEND_S:
            self._sent = 0
        while self._sent < len(self._unstored):
            slot = self._unstored[self._sent]
            if not self._send(self._encode(slot)):
                return
            self._sent += 1
            self._progress_s = time.monotonic()

    def on_stored(self, sequence: int) -> None:
        """Free the slots before ``sequence``, which the server has stored."""
        while self._unstored and int(self._unstored[0].header["sequence"]) < sequence:
            slot = self._unstored.popleft()
            self._stored_rows += int(slot.header["steps"])
            self._store.release(slot.index)
            self._sent = max(0, self._sent - 1)
            self._progress_s = time.monotonic()

    def on_refused(self, sequence: int) -> None:
        """Count no rows of a slot that the server refuses for good.

        The server soon confirms that it continues after it, which frees the slot.
        """
        for slot in self._unstored:
            if int(slot.header["sequence"]) == sequence:
                slot.header["steps"] = 0

    def resume(self, run_id: int, sequence: int, server_rows: int) -> int:
        """Continue the stream after joining a server, perhaps one that was restarted.

        Args:
            run_id: of the server.
            sequence: the next slot that it expects; missing slots are sent again from there.
            server_rows: rows of the stream that it has.

        Returns:
            The number of rows that were known to be stored before.
        """
        self.run_id = run_id
        self.on_stored(sequence)

        # A restarted server may expect an earlier number than that of the oldest slot here.
        for number, slot in enumerate(self._unstored, sequence):
            slot.header["sequence"] = number
        self._lane.continue_from(sequence + len(self._unstored))
        self._sent = 0

        previous_rows, self._stored_rows = self._stored_rows, server_rows
        return previous_rows

    def _encode(self, slot: Slot) -> wire.Parts:
        # The policy's generation is not needed here; its field holds the number of rows.
        header = slot.header.copy()
        header["generation"] = header["rows"]
        return self._encoder.encode(header, slot.payload, self.run_id)

    def close(self) -> None:
        self._store.close()


def read_spec(meta: Any) -> SlotSpec:
    """Read a server's slot spec.

    Raises:
        WireError: it is no spec.
        ReplayError: its slots do not fit the memory of this host.
    """
    try:
        spec = SlotSpec.from_dict(meta)
        nbytes = spec.payload_nbytes * (UNSTORED + 1)
    except wire.STRANGE as error:
        raise WireError("meta", str(error)) from error

    if nbytes > available_nbytes():
        raise ReplayError(
            f"the server's slots of {spec.payload_nbytes / 1e9:.2f} GB do not fit the memory of "
            "this host; serve fewer envs or a smaller unroll"
        )
    return spec
