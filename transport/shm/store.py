"""The slot store: one arena of slots, owned by the consumer, lent to writers through lanes.

Every word has one owner, so that no lock is needed:

- The **store** (one thread of the consumer) alone decides which lane a free slot is lent to, takes
  filled slots in the order of their publication per lane, and frees them after use.
- A **writer** (one per lane) pops a lent id, fills the slot in place and pushes the id to `filled`.
  That push is the publication: a writer killed before it has published nothing.
- A lane of a dead writer is closed only when its death is *confirmed*; until then its slots stay
  lent, because a stopped process that wakes up still has the memory mapped.

A lane may hold at most `want` slots, counted from the loan until the consumer frees them, which
bounds how far a writer can run ahead of the learner. `quota` bounds the same for all lanes
together; with it the consumer decides when slots are filled at all.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.core.descriptors import wait_readable
from penstock.core.specs import HEADER, HEADER_NBYTES, PAGE, Block, Bytes, SlotSpec
from penstock.transport.shm.arena import Arena, fence
from penstock.transport.shm.attach import close_all

WORD_NBYTES = 8
# Words of a cache line.
WORDS_PER_LINE = 8
# Words of the two counters of a ring, each on a line of its own.
COUNTER_WORDS = 2 * WORDS_PER_LINE
EVENT_FLAGS = os.EFD_NONBLOCK | os.EFD_CLOEXEC if hasattr(os, "EFD_NONBLOCK") else 0


@dataclass(frozen=True)
class Slot:
    """A slot in place: views of an arena's memory."""

    index: int
    header: npt.NDArray[Any]
    """One HEADER record."""
    payload: tuple[Bytes, ...]
    """The bytes of each block."""
    columns: dict[str, npt.NDArray[Any]]
    """The columns by name, over the same bytes."""


class LaneOffer(NamedTuple):
    """A lane for a writer in another process."""

    lane: int
    """Its index."""
    fds: list[int]
    """The descriptors to send: of the arena, of the lane's event and of the store's."""
    geometry: dict[str, Any]
    """JSON values by which the writer finds the lane in the arena."""


@dataclass(frozen=True)
class Geometry:
    """The position of lanes and slots in an arena; equal on both sides of an attachment."""

    spec: SlotSpec
    slots: int
    lanes: int

    @property
    def lane_nbytes(self) -> int:
        """Bytes of one lane: the line of `LaneWords.want`, and two rings."""
        words = WORDS_PER_LINE + 2 * Ring.size_words(self.slots)
        return _pages(words * WORD_NBYTES)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole arena."""
        return self._block_starts[-1]

    @property
    def fixed_nbytes(self) -> int:
        """Bytes of lanes and headers, which come first."""
        return self._block_starts[0]

    @cached_property
    def _block_starts(self) -> tuple[int, ...]:
        """The start of each block, and the end of the last; lanes and headers come before."""
        sizes = (HEADER_NBYTES, *(block.nbytes for block in self.spec.blocks))
        areas = (_pages(self.slots * nbytes) for nbytes in sizes)
        starts = accumulate(areas, initial=self._headers_start)
        return tuple(starts)[1:]

    @property
    def _headers_start(self) -> int:
        return self.lanes * self.lane_nbytes

    def lane(self, arena: Arena, index: int) -> LaneWords:
        """Return the shared words of a lane."""
        want_word = index * self.lane_nbytes // WORD_NBYTES
        lent_start = want_word + WORDS_PER_LINE
        filled_start = lent_start + Ring.size_words(self.slots)
        return LaneWords(
            arena.words,
            want_word,
            lent=Ring(arena.words, lent_start, self.slots),
            filled=Ring(arena.words, filled_start, self.slots),
        )

    def slot(self, arena: Arena, index: int) -> Slot:
        """Return the views of a slot."""
        header = self.headers(arena)[index : index + 1].reshape(())
        payload = tuple(
            arena.bytes[start + index * block.nbytes :][: block.nbytes]
            for block, start in self._placed_blocks
        )
        return Slot(index, header, payload, self.spec.views(payload))

    def places(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield the position of a slot's bytes: start and size of each of its blocks."""
        for block, start in self._placed_blocks:
            yield start + index * block.nbytes, block.nbytes

    def headers(self, arena: Arena) -> npt.NDArray[np.void]:
        """Return the HEADER records of all slots, ``[slots]``."""
        raw = arena.bytes[self._headers_start :][: self.slots * HEADER_NBYTES]
        lines = raw.reshape(self.slots, HEADER_NBYTES)[:, : HEADER.itemsize]
        return lines.view(HEADER).reshape(self.slots)

    def blocks(self, arena: Arena) -> dict[str, npt.NDArray[Any]]:
        """Return each block of all slots by name: contiguous ``[slots, *block.shape]``."""
        return {
            block.name: arena.bytes[start:][: self.slots * block.nbytes]
            .view(block.dtype)
            .reshape(self.slots, *block.shape)
            for block, start in self._placed_blocks
        }

    @property
    def _placed_blocks(self) -> Iterator[tuple[Block, int]]:
        """The blocks, each with its start in the arena."""
        return zip(self.spec.blocks, self._block_starts[:-1], strict=True)


def _pages(nbytes: int) -> int:
    """Round a size up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Ring:
    """A ring of slot ids between one writer and one reader, in memory that two processes may share;
    at most ``capacity`` ids, as the protocol above it never lends more slots than exist.

    Two counters that only grow, each with one owner, on cache lines of their own: the pusher stores
    the cell, then `tail`; the popper reads `tail`, then the cell, then stores `head`. With a
    `fence` between, a reader that sees the counter sees the cell and the slot's bytes. A process
    killed between two stores leaves the ring as it was before the push.
    """

    def __init__(self, words: memoryview, offset: int, capacity: int) -> None:
        """Make one side's view of the ring.

        Args:
            words: int64 view of the arena.
            offset: of the ring, in words; a multiple of a line.
            capacity: the most ids in the ring.
        """
        self._words = words
        self._tail = offset
        self._head = offset + WORDS_PER_LINE
        self._cells = offset + COUNTER_WORDS
        self._capacity = capacity

    @staticmethod
    def size_words(capacity: int) -> int:
        """Return the size of a ring in words, in whole lines."""
        return COUNTER_WORDS + -(-capacity // WORDS_PER_LINE) * WORDS_PER_LINE

    def __len__(self) -> int:
        return int(self._words[self._tail] - self._words[self._head])

    def push(self, value: int) -> None:
        """Add an id. Only the writer of the ring calls this."""
        words = self._words
        tail = words[self._tail]
        words[self._cells + tail % self._capacity] = value
        fence()
        words[self._tail] = tail + 1

    def pop(self) -> int | None:
        """Remove the oldest id and return it; None if there is none. Only the reader calls this."""
        words = self._words
        head = words[self._head]
        if words[self._tail] == head:
            return None
        fence()
        value = words[self._cells + head % self._capacity]
        words[self._head] = head + 1
        return int(value)

    @property
    def values(self) -> list[int]:
        """The ids that `pop` would return, in their order."""
        words = self._words
        counts = range(words[self._head], words[self._tail])
        return [int(words[self._cells + count % self._capacity]) for count in counts]

    def reset(self) -> None:
        """Empty the ring; only while the other side is known to be gone."""
        self._words[self._tail] = self._words[self._head] = 0


@dataclass
class LaneWords:
    """The shared words of one lane."""

    words: memoryview
    """Int64 view of the arena."""
    want_word: int
    """The index of the word that holds `want`."""
    lent: Ring
    """Slots on their way from the store to the writer."""
    filled: Ring
    """Slots on their way back: an index if it is filled, its complement (~) if it is not."""

    @property
    def want(self) -> int:
        """The number of slots that the writer wants to hold; the writer sets it."""
        return int(self.words[self.want_word])

    @want.setter
    def want(self, slots: int) -> None:
        self.words[self.want_word] = slots


@dataclass
class _Lane:
    """The store's side of one lane."""

    words: LaneWords
    event: int
    """The eventfd that wakes the writer when slots were lent."""
    lent: set[int] = field(default_factory=set)
    """Slots that were lent and have not come back."""
    held: int = 0
    """Slots that are lent, filled or in use: what counts against `want`."""

    @property
    def wants_more(self) -> bool:
        """Whether the writer wants more slots than count against it."""
        return self.held < self.words.want


class SlotStore:
    """The consumer's side of the slots. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        spec: SlotSpec,
        slots: int,
        lanes: int = 64,
        *,
        shared: bool = True,
        most: int | None = None,
    ) -> None:
        """Allocate the slots.

        Args:
            spec: the layout of a slot.
            slots: number of slots at first.
            lanes: most writers at a time.
            shared: use memory that other processes can map.
            most: a shared store grows up to this number of slots where writers want more; None for
                a store that does not grow.

        Raises:
            UserError: the host lacks the memory for the first slots.
        """
        # The arena has addresses for all slots; memory only for those that exist.
        self.geometry = Geometry(spec, most or slots, lanes)
        nbytes = self.geometry.nbytes
        if not shared:
            self.arena = Arena.private(nbytes)
        elif most is None or most == slots:
            self.arena = Arena.shared(nbytes, "slots")
        else:
            ranges = [(0, self.geometry.fixed_nbytes)]
            for i in range(slots):
                ranges += self.geometry.places(i)
            self.arena = Arena.shared(nbytes, "slots", ranges)

        self.slots = [self.geometry.slot(self.arena, i) for i in range(slots)]
        """The slots that exist, by index."""
        self.blocks = self.geometry.blocks(self.arena)
        """The memory of all slots, by block."""
        self.filled_event = os.eventfd(0, EVENT_FLAGS)
        """The eventfd that wakes the consumer when slots were filled."""
        self.ready: deque[int] = deque()
        """Filled slots, in the order in which they were collected."""
        self.held_back: set[int] = set()
        """Lanes that get no slots for now."""
        self.quota: int | None = None
        """Most slots that are lent or filled at a time. Lanes then get slots in proportion to what
        they want. None: no limit."""
        self._max_slots = most or slots
        self._free: deque[int] = deque(range(slots))  # in the order in which they will be lent
        self._lanes: dict[int, _Lane] = {}
        self._lane_of: dict[int, _Lane] = {}  # by slot that counts against a lane
        self._turn = 0  # counts the lanes that had their turn

    def set_quota(self, slots: int) -> None:
        """Set `quota`, and lend what it allows."""
        self.quota = slots
        self.lend()

    def open_lane(self, want: int) -> int:
        """Open a lane for a new writer, which may hold up to ``want`` slots at first.

        Returns:
            Its index.

        Raises:
            UserError: all lanes are in use.
        """
        unused = (lane for lane in range(self.geometry.lanes) if lane not in self._lanes)
        index = next(unused, None)
        if index is None:
            raise UserError(
                f"all {self.geometry.lanes} lanes of the learner are taken; start fewer actors"
            )

        words = self.geometry.lane(self.arena, index)
        words.lent.reset()
        words.filled.reset()
        words.want = want
        self._lanes[index] = _Lane(words, os.eventfd(0, EVENT_FLAGS))
        self.lend()
        return index

    @property
    def lanes(self) -> set[int]:
        """The indices of the lanes in use."""
        return set(self._lanes)

    def lane_event(self, index: int) -> int:
        """Return the descriptor that wakes the lane's writer."""
        return self._lanes[index].event

    def local_writer(self, index: int) -> SlotWriter:
        """Return the writer of a lane, for this process."""
        event = self.lane_event(index)
        return SlotWriter(self.arena, self.geometry, index, event, self.filled_event)

    def offer_lane(self, want: int) -> LaneOffer:
        """Open a lane of a shared store for another process, which calls `SlotWriter.attached`.

        Raises UserError where all lanes are in use.
        """
        assert self.arena.fd is not None, "a private store cannot be shared"
        lane = self.open_lane(want)
        fds = [self.arena.fd, self.lane_event(lane), self.filled_event]
        geometry = {"lane": lane, "slots": self.geometry.slots, "lanes": self.geometry.lanes}
        return LaneOffer(lane, fds, geometry)

    def close_lane(self, index: int) -> int:
        """Take back the slots of a writer with a confirmed death; return their number."""
        self.collect()
        lane = self._lanes.pop(index)
        self.held_back.discard(index)
        os.close(lane.event)
        for slot in lane.lent:
            del self._lane_of[slot]
            self._free.append(slot)
        self.lend()
        return len(lane.lent)

    def collect(self) -> int:
        """Move filled slots to `ready`; return the number of ready slots.

        Of each lane at most as many are taken as there are slots, so a writer that pushes on and on
        cannot hold up the consumer.
        """
        for lane in self._lanes.values():
            for _ in range(self.geometry.slots):
                pushed = lane.words.filled.pop()
                if pushed is None:
                    break

                # A slot that was not filled comes back as its complement.
                filled = pushed >= 0
                slot = pushed if filled else ~pushed
                lane.lent.remove(slot)
                if filled:
                    self.ready.append(slot)
                else:
                    self._lane_of.pop(slot).held -= 1
                    self._free.append(slot)
        return len(self.ready)

    def hold_slot(self, slot: int) -> None:
        """Hold a slot from `ready` until `release`, without counting it against its lane."""
        self._lane_of.pop(slot).held -= 1

    def release(self, slot: int) -> None:
        """Free a slot that came from `ready`, and lend what is free."""
        lane = self._lane_of.pop(slot, None)
        if lane is not None:
            lane.held -= 1
        self._free.append(slot)
        self.lend()

    @property
    def free(self) -> list[int]:
        """Slots that are neither lent nor in use, in the order in which they will be lent."""
        return list(self._free)

    def hold_all_but(self, free: list[int]) -> None:
        """Hold all slots but the ``free`` ones until `release`; call this before any is lent.

        The free slots are lent in this order.
        """
        self._free = deque(free)

    def loans(self) -> dict[str, Any]:
        """Return JSON values for `restore_loans`: which lane will fill which slot next.

        All writers must be in this process, and none may be filling a slot.
        """
        slots_by_lane = [lane.words.lent.values for lane in self._lanes.values()]
        return {"lent": slots_by_lane, "free": list(self._free), "turn": self._turn}

    def restore_loans(self, loans: dict[str, Any]) -> None:
        """Lend the slots as at `loans`, to as many new lanes in their order.

        The writers of the lanes must be in this process, and must have taken no slot.

        Raises:
            ValueError: the loans were those of other slots or lanes. Nothing was changed.
        """
        lanes = list(self._lanes.values())
        slots_by_lane = loans["lent"]
        free = loans["free"]
        present_slots = [*self._free, *(slot for lane in lanes for slot in lane.lent)]
        saved_slots = [*free, *(slot for slots in slots_by_lane for slot in slots)]
        if len(slots_by_lane) != len(lanes) or sorted(present_slots) != sorted(saved_slots):
            raise ValueError(
                f"loans of {len(saved_slots)} slots in {len(slots_by_lane)} lanes do not fit"
            )

        # `_give` lends the first free slot, so each lane's own slots are the free ones in turn.
        for lane, slots in zip(lanes, slots_by_lane, strict=True):
            lane.held -= len(lane.lent)
            lane.lent.clear()
            lane.words.lent.reset()
            self._free = deque(slots)
            for _ in slots:
                self._give(lane)
        self._free = deque(free)
        self._turn = int(loans["turn"])

    def lend(self) -> None:
        """Give free slots to lanes that want them, in turn; within `quota` if there is one."""
        lanes = self._open_lanes()
        if self.quota is not None:
            self._lend_quota(lanes)
            return

        satisfied = 0  # lanes in a row that want no more
        while lanes and satisfied < len(lanes) and (self._free or self._grow(lanes)):
            self._turn += 1
            lane = lanes[self._turn % len(lanes)]
            if lane.held < lane.words.want:
                satisfied = 0
                self._give(lane)
            else:
                satisfied += 1

    def _lend_quota(self, lanes: list[_Lane]) -> None:
        """Lend up to `quota`, each slot to the lane that holds the least of what it wants."""
        while self._below_quota and (self._free or self._grow(lanes)):
            # Of lanes that hold equal parts each comes first in turn.
            self._turn += 1
            first = self._turn % max(1, len(lanes))
            in_turn = lanes[first:] + lanes[:first]

            # A writer may change what it wants at any time, so that is read once.
            wants = [(lane, lane.words.want) for lane in in_turn]
            parts = [(lane.held / want, lane) for lane, want in wants if lane.held < want]
            if not parts:
                return
            _, neediest = min(parts, key=lambda part: part[0])
            self._give(neediest)

    @property
    def _below_quota(self) -> bool:
        """Whether `quota` allows one more slot that is lent or filled."""
        return self.quota is None or len(self.slots) - len(self._free) < self.quota

    def _grow(self, lanes: list[_Lane]) -> bool:
        """Add one free slot if the store may grow and some lane wants it; return whether it did."""
        index = len(self.slots)
        if index >= self._max_slots or not any(lane.wants_more for lane in lanes):
            return False

        try:
            for start, nbytes in self.geometry.places(index):
                self.arena.commit(start, nbytes)
        except OSError:
            # The host has no more memory: writers share the existing slots.
            self._max_slots = index
            return False
        self.slots.append(self.geometry.slot(self.arena, index))
        self._free.append(index)
        return True

    def _open_lanes(self) -> list[_Lane]:
        """The lanes that may get slots."""
        return [lane for index, lane in self._lanes.items() if index not in self.held_back]

    def lend_one_more(self) -> None:
        """Lend one slot more than wanted where all writers wait for a consumer that lacks slots.

        This happens where a batch takes more slots than the joined writers may hold.
        """
        lanes = [lane for lane in self._lanes.values() if lane.words.want > 0]
        if self._free and self._below_quota and lanes and not any(lane.lent for lane in lanes):
            self._give(min(lanes, key=lambda lane: lane.held))

    def _give(self, lane: _Lane) -> None:
        """Lend the first free slot to a lane, and wake its writer."""
        slot = self._free.popleft()
        lane.lent.add(slot)
        lane.held += 1
        self._lane_of[slot] = lane
        lane.words.lent.push(slot)
        os.eventfd_write(lane.event, 1)

    @property
    def lacks_slots(self) -> bool:
        """Whether some writer wants more slots than it holds and none is free."""
        return not self._free and any(lane.wants_more for lane in self._open_lanes())

    @property
    def has_starved_writer(self) -> bool:
        """Whether some writer has no slot to fill and may not have another."""
        lanes = self._lanes.values()
        return any(not lane.lent and lane.held >= lane.words.want > 0 for lane in lanes)

    def fill_fraction(self) -> float:
        """Return the fraction of the store's slots that are filled and not yet freed.

        This may be called from any thread.
        """
        lent_count = sum(len(lane.lent) for lane in list(self._lanes.values()))
        return 1.0 - (len(self._free) + lent_count) / len(self.slots)

    def close(self) -> None:
        """Close all descriptors; the memory is freed with the last array over it."""
        for lane in self._lanes.values():
            os.close(lane.event)
        self._lanes.clear()
        if self.filled_event >= 0:
            os.close(self.filled_event)
            self.filled_event = -1
        self.arena.close()


class SlotWriter:
    """A writer's side of one lane; used by one thread at a time."""

    def __init__(
        self, arena: Arena, geometry: Geometry, lane: int, lent_event: int, filled_event: int
    ) -> None:
        """Make the writer.

        Args:
            arena: the store's memory.
            geometry: of the store.
            lane: the index of the lane.
            lent_event: the eventfd that wakes the writer.
            filled_event: the eventfd that wakes the consumer.
        """
        self.spec = geometry.spec
        self.blocks = geometry.blocks(arena)
        """The memory of all slots, by block."""
        self.headers = geometry.headers(arena)
        """The HEADER records of all slots."""
        self.event = lent_event
        """Readable when slots were lent."""
        self._words = geometry.lane(arena, lane)
        self._filled_event = filled_event
        self._given_back: list[int] = []  # unpublished slots, for the next `acquire`
        self._slot = lru_cache(maxsize=None)(lambda index: geometry.slot(arena, index))

    @classmethod
    @contextmanager
    def attached(
        cls, spec: SlotSpec, reply: dict[str, Any], fds: list[int]
    ) -> Iterator[SlotWriter]:
        """Yield the writer of a lane that another process has offered by `SlotStore.offer_lane`.

        Args:
            spec: of the slots.
            reply: `LaneOffer.geometry`, among other values.
            fds: `LaneOffer.fds`, as received; they are closed when the block is left.
        """
        with ExitStack() as stack:
            stack.callback(close_all, fds)
            geometry = Geometry(spec, reply["slots"], reply["lanes"])
            events = fds[1:]  # the lane's, and the store's
            yield cls(Arena.attach(fds[0]), geometry, reply["lane"], *events)

    @property
    def available(self) -> int:
        """The number of slots that `acquire` would return without waiting."""
        return len(self._given_back) + len(self._words.lent)

    @property
    def want(self) -> int:
        """The number of slots that this writer wants to hold at a time."""
        return self._words.want

    @want.setter
    def want(self, slots: int) -> None:
        self._words.want = slots
        os.eventfd_write(self._filled_event, 1)  # wakes the store to follow

    def acquire(self, timeout_s: float) -> Slot | None:
        """Return a lent slot to fill, or None when none was lent within ``timeout_s`` seconds."""
        if self._given_back:
            return self._slot(self._given_back.pop())

        deadline_s = time.monotonic() + timeout_s
        while (index := self._words.lent.pop()) is None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not wait_readable(self.event, remaining_s):
                return None
            drain_event(self.event)
        return self._slot(index)

    def publish(self, *slots: Slot) -> None:
        """Hand filled slots to the consumer, in this order."""
        for slot in slots:
            self._words.filled.push(slot.index)
        os.eventfd_write(self._filled_event, 1)

    def reuse_later(self, slot: Slot) -> None:
        """Keep an unpublished slot for the next `acquire`."""
        self._given_back.append(slot.index)

    def return_unfilled(self, slot: Slot) -> None:
        """Return an unpublished slot to the store, which lends it to another writer."""
        self._words.filled.push(~slot.index)
        os.eventfd_write(self._filled_event, 1)

    @contextmanager
    def slot(self, timeout_s: float) -> Iterator[Slot | None]:
        """Lend a slot that is published when the block is left; an exception publishes nothing.

        Yields None when no slot was lent within ``timeout_s`` seconds.
        """
        slot = self.acquire(timeout_s)
        if slot is None:
            yield None
            return

        try:
            yield slot
        except BaseException:
            self.reuse_later(slot)
            raise
        self.publish(slot)


def drain_event(fd: int) -> None:
    """Reset an eventfd; has no effect when another read was first."""
    with suppress(BlockingIOError):
        os.eventfd_read(fd)
