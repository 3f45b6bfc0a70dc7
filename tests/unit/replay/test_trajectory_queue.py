"""The trajectory queue over a real slot store in private memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.core.specs import Column, SlotSpec
from penstock.replay import Accounting, SlotQueue
from penstock.transport.shm.store import Slot, SlotStore, SlotWriter

SPEC = SlotSpec(2, 3, (Column("obs", "<f4", (4,), "unroll+1"), Column("reward", "<f4")))
STEPS = 6


class Rig:
    """A store with one writer and a queue over it."""

    def __init__(self, slots: int = 4, want: int = 4, **options: object) -> None:
        self.store = SlotStore(SPEC, slots, lanes=2, shared=False)
        self.accounting = Accounting()
        options.setdefault("max_policy_lag", 100)
        self.queue = SlotQueue(self.store, self.accounting, **options)  # type: ignore[arg-type]
        lane = self.store.open_lane(want)
        self.writer = SlotWriter(
            self.store.arena,
            self.store.geometry,
            lane,
            self.store.lane_event(lane),
            self.store.filled_event,
        )
        self.sequence = 0

    def write(self, version: int = 0) -> None:
        with self.writer.slot(0) as slot:
            assert slot is not None, "no slot was lent"
            slot.columns["reward"][...] = self.sequence
            slot.header["sequence"] = self.sequence
            slot.header["version"] = version
            slot.header["steps"] = STEPS
            slot.header["produced_steps"] = STEPS * (self.sequence + 1)
        self.sequence += 1


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.store.close()


def rewards(slots: list[Slot]) -> list[float]:
    return [float(slot.columns["reward"][0, 0]) for slot in slots]


def test_queue_gives_oldest_slots_first_and_only_full_batches(rig: Rig) -> None:
    for _ in range(3):
        rig.write()
    assert rewards(rig.queue.take(2, version=0)) == [0, 1]
    assert rig.queue.take(2, version=0) == []
    rig.write()
    assert rewards(rig.queue.take(2, version=0)) == [2, 3]


def test_a_taken_slot_is_lent_again_only_when_released(rig: Rig) -> None:
    for _ in range(4):
        rig.write()
    taken = rig.queue.take(1, version=0)
    assert rig.writer.available == 0
    rig.queue.release(taken)
    assert rig.writer.available == 1


def test_slots_beyond_the_lag_limit_are_dropped_and_counted(rig: Rig) -> None:
    rig.write(version=1)
    rig.write(version=50)
    assert rewards(rig.queue.take(1, version=150)) == [1]
    assert rig.accounting.dropped == {"lag": STEPS}


def test_block_policy_drops_no_slot(rig: Rig) -> None:
    for _ in range(4):
        rig.write()
    with rig.writer.slot(0) as slot:
        assert slot is None
    assert rewards(rig.queue.take(4, version=0)) == [0, 1, 2, 3]
    assert not rig.accounting.dropped


def test_drop_stale_keeps_the_freshest_when_writers_starve() -> None:
    rig = Rig(overflow="drop_stale")
    for _ in range(4):
        rig.write()
    assert rewards(rig.queue.take(1, version=0)) == [3]
    assert rig.accounting.dropped == {"stale": 3 * STEPS}
    assert rig.writer.available == 3
    rig.store.close()


def test_in_flight_steps_are_those_that_wait(rig: Rig) -> None:
    for _ in range(3):
        rig.write()
    rig.queue.release(rig.queue.take(1, version=0))
    rig.accounting.trained += STEPS
    assert rig.queue.in_flight_steps() == 2 * STEPS
    assert rig.accounting.balance(rig.queue.in_flight_steps()) == 0


def test_batch_beyond_the_writers_slots_is_still_collected() -> None:
    rig = Rig(want=1)
    for _ in range(3):
        rig.write()
        taken = rig.queue.take(3, version=0)
    assert rewards(taken) == [0, 1, 2]
    rig.queue.release(taken)
    rig.write()
    assert rig.writer.available == 0  # the exception was for the waiting batch alone
    rig.store.close()


def test_old_slot_behind_a_fresh_one_is_dropped(rig: Rig) -> None:
    rig.write(version=150)
    rig.write(version=1)
    rig.write(version=150)
    assert rewards(rig.queue.take(2, version=150)) == [0, 2]
    assert rig.accounting.dropped == {"lag": STEPS}
