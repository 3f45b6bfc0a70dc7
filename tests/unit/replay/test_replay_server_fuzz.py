"""Mutated messages of a client, through the server's own handler to what is drawn for another."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.replay.remote.intake import ClientStream
from penstock.replay.remote.service import REPLAY_VERSION
from penstock.replay.samplers import Prioritized
from penstock.transport import wire
from penstock.transport.wire import Header, MessageKind
from replay_service import Served, frame_replay, slot_message

HONEST, HOSTILE = b"honest", b"hostile"
BITS = (0, 7, 8, 15, 16, 31, 32, 62, 63, 64)
NEAR = {sign * ((1 << bits) + d) for bits in BITS for d in (-1, 0, 1) for sign in (1, -1)}
EDGES = sorted(n for n in NEAR if -(1 << 63) <= n < 1 << 64)  # what msgpack can say
edges = st.sampled_from(EDGES)
small = st.integers(-3, 70)
numbers = st.one_of(small, edges, st.floats(), st.booleans(), st.text(max_size=3), st.none())
HEAD_BITS = {"frames": 8, "spec_hash": 64, "run_id": 64, "actor": 64, "incarnation": 32,
             "generation": 32, "sequence": 64, "version": 64, "steps": 64, "produced_steps": 64,
             "raw_nbytes": 64}  # fmt: skip
Action = tuple[Any, ...]

columns = st.tuples(
    st.just("columns"),
    st.lists(st.tuples(
        st.sampled_from(["side", "pad", "age", "terminated", "truncated", "alive", "priority",
                         "reward", "action"]),
        st.binary(min_size=1, max_size=64), st.integers(0, 15)), max_size=4),
    st.dictionaries(st.sampled_from(["generation", "version", "steps", "produced_steps"]),
                    st.one_of(st.integers(0, 20), edges.filter(lambda n: n >= 0)), max_size=2),
)  # fmt: skip
sample = st.tuples(st.just("sample"), st.dictionaries(
    st.sampled_from(["batch", "count", "stacked", "read"]), numbers, max_size=3))  # fmt: skip
update = st.tuples(st.just("update"), st.binary(max_size=64), st.binary(max_size=64))
join = st.tuples(st.just("join"), st.one_of(
    st.none(), st.fixed_dictionaries({"version": st.sampled_from([REPLAY_VERSION, 1, None])},
                                     optional={"token": numbers})))  # fmt: skip
garble = st.tuples(st.just("garble"), st.sampled_from(list(MessageKind)),
                   st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 255)), min_size=1,
                            max_size=4), st.booleans())  # fmt: skip


@settings(max_examples=30)
@given(st.lists(st.one_of(columns, sample, update, join, garble), min_size=1, max_size=12))
def test_no_message_ends_the_server_or_returns_rows_of_another(actions: list[Action]) -> None:
    """The honest peer's rows come back as it sent them, whatever the other one says."""
    served = Served(frame_replay(capacity=96, sampler=Prioritized(fast=False), n_step=2))
    try:
        served.join(HONEST)
        served.join(HOSTILE)
        for step, action in enumerate(actions):
            served.slot(HONEST, step, owned_by_honest)
            _act(served, action)
            served.service.tend()
            _check_draws(served)
        assert served.service.rejected["fault"] == 0
        stats = served.replay.stats()
        assert stats["inserted"] == stats["stored"] + sum(stats["evicted"].values())
    finally:
        served.close()


def owned_by_honest(slot: dict[str, Any]) -> None:
    slot["obs"][...], slot["obs@side"][...], slot["action"][...] = 201, 201, 201


def _check_draws(served: Served) -> None:
    with served.replay.lock:
        served.replay.collect()
        batch = served.replay.gather.batch(np.flatnonzero(served.replay.table.valid), None)
    honest = batch["action"] == 201
    assert honest.any()
    assert (batch["obs"][honest] == 201).all()
    assert (batch["next_obs"][honest] == 201).all()
    assert not (batch["obs"][~honest] == 201).any()
    assert not (batch["next_obs"][~honest] == 201).any()
    assert np.isfinite(batch["weights"]).all()
    served.replay.sample(8)


def _act(served: Served, action: Action) -> None:
    what, *rest = action
    stream = _stream(served)
    stream.peer = HOSTILE
    following = stream.next_sequence
    if what == "columns":
        changes, head = rest
        message = slot_message(served.spec, served.run_id, following, _garbled(changes))
        if head:
            message = _with_head(message, head)
        served.service.handle(HOSTILE, message)
    elif what == "sample":
        served.ask(HOSTILE, 1, **rest[0])
    elif what == "update":
        served.say(HOSTILE, MessageKind.UPDATE, None, 0, rest)
    elif what == "join":
        served.say(HOSTILE, MessageKind.JOIN, rest[0])
    else:
        kind, changes, sealed = rest
        message = slot_message(served.spec, served.run_id, following)
        message = _with_head(message, {"kind": int(kind)})
        joined = bytearray(message[0])
        for at, flip in changes:
            joined[at % len(joined)] ^= flip
        message[0] = bytes(joined)
        served.service.handle(HOSTILE, _sealed(message) if sealed else message)


def _stream(served: Served) -> ClientStream:
    peers = served.service._peers.connected
    return peers[HOSTILE if HOSTILE in peers else HONEST].stream


def _garbled(changes: Any) -> Any:
    """Whatever bytes, in columns of the slot; never those that mark the honest peer's rows."""

    def change(slot: dict[str, Any]) -> None:
        for name, data, first in changes:
            column = slot[name]
            copy = np.ascontiguousarray(column)
            flat = copy.reshape(-1).view(np.uint8)
            data = np.frombuffer(data, np.uint8)
            start = first * copy.itemsize % len(flat)
            flat[start : start + len(data)] = data[: len(flat) - start]
            column[...] = copy.view(column.dtype).reshape(column.shape)
        slot["action"][slot["action"] == 201] = 0

    return change


def _with_head(message: Any, changes: dict[str, int]) -> Any:
    head = wire.decode(message).head._replace(**{
        name: value % (1 << HEAD_BITS.get(name, 8)) for name, value in changes.items()
    })  # fmt: skip
    return [bytes(p) for p in wire.encode(_fitting(head), _meta(message), message[2:])]


def _fitting(head: Header) -> Header:
    return head._replace(frames=0)


def _meta(message: Any) -> Any:
    return wire.verify(wire.decode(message))


def _sealed(message: Any) -> Any:
    """With a checksum that is right again."""
    head = bytearray(message[0])
    wire._U32.pack_into(head, wire._CRC_AT, wire._checksum(head, message[1:]))
    return [bytes(head), *message[1:]]
