"""Fuzz tests of relays: hostile children of a relay's server, and a hostile parent relay."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutations import DEEP, bounded, fuzzed, mutated, packed_with, signed_parts, strange_msgpack
from penstock.core.interfaces import Welcome
from penstock.core.params import Stamp
from penstock.transport import wire
from penstock.transport.wire import FAILURES, Header, MessageKind, WeightsAt
from penstock.transport.zmq import relay_peers
from penstock.transport.zmq.client import Client, Weights
from penstock.transport.zmq.relay_peers import MAX_CHILDREN, ParentRelay, RelayServer
from penstock.transport.zmq.sockets import SENT, IsReleased
from transport_world import LAYOUT, RUN_ID, SPEC, context

NEWEST = Stamp(2, 5)
VALUES = np.arange(LAYOUT.size, dtype=np.float32)
GET = Header(MessageKind.WEIGHTS_GET, run_id=RUN_ID)
HONEST = b"honest"
FIELDS = ["kind", "run_id", "generation", "version", "sequence", "spec_hash", "raw_nbytes"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    made = Client(context(tmp_path_factory.getbasetemp()), "tcp://127.0.0.1:9")
    made.welcome = Welcome(RUN_ID, 2, SPEC, LAYOUT, {})
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(client: Client) -> Iterator[RelayServer]:
    made = RelayServer(client)
    yield made
    made.close()


@fuzzed(cost=1)
@given(data=st.data())
def test_relay_keeps_serving_whatever_its_children_send(
    server: RelayServer, data: st.DataObject
) -> None:
    sent: list[tuple[bytes, wire.Message]] = []
    version = data.draw(st.integers(1, 100))

    def send(peer: bytes, parts: wire.Parts) -> tuple[int, IsReleased]:
        sent.append((peer, wire.decode(parts)))
        return SENT, lambda: True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay_peers, "send_to", lambda _, peer, parts: send(peer, parts))
        server.publish(Weights(Stamp(2, version), VALUES))
        for _ in range(data.draw(st.integers(1, 8))):
            peer = data.draw(st.sampled_from([b"evil", b"worse"]))
            want: Any = data.draw(
                st.sampled_from(
                    [None, [2, version], [2**64 - 1, -1], "25", [float("inf")] * 2, *DEEP]
                )
            )
            meta = {"want": want}
            how = data.draw(st.integers(0, 2))
            if how == 0:
                parts = data.draw(mutated(GET, meta, [], FIELDS))
            elif how == 1:
                parts = signed_parts(GET, data.draw(strange_msgpack))
            else:
                parts = signed_parts(GET, packed_with(meta))
            with bounded():
                server.handle(peer, parts)
        assert len(server._waiting) <= MAX_CHILDREN
        sent.clear()
        server.handle(HONEST, signed_parts(GET, packed_with({"want": [2, version]})))
        ((peer, message),) = sent
        assert (peer, message.head.kind) == (HONEST, MessageKind.WEIGHTS)
        np.testing.assert_array_equal(wire.decode_weights(message, LAYOUT)[1], VALUES)
        server._waiting.clear()


@fuzzed(cost=1)
@given(data=st.data())
def test_a_parent_gets_only_the_announced_weights_accepted(
    client: Client, data: st.DataObject
) -> None:
    parent = ParentRelay(client, lambda _: None, lambda _: None)
    sha256 = hashlib.sha256(VALUES.tobytes()).hexdigest()
    at = WeightsAt(NEWEST, VALUES.nbytes, "tcp://127.0.0.1:9", "", sha256, 1)
    head = Header(
        data.draw(st.sampled_from([MessageKind.WEIGHTS] * 3 + [*MessageKind])),
        spec_hash=LAYOUT.hash,
        run_id=RUN_ID,
        generation=NEWEST.generation,
        version=NEWEST.version,
        raw_nbytes=VALUES.nbytes,
    )
    parts = data.draw(mutated(head, {"dtype": "fp32"}, [VALUES.tobytes()], FIELDS))
    fresh = attempt(parent, at, parts)
    if fresh is not None:
        assert fresh[0] == NEWEST
        np.testing.assert_array_equal(fresh[1], VALUES)
    else:
        assert parent.failure in FAILURES
        assert not parent.busy
    parent.close()


def attempt(parent: ParentRelay, at: WeightsAt, parts: list[bytes]) -> Weights | None:
    """What a relay makes of a parent's answer."""
    coming = [parts]
    with pytest.MonkeyPatch.context() as patch, bounded():
        patch.setattr(relay_peers, "receive", lambda _: coming.pop() if coming else None)
        parent.request(at, time.monotonic())
        return parent.poll(time.monotonic())


def test_unmodified_weights_message_is_accepted(client: Client, tmp_path: Path) -> None:
    parent = ParentRelay(client, lambda _: None, lambda _: None)
    at = WeightsAt(
        NEWEST,
        VALUES.nbytes,
        "tcp://127.0.0.1:9",
        "",
        hashlib.sha256(VALUES.tobytes()).hexdigest(),
        1,
    )
    parts = wire.encode_payload(VALUES, NEWEST, LAYOUT, RUN_ID)
    assert attempt(parent, at, [bytes(part) for part in parts]) is not None
    parent.close()
