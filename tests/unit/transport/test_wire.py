"""Encoding and decoding of messages: exact, and never anything but WireError for bad bytes."""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.configs.value_types import MOST_CHAIRS
from penstock.core.params import ParamLayout, Stamp, WireDtype, to_bf16
from penstock.core.specs import HEADER, Bytes, SlotSpec
from penstock.transport import wire
from penstock.transport.wire import Header, MessageKind, SlotDecoder, SlotEncoder, WireError
from transport_world import LAYOUT, SPEC, expected, welcome

GUARD = 64  # bytes before and behind a payload that must stay as they are


def payload_of(sequence: int, spec: SlotSpec = SPEC) -> list[Bytes]:
    payload = spec.zeros()
    for name, values in expected(sequence, spec).items():
        spec.views(payload)[name][...] = values
    return payload


def header_of(sequence: int) -> npt.NDArray[np.void]:
    header = np.zeros((), HEADER)
    header["actor"], header["incarnation"], header["generation"] = 2**63 + 5, 3, 1
    header["sequence"], header["version"] = sequence, 2**40
    header["steps"], header["produced_steps"] = 12, 12 * (sequence + 1)
    header["started_s"], header["published_s"] = 100.0, 100.25
    return header


def message_of(sequence: int = 1, codec: str = "auto") -> list[bytes]:
    parts = SlotEncoder(SPEC, codec).encode(header_of(sequence), payload_of(sequence), run_id=9)
    return [bytes(part) for part in parts]


def decode_guarded(parts: list[bytes]) -> list[Bytes]:
    """Decode into the middle of larger arrays and check that nothing around them changes."""
    around = [np.full(block.nbytes + 2 * GUARD, 0xA5, np.uint8) for block in SPEC.blocks]
    payload = [raw[GUARD:-GUARD] for raw in around]
    try:
        SlotDecoder(SPEC).decode(wire.decode(parts), payload)
    finally:
        for raw in around:
            assert (raw[:GUARD] == 0xA5).all()
            assert (raw[-GUARD:] == 0xA5).all()
    return payload


def resealed(parts: list[bytes], **changes: Any) -> list[bytes]:
    """The message as a hostile sender would make it: sizes and checksum fit what it holds."""
    fields = struct.unpack(wire.HEAD_FORMAT, parts[0])
    head = Header(*fields[2:-1])._replace(
        frames=len(parts) - 2, coded_nbytes=sum(map(len, parts[2:]))
    )
    blank = struct.pack(wire.HEAD_FORMAT, *fields[:2], *head._replace(**changes), 0)
    crc = zlib.crc32(blank[:-4])
    for part in parts[1:]:
        crc = zlib.crc32(part, crc)
    return [blank[:-4] + struct.pack("<I", crc), *parts[1:]]


@pytest.mark.parametrize("codec", ["auto", "snappy", "none"])
def test_slot_survives_encoding(codec: str) -> None:
    decoded = decode_guarded(message_of(5, codec))
    assert list(map(bytes, decoded)) == list(map(bytes, payload_of(5)))


def test_header_fields_survive_encoding() -> None:
    head = wire.decode(message_of(5)).head
    assert head == Header(
        MessageKind.SLOT,
        frames=4,
        spec_hash=SPEC.hash,
        run_id=9,
        actor=2**63 + 5,
        incarnation=3,
        generation=1,
        sequence=5,
        version=2**40,
        steps=12,
        produced_steps=72,
        raw_nbytes=head.raw_nbytes,
        coded_nbytes=sum(map(len, message_of(5)[2:])),
        duration_s=0.25,
    )
    assert head.raw_nbytes == SPEC.payload_nbytes


def test_big_columns_have_their_own_frame_and_small_ones_share() -> None:
    assert [block.name for block in SPEC.blocks] == ["obs", "noise", "records", "slot_records"]
    meta = wire.verify(wire.decode(message_of(5, "none")))
    assert meta == [["raw", block.nbytes] for block in SPEC.blocks]


def test_auto_codec_sends_incompressible_columns_raw_and_retries() -> None:
    encoder = SlotEncoder(SPEC, "auto")
    noise, flat = payload_of(1), payload_of(1)
    SPEC.views(flat)["noise"][...] = 0

    def codecs(payload: list[Bytes]) -> list[str]:
        parts = encoder.encode(header_of(1), payload, run_id=1)
        return [codec for codec, _ in wire.verify(wire.decode(parts))]

    assert codecs(noise) == ["snappy", "raw", "snappy", "raw"]
    for _ in range(SlotEncoder.RETRY_SLOTS):
        assert codecs(flat) == ["snappy", "raw", "snappy", "raw"]
    assert codecs(flat) == ["snappy", "snappy", "snappy", "raw"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_weights_survive_encoding(dtype: WireDtype) -> None:
    values = np.random.default_rng(0).normal(size=LAYOUT.size).astype(np.float32)
    parts = wire.encode_weights(values, Stamp(2, 2**40), dtype, LAYOUT, run_id=4)
    message = wire.decode([bytes(part) for part in parts])
    assert Stamp(message.head.generation, message.head.version) == (2, 2**40)
    _, weights = wire.decode_weights(message, LAYOUT)
    np.testing.assert_array_equal(weights, to_bf16(values) if dtype == "bf16" else values)


def test_policy_id_is_encoded_only_if_not_0() -> None:
    values = np.zeros(LAYOUT.size, np.float32)
    for policy_id, meta in ((0, {"dtype": "fp32"}), (5, {"dtype": "fp32", "policy_id": 5})):
        parts = wire.encode_weights(values, Stamp(0, 1), "fp32", LAYOUT, 4, policy_id)
        message = wire.decode([bytes(part) for part in parts])
        assert wire.verify(message) == meta
        assert wire.decode_weights(message, LAYOUT)[0] == policy_id


def test_a_welcome_names_its_chairs_only_if_there_are_some() -> None:
    assert "chairs" not in wire.welcome_meta(welcome())
    for chairs in (0, 1, MOST_CHAIRS):
        sent = welcome(chairs=chairs)
        meta = msgpack.unpackb(msgpack.packb(wire.welcome_meta(sent)))
        assert wire.read_welcome(sent.run_id, sent.generation, meta) == sent


@pytest.mark.parametrize("chairs", [MOST_CHAIRS + 1, 2**63, -1, True, 1.0, None, "1", [1]])
def test_a_welcome_with_an_impossible_number_of_chairs_is_none(chairs: Any) -> None:
    meta = wire.welcome_meta(welcome()) | {"chairs": chairs}
    with pytest.raises(ValueError, match="there are at most 64"):
        wire.read_welcome(1, 2, meta)


def test_weights_of_another_network_are_refused() -> None:
    other = ParamLayout((("w", (3, 5)), ("b", (3,))))  # as many values, but other shapes
    values = np.zeros(LAYOUT.size, np.float32)
    parts = wire.encode_weights(values, Stamp(0, 1), "bf16", LAYOUT, run_id=4)
    with pytest.raises(WireError) as caught:
        wire.decode_weights(wire.decode([bytes(part) for part in parts]), other)
    assert caught.value.reason == "spec"


def refused(parts: list[bytes]) -> str:
    with pytest.raises(WireError) as caught:
        decode_guarded(parts)
    return caught.value.reason


def test_malformed_messages_are_refused_with_their_reason() -> None:
    good = message_of()
    meta = msgpack.unpackb(good[1])
    zip_bomb = b"\xff\xff\xff\xff\x0f" + good[2][2:]  # claims 4 GiB
    assert refused([]) == "frames"
    assert refused(good[:1]) == "frames"
    assert refused(good[:-1]) == "frames"
    assert refused([*good, b""]) == "frames"
    assert refused([good[0], good[1]] + [b""] * (wire.MAX_FRAMES + 1)) == "frames"
    assert refused(resealed([*good, b""])) == "frames"
    assert refused([good[0][:-1], *good[1:]]) == "header"
    assert refused([b"KSNP" + good[0][4:], *good[1:]]) == "header"
    assert refused([good[0][:4] + b"\x02" + good[0][5:], *good[1:]]) == "version"
    assert refused(resealed(good, kind=99)) == "header"
    assert refused(resealed(good, sequence=wire.MAX_COUNT)) == "header"
    assert refused(resealed(good, raw_nbytes=1)) == "size"
    assert refused([*good[:3], good[3] + b"!", *good[4:]]) == "size"
    assert refused([good[0], b" " * (wire.SHORT_META_NBYTES + 1), *good[2:]]) == "size"
    assert refused(resealed(good, steps=13, produced_steps=99)) == "steps"
    assert refused(resealed(good, produced_steps=11)) == "steps"
    for duration_s in (math.nan, math.inf, -1.0, 86_400.0, 1e5):
        assert refused(resealed(good, duration_s=duration_s)) == "header"
    assert refused([*good[:2], bytes([good[2][0] ^ 1]) + good[2][1:], *good[3:]]) == "checksum"
    assert refused([good[0][:-12] + b"\x00" * 8 + good[0][-4:], *good[1:]]) == "checksum"
    strange_metas: list[Any] = [[], meta[:2], [["lz4", n] for _, n in meta]]
    strange_metas.append([[codec, n + 1] for codec, n in meta])
    for strange in strange_metas:
        assert refused(resealed([good[0], msgpack.packb(strange), *good[2:]])) == "meta"
    assert refused(resealed([good[0], b"\xc1", *good[2:]])) == "meta"
    assert refused(resealed([*good[:2], zip_bomb, *good[3:]])) == "size"
    assert refused(resealed([*good[:2], good[2][:-1], *good[3:]])) == "codec"
    assert refused(resealed([*good[:3], good[3][:-1], *good[4:]])) == "size"  # the raw one


@pytest.mark.parametrize("kind", MessageKind)
def test_only_server_messages_and_hello_allow_long_metas(kind: MessageKind) -> None:
    long = {"HELLO", "WELCOME", "REFUSE", "SPEC", "BATCH", "STATS", "WAIT"}
    parts = wire.encode(Header(kind), "x" * wire.SHORT_META_NBYTES)
    if kind.name in long:
        assert wire.verify(wire.decode(parts)) == "x" * wire.SHORT_META_NBYTES
    else:
        assert refused([bytes(part) for part in parts]) == "size"


@pytest.mark.parametrize("kind", ["HELLO", "BEAT", "WEIGHTS_GET", "JOIN", "SAMPLE"])
def test_frames_of_a_kind_without_frames_are_refused(kind: str) -> None:
    parts = wire.encode(Header(MessageKind[kind]), None, [b"x"])
    assert refused([bytes(part) for part in parts]) == "frames"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_messages_raise_only_wire_errors(data: st.DataObject) -> None:
    """Truncated, bit-flipped, with parts swapped or doubled: refused, or decoded all the same."""
    parts = message_of(2, data.draw(st.sampled_from(["auto", "snappy", "none"])))
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(parts) - 1))
        part = parts[index]
        action = data.draw(st.sampled_from(["flip", "cut", "grow", "swap", "drop"]))
        if action == "flip" and part:
            at = data.draw(st.integers(0, len(part) - 1))
            parts[index] = (
                part[:at] + bytes([part[at] ^ (1 << data.draw(st.integers(0, 7)))]) + part[at + 1 :]
            )
        elif action == "cut":
            parts[index] = part[: data.draw(st.integers(0, len(part)))]
        elif action == "grow":
            parts[index] = part + data.draw(st.binary(max_size=9))
        elif action == "swap":
            other = data.draw(st.integers(0, len(parts) - 1))
            parts[index], parts[other] = parts[other], parts[index]
        elif len(parts) > 1:
            del parts[index]
    try:
        decoded = decode_guarded(parts)
    except WireError:
        return
    assert list(map(bytes, decoded)) == list(map(bytes, payload_of(2)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sealed_nonsense_raises_only_wire_errors(data: st.DataObject) -> None:
    """A hostile sender gets the checksum right."""
    parts = message_of(2)
    index = data.draw(st.integers(1, len(parts) - 2))  # any three bytes are sound slot_records
    nonsense = st.binary(max_size=40) | st.recursive(
        st.none() | st.integers(-(2**63), 2**63) | st.text(max_size=3) | st.floats(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=6,
    ).map(msgpack.packb)
    parts[index] = data.draw(nonsense)
    with pytest.raises(WireError):
        decode_guarded(resealed(parts))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=120), max_size=6))
def test_garbage_raises_only_wire_errors(parts: list[bytes]) -> None:
    wire.is_hello(parts)
    with pytest.raises(WireError):
        wire.verify(wire.decode(parts))


def test_msgpack_beyond_the_limits_is_refused() -> None:
    """No extension types, no binary data, no depth beyond the stack."""
    for meta in (
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb({"a": b"bytes"}),
        b"\x91" * 100_000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",  # an array of 4 G elements
        msgpack.packb({1: 2}),
    ):
        good = [bytes(part) for part in wire.encode(Header(MessageKind.HELLO), None)]
        with pytest.raises(WireError) as caught:
            wire.verify(wire.decode(resealed([good[0], meta])))
        assert caught.value.reason == "meta"


def test_hello_of_another_version_is_recognised() -> None:
    hello = [bytes(part) for part in wire.encode(Header(MessageKind.HELLO), {})]
    newer = [hello[0][:4] + bytes([wire.PROTOCOL_VERSION + 1]) + hello[0][5:50]]
    assert wire.is_hello(newer)
    assert not wire.is_hello([b"PNSK"])
    assert not wire.is_hello([bytes(part) for part in wire.encode(Header(MessageKind.BEAT))])


@pytest.mark.parametrize("entries", [1, 100, 60_000])
def test_meta_with_any_number_of_entries_is_read(entries: int) -> None:
    layout = [[str(i), [3, 3]] for i in range(entries)]
    assert wire.verify(
        wire.decode(wire.encode(Header(MessageKind.WELCOME), {"layout": layout}))
    ) == {"layout": layout}


@pytest.mark.parametrize("meta", [b"\x91" * 5000 + b"\x01", b"\xdc\x40\x00" * 5000])
def test_deeply_nested_meta_is_refused(meta: bytes) -> None:
    parts = [bytes(part) for part in wire.encode(Header(MessageKind.HELLO))]
    with pytest.raises(WireError, match="meta"):
        wire.verify(wire.decode(resealed([parts[0], meta])))
