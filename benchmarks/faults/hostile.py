"""Peers that lie: torn, mutated and well-formed but untrue messages, to each socket that listens.

Everything is drawn from the generator handed in, so a seed repeats it.
"""

from __future__ import annotations

import random
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import zmq

from faults.proxy import Proxy
from penstock.core.specs import SlotSpec
from penstock.transport import wire
from penstock.transport.wire import Header, MessageKind, WireError
from penstock.transport.zmq.sockets import Socket, dealer, receive

EDGES = (0, 1, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)
WIDE_EDGES = (*EDGES, 2**53, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
NARROW = {"kind": 255, "incarnation": 2**32 - 1, "generation": 2**32 - 1}
FIRST_STRANGER = 900_000  # ids that no actor of the run has
MESSAGES = 200
HOARDERS, MOST_WANTED = 16, 64
ANSWER_S = 1.0


def attack_wire(address: str, rng: random.Random) -> int:
    """Messages to a connector, as a stranger and as one that it has let in; how many were sent."""
    with Peer(address) as peer:
        sent = peer.noise(rng, MESSAGES // 2)
        actor = FIRST_STRANGER + rng.randrange(1 << 16)
        spec, run_id = peer.join(actor)
        if spec is None:
            return sent
        honest = Header(
            MessageKind.BEAT, spec_hash=spec.hash, run_id=run_id, actor=actor, incarnation=1
        )
        for _ in range(MESSAGES // 2):
            head = honest._replace(
                kind=rng.choice([MessageKind.BEAT, MessageKind.SLOT, MessageKind.WEIGHTS_GET])
            )
            peer.send(wire.encode(_mutated(head, rng), _meta(rng, spec), _frames(rng, spec)))
            peer.drain()
        last = honest._replace(kind=MessageKind.BYE, produced_steps=rng.choice(WIDE_EDGES))
        peer.send(wire.encode(last))
        return sent + MESSAGES // 2 + 1


def attack_replay(address: str, rng: random.Random) -> int:
    """Messages to a replay server: a client's, with columns, numbers and keys that are untrue."""
    with Peer(address) as peer:
        sent = peer.noise(rng, MESSAGES // 2)
        spec, run_id = peer.join_replay()
        if spec is None:
            return sent
        kinds = [
            MessageKind.SLOT,
            MessageKind.SAMPLE,
            MessageKind.UPDATE,
            MessageKind.ASK_STATS,
            MessageKind.JOIN,
        ]
        for _ in range(MESSAGES // 2):
            head = Header(rng.choice(kinds), spec_hash=spec.hash, run_id=run_id)
            head = _mutated(head, rng) if rng.random() < 0.5 else head
            meta: Any = _meta(rng, spec)
            if head.kind == MessageKind.SAMPLE:
                meta = {"batch": rng.choice(WIDE_EDGES), "count": 1, "stacked": True}
            frames = _frames(rng, spec)
            if head.kind == MessageKind.UPDATE:
                frames = [rng.randbytes(64), rng.randbytes(64)]
            peer.send(wire.encode(head, meta, frames))
            peer.drain()
        return sent + MESSAGES // 2


def attack_attach(path: Path, rng: random.Random) -> int:
    """Bytes to a Unix socket of the run: those of its own protocol, torn, and none at all."""
    for _ in range(8):
        for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
            with socket.socket(socket.AF_UNIX, kind) as peer, suppress(OSError):
                peer.settimeout(0.2)
                peer.connect(str(path))
                for _ in range(rng.randrange(4)):
                    peer.send(rng.randbytes(rng.choice([1, 8, 64, 4096])))
                if rng.random() < 0.5:
                    peer.recv(1 << 16)
    return 16


class Hoard:
    """Peers that ask for as much as they may and send nothing, on a host that then vanishes: their
    connections stay open, and nothing comes over them any more."""

    def __init__(self, address: str, actor: int) -> None:
        port = int(address.rpartition(":")[2])
        self._stack = ExitStack()
        self._proxy = self._stack.enter_context(Proxy(port))
        there = f"tcp://127.0.0.1:{self._proxy.port}"
        for i in range(HOARDERS):
            peer = self._stack.enter_context(Peer(there))
            peer.join(actor + i, MOST_WANTED)
        self._proxy.mode = "hold"

    def close(self) -> None:
        self._proxy.mode = "cut"
        self._stack.close()


class Peer:
    """A DEALER of its own."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._address = address
        self._socket = dealer(self._context, address, None)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close(200)
        self._context.term()

    def send(self, parts: wire.Parts) -> None:
        with suppress(zmq.Again):
            self._socket.send_multipart(parts, zmq.NOBLOCK)

    def noise(self, rng: random.Random, count: int) -> int:
        """Before anybody has let it in: garbage in each layer, over TCP and over ZeroMQ."""
        host, _, port = self._address.removeprefix("tcp://").rpartition(":")
        for data in (rng.randbytes(64), b"GET / HTTP/1.1\r\n\r\n", b""):
            with suppress(OSError), socket.create_connection((host, int(port)), 1.0) as stream:
                stream.send(data)
        for _ in range(count):
            if rng.random() < 0.3:
                parts = _noise(rng)
            else:
                head = _mutated(Header(rng.choice(list(MessageKind))), rng)
                parts = wire.encode(head, rng.choice([None, {}, [], 1, {"want": -1}]))
                if rng.random() < 0.3:
                    torn = bytearray(parts[0])
                    torn[rng.randrange(len(torn))] ^= 1 << rng.randrange(8)
                    parts[0] = bytes(torn)
            self.send(parts)
        self.drain()
        return count

    def join(self, actor: int, want: int = 2) -> tuple[SlotSpec | None, int]:
        """Be let in as an actor of the run's own spec."""
        self.send(wire.encode(Header(MessageKind.HELLO), {"spec": None, "want": 0}))
        welcome = self._await(MessageKind.WELCOME)
        if welcome is None:
            return None, 0
        head, meta = welcome
        spec = SlotSpec.from_dict(meta["spec"])
        hello = Header(MessageKind.HELLO, spec_hash=spec.hash, actor=actor, incarnation=1)
        self.send(wire.encode(hello, {"spec": spec.to_dict(), "want": want}))
        joined = self._await(MessageKind.WELCOME) is not None
        return (spec if joined else None), head.run_id

    def join_replay(self) -> tuple[SlotSpec | None, int]:
        self.send(wire.encode(Header(MessageKind.JOIN)))
        answer = self._await(MessageKind.SPEC)
        if answer is None:
            return None, 0
        head, meta = answer
        return SlotSpec.from_dict(meta["spec"]), head.run_id

    def drain(self) -> None:
        while receive(self._socket) is not None:
            pass

    def _await(self, kind: MessageKind) -> tuple[Header, Any] | None:
        ends_s = time.monotonic() + ANSWER_S
        while time.monotonic() < ends_s:
            self._socket.poll(50)
            while (parts := receive(self._socket)) is not None:
                with suppress(WireError):
                    message = wire.decode(parts)
                    if message.head.kind == kind:
                        return message.head, wire.verify(message)
        return None


def _noise(rng: random.Random) -> wire.Parts:
    return [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 6))]


def _mutated(head: Header, rng: random.Random) -> Header:
    """One to three fields at the edges of their integers, or anywhere."""
    fields = [name for name in Header._fields if name not in ("frames", "coded_nbytes")]
    for name in rng.sample(fields, rng.randrange(1, 4)):
        value: Any = rng.choice(WIDE_EDGES) if rng.random() < 0.7 else rng.getrandbits(64)
        if name == "duration_s":
            value = rng.choice([float("nan"), float("inf"), -1.0, 1e308])
        elif name in NARROW:
            value = int(value) & NARROW[name]
        head = head._replace(**{name: value})
    return head


def _meta(rng: random.Random, spec: SlotSpec) -> Any:
    sound = [[0, block.nbytes] for block in spec.blocks]
    return rng.choice([sound, sound, None, {}, [[255, 2**63]] * len(sound), {"have": [1, 2, 3]}])


def _frames(rng: random.Random, spec: SlotSpec) -> wire.Parts:
    if rng.random() < 0.5:
        return [rng.randbytes(block.nbytes) for block in spec.blocks]
    return [rng.randbytes(rng.randrange(100)) for _ in range(rng.randrange(4))]
