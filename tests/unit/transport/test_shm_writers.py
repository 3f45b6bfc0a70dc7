"""Writer processes seen from the learner: killed, stopped or hostile."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgpack
import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.configs.value_types import MOST_CHAIRS
from penstock.core.params import Stamp
from penstock.core.specs import Column, SlotSpec
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard
from transport_world import LAYOUT, fill, learner, welcome, writer_of

SPEC = SlotSpec(4, 2, (Column("obs", "|u1", (200, 100), "unroll+1"), Column("reward", "|u1")))
WRITER = Path(__file__).parents[2] / "shm_writer.py"


class Owner:
    """The learner's side of real writers, in the thread of the test."""

    def __init__(self, folder: Path, slots: int = 4) -> None:
        self.store = SlotStore(SPEC, slots, lanes=2)
        self.board = WeightsBoard.create(LAYOUT.size)
        self.path = folder / "learner.sock"
        self.host = ShmHost(self.path, welcome(spec=SPEC), [self.board], self.store)

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


def mapped() -> int:
    """The number of descriptors of shared memory in this process."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            links.append(os.readlink(descriptor))
    return sum(link.startswith("/memfd:") for link in links)


def test_an_actor_attaches_to_the_boards_of_the_most_chairs_and_closes_them(
    tmp_path: Path,
) -> None:
    with learner(tmp_path, chairs=MOST_CHAIRS) as side:
        last = side.publish(3, policy_id=MOST_CHAIRS)
        before = mapped()
        link = ShmLink(side.path, spec=None, want=2)
        out = np.zeros(LAYOUT.size, np.float32)
        assert link.read_weights(out, None, MOST_CHAIRS) == Stamp(2, 3)
        np.testing.assert_array_equal(out, last)
        with link.slot(5) as slot:
            assert slot is not None
            fill(slot, 0)
        assert side.take().header["sequence"] == 0
        link.close()
        del link, slot
        gc.collect()  # memory that is mapped has a descriptor too
        assert mapped() == before


@pytest.mark.system
def test_writers_killed_at_any_moment_publish_only_complete_slots(owner: Owner) -> None:
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
    owner.host = ShmHost(owner.path, welcome(spec=SPEC), [owner.board], owner.store)


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
def test_malformed_request_does_not_disturb_the_owner(owner: Owner, request_bytes: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(owner.path))
        peer.send(request_bytes)
        for _ in range(5):
            owner.host.poll(0.01)
        answer = peer.recv(1 << 16)
    assert answer == b"" or "error" in msgpack.unpackb(answer)
    assert owner.writers == 0


def test_leftover_socket_is_taken_over_and_a_live_one_is_not(owner: Owner) -> None:
    with pytest.raises(UserError, match="another process may be using it"):
        ShmHost(owner.path, welcome(), [owner.board])
    left = owner.path.with_name("left.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(left))
    ShmHost(left, welcome(), [owner.board]).close()
    assert not left.exists()


def test_client_for_weights_only_opens_no_lane(owner: Owner) -> None:
    links: list[ShmLink] = []
    thread = threading.Thread(
        target=lambda: links.append(ShmLink(owner.path, None, want=0)), daemon=True
    )
    thread.start()
    while thread.is_alive():
        owner.host.poll(0.01)
    owner.board.publish(np.ones(LAYOUT.size, np.float32), Stamp(0, 1))
    out = np.zeros(LAYOUT.size, np.float32)
    assert links[0].read_weights(out, None) == Stamp(0, 1)
    assert out.all()
    assert owner.writers == 0
    links[0].close()
