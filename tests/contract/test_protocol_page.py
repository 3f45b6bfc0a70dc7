"""An actor written from docs/protocol.md alone, against a real connector.

`Stranger` and what it calls use pyzmq, msgpack, python-snappy, struct, zlib and numpy, and nothing
of Penstock. Where this file and the page disagree, the page is to be mended first.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
import snappy
import zmq

from penstock.transport.zmq.receiver import Receiver
from transport_world import (
    LAYOUT,
    RUN_ID,
    SPEC,
    Learner,
    connector,
    expected,
    learner,
)
from waiting import wait_until

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
            start, meta, *frames = self.socket.recv_multipart()
            fields = dict(zip(FIELDS, HEADER.unpack(start), strict=True))
            crc = zlib.crc32(start[:96])
            for part in (meta, *frames):
                crc = zlib.crc32(part, crc)
            assert (fields["magic"], fields["protocol"], fields["crc"]) == (b"PNSK", 1, crc)
            assert fields["frames"] == len(frames)
            if fields["kind"] == GRANT:
                self.limit = fields["sequence"]
            if fields["kind"] in kinds:
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

    def send_slot(self, columns: Columns, steps: int) -> None:
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
            generation=2,
            version=17,
            sequence=self.sequence,
            steps=steps,
            produced_steps=self.produced_steps,
            raw_nbytes=sum(n for _, n in metas),
        )
        self.sequence += 1

    def weights(self, have: list[int] | None) -> tuple[list[int], npt.NDArray[np.float32]]:
        self.say(WEIGHTS_GET, {"have": have})
        fields, meta, (payload,) = self.hear(WEIGHTS)
        if meta["dtype"] == "bf16":
            values = (np.frombuffer(payload, "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(payload, "<f4")
        return [fields["generation"], fields["version"]], values

    def leave(self) -> None:
        self.say(BYE, sequence=self.sequence, produced_steps=self.produced_steps)
        self.close()

    def close(self) -> None:
        self.socket.close()
        self.context.term()


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


@pytest.fixture
def far_side(tmp_path: Path) -> Iterator[tuple[Learner, Receiver, str]]:
    address = f"ipc://{tmp_path}/wire"
    with ExitStack() as stack:
        side = stack.enter_context(learner(tmp_path))
        yield side, stack.enter_context(connector(side, address)), address


def test_actor_written_from_the_page_trains_with_the_learner(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    side, receiver, address = far_side
    sent_weights = side.publish(17)
    stranger = Stranger(address)
    told = stranger.join(None)
    assert told["spec"] == json.loads(json.dumps(SPEC.to_dict()))
    assert told["config"] == {"env": {"id": "Test-v0"}}
    observations, actions = told["spaces"]
    assert [key for key, _ in observations["Dict"]] == ["seen", "speed"]
    assert observations["Dict"][1][1]["Box"] == [[-math.inf, 0.0], 9.5, [2], "<f4"]
    assert actions == {"Discrete": [3, 1]}
    assert (stranger.run_id, stranger.spec_hash) == (RUN_ID, json_hash(told["spec"]))

    stamp, weights = stranger.weights(None)
    assert stamp == [2, 17]
    np.testing.assert_array_equal(weights, sent_weights)
    assert weights.size == sum(math.prod(shape) for _, shape in told["layout"])

    for sequence in range(12):
        stranger.send_slot(expected(sequence), steps=12)
    for sequence in range(12):
        taken = side.take()
        assert taken.header["sequence"] == sequence
        assert taken.header["actor"] == 4711
        assert taken.header["version"] == 17
        assert (taken.header["steps"], taken.header["produced_steps"]) == (12, 12 * sequence + 12)
        for name, values in expected(sequence).items():
            np.testing.assert_array_equal(taken.columns[name], values, err_msg=name)
    stranger.leave()
    wait_until(lambda: not receiver.grants.streams)
    assert [stream.final_counters() for stream in receiver.grants.ended] == [
        {"actor": 4711, "incarnation": 0, "produced_steps": 144, "sequence": 12}
    ]
    assert receiver.rejected == {}


def test_actor_with_an_equal_spec_gets_each_new_version_of_weights(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    side, _, address = far_side
    stranger = Stranger(address)
    stranger.join(json.loads(json.dumps(SPEC.to_dict())))
    side.publish(1)
    stamp, _ = stranger.weights(None)
    stranger.say(WEIGHTS_GET, {"have": stamp})
    time.sleep(0.05)
    assert not stranger.socket.poll(50) or stranger.hear(GRANT)
    side.publish(2)
    fields, _, (payload,) = stranger.hear(WEIGHTS)
    assert (fields["generation"], fields["version"]) == (2, 2)
    assert len(payload) == LAYOUT.size * 2
    assert fields["spec_hash"] == json_hash([[n, list(s)] for n, s in LAYOUT.entries])
    stranger.leave()


def test_actor_with_another_spec_is_refused_with_the_difference(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    _, _, address = far_side
    stranger = Stranger(address)
    other = json.loads(json.dumps(SPEC.to_dict())) | {"unroll": 5}
    with pytest.raises(PermissionError, match="unroll: learner 4, actor 5"):
        stranger.join(other)
    stranger.close()


def test_actor_without_a_hello_is_asked_for_one(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    side, receiver, address = far_side
    stranger = Stranger(address)
    stranger.run_id = RUN_ID
    stranger.say(BEAT, sequence=5)
    fields, _, _ = stranger.hear(WHO)
    assert fields["run_id"] == RUN_ID
    stranger.sequence, stranger.produced_steps = 5, 60  # as after a restart of the connector
    stranger.join(None)
    stranger.send_slot(expected(5), steps=12)
    assert side.take().header["sequence"] == 5
    assert receiver.rejected == {"unknown": 1}
    stranger.leave()


def test_beats_of_an_actor_are_answered_by_grants_and_checked(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    side, receiver, address = far_side
    stranger = Stranger(address)
    stranger.join(None)
    for sequence in range(3):
        stranger.send_slot(expected(sequence), steps=12)
        stranger.say(BEAT, sequence=stranger.sequence, produced_steps=stranger.produced_steps)
        fields, _, _ = stranger.hear(GRANT)
        assert fields["sequence"] >= stranger.sequence
    stranger.say(BEAT, sequence=99, produced_steps=stranger.produced_steps)
    wait_until(lambda: receiver.rejected == {"ungranted": 1})
    assert [side.take().header["sequence"] for _ in range(3)] == [0, 1, 2]
    stranger.leave()


def test_actor_of_another_run_gets_the_id_of_this_run(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    _, receiver, address = far_side
    stranger = Stranger(address)
    stranger.run_id = RUN_ID - 1
    stranger.say(WEIGHTS_GET, {"have": None})
    fields, _, _ = stranger.hear(WHO)
    assert fields["run_id"] == RUN_ID
    assert receiver.rejected == {"run": 1}
    stranger.close()
