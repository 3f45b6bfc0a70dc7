"""Slots of the table: links, generations, counts, and slots of other writers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core.specs import Column, SlotSpec
from penstock.replay.gather import Gather
from penstock.replay.layout import layout_of_spec
from penstock.replay.samplers import Prioritized, Uniform
from penstock.replay.table import NONE, Table, TableListener, frame_rows
from penstock.transport.shm.store import Slot, SlotWriter

T, E = 4, 2
COLUMNS = (
    Column("obs", "<f4", (3,), "unroll+1"),
    Column("action", "<i4"),
    Column("reward", "<f4"),
    Column("terminated", "|b1"),
    Column("truncated", "|b1"),
)
AGES = (Column("age", "|u1"), Column("pad", "<i2"))
ALIVE = (Column("alive", "|b1"),)


class Foreign:
    """A writer of whole slots, as a process of its own would be; counts observations up."""

    def __init__(self, table: Table, actor: int = 7) -> None:
        self.table, self.actor, self.sequence, self.clock = table, actor, 0, 0.0
        lane = table.store.open_lane(want=1)
        event = table.store.lane_event(lane)
        store = table.store
        self.writer = SlotWriter(store.arena, store.geometry, lane, event, store.filled_event)

    def write(self, **columns: Any) -> int:
        """Fill and publish a slot; ``columns`` besides observations and actions, [T, E]."""
        slot = self.writer.acquire(0)
        assert slot is not None
        times = self.clock + np.arange(T + 1)
        slot.columns["obs"][...] = times[:, None, None] + np.array([0, 0.5])[:, None]
        slot.columns["action"][...] = times[:T, None]
        slot.columns["reward"][...] = times[:T, None]
        for name in ("terminated", "truncated"):
            slot.columns[name][...] = False
        for name, values in columns.items():
            slot.columns[name][...] = values
        slot.header["actor"], slot.header["incarnation"] = self.actor, 0
        slot.header["sequence"], slot.header["rows"] = self.sequence, 0
        self.sequence += 1
        self.clock += T
        self.writer.publish(slot)
        self.table.collect()
        return slot.index


def table_of(*more: Column, slots: int = 4, history: int = 0, sampler: Any = None) -> Table:
    spec = SlotSpec(T, E, (*COLUMNS, *more))
    made = Table(spec, slots, sampler or Uniform(), history=history)
    made._sampler.bind(made.valid, np.random.default_rng(0))
    return made


def flags(*at: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    marked = np.zeros((T, E), bool)
    for t, env in at:
        marked[t, env] = True
    return marked


def valid(table: Table, slot: int) -> Any:
    return table.valid.reshape(-1, T, E)[slot]


def balanced(table: Table) -> bool:
    stored = int(np.count_nonzero(table.valid))
    return table.stored == stored and table.inserted == stored + table.evicted.total()


def test_row_after_an_episode_end_is_invalid_even_in_the_next_slot() -> None:
    table = table_of(*AGES)
    foreign = Foreign(table)
    first = foreign.write(terminated=flags((1, 0)), truncated=flags((3, 1)))
    second = foreign.write()
    assert valid(table, first).tolist() == (~flags((2, 0))).tolist()
    assert valid(table, second).tolist() == (~flags((0, 1))).tolist()
    ages = table.records["age"].reshape(-1, T, E)
    assert ages[first, [0, 1, 3], 0].tolist() == [0, 1, 0]
    assert ages[first, :, 1].tolist() == [0, 1, 2, 3]
    assert ages[second, :, 0].tolist() == [1, 2, 3, 4]
    assert ages[second, 1:, 1].tolist() == [0, 1, 2]
    assert balanced(table)


def test_rows_marked_not_alive_are_invalid() -> None:
    table = table_of(*ALIVE)
    slot = Foreign(table).write(alive=~flags((0, 0), (2, 1)))
    assert valid(table, slot).tolist() == (~flags((0, 0), (2, 1))).tolist()
    assert table.inserted == 6


def test_a_gap_in_the_sequence_breaks_the_link() -> None:
    table = table_of(slots=6)
    foreign, other = Foreign(table), Foreign(table, actor=8)
    first = foreign.write()
    other.write()
    second = foreign.write()
    assert (table.prev[second], table.next[first]) == (first, second)
    foreign.sequence += 1
    third = foreign.write()
    assert (table.prev[third], table.next[second]) == (NONE, NONE)


def test_listeners_hear_of_slots_in_their_order_until_they_unsubscribe() -> None:
    calls: list[tuple[str, str, int]] = []

    class Listener(TableListener):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_ingested(self, slot: Slot) -> None:
            calls.append((self.name, "ingested", slot.index))

        def on_evict(self, slot: int) -> None:
            calls.append((self.name, "evict", slot))

    table = table_of(slots=2)
    first, second = Listener("first"), Listener("second")
    table.subscribe(first)
    table.subscribe(second)
    foreign = Foreign(table)
    slot = foreign.write()
    assert calls == [("first", "ingested", slot), ("second", "ingested", slot)]
    table.unsubscribe(first)
    table.unsubscribe(first)
    table.evict_oldest("capacity")
    assert calls[2:] == [("second", "evict", slot)]


def test_what_a_new_listener_does_not_override_does_nothing() -> None:
    table = table_of(slots=2)
    table.subscribe(TableListener())
    Foreign(table).write()
    table.evict_oldest("capacity")
    assert balanced(table)


@pytest.mark.parametrize("gap", [False, True])
def test_stacks_and_returns_cross_slots_but_not_gaps(gap: bool) -> None:
    table = table_of(*AGES, history=2)
    layout = layout_of_spec(table.spec, 3)
    foreign = Foreign(table)
    first = foreign.write()
    foreign.sequence += gap
    second = foreign.write()
    # Without the slot before, how old the episode is is not known: two rows have no stack.
    assert valid(table, second)[:2].any() == (not gap)
    assert table.evicted["history"] == (4 if gap else 0)
    gather = Gather(table, layout, 3, 0.5)
    last = first * T * E + 3 * E  # the first slot's last row of environment 0
    batch = gather.batch(np.array([last]), None)
    assert batch.obs[0, :, 0].tolist() == [1, 2, 3]
    if gap:
        assert batch.next_obs[0, :, 0].tolist() == [2, 3, 4]
        assert (batch.reward[0], batch.discount[0]) == (3, 0.5)
    else:
        assert batch.next_obs[0, :, 0].tolist() == [4, 5, 6]
        assert (batch.reward[0], batch.discount[0]) == (3 + 0.5 * 4 + 0.25 * 5, 0.125)
        start = second * T * E
        assert gather.batch(np.array([start]), None).obs[0, :, 0].tolist() == [2, 3, 4]
    assert balanced(table)


def test_evicting_the_oldest_slot_invalidates_stacks_that_reach_into_it() -> None:
    table = table_of(*AGES, slots=3, history=2)
    foreign = Foreign(table)
    first = foreign.write()
    second = foreign.write(terminated=flags((0, 0)))
    keys = table.keys(np.array([first * T * E, second * T * E + 2 * E + 1]))
    assert table.fresh(keys).tolist() == [True, True]
    foreign.write()  # the writer wants another: the first makes room
    assert next(iter(table.order)) == second
    assert not valid(table, first).any()
    # Row 0 of both environments and row 1 of the one that goes on began in the first slot; row 1
    # of the other only resets.
    assert valid(table, second).tolist() == [[False] * 2, [False] * 2, [True] * 2, [True] * 2]
    assert dict(table.evicted) == {"capacity": 8, "history": 3}
    assert table.fresh(keys).tolist() == [False, True]
    assert balanced(table)
    third = foreign.write()
    assert third == first
    assert table.fresh(keys).tolist() == [False, False]  # the row counts again, as another


def test_a_key_of_another_table_is_stale() -> None:
    table = table_of()
    Foreign(table).write()
    assert table.fresh(np.array([-1, 1 << 40, (1 << 32) | 999, 99 << 32])).tolist() == [False] * 4


def test_priorities_of_the_writer_reach_the_sampler() -> None:
    sampler = Prioritized(alpha=1.0, beta=1.0, epsilon=1e-12)
    table = table_of(Column("priority", "<f4"), sampler=sampler)
    priorities = np.zeros((T, E), np.float32)
    priorities[2, 1] = 5
    slot = Foreign(table).write(priority=priorities)
    rows, _ = sampler.sample(64)
    assert set(rows.tolist()) == {slot * T * E + 2 * E + 1}


def test_frames_may_be_stored_by_environment() -> None:
    by_step = SlotSpec(T, E, COLUMNS)
    by_env = SlotSpec(T, E, (Column("obs", "<f4", (3,), "frames"), *COLUMNS[1:]))
    assert by_step.payload_nbytes == by_env.payload_nbytes
    views = by_env.views(by_env.zeros())
    assert views["obs"].shape == (T + 1, E, 3)
    for spec in (by_step, by_env):
        lie, table = frame_rows(spec), Table(spec, 3, Uniform())
        for slot, t, env in [(0, 0, 0), (1, 3, 1), (2, T, 1)]:
            table.store.slots[slot].columns["obs"][t, env] = 100 * slot + 10 * t + env
            row = slot * lie.slots + t * lie.steps + env * lie.envs
            assert table.frames["obs"][row].tolist() == [100 * slot + 10 * t + env] * 3


def test_rejected_slot_is_counted_before_it_is_lent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = table_of(*ALIVE, slots=2)
    foreign, release = Foreign(table), table.store.release

    def lent_at_once(slot: int) -> None:
        release(slot)
        table.store.slots[slot].header["steps"] = 0  # by a process that was waiting for it

    monkeypatch.setattr(table.store, "release", lent_at_once)
    counted: list[int] = []

    class Rejections(TableListener):
        def on_rejected(self, slot: Slot, fault: str) -> None:
            counted.append(int(slot.header["steps"]))

    table.subscribe(Rejections())
    slot = foreign.writer.acquire(0)
    assert slot is not None
    slot.header["steps"], slot.header["sequence"] = 8, 0
    slot.columns["terminated"].view(np.uint8)[...] = 7
    foreign.writer.publish(slot)
    table.collect()
    assert counted == [8]
    assert balanced(table)
