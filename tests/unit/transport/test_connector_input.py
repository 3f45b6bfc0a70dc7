"""The connector counts any malformed message and continues."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.params import Stamp
from penstock.transport import wire
from penstock.transport.shm.link import ShmLink
from penstock.transport.wire import Header, MessageKind, RelayOffer
from penstock.transport.zmq import connector as room
from penstock.transport.zmq.receiver import REFUSE_CHARACTERS, Receiver
from penstock.transport.zmq.relay_tree import RelayTree
from penstock.transport.zmq.sockets import SENT, IsReleased
from transport_world import (
    LAYOUT,
    RUN_ID,
    SPEC,
    Learner,
    context,
    learner,
    reports,
)
from waiting import least_ms, wait_until

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=4)
    | st.just(SPEC.to_dict()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["unroll", "envs", "columns", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
METAS = VALUES | st.fixed_dictionaries(
    {}, optional={k: VALUES for k in ("spec", "want", "have", "policy_id", "relay")}
)


@pytest.fixture(scope="module")
def side() -> Iterator[Learner]:
    with tempfile.TemporaryDirectory() as name, learner(Path(name)) as made:
        yield made


@pytest.fixture(scope="module")
def receiver(side: Learner) -> Iterator[Receiver]:
    link = ShmLink(side.path, None, want=0, lane=True)
    made = Receiver(link, f"ipc://{side.path.parent}/wire", side.path)
    yield made
    made.close()
    link.close()


def sealed(head: Header, meta: Any, *frames: bytes) -> list[bytes]:
    return [bytes(part) for part in wire.encode(head, meta, frames)]


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(MessageKind),
    meta=METAS,
    frames=st.lists(st.binary(max_size=8), max_size=4),
    numbers=st.lists(st.integers(0, 2**62 - 1), min_size=6, max_size=6),
    known=st.booleans(),
)
def test_arbitrary_sealed_messages_do_not_end_the_connector(
    receiver: Receiver,
    kind: MessageKind,
    meta: Any,
    frames: list[bytes],
    numbers: list[int],
    known: bool,
) -> None:
    actor, sequence, version, steps, produced, raw = numbers
    if known:  # the actor has joined and may send
        actor = 5
        hello = Header(MessageKind.HELLO, actor=5, sequence=sequence)
        receiver.handle(b"peer", sealed(hello, {"spec": None, "want": 2}))
        receiver.turn(0)
    head = Header(
        kind,
        run_id=RUN_ID,
        spec_hash=SPEC.hash,
        actor=actor,
        sequence=sequence,
        version=version,
        steps=steps,
        produced_steps=produced,
        raw_nbytes=raw,
    )
    before = receiver.received["slots"]
    receiver.handle(b"peer", sealed(head, meta, *frames))
    receiver.turn(0)
    assert receiver.received["slots"] == before
    assert receiver.learner_gone() is False


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=110), max_size=5))
def test_garbage_does_not_end_the_connector(receiver: Receiver, parts: list[bytes]) -> None:
    before = receiver.rejected.total()
    receiver.handle(b"peer", parts)
    assert receiver.rejected.total() == before + 1


def said_by(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> list[wire.Message]:
    """What a connector says from now on, instead of sending it."""
    said: list[wire.Message] = []

    def send(_: bytes, parts: wire.Parts) -> tuple[int, IsReleased]:
        said.append(wire.decode(parts))
        return SENT, lambda: True

    monkeypatch.setattr(receiver, "_send", send)
    return said


@pytest.mark.parametrize("columns", [100, 50_000])
def test_a_long_description_of_slots_is_answered_by_a_short_refusal(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    said = said_by(receiver, monkeypatch)
    names = [[f"{i:x}", "|u1", [], "slot"] for i in range(columns)]
    spec = {"unroll": 1, "envs": 1, "side": 0, "columns": names}
    receiver.handle(b"peer", sealed(Header(MessageKind.HELLO), {"spec": spec, "want": 1}))
    (answer,) = said
    assert answer.head.kind == MessageKind.REFUSE
    error = wire.verify(answer)["error"]
    assert len(error) <= REFUSE_CHARACTERS
    assert ("column 1f: learner absent, actor |u1[] per slot" in error) == (columns == 100)


@pytest.mark.parametrize("kind", ["HELLO", "BEAT", "BYE", "WEIGHTS_GET"])
@pytest.mark.parametrize("nbytes", [1 << 10, 2200, 1 << 20])
def test_no_meta_of_a_peer_takes_more_than_two_milliseconds(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, kind: str, nbytes: int
) -> None:
    """A connector that reads a million lists, ten times a second, receives nothing else."""
    said_by(receiver, monkeypatch)
    empty: list[Any] = [[]] * (nbytes - 80)
    for columns in (empty, [[f"{i:03x}", "|u1", [], "slot"] for i in range(nbytes // 20)]):
        meta = {"spec": {"unroll": 4, "envs": 3, "side": 0, "columns": columns}, "want": 1}
        parts = sealed(Header(MessageKind[kind], run_id=RUN_ID), meta)
        assert least_ms(partial(receiver.handle, b"peer", parts)) < 2.0


def test_ended_streams_are_reported_once_and_in_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "STREAMS_PER_REPORT", 3)
    with learner(tmp_path) as side:
        link = ShmLink(side.path, None, want=0, lane=True)
        made = Receiver(link, f"ipc://{tmp_path}/wire", side.path)
        for actor in range(7):
            made.handle(
                b"peer", sealed(Header(MessageKind.HELLO, actor=actor), {"spec": None, "want": 1})
            )
            made.handle(b"peer", sealed(Header(MessageKind.BYE, run_id=RUN_ID, actor=actor), None))
        ctx = context(tmp_path, "connector", incarnation=4)
        wait_until(lambda: room._report(ctx, made))
        assert [len(r["streams"]) for r in reports(ctx, "connector")] == [3, 3, 1]
        told = [stream for r in reports(ctx, "connector") for stream in r["streams"]]
        assert told == [
            {"actor": actor, "incarnation": 0, "produced_steps": 0, "sequence": 0}
            for actor in range(7)
        ]
        room._report(ctx, made)
        assert reports(ctx, "connector")[-1]["streams"] == []
        made.close()
        link.close()


@pytest.mark.parametrize(
    "policy_id", [3, 2**31 - 1, -1, 2**31, 2**64 - 1, True, 0.0, None, "3", {}]
)
def test_a_policy_that_is_not_published_is_refused(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, policy_id: Any
) -> None:
    reason = "policy" if policy_id in (3, 2**31 - 1) else "meta"
    said = said_by(receiver, monkeypatch)
    before = receiver.rejected[reason]
    head = Header(MessageKind.WEIGHTS_GET, run_id=RUN_ID)
    receiver.handle(b"peer", sealed(head, {"have": None, "policy_id": policy_id}))
    assert receiver.rejected[reason] == before + 1
    if reason == "meta":
        assert not said
        return
    [answer] = said
    text = f"the learner publishes no policy {policy_id}"
    assert answer.head.kind == MessageKind.REFUSE
    assert wire.verify(answer) == {"error": text, "policy_id": policy_id}


OFFER = RelayOffer(7001)


def answers(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, relays: list[tuple[Any, str]]
) -> list[wire.Message]:
    """The answers to relays, of an offer and a host each, that request weights one by one."""
    said = said_by(receiver, monkeypatch)
    tree = RelayTree(LAYOUT.size * 2, fanout=1, min_relays=2, min_nbytes=0)
    receiver._responders[0].tree = tree
    receiver._responders[0]._newest = None
    receiver._responders[0]._sent.clear()
    head = Header(MessageKind.WEIGHTS_GET, run_id=RUN_ID)
    for number, (offer, host) in enumerate(relays):
        meta = {"have": None} | (
            {"relay": offer._asdict()} if isinstance(offer, RelayOffer) else offer
        )
        receiver.handle(b"%d" % number, sealed(head, meta), host=host)
    receiver.turn(0)
    return [message for message in said if message.head.kind != MessageKind.GRANT]


def test_relay_is_referred_to_another_at_its_peer_address(
    receiver: Receiver, side: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.publish(4)
    for host, where in (("10.0.0.3", "10.0.0.3"), ("fd00::3", "[fd00::3]")):
        first, second = answers(receiver, monkeypatch, [(OFFER, host), (OFFER, "10.0.0.4")])
        assert first.head.kind == MessageKind.WEIGHTS
        _, at = wire.decode_weights_at(second, LAYOUT)
        assert at is not None
        assert at.address == f"tcp://{where}:7001"
        assert at.stamp == Stamp(2, 4)
        assert at.sha256 == hashlib.sha256(first.frames[0]).hexdigest()
        assert (at.depth, at.nbytes) == (1, memoryview(first.frames[0]).nbytes)


@pytest.mark.parametrize(
    ("offer", "host"),
    [
        (OFFER, ""),
        (OFFER, "localhost:0:0:77"),
        (RelayOffer(0), "10.0.0.3"),
        (RelayOffer(7001, "k" * 40), "10.0.0.3"),  # a key, and the learner has none
        ({}, "10.0.0.3"),
    ],
)
def test_unreachable_relay_is_referred_to_no_other(
    receiver: Receiver, side: Learner, monkeypatch: pytest.MonkeyPatch, offer: Any, host: str
) -> None:
    side.publish(4)
    found = answers(receiver, monkeypatch, [(offer, host)] + [(RelayOffer(0), "10.0.0.4")] * 2)
    assert [message.head.kind for message in found] == [MessageKind.WEIGHTS] * 3


def test_loopback_relay_is_referred_only_if_all_peers_are_local(
    receiver: Receiver, side: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.publish(4)
    for local, kind in ((True, MessageKind.WEIGHTS_AT), (False, MessageKind.WEIGHTS)):
        monkeypatch.setattr(receiver, "_address_is_local", local)
        found = answers(receiver, monkeypatch, [(OFFER, "127.0.0.1"), (OFFER, "10.0.0.4")])
        assert found[1].head.kind == kind


def test_relay_that_does_not_listen_yet_is_asked_to_listen(
    receiver: Receiver, side: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    side.publish(4)
    found = answers(receiver, monkeypatch, [(RelayOffer(None), "10.0.0.3")] * 2)
    assert [wire.decode_weights_at(message, LAYOUT) for message in found] == [(0, None)] * 2


@pytest.mark.parametrize(
    "relay",
    [
        None, [], {"port": -1}, {"port": 65536}, {"port": True}, {"port": "1"}, {"port": 1.0},
        {"port": 1, "key": "short"}, {"port": 1, "key": None}, {"port": 1, "key": "k" * 41},
        {"port": 1, "key": "\n" * 40}, {"port": 1, "failed": "no"}, {"port": 1, "failed": [1]},
    ],
)  # fmt: skip
def test_a_malformed_offer_is_refused(receiver: Receiver, relay: Any) -> None:
    before = receiver.rejected["meta"]
    head = Header(MessageKind.WEIGHTS_GET, run_id=RUN_ID)
    receiver.handle(b"peer", sealed(head, {"have": None, "relay": relay}), host="10.0.0.3")
    assert receiver.rejected["meta"] == before + 1
