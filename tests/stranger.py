"""An actor written from docs/protocol.md alone.

`Stranger` and what it calls use pyzmq, msgpack, python-snappy, struct, zlib and numpy, and nothing
of Penstock. Where this file and the page disagree, the page is to be mended first.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import zlib
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import snappy
import zmq

HEADER = struct.Struct("<4sBBHQQQIIQQQQQQdI")
FIELDS = (
    *("magic", "protocol", "kind", "frames", "spec_hash", "run_id", "actor", "incarnation"),
    *("generation", "sequence", "version", "steps", "produced_steps", "raw_nbytes"),
    *("coded_nbytes", "duration_s", "crc"),
)
HELLO, WELCOME, REFUSE, GRANT, SLOT, BEAT, BYE, WHO, WEIGHTS_GET, WEIGHTS = range(1, 11)

Columns = dict[str, npt.NDArray[Any]]


class Stranger:
    """An actor that knows nothing but the page."""

    def __init__(self, address: str, actor: int = 4711, incarnation: int = 0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.LINGER, 2000)
        self.socket.connect(address)
        self.own = {"actor": actor, "incarnation": incarnation}
        self.run_id = 0
        self.spec_hash = 0
        self.limit = 0
        self.sequence = 0
        self.produced_steps = 0

    def say(self, kind: int, meta: Any = None, frames: list[bytes] = [], **fields: Any) -> None:  # noqa: B006
        packed = msgpack.packb(meta)
        values = dict.fromkeys(FIELDS, 0) | self.own | fields
        values |= {"magic": b"PNSK", "protocol": 1, "kind": kind, "frames": len(frames)}
        values |= {"run_id": self.run_id, "spec_hash": self.spec_hash, "duration_s": 0.25}
        values["coded_nbytes"] = sum(map(len, frames))
        start = HEADER.pack(*values.values())[:96]
        crc = zlib.crc32(start)
        for part in (packed, *frames):
            crc = zlib.crc32(part, crc)
        self.socket.send_multipart([start + struct.pack("<I", crc), packed, *frames])

    def hear(self, *kinds: int) -> tuple[dict[str, Any], Any, list[bytes]]:
        """The next message of one of these kinds; grants are noted on the way."""
        while True:
            assert self.socket.poll(5000), f"no message of kinds {kinds}"
            message = self.receive()
            if message[0]["kind"] in kinds:
                return message

    def receive(self) -> tuple[dict[str, Any], Any, list[bytes]]:
        """The next message; a grant is noted."""
        start, meta, *frames = self.socket.recv_multipart()
        fields = dict(zip(FIELDS, HEADER.unpack(start), strict=True))
        crc = zlib.crc32(start[:96])
        for part in (meta, *frames):
            crc = zlib.crc32(part, crc)
        assert (fields["magic"], fields["protocol"], fields["crc"]) == (b"PNSK", 1, crc)
        assert fields["frames"] == len(frames)
        if fields["kind"] == GRANT:
            self.limit = fields["sequence"]
        return fields, msgpack.unpackb(meta), frames

    def join(self, spec: dict[str, Any] | None, want: int = 2) -> dict[str, Any]:
        meta, produced = {"spec": spec, "want": want}, self.produced_steps
        self.say(HELLO, meta, sequence=self.sequence, produced_steps=produced)
        fields, meta, _ = self.hear(WELCOME, REFUSE)
        if fields["kind"] == REFUSE:
            raise PermissionError(meta["error"])
        self.run_id, self.spec_hash = fields["run_id"], fields["spec_hash"]
        self.limit = fields["sequence"]
        self.spec = meta["spec"]
        told: dict[str, Any] = meta
        return told

    def send_slot(self, columns: Columns, steps: int, stamp: tuple[int, int] = (2, 17)) -> None:
        """Send a slot as soon as it is granted; ``stamp`` is that of the oldest weights in it."""
        while self.sequence >= self.limit:
            self.say(BEAT, sequence=self.sequence, produced_steps=self.produced_steps)
            self.hear(GRANT)
        metas, frames = [], []
        for raw in slot_frames(self.spec, columns):
            coded = snappy.compress(raw)
            pays = len(coded) * 1.1 <= len(raw)
            metas.append(["snappy" if pays else "raw", len(raw)])
            frames.append(coded if pays else raw)
        self.produced_steps += steps
        self.say(
            SLOT,
            metas,
            frames,
            generation=stamp[0],
            version=stamp[1],
            sequence=self.sequence,
            steps=steps,
            produced_steps=self.produced_steps,
            raw_nbytes=sum(n for _, n in metas),
        )
        self.sequence += 1

    def weights(self, have: list[int] | None) -> tuple[list[int], npt.NDArray[np.float32]]:
        self.say(WEIGHTS_GET, {"have": have})
        fields, meta, (payload,) = self.hear(WEIGHTS)
        return [fields["generation"], fields["version"]], decoded(meta, payload)

    def leave(self) -> None:
        self.say(BYE, sequence=self.sequence, produced_steps=self.produced_steps)
        self.close()

    def close(self) -> None:
        self.socket.close()
        self.context.term()


def decoded(meta: dict[str, Any], payload: bytes) -> npt.NDArray[np.float32]:
    """The flat vector in the frame of WEIGHTS."""
    if meta["dtype"] == "bf16":
        return (np.frombuffer(payload, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(payload, "<f4")


def slot_frames(spec: dict[str, Any], columns: Columns) -> list[bytes]:
    """The bytes of a slot's frames, laid out as the page says."""
    frames = []
    small: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {"unroll": [], "slot": []}
    for name, dtype, shape, rows in spec["columns"]:
        if rows == "unroll+1" or np.dtype(dtype).itemsize * math.prod(shape) > 64:
            frames.append(columns[name].tobytes())
        else:
            small[rows].append((name, dtype, tuple(shape)))
    for rows, extents in (("unroll", (spec["unroll"], spec["envs"])), ("slot", (spec["envs"],))):
        if small[rows]:
            records = np.zeros(extents, np.dtype(small[rows], align=True))
            for name, _, _ in small[rows]:
                records[name] = columns[name]
            frames.append(records.tobytes())
    return frames


def json_hash(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
