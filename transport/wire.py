"""Messages between actors, connector and relays as bytes: pure functions, no sockets.

A message is ``[header | meta | frames...]``: a fixed header, one msgpack object, and the bytes of
arrays, one frame each. docs/protocol.md describes each field for implementations in other
languages; keep the two together.

Any fault of received bytes raises `WireError`, whose ``reason`` is counted. Sizes are compared with
the spec before anything is decompressed, and a slot's memory is written only within the frame's own
range. Never pickle.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import cramjam
import msgpack
import numpy as np
import numpy.typing as npt

from penstock import __version__
from penstock.configs.value_types import MOST_CHAIRS
from penstock.core.interfaces import Welcome
from penstock.core.params import (
    MAX_POLICY_ID,
    POLICY_ID,
    Float32,
    ParamLayout,
    Stamp,
    WireDtype,
    from_bf16,
    to_bf16,
)
from penstock.core.specs import Bytes, SlotSpec
from penstock.transport.checksum import crc32

PROTOCOL_VERSION = 1
MAGIC = b"PNSK"
MAX_FRAMES = 64
# The largest meta of the kinds in `LONG_METAS`.
META_NBYTES = 1 << 20
# The largest meta of any other kind.
SHORT_META_NBYTES = 1 << 10
# Above any sequence, version or number of steps.
MAX_COUNT = 1 << 62
# Above the duration of any unroll.
MAX_DURATION_S = 86_400.0
# The most relays between the connector and another relay.
MAX_DEPTH = 16

Buffer = bytes | bytearray | memoryview
Parts = list[Buffer]
"""The parts of a message: header, meta, frames."""

HEAD_FORMAT = "<4sBBHQQQIIQQQQQQdI"
_HEAD = struct.Struct(HEAD_FORMAT)
_CRC_AT = _HEAD.size - 4
HEAD_NBYTES = _HEAD.size

# What reading a well-formed message with unexpected content raises; nested lists raise the last.
STRANGE = (
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    RecursionError,
)


class MessageKind(IntEnum):
    """The kind of a message."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    GRANT = 4
    SLOT = 5
    BEAT = 6
    BYE = 7
    WHO = 8
    WEIGHTS_GET = 9
    WEIGHTS = 10
    WEIGHTS_AT = 11
    # The kinds of a replay server, docs/replay-protocol.md.
    JOIN = 32
    SPEC = 33
    STORED = 34
    SAMPLE = 35
    BATCH = 36
    UPDATE = 37
    ASK_STATS = 38
    STATS = 39
    WAIT = 40


# Reading a meta takes time by the number of its elements. Long ones are sent only by a learner or
# replay server, which its clients trust; and in HELLO, which the connector limits by its own spec.
LONG_METAS = frozenset(
    {
        MessageKind.HELLO,
        MessageKind.WELCOME,
        MessageKind.REFUSE,
        MessageKind.SPEC,
        MessageKind.BATCH,
        MessageKind.STATS,
        MessageKind.WAIT,
    }
)
# Others have no frames, over which a checksum would be computed in vain.
WITH_FRAMES = frozenset(
    {MessageKind.SLOT, MessageKind.WEIGHTS, MessageKind.BATCH, MessageKind.UPDATE}
)


class WireError(Exception):
    """A message that cannot be used; ``reason`` is one word, the same for all faults of a kind."""

    def __init__(self, reason: str, text: str = "") -> None:
        super().__init__(f"{reason}: {text}" if text else reason)
        self.reason = reason
        self.text = text


class Header(NamedTuple):
    """The header's fields in their order, without magic, version and checksum."""

    kind: int
    frames: int = 0
    spec_hash: int = 0
    run_id: int = 0
    actor: int = 0
    incarnation: int = 0
    generation: int = 0
    sequence: int = 0
    version: int = 0
    steps: int = 0
    produced_steps: int = 0
    raw_nbytes: int = 0
    coded_nbytes: int = 0
    duration_s: float = 0.0


_COUNTS = slice(Header._fields.index("sequence"), Header._fields.index("produced_steps") + 1)


class Message(NamedTuple):
    """A message with a valid header; the rest is not checked yet."""

    head: Header
    parts: Sequence[Buffer]

    @property
    def frames(self) -> Sequence[Buffer]:
        """The parts after header and meta."""
        return self.parts[2:]


def encode(head: Header, meta: Any = None, frames: Sequence[Buffer] = ()) -> Parts:
    """Encode one message.

    Args:
        head: the header; the number and the size of frames, and the checksum are filled in.
        meta: what msgpack can encode.
        frames: the bytes of arrays, which are not copied.
    """
    packed_meta = msgpack.packb(meta)
    coded_nbytes = sum(_nbytes(frame) for frame in frames)
    head = head._replace(frames=len(frames), coded_nbytes=coded_nbytes)

    packed_head = bytearray(_HEAD.pack(MAGIC, PROTOCOL_VERSION, *head, 0))
    _U32.pack_into(packed_head, _CRC_AT, _checksum(packed_head, [packed_meta, *frames]))
    return [bytes(packed_head), packed_meta, *frames]


def decode(parts: Sequence[Buffer]) -> Message:
    """Return the message with these parts, whose header and sizes are checked.

    `verify` checks the checksum, and decodes the meta.

    Raises:
        WireError: the number of parts, the header or a size is not valid.
    """
    if not 2 <= len(parts) <= 2 + MAX_FRAMES:
        raise WireError("frames", f"{len(parts)} parts")
    if _nbytes(parts[0]) != HEAD_NBYTES:
        raise WireError("header", f"{_nbytes(parts[0])} bytes")

    # The fields of the header. The version comes before those whose meaning depends on it.
    magic, version, *fields, _ = _HEAD.unpack(parts[0])
    if magic != MAGIC:
        raise WireError("header", "magic")
    head = Header(*fields)
    if version != PROTOCOL_VERSION:
        text = f"version {version} of the protocol instead of {PROTOCOL_VERSION}"
        raise WireError("version", text)
    if head.kind not in _KINDS or max(fields[_COUNTS]) >= MAX_COUNT:
        raise WireError("header", f"kind {head.kind}, counters {fields[_COUNTS]}")

    # The frames are as many and as large as the header says.
    if head.frames != len(parts) - 2:
        raise WireError("frames", f"{len(parts) - 2} instead of {head.frames}")
    if head.frames and head.kind not in WITH_FRAMES:
        raise WireError("frames", f"{head.frames}, and kind {head.kind} has none")
    meta_nbytes = META_NBYTES if head.kind in LONG_METAS else SHORT_META_NBYTES
    if _nbytes(parts[1]) > meta_nbytes:
        raise WireError("size", f"a meta of {_nbytes(parts[1])} bytes")
    if head.coded_nbytes != sum(map(_nbytes, parts[2:])):
        raise WireError("size", "frames")
    return Message(head, parts)


def verify(message: Message) -> Any:
    """Check the checksum of the whole message and return its meta. Raises WireError."""
    head, meta, *frames = message.parts
    if _checksum(head, [meta, *frames]) != _U32.unpack_from(head, _CRC_AT)[0]:
        raise WireError("checksum")
    try:
        return _unpack(meta)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise WireError("meta", str(error)) from error


def describe_other_version(peer: str, version: str, this_side: str) -> str:
    """Return the sentence for a peer of another protocol version.

    Args:
        peer: the peer's name in the sentence.
        version: the text of the error that `decode` raised.
        this_side: the name of this side.
    """
    return (
        f"{peer} speaks {version}, and {this_side} has Penstock {__version__}; use the same "
        "release on both sides"
    )


def release_of(meta: Any) -> str:
    """Return the peer's release in a meta; empty where it sent none that can be one."""
    release = meta.get("release") if isinstance(meta, dict) else None
    if isinstance(release, str) and _RELEASE.fullmatch(release):
        return release
    return ""


def welcome_meta(welcome: Welcome) -> dict[str, Any]:
    """Return a learner's description for its answer to an actor; `read_welcome` is the inverse."""
    meta: dict[str, Any] = {
        "spec": welcome.spec.to_dict(),
        "layout": welcome.layout.to_list(),
        "config": welcome.config,
        "spaces": welcome.spaces,
        "release": __version__,
    }
    if welcome.chairs:
        meta["chairs"] = welcome.chairs
    return meta


def read_welcome(run_id: int, generation: int, meta: dict[str, Any]) -> Welcome:
    """Return the learner that a meta describes, with its run and generation.

    Raises one of `STRANGE` for a meta that describes none.
    """
    # Memory is allocated for so many policies.
    chairs = meta.get("chairs", 0)
    if type(chairs) is not int or not 0 <= chairs <= MOST_CHAIRS:
        raise ValueError(f"{chairs!r:.20} chairs, and there are at most {MOST_CHAIRS}")

    return Welcome(
        run_id=run_id,
        generation=generation,
        spec=SlotSpec.from_dict(meta["spec"]),
        layout=ParamLayout.from_list(meta["layout"]),
        config=meta["config"],
        spaces=meta.get("spaces"),
        chairs=chairs,
    )


def is_hello(parts: Sequence[Buffer]) -> bool:
    """Whether this is a HELLO of any version: the position of magic, version and kind is fixed."""
    start = bytes(memoryview(parts[0])[:6]) if parts else b""
    return len(start) == 6 and start[:4] == MAGIC and start[5] == MessageKind.HELLO


# ---------------------------------------------------------------------------------------- slots


def max_frame_nbytes(spec: SlotSpec) -> int:
    """Return the largest possible size of a frame of a slot, or of any meta, in bytes."""
    return max(META_NBYTES, *(_max_coded_nbytes(block.nbytes) for block in spec.blocks))


class SlotEncoder:
    """Encodes slots of one spec into buffers of its own, which the next call overwrites.

    With codec "auto" a frame that is compressed by less than `MIN_RATIO` is sent raw, and
    compression is tried again after `RETRY_SLOTS` slots.
    """

    MIN_RATIO: Final = 1.1
    RETRY_SLOTS: Final = 64

    def __init__(self, spec: SlotSpec, codec: str) -> None:
        """``codec``: "auto", "snappy" or "none"."""
        self._codec = codec
        self._spec_hash = spec.hash
        self._raw_nbytes = spec.payload_nbytes
        # By block: the number of slots for which its frame is still sent raw, and a buffer for its
        # compressed bytes.
        self._raw_slots = [0] * len(spec.blocks)
        compresses = codec != "none"
        sizes = [_max_coded_nbytes(block.nbytes) if compresses else 0 for block in spec.blocks]
        self._buffers = [np.empty(nbytes, np.uint8).data for nbytes in sizes]

    def encode(self, header: npt.NDArray[Any], payload: Sequence[Bytes], run_id: int) -> Parts:
        """Encode a slot.

        Args:
            header: its HEADER record.
            payload: the bytes of its blocks.
            run_id: of the learner's run.

        Returns:
            The message. Its frames are valid until the next call, or until ``payload`` is changed.
        """
        coded_frames = [self._encode_frame(i, raw.data) for i, raw in enumerate(payload)]
        meta = [[codec, raw.nbytes] for (codec, _), raw in zip(coded_frames, payload, strict=True)]
        head = Header(
            MessageKind.SLOT,
            spec_hash=self._spec_hash,
            run_id=run_id,
            actor=int(header["actor"]),
            incarnation=int(header["incarnation"]),
            generation=int(header["generation"]),
            sequence=int(header["sequence"]),
            version=int(header["version"]),
            steps=int(header["steps"]),
            produced_steps=int(header["produced_steps"]),
            raw_nbytes=self._raw_nbytes,
            duration_s=float(header["published_s"] - header["started_s"]),
        )
        return encode(head, meta, [frame for _, frame in coded_frames])

    def _encode_frame(self, index: int, raw: memoryview) -> tuple[str, Buffer]:
        """Return the codec of a block's frame, "raw" or "snappy", and its bytes."""
        if self._codec == "none":
            return "raw", raw
        if self._raw_slots[index]:
            self._raw_slots[index] -= 1
            return "raw", raw

        buffer = self._buffers[index]
        nbytes = cramjam.snappy.compress_raw_into(raw, buffer)
        if self._codec == "auto" and nbytes * self.MIN_RATIO > raw.nbytes:
            self._raw_slots[index] = self.RETRY_SLOTS
            return "raw", raw
        return "snappy", buffer[:nbytes]


class SlotDecoder:
    """Decodes slots of one spec into the caller's memory."""

    def __init__(self, spec: SlotSpec) -> None:
        self._frame_count = len(spec.blocks)
        self._raw_nbytes = spec.payload_nbytes
        self._max_steps = spec.unroll * spec.envs

    def decode(self, message: Message, payload: Sequence[Bytes]) -> None:
        """Write the frames of a message into ``payload``, the bytes of a slot's blocks.

        Raises:
            WireError: the message is no slot of this spec. ``payload`` may be partly written.
        """
        # Header and meta are checked first, so that no frame is decompressed in vain.
        head = message.head
        frames = message.frames
        if len(frames) != self._frame_count:
            raise WireError("frames", f"{len(frames)} instead of {self._frame_count}")
        if head.raw_nbytes != self._raw_nbytes:
            raise WireError("size", f"{head.raw_nbytes} bytes instead of {self._raw_nbytes}")
        if not head.steps <= min(head.produced_steps, self._max_steps):
            raise WireError("steps", f"{head.steps} of {head.produced_steps}")
        if not 0 <= head.duration_s < MAX_DURATION_S:
            raise WireError("header", f"a duration of {head.duration_s} s")
        meta = verify(message)
        if not isinstance(meta, list) or len(meta) != len(frames):
            raise WireError("meta")

        for entry, frame, block in zip(meta, frames, payload, strict=True):
            _decode_frame(entry, frame, block)


def fill_header(record: npt.NDArray[np.void], head: Header, now_s: float, rows: int = 0) -> None:
    """Fill a slot's HEADER record from the header of its message.

    Times are by this host's clock, as if the slot had been published on arrival at ``now_s``.
    """
    started_s = now_s - head.duration_s
    # The order is that of `core.specs.HEADER`.
    record[...] = (
        head.actor,
        head.incarnation,
        head.generation,
        head.sequence,
        head.version,
        head.steps,
        head.produced_steps,
        started_s,
        now_s,
        rows,
    )


def _decode_frame(entry: Any, frame: Buffer, block: Bytes) -> None:
    """Write a frame into the memory of its block. Raises WireError.

    ``entry`` is the frame's element of the meta: its codec, and its size when it is decoded.
    """
    if entry == ["raw", block.nbytes]:
        if _nbytes(frame) != block.nbytes:
            raise WireError("size", f"a raw frame of {_nbytes(frame)} bytes for {block.nbytes}")
        np.copyto(block, np.frombuffer(frame, np.uint8))
        return

    if entry != ["snappy", block.nbytes]:
        raise WireError("meta", "codec or size")
    try:
        if cramjam.snappy.decompress_raw_len(frame) != block.nbytes:
            raise WireError("size", "decompressed")
        nbytes = cramjam.snappy.decompress_raw_into(frame, block.data)
    except cramjam.DecompressionError as error:
        raise WireError("codec", str(error)) from error
    if nbytes != block.nbytes:
        raise WireError("codec", f"{nbytes} bytes instead of {block.nbytes}")


# -------------------------------------------------------------------------------------- weights


def encode_weights(
    values: Float32,
    stamp: Stamp,
    dtype: WireDtype,
    layout: ParamLayout,
    run_id: int,
    policy_id: int = POLICY_ID,
) -> Parts:
    """Encode one version of the weights.

    Args:
        values: the weights, float32 ``[layout.size]``.
        stamp: their version.
        dtype: the type in which they are sent; fp32 for a network that normalizes observations.
        layout: of the weights.
        run_id: of the learner's run.
        policy_id: whose weights they are.
    """
    # bf16 would round means of far-off observations by many of their deviations.
    if any(name.startswith("normalizer.") for name, _ in layout.entries):
        dtype = "fp32"

    payload: npt.NDArray[Any] = values if dtype == "fp32" else to_bf16(values)
    return encode_payload(payload, stamp, layout, run_id=run_id, policy_id=policy_id)


def encode_payload(
    payload: npt.NDArray[Any],
    stamp: Stamp,
    layout: ParamLayout,
    run_id: int,
    policy_id: int = POLICY_ID,
) -> Parts:
    """Encode one version of the weights without converting or copying them.

    Args:
        payload: the weights ``[layout.size]``: float32, or bfloat16 bits as uint16.
        stamp: their version.
        layout: of the weights.
        run_id: of the learner's run.
        policy_id: whose weights they are.
    """
    dtype = "fp32" if payload.dtype == np.float32 else "bf16"
    raw = payload.view(np.uint8).data

    head = Header(
        MessageKind.WEIGHTS,
        spec_hash=layout.hash,
        run_id=run_id,
        generation=stamp.generation,
        version=stamp.version,
        raw_nbytes=raw.nbytes,
    )
    return encode(head, {"dtype": dtype} | policy_meta(policy_id), [raw])


def decode_weights(message: Message, layout: ParamLayout) -> tuple[int, npt.NDArray[Any]]:
    """Decode weights without copying them.

    Returns:
        The policy id, and the weights ``[layout.size]`` as a view of the message's frame: float32,
        or bfloat16 bits as uint16.

    Raises:
        WireError: the message cannot be used.
    """
    meta = verify(message)
    dtype = _WEIGHT_DTYPES.get(str(meta.get("dtype"))) if isinstance(meta, dict) else None
    if dtype is None or len(message.frames) != 1 or message.head.spec_hash != layout.hash:
        raise WireError("spec", "these weights belong to another network")

    if _nbytes(message.frames[0]) != layout.size * dtype.itemsize:
        raise WireError("size", f"{_nbytes(message.frames[0])} bytes of weights")
    weights: npt.NDArray[Any] = np.frombuffer(message.frames[0], dtype)
    return policy_of(meta), weights


def policy_meta(policy_id: int) -> dict[str, int]:
    """Return the fields that name the policy in the meta of a message about weights."""
    return {} if policy_id == POLICY_ID else {"policy_id": policy_id}


def policy_of(meta: Any) -> int:
    """Return the policy id in the meta of a message about weights.

    Raises WireError for an invalid one.
    """
    policy_id = meta.get("policy_id", POLICY_ID) if isinstance(meta, dict) else None
    if type(policy_id) is not int or not 0 <= policy_id <= MAX_POLICY_ID:
        raise WireError("meta", "policy_id")
    return policy_id


class RelayOffer(NamedTuple):
    """What a relay states in WEIGHTS_GET about serving the weights to other relays."""

    port: int | None
    """Where it listens; None while it does not, 0 if it cannot."""
    key: str = ""
    """The public CURVE key of its socket, Z85 text; empty without CURVE."""
    failed: str = ""
    """Why the relay that the last WEIGHTS_AT named was of no use, one of `FAILURES`; then only the
    connector itself may answer. Empty if that relay was of use."""


FAILURES = ("late", "wrong", "passed")
"""The relay did not answer in time; sent other bytes than announced; has a newer version."""


def relay_offer(meta: Any) -> RelayOffer | None:
    """Return the offer in the meta of a WEIGHTS_GET.

    Returns None where the peer takes weights only from the connector. Raises WireError for an
    invalid offer.
    """
    if "relay" not in meta:
        return None
    offer = meta["relay"]
    if not isinstance(offer, dict):
        raise WireError("meta", "relay")

    port = offer.get("port")
    key = offer.get("key", "")
    failed = offer.get("failed", "")
    valid_port = port is None or (type(port) is int and 0 <= port < 1 << 16)
    valid_failed = failed == "" or failed in FAILURES
    valid_key = isinstance(key, str) and _KEY.fullmatch(key)
    if not (valid_port and valid_failed and valid_key):
        raise WireError("meta", "relay")
    return RelayOffer(port, key, failed)


class WeightsAt(NamedTuple):
    """The relay that has a version of the weights, or is about to receive it."""

    stamp: Stamp
    nbytes: int
    """Size of the weights, as `encode_payload` gets them."""
    address: str
    """Where the relay serves others: ``tcp://HOST:PORT``."""
    key: str
    """The public CURVE key of its socket, Z85 text; empty without CURVE."""
    sha256: str
    """The checksum of the weights, in hexadecimal digits: only these may be accepted from the
    relay."""
    depth: int
    """Number of relays between the connector and the receiver of this message."""


def encode_weights_at(
    weights_at: WeightsAt | None, run_id: int, policy_id: int = POLICY_ID
) -> Parts:
    """Encode the answer that sends a relay to another one, or asks it to listen itself (None)."""
    if weights_at is None:
        return encode(Header(MessageKind.WEIGHTS_AT, run_id=run_id), policy_meta(policy_id))

    head = Header(
        MessageKind.WEIGHTS_AT,
        run_id=run_id,
        generation=weights_at.stamp.generation,
        version=weights_at.stamp.version,
        raw_nbytes=weights_at.nbytes,
    )
    meta = {
        "address": weights_at.address,
        "key": weights_at.key,
        "sha256": weights_at.sha256,
        "depth": weights_at.depth,
    }
    return encode(head, meta | policy_meta(policy_id))


def decode_weights_at(message: Message, layout: ParamLayout) -> tuple[int, WeightsAt | None]:
    """Decode the answer that sends a relay to another one.

    Returns:
        The policy id, and the relay to ask; None where the receiver is to listen itself.

    Raises:
        WireError: the message cannot be used, or names more bytes than weights of ``layout`` have.
    """
    head = message.head
    meta = verify(message)
    policy_id = policy_of(meta)
    if "address" not in meta:
        return policy_id, None

    address = meta.get("address")
    key = meta.get("key")
    sha256 = meta.get("sha256")
    depth = meta.get("depth")
    are_texts = isinstance(address, str) and isinstance(key, str) and isinstance(sha256, str)
    if not are_texts or not (_RELAY.fullmatch(address) and _KEY.fullmatch(key)):
        raise WireError("meta", "the relay's address or key")
    if not _SHA256.fullmatch(sha256) or type(depth) is not int or not 1 <= depth <= MAX_DEPTH:
        raise WireError("meta", "sha256 or depth")
    if head.raw_nbytes > layout.size * _WEIGHT_DTYPES["fp32"].itemsize:
        raise WireError("size", f"{head.raw_nbytes} bytes of weights")
    stamp = Stamp(head.generation, head.version)
    weights_at = WeightsAt(
        stamp=stamp,
        nbytes=head.raw_nbytes,
        address=address,
        key=key,
        sha256=sha256,
        depth=depth,
    )
    return policy_id, weights_at


def to_float32(weights: npt.NDArray[Any]) -> Float32:
    """Convert the result of `decode_weights` to float32."""
    return weights if weights.dtype == np.float32 else from_bf16(weights)


_KEY = re.compile(r"|[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}")
_RELAY = re.compile(r"tcp://[0-9A-Za-z.:\[\]%_-]{1,100}:[0-9]{1,5}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RELEASE = re.compile(r"[0-9A-Za-z.+-]{1,40}")
_U32 = struct.Struct("<I")
_KINDS = frozenset(MessageKind)
_WEIGHT_DTYPES: dict[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "bf16": np.dtype("<u2")}


def _unpack(meta: Buffer) -> Any:
    """Decode a meta, in time and memory bounded by its length.

    Raises what msgpack raises for bytes that are no message.
    """
    # msgpack allocates an array when it is announced, even if its elements are missing: a thousand
    # nested arrays take a thousand times the length. Skipping over a long meta first allocates
    # nothing, and raises where elements are missing.
    nbytes = _nbytes(meta)
    if nbytes > SHORT_META_NBYTES:
        skipper = msgpack.Unpacker(max_buffer_size=nbytes)
        skipper.feed(meta)
        skipper.skip()

    return msgpack.unpackb(
        meta,
        max_bin_len=0,
        max_ext_len=0,
        max_str_len=nbytes,
        max_array_len=nbytes,
        max_map_len=nbytes,
    )


def _nbytes(buffer: Buffer) -> int:
    """The size of a buffer; `len` counts the elements of a memoryview."""
    return memoryview(buffer).nbytes


def _checksum(head: Buffer, other_parts: Sequence[Buffer]) -> int:
    """CRC-32 of the header up to its checksum, then meta and frames."""
    crc = crc32(memoryview(head)[:_CRC_AT])
    for part in other_parts:
        crc = crc32(part, crc)
    return crc


def _max_coded_nbytes(raw_nbytes: int) -> int:
    """The most bytes that snappy makes of ``raw_nbytes``."""
    return 32 + raw_nbytes + raw_nbytes // 6
