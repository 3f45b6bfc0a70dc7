"""A replay service without sockets, and peers that say to it whatever a test wants."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from penstock.replay.buffer import Replay
from penstock.replay.remote.peers import ServiceLimits
from penstock.replay.remote.service import REPLAY_VERSION, ReplayService
from penstock.transport import wire
from penstock.transport.wire import Header, Message, MessageKind
from penstock.transport.zmq.sockets import GONE, SENT, IsReleased

FRAMES: dict[str, Any] = {"obs": (np.uint8, (4, 5, 5)), "action": (np.int64, ())}
ENVS, UNROLL = 2, 8


def frame_replay(**options: Any) -> Replay:
    """Stacks of 4 frames, so that slots have `age`, `pad` and `side`."""
    options = {"frame_stack": 4, "envs": ENVS, "unroll": UNROLL, "seed": 0} | options
    return Replay(FRAMES, options.pop("capacity", 64), shared=True, **options)


class Served:
    """A replay service over ``replay``, and its answers by peer, as (kind, meta, message)."""

    def __init__(self, replay: Replay, **options: Any) -> None:
        self.replay, self.spec = replay, replay.layout.spec
        self.lines: list[str] = []
        self.answers: dict[bytes, list[tuple[MessageKind, Any, Message]]] = defaultdict(list)
        self.gone: set[bytes] = set()
        self.stuck: set[bytes] = set()  # peers to which the socket sends nothing
        self.sent_nbytes = 0
        limits = ServiceLimits(**options.pop("limits", {}))
        self.service = ReplayService(
            replay, self._send, limits=limits, log=self.lines.append, **options
        )
        self.run_id = 0

    def _send(self, name: bytes, parts: wire.Parts) -> tuple[int, IsReleased]:
        def is_released() -> bool:
            return name not in self.stuck

        if name in self.gone:
            return GONE, is_released
        message = wire.decode([bytes(part) for part in parts])
        self.answers[name].append((MessageKind(message.head.kind), wire.verify(message), message))
        if message.head.kind == MessageKind.BATCH:
            self.sent_nbytes += message.head.coded_nbytes
        return SENT, is_released

    def join(self, name: bytes = b"a", token: str = "") -> dict[str, Any]:
        """Joins as a peer and returns the meta of SPEC or of REFUSE."""
        self.say(name, MessageKind.JOIN, {"version": REPLAY_VERSION, "token": token})
        _, meta, message = self.answers[name][-1]
        self.run_id = message.head.run_id
        told: dict[str, Any] = meta
        return told

    def say(
        self, name: bytes, kind: MessageKind, meta: Any = None, number: int = 0, frames: Any = ()
    ) -> None:
        """Sends a message of a peer to the service."""
        head = Header(kind, run_id=self.run_id, sequence=number)
        self.service.handle(name, [bytes(p) for p in wire.encode(head, meta, frames)])

    def ask(self, name: bytes, number: int, **changes: Any) -> None:
        """Sends a request for batches."""
        meta = {"batch": 4, "count": 1, "stacked": True, "read": 0} | changes
        self.say(name, MessageKind.SAMPLE, meta, number)

    def slot(self, name: bytes, sequence: int, change: Any = None, **head: Any) -> None:
        """Send a slot of sound rows after ``change(columns)``, with other fields of the header."""
        message = slot_message(self.spec, self.run_id, sequence, change, **head)
        self.service.handle(name, message)

    def last(self, name: bytes, kind: MessageKind) -> Any:
        """Returns the meta of the newest answer of a kind."""
        return next(meta for k, meta, _ in reversed(self.answers[name]) if k == kind)

    def count(self, name: bytes, kind: MessageKind) -> int:
        """Returns the number of answers of a kind."""
        return sum(k == kind for k, _, _ in self.answers[name])

    def close(self) -> None:
        self.service.close()
        self.replay.close()


def slot_message(spec: Any, run_id: int, sequence: int, change: Any = None, **head: Any) -> Any:
    payload = spec.zeros()
    columns = spec.views(payload)
    columns["alive"][...] = 1
    if "side" in columns:
        columns["side"][...] = -1
        columns["age"][...] = np.minimum(np.arange(spec.unroll)[:, None], 255)
        columns["obs"][...] = sequence % 251
    columns["action"][...] = sequence
    if "priority" in columns:
        columns["priority"][...] = np.nan
    if change is not None:
        change(columns)
    steps = int(np.count_nonzero(columns["alive"]))
    fields = {
        "spec_hash": spec.hash,
        "run_id": run_id,
        "sequence": sequence,
        "generation": spec.unroll,
        "steps": steps,
        "produced_steps": steps * (sequence + 1),
        "raw_nbytes": spec.payload_nbytes,
    } | head
    meta = [["raw", block.nbytes] for block in payload]
    return [
        bytes(p)
        for p in wire.encode(Header(MessageKind.SLOT, **fields), meta, [p.data for p in payload])
    ]
