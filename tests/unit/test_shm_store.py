"""Store, lanes, rings and board: what they promise while their users come, stop and die."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.configs.errors import UserError
from penstock.core.params import to_bf16
from penstock.core.specs import Column, SlotSpec
from penstock.transport.base import Stamp
from penstock.transport.shm.arena import Arena, available_nbytes
from penstock.transport.shm.board import WeightsBoard
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.ring import Ring
from penstock.transport.shm.slot_writer import SlotWriter
from penstock.transport.shm.store import Slot, SlotStore
from transport_world import LAYOUT, welcome

SPEC = SlotSpec(4, 2, (Column("obs", "|u1", (200, 100), "unroll+1"), Column("reward", "|u1")))
WRITER = Path(__file__).parents[1] / "shm_writer.py"


def writer_of(store: SlotStore, want: int) -> tuple[int, SlotWriter]:
    lane = store.open_lane(want)
    made = SlotWriter(store.arena, store.geometry, lane, store.lane_event(lane), store.filled_event)
    return lane, made


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
def test_a_ring_is_a_queue_however_often_it_wraps(capacity: int, pushes: list[bool]) -> None:
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


def test_a_ring_between_two_threads_keeps_order() -> None:
    arena = Arena.private(4096)
    ring = Ring(arena.words, 0, 5)
    count = 20_000

    def push() -> None:
        for value in range(count):
            while len(ring) == 5:
                time.sleep(0)
            ring.push(value)

    thread = threading.Thread(target=push)
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


def test_scarce_slots_go_round(store: SlotStore) -> None:
    writers = [writer_of(store, want=0)[1] for _ in range(3)]
    for writer in writers:
        writer.want = 6
    store.lend()
    assert [writer.available for writer in writers] == [2, 2, 2]


def test_a_writer_that_wants_more_wakes_the_store(store: SlotStore) -> None:
    _, writer = writer_of(store, want=0)
    assert writer.available == 0
    writer.want = 2
    assert os.eventfd_read(store.filled_event) == 1
    store.lend()
    assert (writer.want, writer.available) == (2, 2)


def test_an_unpublished_slot_is_given_again(store: SlotStore) -> None:
    _, writer = writer_of(store, want=1)
    slot = writer.acquire(0)
    assert slot is not None
    writer.give_back(slot)
    again = writer.acquire(0)
    assert again is not None
    assert again.index == slot.index


def test_waiting_ends_at_the_deadline_whatever_woke_it(store: SlotStore) -> None:
    _, writer = writer_of(store, want=1)
    write(writer, 0)  # took the slot without reading the event that told of it
    started_s = time.monotonic()
    assert writer.acquire(0.2) is None
    assert time.monotonic() - started_s >= 0.19


def test_foreign_ids_are_counted_and_do_no_harm(store: SlotStore) -> None:
    lane, writer = writer_of(store, want=2)
    _, other = writer_of(store, want=2)
    words = store.geometry.lane(store.arena, lane)
    theirs = other.acquire(0)
    assert theirs is not None
    for bogus in (theirs.index, 10**12, -1, 5):
        words.filled.push(bogus)
    assert store.collect() == 0
    assert store.corrupt_lanes == 4
    write(writer, 7)
    assert take(store).header["sequence"] == 7


def test_a_ring_of_garbage_does_not_stop_the_store(store: SlotStore) -> None:
    lane, _ = writer_of(store, want=2)
    _, other = writer_of(store, want=1)
    nbytes = store.geometry.lane_nbytes
    lane_bytes = store.arena.bytes[lane * nbytes : (lane + 1) * nbytes]
    lane_bytes[64:] = np.random.default_rng(0).integers(256, size=nbytes - 64)
    write(other, 3)
    assert take(store).header["sequence"] == 3


def test_a_closed_lane_gives_back_what_it_held_and_keeps_what_it_filled(store: SlotStore) -> None:
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


def test_too_many_writers_are_refused_in_words(store: SlotStore) -> None:
    for _ in range(3):
        store.open_lane(want=1)
    with pytest.raises(UserError, match="all 3 lanes of the learner are taken"):
        store.open_lane(want=1)


# ------------------------------------------------------------------------------- real processes


class Owner:
    """The learner's side of real writers, in the thread of the test."""

    def __init__(self, folder: Path, slots: int = 4) -> None:
        self.store = SlotStore(SPEC, slots, lanes=2)
        self.board = WeightsBoard.create(LAYOUT.size)
        self.path = folder / "learner.sock"
        self.host = ShmHost(self.path, welcome(spec=SPEC), self.board, self.store)

    @contextmanager
    def writer(self, want: int, *extra: str) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            [sys.executable, str(WRITER), str(self.path), str(want), *extra],
            stdout=subprocess.PIPE,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    @property
    def writers(self) -> int:
        return len(self.store._lanes)

    def poll_until(self, writers: int, timeout_s: float = 10.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.writers != writers:
            assert time.monotonic() < deadline_s
            self.host.poll(0.01)

    def take_for(self, seconds: float) -> list[int]:
        """Sequences of the slots that came, each checked to be whole."""
        seen = []
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self.host.poll(0.005)
            seen += self.take_ready()
        return seen

    def take_ready(self) -> list[int]:
        seen = []
        while self.store.collect():
            slot = self.store.slots[self.store.ready.popleft()]
            sequence = int(slot.header["sequence"])
            for column in slot.columns.values():
                assert (column == sequence % 200).all()
            seen.append(sequence)
            self.store.release(slot.index)
        return seen

    def close(self) -> None:
        self.host.close()
        self.store.close()
        self.board.close()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    made = Owner(tmp_path)
    yield made
    made.close()


@pytest.mark.system
def test_writers_killed_at_any_moment_publish_whole_slots_or_none(owner: Owner) -> None:
    rng = random.Random(0)
    for _ in range(8):
        with owner.writer(want=3) as process:
            owner.poll_until(writers=1)
            seen = owner.take_for(0.05 + 0.1 * rng.random())
            process.kill()
            owner.poll_until(writers=0)
            seen += owner.take_ready()
        assert len(seen) > 3
        assert seen == list(range(len(seen)))
        _, heir = writer_of(owner.store, want=4)
        assert heir.available == 4  # nothing stayed with the dead
        owner.store.close_lane(0)


@pytest.mark.system
def test_a_stopped_writer_keeps_its_slots_until_it_is_dead(owner: Owner) -> None:
    """It may wake up and write, so nobody else may get its memory."""
    with owner.writer(2, "hold") as process:
        owner.poll_until(writers=1)
        assert process.stdout is not None
        assert process.stdout.readline() == b"holding\n"
        process.send_signal(signal.SIGSTOP)
        _, other = writer_of(owner.store, want=4)
        for _ in range(20):
            owner.host.poll(0.01)
        assert (owner.writers, other.available) == (2, 2)
        process.kill()
        owner.poll_until(writers=1)
        assert other.available == 4


@pytest.mark.system
def test_a_writer_notices_that_the_owner_closed(owner: Owner) -> None:
    with owner.writer(want=1) as process:
        owner.poll_until(writers=1)
        owner.host.close()
        assert process.wait(timeout=10) == 1  # LearnerGoneError
    owner.host = ShmHost(owner.path, welcome(spec=SPEC), owner.board, owner.store)


# ---------------------------------------------------------------------------------------- socket


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        msgpack.packb({"attach": 99}),
        msgpack.packb({"attach": 1}),
        msgpack.packb({"attach": 1, "want": "x", "lane": True, "spec": {"unroll": []}}),
    ],
)
def test_a_strange_request_hurts_nobody(owner: Owner, request_bytes: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(owner.path))
        peer.send(request_bytes)
        for _ in range(5):
            owner.host.poll(0.01)
        answer = peer.recv(1 << 16)
    assert answer == b"" or "error" in msgpack.unpackb(answer)
    assert owner.writers == 0


def test_a_socket_left_behind_is_taken_over_and_a_living_one_is_not(owner: Owner) -> None:
    with pytest.raises(UserError, match="another process may be using it"):
        ShmHost(owner.path, welcome(), owner.board)
    left = owner.path.with_name("left.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(left))
    ShmHost(left, welcome(), owner.board).close()
    assert not left.exists()


def test_weights_alone_open_no_lane(owner: Owner) -> None:
    links: list[ShmLink] = []
    thread = threading.Thread(target=lambda: links.append(ShmLink(owner.path, None, want=0)))
    thread.start()
    while thread.is_alive():
        owner.host.poll(0.01)
    owner.board.publish(np.ones(LAYOUT.size, np.float32), Stamp(0, 1))
    out = np.zeros(LAYOUT.size, np.float32)
    assert links[0].read_weights(out, None) == Stamp(0, 1)
    assert out.all()
    assert owner.writers == 0
    links[0].close()


# ----------------------------------------------------------------------------------------- board


def test_the_board_shows_the_newest_in_either_precision() -> None:
    board = WeightsBoard.create(3, shared=False)
    out = np.zeros(3, np.float32)
    assert (board.stamp, board.read(out)) == (None, None)
    board.publish(np.array([1, 2, 3], np.float32), Stamp(1, 10))
    assert board.read(out, Stamp(1, 9)) == board.stamp == Stamp(1, 10)
    assert out.tolist() == [1, 2, 3]
    board.publish(to_bf16(np.array([4, 5, 6], np.float32)), Stamp(2, 1))
    assert board.read(out, Stamp(1, 10)) == Stamp(2, 1)
    assert out.tolist() == [4, 5, 6]
    assert board.read(out, Stamp(2, 1)) is None


def test_a_reader_never_sees_half_of_two_versions() -> None:
    board = WeightsBoard.create(20_000, shared=False)
    stop = threading.Event()

    def publish() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            board.publish(np.full(20_000, version, np.float32), Stamp(0, version))

    thread = threading.Thread(target=publish)
    thread.start()
    out = np.zeros(20_000, np.float32)
    stamp, seen = None, 0
    deadline_s = time.monotonic() + 1.0
    try:
        while time.monotonic() < deadline_s:
            newer = board.read(out, stamp)
            if newer is None:
                continue
            assert (out == newer.version).all()
            assert stamp is None or newer.version > stamp.version
            stamp, seen = newer, seen + 1
    finally:
        stop.set()
        thread.join()
    assert seen > 10


def test_memory_that_is_not_there_is_refused_at_creation() -> None:
    """And nothing is allocated first, which would have someone killed for it."""
    before = available_nbytes()
    with pytest.raises(UserError, match=r"1125899\.91 GB of shared memory for slots cannot"):
        Arena.shared(1 << 50, "slots")
    assert available_nbytes() > before // 2
