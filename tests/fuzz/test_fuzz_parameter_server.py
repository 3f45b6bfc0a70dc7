"""Hostile workers at a parameter server, through pace and parameters to what other workers read;
and a hostile server at a worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mutations import bounded, flipped, floats, fuzzed, signed, unsigned
from penstock.configs.errors import UserError
from penstock.learner.extras.parameter_server import client as client_module
from penstock.learner.extras.parameter_server import protocol
from penstock.learner.extras.parameter_server import server as server_module
from penstock.learner.extras.parameter_server.client import ServerClient
from penstock.learner.extras.parameter_server.parameters import pack_state, template
from penstock.learner.extras.parameter_server.protocol import (
    Flag,
    ServerHeader,
    ServerMessageKind,
    rules,
)
from penstock.learner.extras.parameter_server.server import ParameterServer
from penstock.learner.progress import GROWTH
from server_rig import SIZE, config, optimizer_of

HONEST = b"honest"
PEERS = st.sampled_from([b"evil", b"worse"])
KINDS = st.sampled_from(list(ServerMessageKind))
# A learner is trusted with its counts, and only the form of a message is hostile.
COUNTS = st.sampled_from([0, 1, 64, 2**31, 2**40])
VERSIONS = st.integers(-(2**40), 2**40)
SOUND_TALLIES = st.lists(st.sampled_from([0.0, 1.0, 1e15]), min_size=GROWTH, max_size=GROWTH).map(
    tuple
)
TALLIES = SOUND_TALLIES | st.lists(
    st.sampled_from([-1.0, float("nan"), float("inf")]), min_size=GROWTH, max_size=GROWTH
).map(tuple)
VALUES = st.lists(
    st.sampled_from([0.0, 1.0, -1.0, 1e10, 1e19, 3e38, -3e38]) | floats,
    min_size=SIZE,
    max_size=SIZE,
).map(lambda numbers: np.array(numbers, np.float64).clip(-3e38, 3e38).astype(np.float32))


class LocalPeers:
    """Stands for the server's socket; writes down what is sent."""

    def __init__(self, *_: Any) -> None:
        self.said: list[tuple[bytes, list[bytes]]] = []

    def send(self, name: bytes, frames: Sequence[protocol.Payload]) -> bool:
        self.said.append((name, [bytes(frame) for frame in frames]))
        return True

    def is_there(self, name: bytes) -> bool:
        return True

    def gone(self, names: Iterable[bytes]) -> list[bytes]:
        return []

    def close(self) -> None:
        """Nothing is open."""


class Workers(RuleBasedStateMachine):
    """An honest worker of rank 0 and hostile ones of other ranks, under one pace."""

    PACE: ClassVar[dict[str, Any]] = {"pace": "tap"}

    def __init__(self) -> None:
        super().__init__()
        self.cfg = config(count=4, **self.PACE)
        with patch.object(server_module, "Peers", LocalPeers):
            self.server = ParameterServer(self.cfg, "inproc://parameters")
        self.peers: Any = self.server._peers
        self.sessions: dict[bytes, int] = {}
        self.number = 0
        self.join(HONEST, 0)
        shapes = template(SIZE, self.cfg)
        arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        state = pack_state(np.zeros(SIZE, np.float32), arrays)
        self.say(HONEST, ServerHeader(ServerMessageKind.STATE), state)

    def say(self, name: bytes, head: ServerHeader, packed: protocol.Packed | None = None) -> None:
        head = head._replace(session=head.session or self.sessions.get(name, 0))
        self.handle(name, protocol.encode(head, packed))

    def handle(self, name: bytes, frames: list[Any]) -> None:
        with bounded():
            self.server.handle(name, frames)
        for peer, said in self.peers.said:
            message = protocol.decode(said)  # what it says must be of use to those who hear it
            if message.head.kind == ServerMessageKind.WELCOME:
                self.sessions[peer] = message.head.session
        self.answers = [said for peer, said in self.peers.said if peer == HONEST]
        self.peers.said.clear()

    def join(self, name: bytes, rank: int, **fields: Any) -> None:
        head = ServerHeader(
            ServerMessageKind.JOIN, rank=rank, session=rank + 5, entries=SIZE, rules=rules(self.cfg)
        )
        self.handle(name, protocol.encode(head._replace(**fields)))

    @rule(name=PEERS, rank=st.integers(1, 3), version=COUNTS)
    def hostile_join(self, name: bytes, rank: int, version: int) -> None:
        self.join(name, rank, version=version)

    @rule(
        name=PEERS,
        rank=unsigned(32),
        version=VERSIONS,
        entries=unsigned(32),
        session=unsigned(64),
    )
    def strange_join(self, name: bytes, rank: int, **fields: int) -> None:
        self.join(name, rank or 1, **fields)

    @rule(name=PEERS, samples=COUNTS, tally=TALLIES, values=VALUES, flags=unsigned(16))
    def hostile_push(self, name: bytes, samples: int, tally: Any, values: Any, flags: int) -> None:
        self.push(name, samples, tally, values, flags)

    def push(self, name: bytes, samples: int, tally: Any, values: Any, flags: int) -> None:
        """``flags`` may not tell all to stop, which any worker may."""
        flags &= ~(Flag.STOP | Flag.NAN | Flag.DENSE | Flag.SPARSE)
        head = ServerHeader(ServerMessageKind.PUSH, flags, samples=samples, tally=tally)
        if self.cfg.pace == "asp":
            packed = protocol.pack_sparse(np.arange(SIZE, dtype=np.uint32), values)
        else:
            packed = protocol.pack_dense(values)
        self.say(name, head, packed)

    @rule(name=PEERS, rank=st.integers(1, 3), samples=COUNTS, tally=SOUND_TALLIES, values=VALUES)
    def turn(self, name: bytes, rank: int, samples: int, tally: Any, values: Any) -> None:
        """Join, pull and push, as a sound worker would."""
        if name not in self.server._members:
            self.join(name, rank)
        self.number += 1
        self.say(name, ServerHeader(ServerMessageKind.PULL, number=self.number))
        self.push(name, samples, tally, values, 0)

    @rule(
        name=PEERS,
        indices=st.lists(unsigned(32), max_size=SIZE),
        values=VALUES,
        kind=st.sampled_from([ServerMessageKind.PUSH, ServerMessageKind.STATE]),
    )
    def sparse(self, name: bytes, indices: list[int], values: Any, kind: ServerMessageKind) -> None:
        packed = protocol.pack_sparse(np.array(indices, np.uint32), values[: len(indices)])
        self.say(name, ServerHeader(kind, samples=1), packed)

    @rule(name=PEERS, version=COUNTS, samples=COUNTS, tally=TALLIES, extra=st.integers(-4, 40))
    def state(self, name: bytes, version: int, samples: int, tally: Any, extra: int) -> None:
        shapes = template(SIZE, self.cfg)
        size = SIZE + sum(int(np.prod(shape)) for shape in shapes.values()) + max(0, extra - 30)
        packed = protocol.pack_dense(np.ones(size, np.float32))
        self.say(
            name,
            ServerHeader(ServerMessageKind.STATE, version=version, samples=samples, tally=tally),
            packed,
        )

    @rule(name=PEERS, kind=KINDS, number=unsigned(32), version=VERSIONS)
    def other(self, name: bytes, kind: ServerMessageKind, number: int, version: int) -> None:
        self.say(name, ServerHeader(kind, number=number, version=version))

    @rule(data=st.data(), name=PEERS, kind=KINDS, rank=unsigned(31), number=unsigned(31))
    def noise(
        self, data: st.DataObject, name: bytes, kind: ServerMessageKind, rank: int, number: int
    ) -> None:
        session, version = data.draw(unsigned(31)), data.draw(unsigned(31))
        head = ServerHeader(kind, 0, rank, number, session, version)
        frames = protocol.encode(head, protocol.pack_text("text"))
        at = data.draw(st.integers(0, 1))
        frames[at] = data.draw(st.composite(lambda draw: flipped(bytes(frames[at]), draw))())
        self.handle(name, frames[: data.draw(st.integers(0, 2))])

    @rule(values=VALUES)
    def honest_turn(self, values: Any) -> None:
        """Pull, then push a gradient: the server answers, with numbers."""
        self.number += 1
        version = self.server.pace.version
        pull = ServerHeader(ServerMessageKind.PULL, number=self.number, version=version)
        self.say(HONEST, pull)
        if self.answers and protocol.decode(self.answers[-1]).head.kind == ServerMessageKind.WHO:
            self.join(HONEST, 0, version=0)  # another's parameters were ahead
            self.say(HONEST, pull)
        answers = [
            m for m in map(protocol.decode, self.answers) if m.head.kind == ServerMessageKind.VALUES
        ]
        if not answers:  # its pace waits for a slower one
            return
        assert answers[0].head.number == self.number
        head = ServerHeader(ServerMessageKind.PUSH, samples=1, tally=(0.0, 1.0, 0.0, 0.0, 0.0, 0.0))
        if self.cfg.pace == "asp":
            small = protocol.pack_sparse(
                np.arange(2, dtype=np.uint32), np.full(2, 1e-3, np.float32)
            )
        else:
            small = protocol.pack_dense(np.full(SIZE, 1e-3, np.float32))
        self.say(HONEST, head, small)

    @invariant()
    def holds(self) -> None:
        self.server.figures()
        assert len(self.server._members) <= 3

    def teardown(self) -> None:
        self.server.close()


class AsynchronousWorkers(Workers):
    PACE: ClassVar[dict[str, Any]] = {"pace": "asp"}


TestWorkers = Workers.TestCase
TestAsynchronousWorkers = AsynchronousWorkers.TestCase
TestWorkers.settings = TestAsynchronousWorkers.settings = fuzzed(cost=3, stateful_step_count=25)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class LocalSocket:
    """Stands for a worker's socket: gives one message, and takes any."""

    def __init__(self) -> None:
        self.coming: list[list[bytes]] = []

    def send_multipart(self, *_: Any, **__: Any) -> None:
        """It is lost."""

    def recv_multipart(self, copy: bool) -> list[Any]:
        return [_Frame(frame) for frame in self.coming.pop(0)]

    def poll(self, timeout_ms: int) -> bool:
        return bool(self.coming)

    def get_monitor_socket(self, events: int) -> LocalSocket:
        return LocalSocket()

    def disable_monitor(self) -> None:
        """There are no events."""

    def close(self, linger: int = 0) -> None:
        """Nothing is open."""


class LocalPoller:
    """Stands for a poller of such sockets."""

    def __init__(self) -> None:
        self._sockets: list[LocalSocket] = []

    def register(self, socket: LocalSocket, _: int) -> None:
        self._sockets.append(socket)

    def poll(self, timeout_ms: int) -> list[tuple[LocalSocket, int]]:
        return [(socket, 1) for socket in self._sockets if socket.poll(timeout_ms)]


class _Frame:
    def __init__(self, data: bytes) -> None:
        self.buffer = memoryview(data)


@pytest.mark.parametrize("pace", ["tap", "asp"])
@fuzzed(cost=1)
@given(data=st.data())
def test_a_worker_survives_any_server(pace: str, data: st.DataObject) -> None:
    cfg = config(pace)
    socket: Any = LocalSocket()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "dealer", lambda *_, **__: socket)
        patch.setattr(zmq, "Poller", LocalPoller)
        client = ServerClient(["inproc://nobody"], 0, optimizer_of(cfg), cfg)
    try:
        _attack(client, socket, data)
    finally:
        client.close()


def _attack(client: ServerClient, socket: LocalSocket, data: st.DataObject) -> None:
    welcome = protocol.encode(ServerHeader(ServerMessageKind.WELCOME, session=5))
    socket.coming.append([bytes(frame) for frame in welcome])
    client.pull(0.0)
    for _ in range(data.draw(st.integers(1, 6))):
        head = ServerHeader(
            data.draw(KINDS),
            data.draw(unsigned(16)),
            number=data.draw(st.integers(0, 3)),
            session=data.draw(st.sampled_from([0, 5, 6])),
            version=data.draw(COUNTS),
            samples=data.draw(COUNTS),
            lag=data.draw(signed(32)),
            workers=data.draw(unsigned(32)),
            tally=data.draw(TALLIES),
        )
        values = data.draw(VALUES)
        packed = data.draw(
            st.sampled_from(
                [
                    None,
                    protocol.pack_text("some text"),
                    protocol.pack_dense(values),
                    protocol.pack_sparse(np.arange(SIZE, dtype=np.uint32), values),
                    protocol.pack_sparse(np.array([3, 2**32 - 1], np.uint32), values[:2]),
                    protocol.pack_dense(np.ones(3 * SIZE + 1, np.float32)),
                ]
            )
        )
        socket.coming.append([bytes(frame) for frame in protocol.encode(head, packed)])
        try:
            with bounded():
                (client.pull if data.draw(st.booleans()) else client.fetch)(0.0)
                client.push(1)
        except UserError:
            pass  # it was refused
        assert client._optimizer.values.shape == (SIZE,)
        assert torch.isfinite(client._optimizer.values).all()
