"""The connector as a real process that is killed, flooded, replayed to, refused or stopped."""

from __future__ import annotations

import random
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import zmq

from idle_peers import connecting, processor_s
from penstock.core.interfaces import LearnerGoneError, RunOverError
from penstock.core.role import EXIT_REJOIN
from penstock.core.specs import Column, SlotSpec
from penstock.launch.engines.local import LocalHandle
from penstock.replay.accounting import Accounting
from penstock.transport import wire
from penstock.transport.addresses import address_of_rank
from penstock.transport.wire import Header, MessageKind
from penstock.transport.zmq.link import ZmqLink
from transport_world import (
    RUN_ID,
    SPEC,
    Learner,
    Taken,
    context,
    exit_code,
    expected,
    fill,
    heard,
    learner,
    role_process,
)
from waiting import free_port, wait_until

pytestmark = pytest.mark.system

BIG = SlotSpec(4, 2, (Column("noise", "<f4", (500_000,)), Column("reward", "<f4")))  # 16 MB


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Learner]:
    with learner(tmp_path) as made:
        yield made


class Join(Protocol):
    """Join as actor 7; the link is closed at the end of the test, if not before."""

    def __call__(self, address: str, spec: SlotSpec = SPEC) -> ZmqLink: ...


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    with ExitStack() as links:

        def made(address: str, spec: SlotSpec = SPEC) -> ZmqLink:
            link = ZmqLink(context(tmp_path), address, spec, 2, actor=7, codec="none")
            links.callback(link.close)
            return link

        yield made


def send(link: ZmqLink, sequence: int) -> None:
    with link.slot(20) as slot:
        assert slot is not None
        fill(slot, sequence)


def test_actor_continues_when_the_connector_is_killed_amid_messages(
    tmp_path: Path, join: Join
) -> None:
    """Whatever was lost, the gaps in the sequence tell; nothing torn is published."""
    address = f"ipc://{tmp_path}/wire"
    rng = random.Random(1)
    with learner(tmp_path, slots=4, spec=BIG) as side, ExitStack() as stack:
        child = stack.enter_context(role_process(tmp_path, "connector", address))
        link = join(address, BIG)
        stop = threading.Event()
        sent = 0

        def play() -> None:
            nonlocal sent
            noise = [np.full(shape_of("noise"), i, np.float32) for i in range(7)]
            while not stop.is_set():
                with link.slot(1) as slot:
                    if slot is None:
                        continue
                    slot.columns["noise"][...] = noise[sent % 7]
                    slot.columns["reward"][...] = sent
                    slot.header["actor"], slot.header["sequence"] = 7, sent
                    slot.header["steps"], slot.header["produced_steps"] = 8, 8 * (sent + 1)
                    sent += 1

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        taken: list[Taken] = []
        try:
            for incarnation in range(1, 6):
                arrived = len(taken)
                while len(taken) < arrived + 3:
                    taken.append(side.take(20))
                time.sleep(rng.random() * 0.05)
                child.signal(signal.SIGKILL)
                child = stack.enter_context(
                    role_process(tmp_path, "connector", address, incarnation=incarnation)
                )
            taken.append(side.take(20))
        finally:
            stop.set()
            thread.join()
        send_last(link, sent)
        while not taken or taken[-1].header["sequence"] != sent:
            taken.append(side.take(20))

    accounting = Accounting()
    for slot in taken:
        sequence = slot.header["sequence"]
        assert (slot.columns["noise"] == sequence % 7).all()
        assert (slot.columns["reward"] == sequence).all()
        accounting.arrived(slot.header)
        accounting.trained += slot.header["steps"]
    sequences = [slot.header["sequence"] for slot in taken]
    assert sequences == sorted(set(sequences))
    missing = sent + 1 - len(taken)
    assert accounting.lost["disconnect"] == 8 * missing
    assert missing <= 5 * 4  # two granted and two on their way, each time
    assert accounting.balance(in_flight=0) == 0


def shape_of(name: str) -> tuple[int, ...]:
    (column,) = (c for c in BIG.columns if c.name == name)
    return (*BIG.rows_of(column), *column.shape)


def send_last(link: ZmqLink, sequence: int) -> None:
    with link.slot(20) as slot:
        assert slot is not None
        slot.columns["noise"][...] = sequence % 7
        slot.columns["reward"][...] = sequence
        slot.header["sequence"], slot.header["steps"] = sequence, 8
        slot.header["produced_steps"] = 8 * (sequence + 1)


def test_flood_of_garbage_is_counted_and_disturbs_no_actor(
    tmp_path: Path, side: Learner, join: Join
) -> None:
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    expected_counts = {"frames": 100, "header": 50, "spec": 50}
    rng = random.Random(2)
    with role_process(tmp_path, "connector", address) as child:
        link = join(address)
        with zmq.Context() as other, other.socket(zmq.DEALER) as flood:
            flood.connect(address)
            for sequence in range(50):
                flood.send(rng.randbytes(100))
                flood.send_multipart([rng.randbytes(100), rng.randbytes(30)])
                flood.send_multipart([b"x"] * 200)
                flood.send_multipart(
                    wire.encode(Header(MessageKind.SLOT, run_id=RUN_ID, actor=99), [])
                )
                send(link, sequence)
            wait_until(lambda: heard(child, "connector")["rejected"] == expected_counts)
        for sequence in range(50, 60):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(rng.randbytes(10_000))  # not ZeroMQ, which sees messages in it
            send(link, sequence)
        assert [side.take().header["sequence"] for _ in range(60)] == list(range(60))


def test_an_oversized_frame_ends_only_its_own_connection(
    tmp_path: Path, side: Learner, join: Join
) -> None:
    address = f"ipc://{tmp_path}/wire"
    with role_process(tmp_path, "connector", address) as child:
        link = join(address)
        with zmq.Context() as other, other.socket(zmq.DEALER) as huge:
            huge.connect(address)
            huge.send_multipart([b"x" * 100, b"x" * (3 << 20)])
            for sequence in range(20):
                send(link, sequence)
            assert [side.take().header["sequence"] for _ in range(20)] == list(range(20))
            huge.close(0)
        assert heard(child, "connector")["rejected"] == {}


def test_a_replayed_message_is_counted_and_dropped(
    tmp_path: Path, side: Learner, join: Join
) -> None:
    """The same bytes again, from another connection: never stored twice."""
    address = f"ipc://{tmp_path}/wire"
    with role_process(tmp_path, "connector", address) as child:
        link = join(address)
        link._encoder = encoder = Recorder(link._encoder)  # type: ignore[assignment]
        for sequence in range(3):
            send(link, sequence)
        assert [side.take().header["sequence"] for _ in range(3)] == [0, 1, 2]
        with zmq.Context() as other, other.socket(zmq.DEALER) as thief:
            thief.connect(address)
            for parts in encoder.recorded:
                thief.send_multipart(parts)
            wait_until(lambda: heard(child, "connector")["rejected"] == {"taken": 3})
        send(link, 3)
        assert side.take().header["sequence"] == 3
        assert not side.taken


class Recorder:
    """Keeps a copy of every message."""

    def __init__(self, encoder: wire.SlotEncoder) -> None:
        self._encoder = encoder
        self.recorded: list[list[bytes]] = []

    def encode(self, *args: object) -> wire.Parts:
        parts = self._encoder.encode(*args)  # type: ignore[arg-type]
        self.recorded.append([bytes(part) for part in parts])
        return parts


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_two_connectors_cannot_share_an_address(
    tmp_path: Path, side: Learner, join: Join, scheme: str
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"ipc://{tmp_path}/wire"
    with role_process(tmp_path, "connector", address) as first:
        heard(first, "ready")
        with role_process(tmp_path, "connector", address) as second:
            error = heard(second, "error")
            assert error["user"]
            assert error["message"].startswith(f"cannot listen at {address} (")
            assert "another process may be using it" in error["message"]
            assert exit_code(second) == 2
        link = join(address)  # the first one is as well as before
        send(link, 0)
        assert side.take().header["sequence"] == 0


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_two_connectors_of_a_learner_each_receive_from_their_actors(
    tmp_path: Path, side: Learner, scheme: str
) -> None:
    """All actors join at the address of the first; one is killed, and receives again."""
    first = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"ipc://{tmp_path}/wire"
    second = address_of_rank(first, 1)
    with ExitStack() as stack:

        def start(address: str, index: int, incarnation: int = 0) -> LocalHandle:
            numbers = {"index": index, "incarnation": incarnation}
            started = role_process(
                tmp_path, "connector", address, connectors=2, bind=first, **numbers
            )
            return stack.enter_context(started)

        kept, killed = start(first, 0), start(second, 1)
        links = {
            actor: ZmqLink(context(tmp_path), first, SPEC, 2, actor=actor) for actor in range(4)
        }
        for link in links.values():
            stack.callback(link.close)

        def play(sequence: int) -> None:
            for actor, link in links.items():
                with link.slot(20) as slot:
                    assert slot is not None
                    fill(slot, sequence, actor=actor)

        play(0)
        play(1)
        received = sorted(stream_of(side.take(20)) for _ in range(8))
        assert received == [(actor, n) for actor in range(4) for n in range(2)]
        for index, end in enumerate((kept, killed)):
            report = heard(end, "connector")
            while report["slots"] < 4:
                report = heard(end, "connector")
            assert (report["index"], report["actors"], report["rejected"]) == (index, 2, {})
        killed.signal(signal.SIGKILL)
        start(second, 1, incarnation=1)
        for sequence in range(2, 6):  # two per actor may still go to the connector that was killed
            play(sequence)
        expected_now = {(actor, n) for actor in (0, 2) for n in range(2, 6)} | {(1, 5), (3, 5)}
        wait_until(lambda: expected_now <= set(map(stream_of, side.taken)), 20)


def stream_of(taken: Taken) -> tuple[int, int]:
    """Actor and sequence of a slot."""
    return taken.header["actor"], taken.header["sequence"]


def test_bind_for_other_hosts_needs_keys(tmp_path: Path, side: Learner) -> None:
    with role_process(tmp_path, "connector", "tcp://0.0.0.0:0") as child:
        error = heard(child, "error")
        assert "make keys with `penstock keys new`" in error["message"]
        assert exit_code(child) == 2


def test_terminated_connector_takes_in_all_sent_slots(
    tmp_path: Path, side: Learner, join: Join
) -> None:
    address = f"ipc://{tmp_path}/wire"
    with role_process(tmp_path, "connector", address) as child:
        link = join(address)
        for sequence in range(4):
            send(link, sequence)
        child.signal(signal.SIGTERM)
        assert exit_code(child) == 0
        final = heard(child, "connector")
        assert (final["slots"], final["steps"]) == (4, 48)
        assert final["streams"] == [
            {"actor": 7, "incarnation": 0, "produced_steps": 48, "sequence": 4}
        ]
        assert [side.take().header["sequence"] for _ in range(4)] == [0, 1, 2, 3]


def test_playing_actor_learns_of_the_end_of_the_run_before_the_connector_ends(
    tmp_path: Path, side: Learner, join: Join
) -> None:
    address = f"ipc://{tmp_path}/wire"
    with role_process(tmp_path, "connector", address) as child:
        link = join(address)
        send(link, 0)
        child.send({"kind": "over"})
        child.signal(signal.SIGTERM)
        time.sleep(1)  # between two beats
        with pytest.raises(RunOverError):
            link.beat()
        link.close()
        assert exit_code(child) == 0


def test_connector_ends_with_its_learner_and_the_actor_joins_the_next_run(
    tmp_path: Path, join: Join
) -> None:
    address = f"ipc://{tmp_path}/wire"
    with learner(tmp_path) as side, role_process(tmp_path, "connector", address) as child:
        link = join(address)
        send(link, 0)
        assert side.take().columns["reward"].max() == expected(0)["reward"].max()
        (tmp_path / "learner-0.sock").unlink()
        side.stop()
        assert exit_code(child) == EXIT_REJOIN
    with (
        learner(tmp_path, run_id=RUN_ID + 1) as side,
        role_process(tmp_path, "connector", address) as child,
    ):
        heard(child, "ready")

        def go_on() -> None:
            for sequence in range(1, 100):
                send(link, sequence)
                time.sleep(0.05)

        with pytest.raises(LearnerGoneError, match="another run"):
            go_on()
        assert not side.taken
        link = join(address)
        assert link.welcome.run_id == RUN_ID + 1
        send(link, 0)
        assert side.take().header["sequence"] == 0
        link.close()


def test_idle_connections_take_no_processor_time_and_block_no_actor(
    tmp_path: Path, side: Learner, join: Join
) -> None:
    """200 that never speak, where 128 descriptors are allowed."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    with role_process(tmp_path, "connector", address) as child, ExitStack() as idle:
        heard(child, "ready")
        link = join(address)
        send(link, 0)
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (128, 128))
        for _ in range(200):
            idle.enter_context(connecting(port))
        event = heard(child, "event")
        assert (event["event"], event["data"]["reason"]) == ("refused", "descriptors")
        assert "file descriptors are in use: raise the hard limit" in event["text"]
        before_s = processor_s(child.pid)
        time.sleep(1)
        assert processor_s(child.pid) - before_s < 0.25
        send(link, 1)  # who was there is as well as before
        late = ZmqLink(context(tmp_path), address, SPEC, 2, actor=8)
        with late.slot(40) as slot:  # once those that never spoke were closed
            assert slot is not None
            fill(slot, 0, actor=8)
        late.close()
        sent = [(side.take().header["actor"]) for _ in range(3)]
        assert sent == [7, 7, 8]
