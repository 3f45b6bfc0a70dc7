"""Hostile peers at a replay server, through to batches and what the owner samples; and a hostile
server at a client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mutations import (
    DEEP,
    EXTREMES,
    HEAD_FIELDS,
    bounded,
    changed,
    floats,
    fuzzed,
    integers,
    mutated,
    packed_with,
    signed_parts,
    strange_msgpack,
    unsigned,
)
from penstock.configs.errors import UserError
from penstock.replay import Prioritized, Replay, ReplayError
from penstock.replay.remote import client as client_module
from penstock.replay.remote.client import ReplayClient
from penstock.replay.remote.server import ReplayServer
from penstock.replay.remote.service import REPLAY_VERSION
from penstock.transport import wire
from penstock.transport.wire import Header, MessageKind, WireError
from penstock.transport.zmq import sockets
from penstock.transport.zmq.sockets import SENT, IsReleased

COLUMNS: dict[str, Any] = {
    "obs": {"speed": ("<f4", (2,)), "image": ("|u1", (3, 6, 6))},
    "action": ("<i8", ()),
}
OPTIONS: list[dict[str, Any]] = [
    {"n_step": 1},
    {"n_step": 3, "autoreset": "next_step"},
    {"n_step": 2, "autoreset": "same_step"},
    {"n_step": 1, "frame_stack": 3, "autoreset": "same_step"},
    {"n_step": 3, "frame_stack": 3, "autoreset": "next_step"},
]
HONEST = b"honest"
PEERS = st.sampled_from([b"evil", b"worse"])
CAPACITY = 256
MARK, MARK_BYTE = 4242, 0xC9  # the action and the pixels of an honest row
FIELDS = [name for name in HEAD_FIELDS if name not in ("run_id", "spec_hash")]


class LocalServer(ReplayServer):
    """Keeps what it says instead of sending it."""

    said: list[tuple[bytes, list[bytes]]]

    def _send(self, name: bytes, parts: wire.Parts) -> tuple[int, IsReleased]:
        self.said.append((name, [bytes(part) for part in parts]))
        return SENT, lambda: True


class Peers(RuleBasedStateMachine):
    """An honest writer and reader, and two peers who send whatever they like."""

    @initialize(options=st.sampled_from(OPTIONS), prioritized=st.booleans())
    def begin(self, options: dict[str, Any], prioritized: bool) -> None:
        if prioritized:
            options = {**options, "sampler": Prioritized()}
        self.replay = Replay(COLUMNS, CAPACITY, envs=2, unroll=4, shared=True, seed=0, **options)
        self.server = LocalServer(self.replay, "tcp://127.0.0.1:*")
        self.server.said = []
        self.spec = self.replay.layout.spec
        self.heard: list[wire.Message] = []
        self.run_id = 0
        self.next = dict.fromkeys((HONEST, b"evil", b"worse"), 0)
        self.produced = 0
        for peer in self.next:
            joining = {"version": REPLAY_VERSION, "token": peer.decode() * 4}
            self.attack(peer, signed_parts(Header(MessageKind.JOIN), packed_with(joining)))
        self.run_id = self.heard[0].head.run_id

    def attack(self, peer: bytes, parts: list[bytes]) -> None:
        with bounded():
            self.server.handle(peer, parts)
            self.server.turn(0)
        for name, said in self.server.said:
            message = wire.decode(said)
            wire.verify(message)
            if message.head.kind == MessageKind.STORED:
                self.next[name] = message.head.sequence
            if name == HONEST:
                self.heard.append(message)
        self.server.said.clear()

    def slot(self, peer: bytes, **cells: Any) -> tuple[Header, list[Any], list[bytes]]:
        """The next slot of a peer, sound but for some cells."""
        payload = self.spec.zeros()
        columns = self.spec.views(payload)
        if "alive" in columns:
            columns["alive"][...] = True
        for name, value in cells.items():
            for column in columns:
                if name in column:
                    columns[column][...] = value
        frames = [block.tobytes() for block in payload]
        head = Header(
            MessageKind.SLOT,
            spec_hash=self.spec.hash,
            run_id=self.run_id,
            generation=self.spec.unroll,  # rows
            sequence=self.next[peer],
            steps=self.spec.unroll * self.spec.envs,
            produced_steps=(self.next[peer] + 1) * self.spec.unroll * self.spec.envs,
            raw_nbytes=self.spec.payload_nbytes,
        )
        return head, [["raw", len(frame)] for frame in frames], frames

    @rule(data=st.data(), peer=PEERS)
    def hostile_slot(self, data: st.DataObject, peer: bytes) -> None:
        head, meta, frames = self.slot(peer)
        if data.draw(st.booleans()):
            self.attack(peer, data.draw(mutated(head, meta, frames, FIELDS)))
            return
        payload = [np.frombuffer(frame, np.uint8).copy() for frame in frames]
        columns = self.spec.views(payload)
        telling = [name for name in ("side", "pad", "age", "alive") if name in columns]
        names = st.sampled_from(telling) | st.sampled_from(sorted(columns))
        for name in data.draw(st.lists(names, min_size=1, max_size=3)):
            _put(columns[name], data)
        if data.draw(st.booleans()):
            name = data.draw(st.sampled_from(["generation", "steps", "version", "produced_steps"]))
            head = head._replace(**{name: data.draw(st.integers(0, 9) | HEAD_FIELDS[name])})
        frames = [block.tobytes() for block in payload]
        self.attack(peer, signed_parts(head, packed_with(meta), frames))

    @rule(
        peer=PEERS,
        number=unsigned(62),
        batch=st.integers(0, CAPACITY + 1) | integers | floats,
        count=st.integers(0, 65) | integers | floats,
        stacked=st.sampled_from([True, False, 0, "", [], None]),
    )
    def hostile_sample(self, peer: bytes, number: int, **meta: Any) -> None:
        head = Header(MessageKind.SAMPLE, run_id=self.run_id, sequence=number)
        self.attack(peer, signed_parts(head, packed_with(meta)))

    @rule(
        peer=PEERS,
        keys=st.lists(
            st.sampled_from([*EXTREMES[:-2], -1, -(2**63)]) | st.integers(0, 600), max_size=5
        ),
        priorities=st.lists(floats, max_size=5),
        extra=st.sampled_from([b"", b"1", b"12345678"]),
    )
    def hostile_update(
        self, peer: bytes, keys: list[int], priorities: list[float], extra: bytes
    ) -> None:
        frames = [np.array(keys, np.int64).tobytes(), np.array(priorities).tobytes() + extra]
        self.attack(
            peer, signed_parts(Header(MessageKind.UPDATE, run_id=self.run_id), b"\xc0", frames)
        )

    @rule(data=st.data(), peer=PEERS, kind=st.sampled_from(MessageKind))
    def anything(self, data: st.DataObject, peer: bytes, kind: MessageKind) -> None:
        head = Header(kind, spec_hash=self.spec.hash, run_id=self.run_id)
        meta = {"batch": 2, "count": 1, "stacked": True}
        frames = data.draw(st.lists(st.binary(max_size=16), max_size=3))
        self.attack(peer, data.draw(mutated(head, meta, frames, FIELDS)))

    @rule()
    def honest_slot(self) -> None:
        """It is stored, or waits as the buffer takes none now."""
        before = dict(self.server.rejected)
        head, meta, frames = self.slot(HONEST, action=MARK, image=MARK_BYTE)
        self.attack(HONEST, signed_parts(head, packed_with(meta), frames))
        assert dict(self.server.rejected) == before

    @rule(count=st.sampled_from([1, 7, 64]))
    def owner_samples(self, count: int) -> None:
        """Who has the buffer draws from it, whatever was stored."""
        if len(self.replay) == 0:
            return
        with bounded():
            batch = self.replay.sample(count := min(count, len(self.replay)))
            self.replay.update_priorities(batch.keys, np.ones(count))
        assert np.isfinite(batch["weights"]).all()
        assert len(batch.keys) == count
        honest = batch["action"].reshape(count) == MARK
        for images in (batch["obs"]["image"], batch["next_obs"]["image"]):
            marked = (images == MARK_BYTE).reshape(count, -1)
            assert marked[honest].all(), "an honest row was changed"
            assert marked[~honest].mean(axis=1).max(initial=0.0) < 0.3, (
                "a hostile row shows another's images"
            )

    @invariant()
    def holds(self) -> None:
        stats = self.replay.stats()
        assert 0 <= len(self.replay) <= CAPACITY + 64, stats
        assert len(self.server.figures()["rejected"]) < 30

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        try:
            head, meta, frames = self.slot(HONEST, action=MARK, image=MARK_BYTE)
            at = self.next[HONEST]
            for _ in range(3):
                self.attack(HONEST, signed_parts(head, packed_with(meta), frames))
            assert self.next[HONEST] > at, "the honest writer's slot was not stored"
        finally:
            self.server.close()
            self.replay.close()


def _put(column: Any, data: st.DataObject) -> None:
    """Strange bytes into some cell of a column, or into all."""
    kind = column.dtype.kind
    if kind in "iu":
        info = np.iinfo(column.dtype)
        near = [n for n in (-3, -1, 0, 1, 2, 3, 7, 8, 9, 100, 300, 3000) if info.min <= n]
        number = data.draw(st.sampled_from([info.min, info.max, *near]))
        strange = np.array(min(number, info.max)).astype(column.dtype)
    else:
        cell = data.draw(st.binary(min_size=column.itemsize, max_size=column.itemsize))
        strange = np.frombuffer(cell, column.dtype)[0]
    where = tuple(data.draw(st.integers(0, n - 1)) for n in column.shape)
    column[where if data.draw(st.integers(0, 3)) == 0 else ...] = strange


TestPeers = Peers.TestCase
TestPeers.settings = fuzzed(cost=2, stateful_step_count=25)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")


# --------------------------------------------------------------------------------------- client


class LocalSocket:
    """Stands for a client's socket: gives one message after the other, and takes any."""

    closed = False

    def __init__(self) -> None:
        self.coming: list[list[bytes]] = []

    def send_multipart(self, *_: Any, **__: Any) -> None:
        """It is lost."""

    def poll(self, timeout_ms: int) -> bool:
        return bool(self.coming)

    def close(self) -> None:
        self.closed = True


def _receive(socket: Any) -> list[Any] | None:
    return socket.coming.pop(0) if socket.coming else None


def _spec_meta() -> dict[str, Any]:
    replay = Replay(COLUMNS, CAPACITY, envs=2, unroll=4, shared=True)
    try:
        return {
            "spec": replay.layout.spec.to_dict(),
            "frame_stack": 1,
            "autoreset": "none",
            "row_nbytes": 100,
            "version": REPLAY_VERSION,
            "token": "abc",
            "next": 0,
            "kept": 0,
            "sent": 0,
        }
    finally:
        replay.close()


SPEC_META = _spec_meta()
BATCH_META: list[Any] = [["obs.a", "<f4", [4, 3]], ["obs.b.0", "|u1", [4]], ["keys", "<i8", [4]]]
BATCH_FRAME = bytes(48 + 16 + 64 + 32)
NAMES = st.sampled_from(["obs", "obs.a", "obs.0", "obs.a.b", ".", "", "a..b", "obs.-1", "obs.1"])
DTYPES = st.sampled_from(
    ["<f4", "|u1", "O", "V0", "S0", "f4,O", "f4," * 50, "(2,3)f4", "(1 2)f4", "M8[s]", "", "\0"]
)
SHAPES = st.lists(
    st.integers(0, 4) | st.sampled_from([-1, 2**31, 2**62, 2**63 - 1, 2**64 - 1]), max_size=4
)


@fuzzed(cost=1)
@given(data=st.data())
def test_a_client_survives_any_server(data: st.DataObject) -> None:
    socket: Any = LocalSocket()
    spec_meta = data.draw(st.just(SPEC_META) | changed(SPEC_META))
    early = [_answer(data) for _ in range(data.draw(st.integers(0, 1)))]
    socket.coming = [
        *early,
        signed_parts(Header(MessageKind.SPEC, run_id=5), packed_with(spec_meta)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "dealer", lambda *_: socket)
        patch.setattr(sockets, "receive", _receive)
        try:
            with bounded():
                client = ReplayClient("ipc://nobody", patience_s=0.0, prefetch=4)
        except (ReplayError, UserError):
            return  # a typed refusal
        try:
            for _ in range(data.draw(st.integers(1, 4))):
                socket.coming = [_answer(data) for _ in range(data.draw(st.integers(1, 3)))]
                try:
                    with bounded():
                        client.sample(4, timeout_s=0.0)
                except (ReplayError, UserError, TimeoutError, WireError):
                    pass  # a typed refusal
                try:
                    with bounded():
                        client.stats(timeout_s=0.0)
                except (ReplayError, UserError, TimeoutError):
                    pass  # a typed refusal
        finally:
            client.close()


def _answer(data: st.DataObject) -> list[bytes]:
    """A server's message, nearly sound."""
    kind = data.draw(
        st.sampled_from(
            [
                MessageKind.BATCH,
                MessageKind.BATCH,
                MessageKind.STORED,
                MessageKind.WAIT,
                MessageKind.STATS,
                MessageKind.REFUSE,
                MessageKind.WHO,
                MessageKind.SPEC,
                MessageKind.HELLO,
            ]
        )
    )
    meta: Any = {"reason": "because", "error": "no", **SPEC_META}
    frames: list[bytes] = []
    if kind == MessageKind.BATCH:
        meta = data.draw(
            st.just(BATCH_META)
            | changed(BATCH_META)
            | st.lists(st.tuples(NAMES, DTYPES, SHAPES).map(list), max_size=4)
        )
        frames = [BATCH_FRAME[: data.draw(st.sampled_from([0, 64, len(BATCH_FRAME)]))]]
    head = Header(
        kind,
        run_id=data.draw(st.sampled_from([5, 5, 0])),
        sequence=data.draw(st.integers(0, 3) | unsigned(64)),
    )
    how = data.draw(st.integers(0, 3))
    if how == 0:
        return data.draw(mutated(head, meta, frames))
    if how == 1:
        coded = data.draw(strange_msgpack | st.sampled_from(DEEP))
        return signed_parts(head, bytes(coded), frames)
    return signed_parts(head, packed_with(meta), frames)
