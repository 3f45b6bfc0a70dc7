"""Relays that fetch weights from each other, over real sockets, with and without keys.

Connector, parents and children are the real ones; hostile parents are sockets that speak the
protocol.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import zmq

from penstock.core.params import ParamLayout, Stamp
from penstock.transport import wire
from penstock.transport.wire import Header, MessageKind, WeightsAt
from penstock.transport.zmq import keys, relay_peers
from penstock.transport.zmq.client import Client, Weights
from penstock.transport.zmq.relay_peers import (
    MAX_CHILDREN,
    ParentRelay,
    RelayServer,
    WeightsPuller,
)
from penstock.transport.zmq.relay_tree import RelayTree
from penstock.transport.zmq.sockets import receive
from transport_world import (
    LAYOUT,
    RUN_ID,
    Learner,
    connector,
    context,
    learner,
    waiting,
)
from waiting import wait_until

NBYTES = LAYOUT.size * 2
ANNOUNCED = Stamp(2, 5)


def ignore(*_: object) -> None:
    """For what needs no descriptors watched, and no reports."""


class Relay:
    """A relay without its board: the puller, and what it received."""

    def __init__(self, folder: Path, address: str, curve: Path | None) -> None:
        self.client = Client(context(folder, "relay", curve=curve), address)
        self.client.join()
        self.reports: list[str] = []
        self.puller = WeightsPuller(self.client, ignore, ignore, self.reports.append)
        self.received: list[Weights] = []

    def turn(self) -> None:
        fresh, _ = self.puller.turn()
        if fresh is not None:
            self.received.append(fresh)

    @property
    def version(self) -> int:
        return self.received[-1][0].version if self.received else -1

    def close(self) -> None:
        self.puller.close()
        self.client.close()


class World:
    """A learner with a connector, and relays that join it. The tree is one of small limits."""

    def __init__(
        self, folder: Path, stack: ExitStack, curve: Path | None, address: str = ""
    ) -> None:
        self.curve = curve
        self.folder = folder
        self._stack = stack
        self.side: Learner = stack.enter_context(learner(folder))
        self.tree = RelayTree(NBYTES, fanout=1, min_relays=2, min_nbytes=0)
        self.relays: list[Relay] = []
        with zmq.Context() as probe, probe.socket(zmq.ROUTER) as free:
            port = free.bind_to_random_port("tcp://127.0.0.1")
        self.address = address or f"tcp://127.0.0.1:{port}"
        self.receiver = stack.enter_context(
            connector(self.side, self.address, curve=curve, tree=self.tree)
        )

    def join(self, count: int) -> None:
        for _ in range(count):
            relay = Relay(self.folder, self.address, self.curve)
            self._stack.callback(relay.close)
            self.relays.append(relay)
            count = len(self.relays)
            self.turn_until(lambda: len(self.tree._relays) >= count)  # noqa: B023

    def turn_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
        """Let all relays work until a condition holds; returns the seconds that took."""
        began_s = time.monotonic()

        def turned() -> bool:
            for relay in self.relays:
                relay.turn()
            return condition()

        wait_until(turned, timeout_s)
        return time.monotonic() - began_s

    def settle(self) -> None:
        """Let all relays ask for the next version, so that the first one is served first."""
        self.turn_until(lambda: waiting(self.receiver) >= len(self.relays))

    def publish(self, version: int) -> npt.NDArray[np.float32]:
        self.settle()
        return self.side.publish(version)

    def all_have(self, version: int) -> Callable[[], bool]:
        return lambda: all(relay.version == version for relay in self.relays)


@pytest.fixture(params=["plain", "curve"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    curve = tmp_path / "keys" if request.param == "curve" else None
    if curve is not None:
        keys.make_keys(curve)
    with ExitStack() as stack:
        yield World(tmp_path, stack, curve)


def grown(world: World, count: int) -> None:
    """``count`` relays that all listen and have version 1."""
    world.join(count)
    world.side.publish(0)
    world.turn_until(world.all_have(0))
    world.publish(1)  # the first relay of all did not listen before there were others
    world.turn_until(world.all_have(1))


def test_weights_pass_through_a_chain_of_relays(world: World) -> None:
    """With a fan-out of one, each relay fetches from the one before it."""
    grown(world, 4)
    before = [relay.puller.from_relays for relay in world.relays]
    for version in (2, 3, 7):
        sent = world.publish(version)
        world.turn_until(world.all_have(version))
        for relay in world.relays:
            stamp, values = relay.received[-1]
            assert stamp == Stamp(2, version)
            np.testing.assert_array_equal(wire.to_float32(values), sent)
    used = [r.puller.from_relays - b for r, b in zip(world.relays, before, strict=True)]
    assert used == [0, 3, 3, 3]
    assert not world.receiver.rejected


def test_late_relay_fetches_from_a_relay_that_has_the_version(world: World) -> None:
    grown(world, 3)
    world.join(1)
    world.turn_until(world.all_have(1))
    assert world.relays[-1].puller.from_relays == 1


def test_a_relay_that_ended_is_not_named(world: World) -> None:
    grown(world, 4)
    ended = world.relays.pop(1)
    ended.close()
    world.publish(2)
    took_s = world.turn_until(world.all_have(2))
    assert took_s < relay_peers.PATIENCE_S
    assert not any(relay.reports for relay in world.relays)


def test_children_of_a_relay_that_hangs_get_their_weights_from_the_connector(world: World) -> None:
    grown(world, 4)
    world.settle()
    hung = world.relays.pop(1)  # its sockets stay open, and nothing answers
    world.publish(2)
    took_s = world.turn_until(world.all_have(2))
    assert took_s < 2 * relay_peers.PATIENCE_S + 1
    (report,) = world.relays[1].reports
    assert "did not send its weights in time" in report
    hung.turn()
    world.publish(3)
    took_s = world.turn_until(world.all_have(3))
    assert took_s < relay_peers.PATIENCE_S, "a parent that failed is named again"


def test_tampered_weights_are_rejected_and_fetched_from_the_connector(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown(world, 3)
    server = world.relays[0].puller._server
    assert server is not None
    sound = server.publish
    monkeypatch.setattr(
        server, "publish", lambda weights: sound(weights._replace(values=weights.values + 1))
    )
    sent = world.publish(2)
    took_s = world.turn_until(world.all_have(2))
    assert took_s < relay_peers.PATIENCE_S, "there is nothing to wait for"
    for relay in world.relays:
        np.testing.assert_array_equal(wire.to_float32(relay.received[-1][1]), sent)
    (report,) = world.relays[1].reports
    assert "something else than the learner's weights" in report


def test_parent_relay_with_an_old_version_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown(world, 3)
    server = world.relays[0].puller._server
    assert server is not None
    monkeypatch.setattr(server, "publish", ignore)
    for version in (2, 3):
        sent = world.publish(version)
        world.turn_until(world.all_have(version))
        np.testing.assert_array_equal(wire.to_float32(world.relays[2].received[-1][1]), sent)
    reports = [report for relay in world.relays for report in relay.reports]
    assert len(reports) == 1, "the parent is named to no child of the next version"


def test_relay_without_a_port_is_served_by_the_connector(world: World) -> None:
    grown(world, 3)
    world.relays[1].puller._port = 0
    world.publish(2)
    world.turn_until(world.all_have(2))


def test_relays_that_join_by_a_socket_of_this_host_do_not_listen(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack, None, f"ipc://{tmp_path}/wire")
        grown(world, 2)
        world.publish(2)
        world.turn_until(world.all_have(2))
        assert [relay.puller.from_relays for relay in world.relays] == [0, 0]


# ---------------------------------------------------------------------------- hostile parents


class HostileParent:
    """A socket at a relay's address, which answers a request by what a test chooses."""

    def __init__(self, world: World, stack: ExitStack) -> None:
        world.join(1)
        self.client = world.relays[0].client
        context = zmq.Context()
        stack.callback(context.destroy, 0)
        self.key, own = "", None
        self.socket = context.socket(zmq.ROUTER)
        if world.curve is not None:
            public, own = zmq.curve_keypair()
            self.key = public.decode()
            self.socket.curve_server, self.socket.curve_secretkey = True, own
            self.socket.curve_publickey = public
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.parent = ParentRelay(self.client, ignore, ignore)
        stack.callback(self.parent.close)
        self.values = np.arange(LAYOUT.size, dtype=np.float32)

    def at(self, **changes: object) -> WeightsAt:
        """What the connector would announce."""
        sha256 = hashlib.sha256(self.values.tobytes()).hexdigest()
        address = f"tcp://127.0.0.1:{self.port}"
        at = WeightsAt(ANNOUNCED, self.values.nbytes, address, self.key, sha256, 1)
        return at._replace(**changes)  # type: ignore[arg-type]

    def weights(
        self,
        values: npt.NDArray[np.generic] | None = None,
        stamp: Stamp = ANNOUNCED,
        **changes: int,
    ) -> wire.Parts:
        options = {"run_id": RUN_ID, "policy_id": 0} | changes
        sent = self.values if values is None else values
        return wire.encode_payload(sent, stamp, LAYOUT, **options)

    def ask(self, answer: wire.Parts | None, at: WeightsAt | None = None) -> Weights | None:
        """What the relay makes of an answer; None is none at all."""
        self.parent.failure = ""
        self.parent.request(at or self.at(), time.monotonic())
        if not self.parent.failure and answer is not None:
            peer, *_ = self.socket.recv_multipart()
            self.socket.send_multipart([peer, *answer])
        ends_s = time.monotonic() + 10
        while time.monotonic() < ends_s and not self.parent.failure:
            fresh = self.parent.poll(time.monotonic())
            if fresh is not None:
                return fresh
            time.sleep(0.002)
        assert not self.parent.busy
        return None


@pytest.fixture
def hostile(world: World) -> Iterator[HostileParent]:
    with ExitStack() as stack:
        yield HostileParent(world, stack)


def test_the_announced_weights_are_accepted(hostile: HostileParent) -> None:
    for _ in range(2):  # the second time over the same connection
        fresh = hostile.ask(hostile.weights())
        assert fresh is not None
        np.testing.assert_array_equal(fresh[1], hostile.values)


@pytest.mark.parametrize(
    "case", ["values", "old", "newer", "run", "policy", "dtype", "kind", "noise", "late", "passed"]
)
def test_every_other_answer_of_a_parent_is_a_failure_with_its_reason(
    hostile: HostileParent, case: str
) -> None:
    answers: dict[str, wire.Parts | None] = {
        "values": hostile.weights(hostile.values + 1),
        "old": hostile.weights(stamp=Stamp(2, 4)),
        "newer": hostile.weights(stamp=Stamp(3, 0)),
        "run": hostile.weights(run_id=RUN_ID + 1),
        "policy": hostile.weights(policy_id=1),
        "dtype": hostile.weights(np.zeros(LAYOUT.size, np.uint16)),
        "kind": wire.encode(Header(MessageKind.WELCOME, run_id=RUN_ID), {}),
        "noise": [b"PNSK", b"\x00" * 300],
        "late": None,
        "passed": wire.encode(Header(MessageKind.REFUSE, run_id=RUN_ID), {"error": "newer"}),
    }
    began_s = time.monotonic()
    assert hostile.ask(answers[case]) is None
    assert hostile.parent.failure == (case if case in ("late", "passed") else "wrong")
    assert time.monotonic() - began_s < relay_peers.PATIENCE_S + 1
    if case != "late":  # nothing of the failure is left
        assert hostile.ask(hostile.weights()) is not None


def test_an_address_or_key_that_cannot_be_used_is_a_failure(hostile: HostileParent) -> None:
    for changes in (
        {"address": "tcp://127.0.0.1:0"},
        {"address": "tcp://127.0.0.1:99999"},
        {"key": "%%%%%" * 8},
        {"key": "" if hostile.key else "0" * 40},
    ):
        assert hostile.ask(None, hostile.at(**changes)) is None
        assert hostile.parent.failure in ("wrong", "late")


def test_weights_of_a_parent_with_another_key_are_not_taken(hostile: HostileParent) -> None:
    if not hostile.key:
        pytest.skip("without keys")
    other = zmq.curve_keypair()[0].decode()
    assert hostile.ask(None, hostile.at(key=other)) is None
    assert hostile.parent.failure == "late"


def test_message_larger_than_the_weights_is_not_received(hostile: HostileParent) -> None:
    huge = hostile.weights()
    huge[2] = bytes(1 << 20)
    assert hostile.ask(huge) is None
    assert hostile.parent.failure == "late", "ZeroMQ closes the connection"


# --------------------------------------------------------------------------- hostile children


@pytest.fixture
def server(world: World) -> Iterator[RelayServer]:
    world.join(1)
    made = RelayServer(world.relays[0].client)
    yield made
    made.close()


def child(
    world: World, server: RelayServer, key: str | None = None, received: int = 1000
) -> zmq.Socket[bytes]:
    """A connection to a relay's server, by the key that the connector would hand out, on which
    ``received`` messages may wait to be read.

    The system's own buffer for it is small, as one that adapts may grow beyond 32 MB.
    """
    context = world.relays[0].client.context
    socket = context.socket(zmq.DEALER)
    socket.rcvhwm = received
    socket.rcvbuf = 1 << 18
    if server.key:
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = (key or server.key).encode()
    socket.connect(f"tcp://127.0.0.1:{server.port}")
    return socket


def request(socket: zmq.Socket[bytes], meta: object, run_id: int = RUN_ID) -> None:
    head = Header(MessageKind.WEIGHTS_GET, run_id=run_id)
    socket.send_multipart(wire.encode(head, meta))


def answers(server: RelayServer, socket: zmq.Socket[bytes], seconds: float = 0.3) -> list[int]:
    """The kinds of messages that arrive meanwhile."""
    found = []
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        server.turn()
        if (parts := receive(socket)) is not None:
            found.append(wire.decode(parts).head.kind)
        time.sleep(0.002)
    return found


def published(version: int) -> Weights:
    return Weights(Stamp(2, version), np.full(LAYOUT.size, version, np.float32))


def test_child_waits_for_its_version_and_receives_it_once(
    world: World, server: RelayServer
) -> None:
    with child(world, server) as socket:
        request(socket, {"want": [2, 3]})
        server.publish(published(2))
        assert answers(server, socket) == [], "an older version is not sent"
        server.publish(published(3))
        request(socket, {"want": [2, 3]})
        assert answers(server, socket) == [MessageKind.WEIGHTS]
        request(socket, {"want": [2, 2]})
        assert answers(server, socket) == [MessageKind.REFUSE]


def test_requests_of_other_runs_and_malformed_requests_are_dropped(
    world: World, server: RelayServer
) -> None:
    server.publish(published(3))
    with child(world, server) as socket:
        request(socket, {"want": [2, 3]}, run_id=RUN_ID + 1)
        for meta in (None, {}, {"want": 3}, {"want": None}, {"want": [2, 3], "policy_id": 1}):
            request(socket, meta)
        socket.send_multipart(wire.encode(Header(MessageKind.HELLO, run_id=RUN_ID), {}))
        socket.send_multipart([b"", b"x"])
        assert answers(server, socket) == []
        request(socket, {"want": [2, 3]})
        assert answers(server, socket) == [MessageKind.WEIGHTS]


def test_the_number_of_children_is_bounded(world: World, server: RelayServer) -> None:
    for number in range(MAX_CHILDREN + 10):
        for want in (3, 4):
            head = Header(MessageKind.WEIGHTS_GET, run_id=RUN_ID)
            server.handle(b"%d" % number, wire.encode(head, {"want": [2, want]}))
    assert len(server._waiting) == MAX_CHILDREN
    server.publish(published(4))
    assert len(server._copies) == MAX_CHILDREN
    for number in range(MAX_CHILDREN + 10):
        server.handle(b"%d" % number, wire.encode(head, {"want": [2, 4]}))
    assert len(server._copies) == MAX_CHILDREN


def test_a_child_that_reads_nothing_is_sent_no_further_version(
    world: World, server: RelayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server.key:
        pytest.skip("libzmq holds one more copy, which is encrypted")
    values = np.zeros(4 << 20, np.float32)  # more than the system's buffers of a connection hold
    monkeypatch.setattr(server, "_layout", ParamLayout((("w", values.shape),)))
    with child(world, server, received=1) as socket:

        def publish_and_ask(version: int) -> None:
            server.publish(Weights(Stamp(2, version), values))
            request(socket, {"want": [2, version]})
            wait_until(lambda: server.turn() > 0)

        # The first copy waits at the child to be read, and the second one in the connection.
        publish_and_ask(1)
        wait_until(lambda: all(copy.is_released() for copy in server._copies.values()))
        publish_and_ask(2)
        publish_and_ask(3)
        for _ in range(20):
            server.turn()
            time.sleep(0.002)
        assert list(server._waiting.values()) == [Stamp(2, 3)]

        versions: list[int] = []

        def has_newest() -> bool:
            server.turn()
            if (parts := receive(socket)) is not None:
                versions.append(wire.decode(parts).head.version)
            return 3 in versions

        wait_until(has_newest)
        assert versions == [1, 2, 3]


def test_children_waiting_for_a_missing_version_do_not_block_other_children(
    world: World, server: RelayServer
) -> None:
    server.publish(published(1))
    head = Header(MessageKind.WEIGHTS_GET, run_id=RUN_ID)
    for number in range(MAX_CHILDREN):
        server.handle(b"%d" % number, wire.encode(head, {"want": [2, 1 << 40]}))
    with child(world, server) as socket:
        for version in (2, 3):
            request(socket, {"want": [2, version]})
            assert answers(server, socket) == []
            server.publish(published(version))
            assert answers(server, socket) == [MessageKind.WEIGHTS]


def test_without_the_key_of_the_connector_no_child_connects(
    world: World, server: RelayServer
) -> None:
    if not server.key:
        pytest.skip("without keys")
    server.publish(published(3))
    other = zmq.curve_keypair()[0].decode()
    with child(world, server, other) as socket:
        request(socket, {"want": [2, 3]})
        assert answers(server, socket, 0.5) == []
        socket.linger = 0
