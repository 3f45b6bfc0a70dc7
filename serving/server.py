"""Serves a replay buffer over ZeroMQ: several writers and readers, on this host or others.

    SLOT    ── verify ── decode into a lent slot ── publish ── collect ──► the buffer ── STORED
    SAMPLE  ── as soon as the rate limiter allows ── sample ── pack ──────────────────► BATCH
    UPDATE  ── update_priorities

docs/replay-protocol.md is the page for those on the other side. One thread does everything; nothing
that is received raises: what cannot be used is counted by reason and dropped, and what a request
asks wrongly is answered by REFUSE with a sentence. What may not be done yet waits here, in a line
per peer of bounded length, and the peer hears why when it asks again.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from penstock.replay.buffer import Replay
from penstock.replay.errors import ReplayError
from penstock.replay.prefetch import Source
from penstock.serving.batches import Array, Shape, pack
from penstock.serving.intake import Intake
from penstock.transport import wire
from penstock.transport.keys import answer_zap, load_learner
from penstock.transport.sockets import Socket, is_local, receive, router, zap
from penstock.transport.wire import Buffer, Head, Kind, WireError

BATCH = 64  # messages between two looks at everything else
TICK_S = 0.005  # how often what waits is tried again
MAX_PEERS = 4096  # beyond it the one that was silent longest is forgotten
MAX_ASKS = 64  # requests of a peer that may wait
MAX_BATCHES = 64  # in one request
MAX_DRAW_NBYTES = 1 << 30  # of one answer
TOGETHER_NBYTES = 1 << 20  # of batches that are drawn at once
SCALARS_NBYTES = 32  # reward, discount, flags, weight and key of a row


@dataclass
class Ask:
    """A peer wants ``count`` batches."""

    number: int
    source: Source
    batch: int
    count: int
    stacked: bool


@dataclass
class Peer:
    """What the server knows of a client."""

    stream: int
    asks: OrderedDict[int, Ask] = field(default_factory=OrderedDict)


class ReplayServer:
    """``replay`` stays the caller's, who may use it meanwhile. Call `turn` again and again."""

    def __init__(
        self, replay: Replay, bind: str, *, curve: Path | None = None, insecure: bool = False
    ) -> None:
        """``curve``: folder of keys, as `penstock keys new` makes it.

        Raises UserError for an address that is taken, or that others reach without keys.
        """
        if not (curve or insecure or is_local(bind)):
            raise ReplayError(
                f"{bind} can be reached from other hosts, where anyone could change the buffer; "
                "make keys with `penstock keys new` and give their folder as curve, or say insecure"
            )
        if "alive" not in (replay.table.records.dtype.names or ()):
            raise ReplayError("this replay has no room for others' rows; make it with shared=True")
        self.rejected: Counter[str] = Counter()
        self._replay = replay
        self._run_id = secrets.randbits(63) | 1
        self._peers: OrderedDict[bytes, Peer] = OrderedDict()
        self._streams = 0
        self._row_nbytes = row_nbytes(replay)
        self._handlers: dict[int, Callable[[bytes, wire.Message], None]] = {
            Kind.JOIN: self._join,
            Kind.SLOT: self._slot,
            Kind.SAMPLE: self._sample,
            Kind.UPDATE: self._update,
            Kind.ASK_STATS: self._ask_stats,
        }
        keys = load_learner(curve) if curve else None
        self._allowed = keys.allowed if keys else frozenset()
        self._poller = zmq.Poller()
        with ExitStack() as opening:
            context = zmq.Context()
            opening.callback(context.destroy, 500)  # sockets too
            self._zap = zap(context) if keys else None
            self._router = router(context, bind, keys, wire.max_frame_nbytes(replay.layout.spec))
            self.address = _address(bind, self._router)
            self._intake = opening.enter_context(Intake(replay, self.rejected))
            self._stack = opening.pop_all()
        for socket in (self._router, self._zap):
            if socket is not None:
                self._poller.register(socket, zmq.POLLIN)

    def turn(self, timeout_s: float) -> int:
        """Handle what has come, waiting up to ``timeout_s`` for something; how many messages."""
        waiting = self._intake.waiting or any(peer.asks for peer in self._peers.values())
        patience_s = min(TICK_S, timeout_s) if waiting else timeout_s
        ready = dict(self._poller.poll(round(patience_s * 1000)))
        if self._zap is not None and self._zap in ready:
            answer_zap(self._zap, self._allowed)
        count = 0
        while count < BATCH and (parts := receive(self._router)) is not None:
            self.handle(bytes(parts[0]), parts[1:])
            count += 1
        self._tend()
        return count

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until ``stopping()``."""
        while not stopping():
            self.turn(0.1)

    def handle(self, name: bytes, parts: Sequence[Buffer]) -> None:
        """Take in one message of a peer; whatever is wrong with it is counted."""
        try:
            message = wire.decode(parts)
            handler = self._handlers.get(message.head.kind)
            if handler is None:
                raise WireError("kind")
            if message.head.kind != Kind.JOIN:
                if message.head.run_id != self._run_id or name not in self._peers:
                    raise WireError("unknown")
                self._peers.move_to_end(name)
            handler(name, message)
        except WireError as error:
            self.rejected[error.reason] += 1
            if error.reason == "unknown":
                self._say(name, Kind.WHO)
            elif error.reason == "version":
                self._refuse(name, 0, f"the server {wire.OTHER_VERSION}")
        except ReplayError as error:
            self.rejected["refused"] += 1
            self._refuse(name, message.head.sequence, str(error))
        except wire.STRANGE:
            self.rejected["meta"] += 1

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> ReplayServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _join(self, name: bytes, message: wire.Message) -> None:
        wire.verify(message)
        if name not in self._peers:
            self._streams += 1
            self._peers[name] = Peer(self._streams)
            if len(self._peers) > MAX_PEERS:
                _, gone = self._peers.popitem(last=False)
                self._intake.forget(gone.stream)
        layout = self._replay.layout
        meta = {
            "spec": layout.spec.to_dict(),
            "frame_stack": layout.frame_stack,
            "autoreset": self._replay.autoreset,
            "row_nbytes": self._row_nbytes,
        }
        self._say(name, Kind.SPEC, meta, actor=self._peers[name].stream)

    def _slot(self, name: bytes, message: wire.Message) -> None:
        self._intake.accept(self._peers[name].stream, name, message)

    def _sample(self, name: bytes, message: wire.Message) -> None:
        meta = wire.verify(message)
        number, peer = message.head.sequence, self._peers[name]
        batch, count = int(meta["batch"]), int(meta["count"])
        if number in peer.asks:
            self._say(name, Kind.WAIT, {"reason": peer.asks[number].source.missing()}, number)
            return
        if not 1 <= count <= MAX_BATCHES or not 1 <= batch <= self._replay.capacity:
            raise ReplayError(
                f"{count} batches of {batch} rows; ask for 1 to {MAX_BATCHES} of 1 to "
                f"{self._replay.capacity}, the buffer's capacity"
            )
        if batch * count * self._row_nbytes > MAX_DRAW_NBYTES:
            raise ReplayError(
                f"{count} batches of {batch} rows of {self._row_nbytes} bytes are more than "
                f"{MAX_DRAW_NBYTES >> 20} MiB; ask for less at a time: a lower prefetch"
            )
        if len(peer.asks) >= MAX_ASKS:
            raise ReplayError(f"more than {MAX_ASKS} requests wait; wait for answers first")
        stacked = bool(meta["stacked"])
        source = Source(self._replay, batch, stacked)
        peer.asks[number] = Ask(number, source, batch, count, stacked)

    def _update(self, name: bytes, message: wire.Message) -> None:
        wire.verify(message)
        if len(message.frames) != 2:
            raise WireError("frames", "an update has keys and priorities")
        keys = np.frombuffer(message.frames[0], np.int64)
        priorities = np.frombuffer(message.frames[1], np.float64)
        if len(keys) != len(priorities):
            raise WireError("size", f"{len(keys)} keys, {len(priorities)} priorities")
        self._replay.update_priorities(keys, priorities)

    def _ask_stats(self, name: bytes, message: wire.Message) -> None:
        wire.verify(message)
        stats = self._replay.stats() | {"server": self.figures()}
        self._say(name, Kind.STATS, stats, message.head.sequence)

    def figures(self) -> dict[str, Any]:
        """Counters of the server itself."""
        return {
            "peers": len(self._peers),
            **self._intake.received,
            "rejected": dict(self.rejected),
        }

    def _tend(self) -> None:
        """Store and sample what may be by now, one request of each peer in turn."""
        for name, stored in self._intake.store():
            self._say(name, Kind.STORED, None, stored)
        for name, peer in self._peers.items():
            if peer.asks and not next(iter(peer.asks.values())).source.missing():
                self._answer(name, peer.asks.popitem(last=False)[1])

    def _answer(self, name: bytes, ask: Ask) -> None:
        try:
            packed = self._draw(ask)
        except ReplayError as error:
            self._refuse(name, ask.number, str(error))
            return
        if packed:  # else it asks again
            frames = [frame.data for _, frames in packed for frame in frames]
            self._say(name, Kind.BATCH, packed[0][0].meta, ask.number, frames=frames)

    def _draw(self, ask: Ask) -> list[tuple[Shape, Array]]:
        """Small batches are drawn at once, which costs less, and dealt out in turn: each has its
        share of every stratum, as if it had been drawn alone."""
        replay, rows = self._replay, ask.batch * ask.count
        together = rows * self._row_nbytes <= TOGETHER_NBYTES and rows <= len(replay)
        if ask.count == 1 or not together or replay.sequences is not None:
            drawn = [ask.source.draw(0.0) for _ in range(ask.count)]
            return [pack(batch) for batch in drawn if batch is not None]
        batch = replay.sample(rows, stacked=ask.stacked)
        weights = batch["weights"].reshape(-1, ask.count)
        batch["weights"] = (weights / weights.max(axis=0)).reshape(-1)
        return [pack(batch, ask.count)]

    def _refuse(self, name: bytes, number: int, text: str) -> None:
        self._say(name, Kind.REFUSE, {"error": text}, number)

    def _say(
        self,
        name: bytes,
        kind: Kind,
        meta: Any = None,
        number: int = 0,
        actor: int = 0,
        frames: Sequence[Buffer] = (),
    ) -> None:
        spec_hash = self._replay.layout.spec.hash
        head = Head(kind, spec_hash=spec_hash, run_id=self._run_id, actor=actor, sequence=number)
        # A ROUTER drops what goes to a peer that left or does not read; that one asks again.
        self._router.send_multipart([name, *wire.encode(head, meta, frames)], copy=not frames)


def _address(bind: str, bound: Socket) -> str:
    """Where clients of this host connect, with the port that was chosen."""
    if not bind.startswith("tcp://"):
        return bind
    endpoint = bound.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    port = endpoint.rstrip(b"\0").decode().rpartition(":")[2]
    return f"{bind.rpartition(':')[0]}:{port}"


def row_nbytes(replay: Replay) -> int:
    """Bytes of one row of a batch, about; of a whole sequence where the replay gives those."""
    layout = replay.layout
    row = sum(2 * o.leaf.nbytes for o in layout.observations)
    row += sum(leaf.nbytes for leaf in layout.others) + SCALARS_NBYTES
    return row * (replay.sequences.length if replay.sequences else 1)
