"""Whatever a peer sends, the connector counts it and goes on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.transport import wire
from penstock.transport.shm.link import ShmLink
from penstock.transport.wire import Header, MessageKind
from penstock.transport.zmq import connector as room
from penstock.transport.zmq.receiver import REFUSE_CHARACTERS, Receiver
from transport_world import RUN_ID, SPEC, context, learner, reports, wait_until

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
    {}, optional={k: VALUES for k in ("spec", "want", "have", "policy_id")}
)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with tempfile.TemporaryDirectory() as name, learner(Path(name)) as side:
        link = ShmLink(side.path, None, want=0, lane=True)
        made = Receiver(link, f"ipc://{name}/wire", side.path)
        yield made
        made.close()
        link.close()


def sealed(head: Header, meta: Any, *frames: bytes) -> list[bytes]:
    return [bytes(part) for part in wire.encode(head, meta, frames)]


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(MessageKind),
    meta=METAS,
    frames=st.lists(st.binary(max_size=8), max_size=4),
    numbers=st.lists(st.integers(0, 2**62 - 1), min_size=6, max_size=6),
    known=st.booleans(),
)
def test_no_message_ends_it(
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


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=110), max_size=5))
def test_no_garbage_ends_it(receiver: Receiver, parts: list[bytes]) -> None:
    before = receiver.rejected.total()
    receiver.handle(b"peer", parts)
    assert receiver.rejected.total() == before + 1


def test_a_long_difference_is_cut_short(receiver: Receiver) -> None:
    said: list[wire.Parts] = []
    receiver._send = lambda peer, parts: not said.append(parts)  # type: ignore[method-assign, func-returns-value]
    spec = {"unroll": 1, "envs": 1, "side": 0, "columns": [["n" * 500_000, "|u1", [], "slot"]]}
    receiver.handle(b"peer", sealed(Header(MessageKind.HELLO), {"spec": spec, "want": 1}))
    (answer,) = said
    message = wire.decode(answer)
    assert message.head.kind == MessageKind.REFUSE
    assert len(msgpack.unpackb(answer[1])["error"]) == REFUSE_CHARACTERS


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
    said: list[Any] = []
    monkeypatch.setattr(receiver, "_send", lambda _, parts: said.append(wire.decode(parts)))
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
