"""Store, lanes and rings: their invariants while users join, stop and die."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.configs.errors import UserError
from penstock.core.specs import Column, SlotSpec
from penstock.transport.shm.arena import Arena
from penstock.transport.shm.store import Ring, Slot, SlotStore, SlotWriter
from transport_world import writer_of

SPEC = SlotSpec(4, 2, (Column("obs", "|u1", (200, 100), "unroll+1"), Column("reward", "|u1")))


def write(writer: SlotWriter, sequence: int) -> None:
    with writer.slot(0) as slot:
        assert slot is not None
        slot.columns["reward"][...] = sequence
        slot.header["sequence"] = sequence


@pytest.fixture
def store() -> Iterator[SlotStore]:
    made = SlotStore(SPEC, slots=6, lanes=3, shared=False)
    yield made
    made.close()


def take(store: SlotStore) -> Slot:
    store.collect()
    return store.slots[store.ready.popleft()]


# ---------------------------------------------------------------------------------------- rings


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.lists(st.booleans(), max_size=200))
def test_ring_is_a_queue_across_wrap_arounds(capacity: int, pushes: list[bool]) -> None:
    arena = Arena.private(4096)
    ring = Ring(arena.words, 0, capacity)
    model: deque[int] = deque()
    for value, push in enumerate(pushes):
        if push and len(model) < capacity:
            ring.push(value)
            model.append(value)
        elif not push:
            assert ring.pop() == (model.popleft() if model else None)
        assert len(ring) == len(model)
        assert ring.values == [*model]


def test_a_ring_between_two_threads_keeps_order() -> None:
    arena = Arena.private(4096)
    ring = Ring(arena.words, 0, 5)
    count = 20_000

    def push() -> None:
        for value in range(count):
            while len(ring) == 5:
                time.sleep(0)
            ring.push(value)

    thread = threading.Thread(target=push, daemon=True)
    thread.start()
    seen: list[int] = []
    while len(seen) < count:
        value = ring.pop()
        if value is None:
            time.sleep(0)
        else:
            seen.append(value)
    thread.join()
    assert seen == list(range(count))


# ---------------------------------------------------------------------------------------- lanes


def test_slots_of_a_lane_arrive_in_order_through_many_rounds(store: SlotStore) -> None:
    _, writer = writer_of(store, want=3)
    for sequence in range(100):
        write(writer, sequence % 200)
        slot = take(store)
        assert (slot.columns["reward"] == sequence % 200).all()
        assert slot.header["sequence"] == sequence % 200
        store.release(slot.index)


def test_a_lane_holds_no_more_than_it_wants_until_slots_are_released(store: SlotStore) -> None:
    _, writer = writer_of(store, want=2)
    write(writer, 0)
    write(writer, 1)
    assert writer.acquire(0) is None
    slot = take(store)
    assert writer.acquire(0) is None  # taken, but still in use
    store.release(slot.index)
    assert writer.available == 1


def test_scarce_slots_are_lent_in_turn(store: SlotStore) -> None:
    writers = [writer_of(store, want=0)[1] for _ in range(3)]
    for writer in writers:
        writer.want = 6
    store.lend()
    assert [writer.available for writer in writers] == [2, 2, 2]


def test_quota_bounds_the_slots_of_all_lanes(store: SlotStore) -> None:
    store.quota = 0
    writers = [writer_of(store, want=4)[1] for _ in range(2)]
    store.quota = 3
    store.lend()
    assert sorted(w.available for w in writers) == [1, 2]
    first = max(writers, key=lambda w: w.available)
    write(first, 0)
    slot = take(store)
    store.lend()
    store.lend_one_more()
    assert sum(w.available for w in writers) == 2  # a filled slot counts until it is released
    store.quota = 0
    store.release(slot.index)
    assert sum(w.available for w in writers) == 2
    store.quota = 3
    store.lend()
    assert sum(w.available for w in writers) == 3


def test_quota_of_zero_lends_no_slot_even_if_all_writers_wait(store: SlotStore) -> None:
    store.quota = 0
    _, writer = writer_of(store, want=2)
    store.lend()
    store.lend_one_more()
    assert writer.available == 0


def test_quota_is_shared_in_proportion_to_wants(store: SlotStore) -> None:
    store.quota = 0
    one, many = (writer_of(store, want=want)[1] for want in (1, 3))
    store.quota = 4
    store.lend()
    assert (one.available, many.available) == (1, 3)


def test_scarce_quota_is_lent_to_all_lanes_in_turn(store: SlotStore) -> None:
    store.quota = 0
    writers = [writer_of(store, want=1)[1] for _ in range(3)]
    store.quota = 1
    store.lend()
    served = []
    for _ in range(6):
        number = next(n for n, writer in enumerate(writers) if writer.available)
        served.append(number)
        write(writers[number], 0)
        store.release(take(store).index)
    assert sorted(served[:3]) == [0, 1, 2]
    assert served[3:] == served[:3]


def test_quota_of_a_dead_writer_is_lent_to_another(store: SlotStore) -> None:
    store.quota = 1
    lane, dying = writer_of(store, want=1)
    assert dying.acquire(0) is not None
    _, other = writer_of(store, want=1)
    assert other.available == 0
    store.close_lane(lane)
    assert other.available == 1


def test_a_slot_that_is_returned_unfilled_is_lent_to_another(store: SlotStore) -> None:
    store.quota = 1
    _, first = writer_of(store, want=1)
    _, other = writer_of(store, want=1)
    slot = first.acquire(0)
    assert slot is not None
    first.want = 0
    first.return_unfilled(slot)
    assert store.collect() == 0
    store.lend()
    assert (first.available, other.available) == (0, 1)


def test_a_writer_that_wants_more_wakes_the_store(store: SlotStore) -> None:
    _, writer = writer_of(store, want=0)
    assert writer.available == 0
    writer.want = 2
    assert os.eventfd_read(store.filled_event) == 1
    store.lend()
    assert (writer.want, writer.available) == (2, 2)


def test_fill_counts_filled_slots_that_are_not_yet_freed(store: SlotStore) -> None:
    _, writer = writer_of(store, want=3)
    assert store.fill_fraction() == 0
    write(writer, 0)
    slot = take(store)
    assert store.fill_fraction() == pytest.approx(1 / 6)  # two are lent, three are free
    store.release(slot.index)
    assert store.fill_fraction() == 0


def test_one_waiting_writer_gets_an_extra_slot_when_all_wait(store: SlotStore) -> None:
    writers = [writer_of(store, want=1)[1] for _ in range(2)]
    for writer in writers:
        write(writer, 0)
    store.collect()
    store.lend()
    assert sum(writer.available for writer in writers) == 0
    for _ in range(2):
        store.lend_one_more()
        assert sum(writer.available for writer in writers) == 1


def test_writer_without_a_slot_at_its_limit_is_starved(store: SlotStore) -> None:
    _, writer = writer_of(store, want=1)
    assert not store.has_starved_writer
    write(writer, 0)
    store.collect()
    assert store.has_starved_writer
    for want in (0, 2):
        writer.want = want
        assert not store.has_starved_writer


def test_unpublished_slot_is_acquired_again(store: SlotStore) -> None:
    _, writer = writer_of(store, want=1)
    slot = writer.acquire(0)
    assert slot is not None
    writer.reuse_later(slot)
    again = writer.acquire(0)
    assert again is not None
    assert again.index == slot.index


def test_acquire_ends_at_its_deadline_despite_stale_events(store: SlotStore) -> None:
    _, writer = writer_of(store, want=1)
    write(writer, 0)  # took the slot without reading the event that told of it
    started_s = time.monotonic()
    assert writer.acquire(0.2) is None
    assert time.monotonic() - started_s >= 0.19


def test_closed_lane_returns_held_slots_and_keeps_filled_ones(store: SlotStore) -> None:
    lane, writer = writer_of(store, want=3)
    write(writer, 1)
    assert writer.acquire(0) is not None  # dies while it fills this one
    assert store.close_lane(lane) == 2
    assert take(store).header["sequence"] == 1
    _, new = writer_of(store, want=6)
    assert new.available == 5


def test_slots_of_a_dead_writer_do_not_count_for_its_successor(store: SlotStore) -> None:
    """The new writer gets the old one's lane while the consumer still uses its slots."""
    lane, writer = writer_of(store, want=2)
    write(writer, 0)
    write(writer, 1)
    slots = [take(store), take(store)]
    store.close_lane(lane)
    new_lane, new = writer_of(store, want=2)
    assert new_lane == lane
    for slot in slots:
        store.release(slot.index)
    assert new.available == 2


def test_writers_beyond_the_lanes_are_refused(store: SlotStore) -> None:
    for _ in range(3):
        store.open_lane(want=1)
    with pytest.raises(UserError, match="all 3 lanes of the learner are taken"):
        store.open_lane(want=1)


def test_store_grows_with_the_wants_of_its_writers() -> None:
    store = SlotStore(SPEC, 2, lanes=4, most=7)
    lane = store.geometry.lane(store.arena, store.open_lane(2))
    assert len(store.slots) == 2
    lane.want = 5
    store.lend()
    assert (len(store.slots), len(lane.lent)) == (5, 5)
    _, writer = writer_of(store, 64)
    assert (len(store.slots), writer.available) == (7, 2)
    slot = writer.acquire(1)
    assert slot is not None
    assert slot.index >= 5
    writer.publish(slot)
    assert store.collect() == 1
    assert store.slots[store.ready[0]].header is not None
    store.close()


def test_a_store_stops_growing_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SlotStore(SPEC, 2, lanes=4, most=7)
    monkeypatch.setattr("penstock.transport.shm.arena.available_nbytes", lambda: 0)
    store.open_lane(5)
    assert (len(store.slots), store.lacks_slots) == (2, True)
    store.close()


# ---------------------------------------------------------------------------------------- loans


def fill_order(store: SlotStore, writers: list[SlotWriter], rng: np.random.Generator) -> list[int]:
    """Which slots are filled by writers in a random order, and freed later in another."""
    filled = []
    out: list[Slot] = []
    for _ in range(60):
        if out and rng.random() < 0.5:
            store.release(out.pop(int(rng.integers(len(out)))).index)
        writer = writers[int(rng.integers(len(writers)))]
        if writer.available:
            write(writer, 0)
            out.append(take(store))
            store.hold_slot(out[-1].index)
            filled.append(out[-1].index)
    for slot in out:
        store.release(slot.index)
    return filled


def test_a_store_with_the_loans_of_another_fills_the_same_slots(store: SlotStore) -> None:
    writers = [writer_of(store, want=2)[1] for _ in range(2)]
    fill_order(store, writers, np.random.default_rng(0))
    loans = store.loans()
    wanted = fill_order(store, writers, np.random.default_rng(1))
    other = SlotStore(SPEC, slots=6, lanes=3, shared=False)
    others = [writer_of(other, want=2)[1] for _ in range(2)]
    assert other.loans() != loans
    other.restore_loans(loans)
    assert other.loans() == loans
    assert fill_order(other, others, np.random.default_rng(1)) == wanted
    assert len(wanted) > 30
    other.close()


@pytest.mark.parametrize(
    "change", [{"free": [0, 0]}, {"free": []}, {"lent": [[0]]}, {"lent": [[0, 1], [2, 9]]}]
)
def test_loans_of_another_store_are_refused(store: SlotStore, change: dict[str, Any]) -> None:
    for _ in range(2):
        writer_of(store, want=2)
    with pytest.raises(ValueError, match="do not fit"):
        store.restore_loans(store.loans() | change)
