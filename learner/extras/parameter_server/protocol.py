"""Messages between learners (workers) and their parameter server: pure functions, no sockets.

A message is two frames, ``[head | payload]``, to the server's ROUTER from a worker's DEALER and
back. The head is `HEAD`, little-endian; fields that a kind does not name are 0. The payload is raw:

    dense     ``entries`` float32; with flag BF16 as many bfloat16
    sparse    ``entries`` uint32 indices, ascending, then as many float32
    text      ``entries`` bytes of UTF-8

    kind       from    content
    JOIN       worker  rank; number = its clock by the first shard, 0 to that one; session = the
                       worker's own random token; version = updates that its parameters have seen;
                       entries = number of parameters; rules = checksum of the settings on which
                       all must agree; tally = those of its own counts that are in the tally of
                       the last VALUES it got, else 0
    WELCOME    server  number = the worker's clock; session to name from now on; flag WANTED: send
                       your parameters
    STATE      worker  version, samples, tally of the run; dense: parameters, then the optimizer's
                       arrays by name; the server takes them if it has none, or older ones
    PUSH       worker  samples; tally of the worker since it began. dense: the gradient, summed over
                       its samples. sparse (asp): changes of parameters. 0 samples, no payload:
                       after a pull that is a turn without a gradient, else only tally and flags.
                       Another one without a pull is a step with the same parameters, if the pace
                       allows it
    PULL       worker  number = that of its answer; version = the worker's (asp), -1 for none; flag
                       AHEAD: for the step after the next push
    VALUES     server  number; version, samples, tally of the run; lag = staleness of the worker's
                       last push, -1 where it was discarded; workers; rules = the further pushes
                       that it may make with these parameters. dense: all parameters; sparse
                       (asp): those that changed since ``version``. flag AHEAD: they lack the push
                       that the worker made after its pull
    ASK_STATE  worker  number
    STATE      server  number, as above
    BYE        worker  it leaves
    `WHO`      server  session = one that it does not know (any more): join again
    BUSY       server  text: why the worker cannot join now; it tries again
    REFUSE     server  text: why the worker can never join
    PING       server  no content: tests whether the worker can be reached

A tally is `Progress.growth`: counts that add up, then sums of which each worker's last one counts.
Flags STOP and NAN in a PUSH are for all workers: each finds them in all later VALUES. When all
stop, no worker waits, and gradients count no more.

Any fault of received bytes raises `WireError`, whose ``reason`` is counted. A worker that
reconnects has a new identity, and is answered `WHO`; the gradient of a push that was lost with the
connection is lost. The counts of that push are not lost, as each push has all counts of its worker:
one that joins again sends a push without a gradient if the server may lack some. The server knows
the worker by its token, and adds by how much its counts have grown. Never pickle.

A run's server listens in the run's runtime folder of mode 0700, so a worker is a process of the
same user; or on the network, where a worker has the learner's secret key. Its messages are checked
for size, number and range, and its gradients and counts are trusted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from enum import IntEnum, IntFlag
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.configs.learner import OPTIMIZERS, LearnerConfig
from penstock.core.params import from_bf16, to_bf16
from penstock.learner.progress import BOOKED, GROWTH
from penstock.transport.checksum import crc32
from penstock.transport.wire import WireError

PROTOCOL_VERSION = 3
MAGIC = b"PNPS"
FRAMES = 2  # number of frames of a message
MAX_SPARE = 2**32 - 1  # most further pushes that an answer allows
TEXT_CHARACTERS = 2000  # longest text
TEXT_NBYTES = 4 * TEXT_CHARACTERS  # its size in UTF-8

# The head: magic, protocol, kind, flags, rank, number, session, version, samples, entries, rules,
# lag, workers, tally, checksum of the payload, checksum of all before it.
HEAD = struct.Struct(f"<4sBBHIQQqqQIiI{GROWTH}dII")
_U32 = struct.Struct("<I")

# Settings of `learner` on which all learners and their server must agree.
AGREED = {"pace", "count", "staleness", "significance", "spare", "optimizer", "momentum"}
AGREED |= {"weight_decay", "lr", "lr_scaling", "lr_warmup_updates", "lr_end_fraction"}
AGREED |= {"lr_decay_steps", "eps", "grad_clip", "server_shards"}

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint32]
Payload = bytes | memoryview

# A tally begins with counts that add up over all workers and all time. The sums behind them are of
# recent episodes, and only the last ones of each worker count.
Tally = tuple[float, ...]
COUNTS = len(BOOKED)  # number of the counts
TRAINED_STEPS = BOOKED.index("trained_steps")  # index of the agent steps trained on
NOTHING: Tally = (0.0,) * GROWTH


class ServerMessageKind(IntEnum):
    """The kind of a message."""

    JOIN = 1
    WELCOME = 2
    STATE = 3
    PUSH = 4
    PULL = 5
    VALUES = 6
    ASK_STATE = 7
    BYE = 8
    WHO = 9
    BUSY = 10
    REFUSE = 11
    PING = 12


class Flag(IntFlag):
    """Flags of a message.

    ``DENSE`` and ``SPARSE`` give the form of the payload; with neither it is text or empty.
    ``BF16`` belongs to ``DENSE``.
    """

    NONE = 0
    DENSE = 1
    SPARSE = 2
    WANTED = 4
    STOP = 8
    NAN = 32
    BF16 = 64
    AHEAD = 128


class ServerHeader(NamedTuple):
    """The fields in their order, without magic, version and checksums.

    The beginning of this file says what they mean in each kind of message.
    """

    kind: int
    flags: int = 0
    rank: int = 0
    number: int = 0
    session: int = 0
    version: int = 0
    samples: int = 0
    entries: int = 0
    rules: int = 0
    lag: int = 0
    workers: int = 0
    tally: Tally = NOTHING


class ServerMessage(NamedTuple):
    """A valid head, and a payload of its announced size and checksum."""

    head: ServerHeader
    payload: memoryview


class Packed(NamedTuple):
    """A payload that is sent several times, with its fields of the head."""

    payload: Payload
    flags: Flag
    entries: int
    crc: int


def rules(cfg: LearnerConfig, shard: int = 0) -> int:
    """Returns the checksum of what a worker and the server's shard must agree on.

    These are settings of all learners, and the number of the shard.
    """
    optimizer = OPTIMIZERS.specs[cfg.optimizer]
    settings = cfg.model_dump(mode="json", include=AGREED.union(optimizer.options))
    agreed = settings | {"codec": cfg.reduce.codec, "shard": shard}
    text = json.dumps(agreed, sort_keys=True)
    return crc32(text.encode())


def pack_dense(values: Floats, *, bf16: bool = False) -> Packed:
    """Copy ``values``, which may change while the payload is on its way; ``bf16`` rounds them."""
    if bf16:
        flags = Flag.DENSE | Flag.BF16
        payload = to_bf16(values).astype("<u2", copy=False).tobytes()
    else:
        flags = Flag.DENSE
        payload = values.astype("<f4", copy=False).tobytes()
    return Packed(payload, flags, entries=values.size, crc=crc32(payload))


def pack_sparse(indices: Indices, values: Floats) -> Packed:
    """Pack ascending ``indices`` and their values."""
    payload = indices.astype("<u4", copy=False).tobytes()
    payload += values.astype("<f4", copy=False).tobytes()
    return Packed(payload, Flag.SPARSE, entries=values.size, crc=crc32(payload))


def pack_text(text: str) -> Packed:
    """Pack a sentence in UTF-8."""
    payload = text.encode()
    return Packed(payload, Flag.NONE, entries=len(payload), crc=crc32(payload))


def encode(head: ServerHeader, packed: Packed | None = None) -> list[Payload]:
    """Encode the two frames; the payload's fields in ``head`` are filled in."""
    payload: Payload = b""
    payload_crc = crc32(b"")
    if packed is not None:
        payload = packed.payload
        payload_crc = packed.crc
        head = head._replace(flags=head.flags | packed.flags, entries=packed.entries)

    # The last field of the head is the checksum of those before it.
    fields_but_tally = head[:-1]
    packed_head = HEAD.pack(MAGIC, PROTOCOL_VERSION, *fields_but_tally, *head.tally, payload_crc, 0)
    checked = packed_head[: -_U32.size]
    return [checked + _U32.pack(crc32(checked)), payload]


def decode(frames: Sequence[Payload]) -> ServerMessage:
    """Decode a message, and check everything that needs no knowledge of the run.

    Raises:
        WireError: if the frames are no valid message.
    """
    if len(frames) != FRAMES:
        raise WireError("frames", f"{len(frames)} frames")
    raw_head = bytes(frames[0][: HEAD.size + 1])  # one byte more shows that it is too long
    payload = memoryview(frames[1])

    # The head is whole and of this version.
    if len(raw_head) != HEAD.size:
        raise WireError("header", f"{len(raw_head)} bytes")
    magic, version, *fields, payload_crc, head_crc = HEAD.unpack(raw_head)
    if magic != MAGIC or crc32(raw_head[: -_U32.size]) != head_crc:
        raise WireError("header", "magic or checksum")
    if version != PROTOCOL_VERSION:
        text = f"version {version} of the protocol instead of {PROTOCOL_VERSION}"
        raise WireError("version", text)

    # Its fields are in range.
    head = ServerHeader(*fields[:-GROWTH])._replace(tally=tuple(fields[-GROWTH:]))
    if head.kind not in _KINDS:
        raise WireError("header", f"kind {head.kind}")
    if min(head.samples, head.version + 1, *head.tally[:COUNTS]) < 0:  # -1: no version
        raise WireError("header", "negative counts")
    if not all(map(isfinite, head.tally)):
        raise WireError("header", "sums that are not finite")

    # The payload is the announced one.
    if payload.nbytes != _payload_nbytes(head):
        raise WireError("size", f"{payload.nbytes} bytes for {head.entries} entries")
    if crc32(payload) != payload_crc:
        raise WireError("checksum")
    return ServerMessage(head, payload)


def dense(message: ServerMessage, size: int) -> Floats:
    """Returns the payload as float32 ``[size]``: possibly not a copy, and not aligned.

    Raises:
        WireError: if it is not dense, or of another size.
    """
    if message.head.flags & _SHAPES != Flag.DENSE or message.head.entries != size:
        raise WireError("size", f"{message.head.entries} instead of {size} values")
    return unrounded(message.payload, Flag(message.head.flags))


def unrounded(payload: Payload, flags: Flag) -> Floats:
    """Returns the values of a dense payload, as float32."""
    if Flag.BF16 in flags:
        return from_bf16(np.frombuffer(payload, "<u2"))
    return np.frombuffer(payload, "<f4")


def sparse(message: ServerMessage, size: int) -> tuple[Indices, Floats]:
    """Returns indices below ``size``, ascending and each once, and their values.

    Raises:
        WireError: if the payload is not sparse, or its indices are not so.
    """
    if message.head.flags & _SHAPES != Flag.SPARSE or message.head.entries > size:
        raise WireError("size", f"{message.head.entries} of {size} values")

    indices_nbytes = 4 * message.head.entries
    indices = np.frombuffer(message.payload[:indices_nbytes], "<u4")
    if indices.size and (indices[-1] >= size or np.any(indices[1:] <= indices[:-1])):
        raise WireError("indices", f"not growing, or not below {size}")
    return indices, np.frombuffer(message.payload[indices_nbytes:], "<f4")


def text(message: ServerMessage) -> str:
    """Returns the sentence of a message, at most `TEXT_CHARACTERS` long."""
    return bytes(message.payload[:TEXT_NBYTES]).decode(errors="replace")[:TEXT_CHARACTERS]


def _payload_nbytes(head: ServerHeader) -> int:
    """Returns the size in bytes of the payload that a head announces.

    Raises:
        WireError: if the head announces none that is possible.
    """
    shape = head.flags & _SHAPES
    if shape == _SHAPES:
        raise WireError("header", "both dense and sparse")
    if head.flags & Flag.BF16:
        if shape != Flag.DENSE:
            raise WireError("header", "bf16 and not dense")
        return 2 * int(head.entries)

    if head.kind == ServerMessageKind.JOIN:  # there ``entries`` describes what is not sent
        return 0
    if not shape and head.entries > TEXT_NBYTES:
        raise WireError("size", f"a text of {head.entries} bytes")
    entry_nbytes = {Flag.DENSE: 4, Flag.SPARSE: 8}.get(Flag(shape), 1)
    return int(head.entries) * entry_nbytes


_KINDS = frozenset(ServerMessageKind)
_SHAPES = Flag.DENSE | Flag.SPARSE
