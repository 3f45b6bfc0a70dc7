"""Messages of the parameter server survive encoding, and malformed ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.learner.extras.parameter_server import protocol
from penstock.learner.extras.parameter_server.protocol import (
    HEAD,
    Flag,
    Payload,
    ServerHeader,
    ServerMessageKind,
)
from penstock.transport.checksum import crc32
from penstock.transport.wire import WireError

VALUES = np.array([1.5, -2.0, 0.25], np.float32)


def push(samples: int = 5, **fields: Any) -> list[Payload]:
    head = ServerHeader(ServerMessageKind.PUSH, samples=samples, **fields)
    return protocol.encode(head, protocol.pack_dense(VALUES))


def reason(frames: list[Payload], size: int = 3) -> str:
    with pytest.raises(WireError) as caught:
        protocol.dense(protocol.decode(frames), size)
    return caught.value.reason


def test_dense_message_survives_encoding() -> None:
    head = ServerHeader(
        ServerMessageKind.PUSH,
        Flag.STOP,
        3,
        4,
        1 << 63,
        6,
        7,
        tally=(1.0, 2.0, 3.0, -4.5, 5.5, 6.0),
    )
    message = protocol.decode(protocol.encode(head, protocol.pack_dense(VALUES)))
    assert message.head == head._replace(flags=Flag.STOP | Flag.DENSE, entries=3)
    np.testing.assert_array_equal(protocol.dense(message, 3), VALUES)


def test_a_dense_message_in_bf16_has_half_the_bytes() -> None:
    values = np.array([1.0, -2.5, 1.0 + 2**-9, 3e38], np.float32)
    packed = protocol.pack_dense(values, bf16=True)
    assert len(packed.payload) == 8
    message = protocol.decode(protocol.encode(ServerHeader(ServerMessageKind.PUSH), packed))
    found = protocol.dense(message, 4)
    np.testing.assert_array_equal(found[:3], [1.0, -2.5, 1.0])  # of ties the even one
    assert abs(found[3] / 3e38 - 1) < 2**-8


def test_bf16_is_a_form_of_dense_values_only() -> None:
    sparse = protocol.pack_sparse(np.array([1], np.uint32), np.ones(1, np.float32))
    head = ServerHeader(ServerMessageKind.VALUES, Flag.BF16)
    with pytest.raises(WireError, match="bf16 and not dense"):
        protocol.decode(protocol.encode(head, sparse))


def test_sparse_message_survives_encoding() -> None:
    indices = np.array([0, 7, 9], np.uint32)
    packed = protocol.pack_sparse(indices, VALUES)
    assert len(packed.payload) == 24  # four bytes an index, four a value
    message = protocol.decode(
        protocol.encode(ServerHeader(ServerMessageKind.VALUES, lag=-1), packed)
    )
    found, values = protocol.sparse(message, 10)
    np.testing.assert_array_equal(found, indices)
    np.testing.assert_array_equal(values, VALUES)
    assert message.head.lag == -1


def test_a_sparse_message_may_be_empty() -> None:
    packed = protocol.pack_sparse(np.zeros(0, np.uint32), np.zeros(0, np.float32))
    indices, values = protocol.sparse(protocol.decode(protocol.encode(ServerHeader(1), packed)), 10)
    assert indices.size == values.size == 0


def test_text_survives_encoding() -> None:
    message = protocol.decode(
        protocol.encode(ServerHeader(ServerMessageKind.REFUSE), protocol.pack_text("no: ü"))
    )
    assert protocol.text(message) == "no: ü"


def test_values_may_lie_at_odd_addresses() -> None:
    head, payload = push()
    shifted = memoryview(bytearray(b"x" + bytes(payload)))[1:]
    np.testing.assert_array_equal(protocol.dense(protocol.decode([head, shifted]), 3), VALUES)


def test_malformed_message_is_refused_with_its_reason() -> None:
    head, payload = push()
    assert reason([]) == "frames"
    assert reason([head, payload, b""]) == "frames"
    assert reason([b"", payload]) == "header"
    assert reason([bytes(head) + b"x", payload]) == "header"
    assert reason([b"PNSK" + bytes(head[4:]), payload]) == "header"
    assert reason([head, bytes(payload) + b"x"]) == "size"
    assert reason([head, payload[:-4]]) == "size"
    assert reason([head, b"x" + bytes(payload[1:])]) == "checksum"
    assert reason([head, payload], size=4) == "size"
    assert reason(push(version=-2)) == "header"
    assert reason(push(samples=-1)) == "header"
    assert reason(push(tally=(0.0, -1.0, 0.0, 0.0, 0.0, 0.0))) == "header"
    assert reason(push(tally=(0.0, 0.0, 0.0, np.nan, 0.0, 0.0))) == "header"
    assert reason(protocol.encode(ServerHeader(99), protocol.pack_dense(VALUES))) == "header"


def test_other_protocol_version_has_its_own_reason() -> None:
    head = bytearray(push()[0])
    head[4] = protocol.PROTOCOL_VERSION + 1
    head[-4:] = crc32(bytes(head[:-4])).to_bytes(4, "little")
    assert reason([bytes(head), push()[1]]) == "version"


def test_payload_cannot_be_dense_and_sparse() -> None:
    head = ServerHeader(ServerMessageKind.PUSH, Flag.DENSE | Flag.SPARSE)
    assert reason(protocol.encode(head)) == "header"


@pytest.mark.parametrize("indices", [[3, 2], [2, 2], [0, 10]])
def test_indices_must_increase_and_be_in_range(indices: list[int]) -> None:
    packed = protocol.pack_sparse(np.array(indices, np.uint32), VALUES[:2])
    message = protocol.decode(protocol.encode(ServerHeader(ServerMessageKind.PUSH), packed))
    with pytest.raises(WireError) as caught:
        protocol.sparse(message, 10)
    assert caught.value.reason == "indices"


def test_more_changes_than_values_are_refused() -> None:
    packed = protocol.pack_sparse(np.arange(3, dtype=np.uint32), VALUES)
    message = protocol.decode(protocol.encode(ServerHeader(ServerMessageKind.PUSH), packed))
    with pytest.raises(WireError):
        protocol.sparse(message, 2)
    with pytest.raises(WireError):
        protocol.dense(message, 3)


@given(st.binary(min_size=HEAD.size, max_size=HEAD.size), st.binary(max_size=64))
def test_random_bytes_raise_only_wire_errors(head: bytes, payload: bytes) -> None:
    with pytest.raises(WireError):
        protocol.decode([head, payload])


@given(st.integers(0, HEAD.size - 1), st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_detected(at: int, change: int) -> None:
    head, payload = push()
    broken = bytearray(head)
    broken[at] ^= change
    with pytest.raises(WireError):
        protocol.decode([bytes(broken), payload])
