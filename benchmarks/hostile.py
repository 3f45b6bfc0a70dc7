"""Hostile messages at full speed: what is refused and why, whether memory stays flat, and whether
an honest peer beside them is served.

    connector   messages handed to a connector's receiver, in one process, for volume
    sockets     the same from processes of their own, through the connector's socket
    replay      messages handed to a replay server, with an honest client at its socket
    weights     requests of ever more connections that claim weights which they have not read

A message is a sound one with fields at the limits of their integers, meta of strange types, frames
that are flipped, cut, swapped or missing, and the checksum that belongs to it: an attacker computes
it, too. Everything comes from ``--seed``. Whatever is raised but a typed refusal is counted as a
fault, with the place that raised it, and makes the exit code 1; so does an honest slot that arrives
changed or not at all, and memory that grows.

    python benchmarks/hostile.py [--messages 2000000] [--seed 0] [--json] [--save]
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import psutil
import zmq

from common import finish, free_port, parser
from penstock.core.interfaces import Welcome
from penstock.core.params import ParamLayout, Stamp
from penstock.core.specs import Column, SlotSpec
from penstock.profiling.status import StatusPage
from penstock.replay import Accounting, Prioritized, Replay, ReplayError, SlotQueue
from penstock.replay.remote.client import ReplayClient
from penstock.replay.remote.server import ReplayServer
from penstock.replay.remote.service import REPLAY_VERSION
from penstock.transport import wire
from penstock.transport.checksum import crc32
from penstock.transport.grants import ActorStream
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.wire import Header, MessageKind
from penstock.transport.zmq import keys
from penstock.transport.zmq.receiver import Receiver
from penstock.transport.zmq.sockets import SENT, IsReleased, dealer

RUN_ID = 0x1234_5678_9ABC_DEF0
LOCAL_PEERS = [bytes([k]) * 5 for k in range(1, 9)]
HONEST = 7  # an actor's id that no attacker uses: without keys an id is whose says it
ATTACKERS = 2
SLOTS = 32
SHARES = {"connector": 0.59, "sockets": 0.2, "replay": 0.2, "weights": 0.01}
SAMPLES = 40  # of memory, over a phase
FLAT_NBYTES = 32 << 20  # the growth over the second half of a phase that still counts as flat
SHOWN = {
    "messages": "messages",
    "messages_per_s": "messages/s",
    "refused": "refused",
    "faults": "faults",
    "honest_slots": "honest slots",
    "honest_slots_per_s": "per s",
    "honest_lost": "lost",
    "rss_before_mb": "MB before",
    "rss_after_mb": "MB after",
    "rss_slope_mb_per_million": "MB/million",
}
SPEC = SlotSpec(
    8,
    4,
    (
        Column("obs", "|u1", (16, 16), "unroll+1"),
        Column("noise", "<f4", (24,)),
        Column("reward", "<f4"),
        Column("action", "<i4"),
        Column("alive", "|b1"),
    ),
)
LAYOUT = ParamLayout((("w", (16, 4)), ("b", (4,))))
LARGE_LAYOUT = ParamLayout((("w", (11 << 20,)),))  # 23 MB in bf16
PUBLISH_S = 0.25
MOST_CONNECTIONS = 400
LIMITS = (
    0, 1, 2, 63, 64, 255, 2**16, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1,
    2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
FLOATS = (0.0, -1.0, 1e300, 1.7e308, float("nan"), float("inf"), float("-inf"))
BITS = {
    "kind": 8, "spec_hash": 64, "run_id": 64, "actor": 64, "incarnation": 32, "generation": 32,
    "sequence": 64, "version": 64, "steps": 64, "produced_steps": 64, "raw_nbytes": 64,
}  # fmt: skip
COUNTERS = ("sequence", "produced_steps", "steps", "version", "generation", "incarnation")
STRANGE_META = [
    b"", b"\xc1", b"\xff", b"\xa2\xff\xfe", b"\xc4\x01a", b"\xd6\xff\0\0\0\0", b"\x81\x01\x02",
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 400 + b"\x01",
    b"\x91" * 1000 + b"\x01", b"\x91" * 5000, b"\x82\xa1a\x01\xa1a\x02",
]  # fmt: skip
STRANGE_VALUES: list[Any] = [
    None, True, -1, 0, 2**63 - 1, 2**64 - 1, float("nan"), float("inf"), "", "x", [], {}, [[]],
    ["raw", -1], {"x": []}, "9" * 50,
]  # fmt: skip


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--messages", type=int, default=2_000_000, help="of all phases together")
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--phase", choices=sorted(SHARES), help="only this one, with all messages")
    options = args.parse_args()
    shares = {options.phase: 1.0} if options.phase else SHARES
    run: dict[str, Callable[[int, int], dict[str, Any]]] = {
        "connector": connector_phase,
        "sockets": sockets_phase,
        "replay": replay_phase,
        "weights": weights_phase,
    }
    phases = {
        name: run[name](round(share * options.messages), options.seed)
        for name, share in shares.items()
    }
    rows: list[list[Any]] = [["phase", *SHOWN.values()]]
    rows += [[name, *(p[figure] for figure in SHOWN)] for name, p in phases.items()]
    sound = all(p["sound"] for p in phases.values())
    finish("hostile", {"seed": options.seed, "phases": phases, "sound": sound}, rows, options)
    for name, phase in phases.items():
        reasons = ", ".join(f"{reason} {n:,}" for reason, n in phase["reasons"].items())
        print(f"{name} refused: {reasons}")
        for text, count in phase["fault_kinds"].items():
            print(f"{name} FAULT x {count:,}: {text}")
    sys.exit(0 if sound else 1)


# ------------------------------------------------------------------------------------- messages


class Mutator:
    """Hostile messages from sound ones: ``message`` takes a head, its meta and its frames."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._noise = random.Random(seed + 1).randbytes(1 << 16)

    def message(
        self,
        head: Header,
        meta: Any,
        frames: Sequence[bytes] = (),
        fields: Sequence[str] = COUNTERS,
    ) -> list[bytes]:
        rnd = self.random
        packed: bytes = msgpack.packb(meta)
        parts = list(frames)
        for _ in range(1 + (rnd.random() < 0.3)):
            how = rnd.random()
            if how < 0.45:
                name = rnd.choice(fields)
                head = head._replace(**{name: self.number(BITS[name])})
            elif how < 0.5:
                head = head._replace(duration_s=rnd.choice(FLOATS))
            elif how < 0.6:
                packed = rnd.choice(STRANGE_META) if rnd.random() < 0.5 else self.flip(packed)
            elif how < 0.72:
                packed = msgpack.packb(self.replace(meta))
            elif parts:
                parts = self.change_frames(parts)
        number, nbytes = len(parts), sum(map(len, parts))
        if rnd.random() < 0.02:
            number, nbytes = rnd.randrange(1 << 16), self.number(64)
        made = sign(head._replace(frames=number, coded_nbytes=nbytes), packed, parts)
        if rnd.random() < 0.03:
            made[0] = self.flip(made[0])
        elif rnd.random() < 0.01:
            made = made[: rnd.randrange(2)]
        return made

    def number(self, bits: int) -> int:
        value = self.random.choice(LIMITS) if self.random.random() < 0.7 else None
        return self.random.getrandbits(bits) if value is None or value >> bits else value

    def flip(self, data: bytes) -> bytes:
        if not data:
            return b"\0"
        at = self.random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ self.random.randrange(1, 256)]) + data[at + 1 :]

    def replace(self, value: Any) -> Any:
        """Some part of a value made strange."""
        rnd = self.random
        if isinstance(value, dict) and value and rnd.random() < 0.8:
            key = rnd.choice(list(value))
            return {**value, key: self.replace(value[key])}
        if isinstance(value, list | tuple) and value and rnd.random() < 0.8:
            at = rnd.randrange(len(value))
            return [*value[:at], self.replace(value[at]), *value[at + 1 :]]
        return rnd.choice(STRANGE_VALUES)

    def change_frames(self, frames: list[bytes]) -> list[bytes]:
        rnd, made = self.random, list(frames)
        at = rnd.randrange(len(made))
        how = rnd.randrange(8)
        if how < 3:
            start = rnd.randrange(1 << 15)
            size = min(len(made[at]), 16 if how else 1 << 15)
            made[at] = self._noise[start : start + size] + made[at][size:]
        elif how == 3:
            made[at] = made[at][: rnd.choice((0, 1, len(made[at]) // 2, len(made[at]) - 1))]
        elif how == 4:
            made[at] += b"\0"
        elif how == 5:
            made[0], made[at] = made[at], made[0]
        elif how == 6:
            made.pop(at)
        else:
            made.append(made[at])
        return made


def sign(head: Header, packed: bytes, frames: Sequence[bytes]) -> list[bytes]:
    """A message with its checksum, whatever its head says."""
    blank = struct.pack(wire.HEAD_FORMAT, wire.MAGIC, wire.PROTOCOL_VERSION, *head, 0)[:-4]
    crc = crc32(blank)
    for part in (packed, *frames):
        crc = crc32(part, crc)
    return [blank + struct.pack("<I", crc), packed, *frames]


def slot_of(
    actor: int, incarnation: int, sequence: int, produced_steps: int
) -> tuple[Header, list[Any], list[bytes]]:
    """A sound slot whose bytes tell its sequence."""
    steps = SPEC.unroll * SPEC.envs
    frames = [bytes([mark_of(sequence)]) * block.nbytes for block in SPEC.blocks]
    head = Header(
        MessageKind.SLOT,
        spec_hash=SPEC.hash,
        run_id=RUN_ID,
        actor=actor,
        incarnation=incarnation,
        sequence=sequence,
        version=1,
        steps=steps,
        produced_steps=produced_steps,
        raw_nbytes=SPEC.payload_nbytes,
        duration_s=0.1,
    )
    return head, [["raw", len(frame)] for frame in frames], frames


def mark_of(sequence: int) -> int:
    """What all bytes of a sound slot are; above 0, as all its rows are alive."""
    return sequence % 250 + 1


def at_connector(
    mutator: Mutator, streams: dict[int, tuple[int, int, int]], number: int | None = None
) -> list[bytes]:
    """A message to a connector; ``streams`` tells by actor where a stream stands: incarnation,
    next sequence, steps produced."""
    rnd = mutator.random
    actor = rnd.choice(list(streams)) if streams and rnd.random() < 0.9 else rnd.getrandbits(64)
    if number is not None:  # a stream belongs to the peer that began it
        actor += number - actor % 8
    actor += 8 * (actor == HONEST)
    incarnation, sequence, produced = streams.get(actor, (0, 0, 0))
    produced = min(produced, 2**64 - 1000)
    how = rnd.random()
    fields = COUNTERS if rnd.random() < 0.9 else [f for f in BITS if f != "actor"]
    if how < 0.45:
        head, meta, frames = slot_of(actor, incarnation, sequence, produced + 32)
        return mutator.message(head, meta, frames, fields)
    about = {"actor": actor, "incarnation": incarnation, "sequence": sequence}
    if how < 0.6:
        hello = Header(MessageKind.HELLO, **about, produced_steps=produced)
        return mutator.message(hello, {"spec": SPEC.to_dict(), "want": 2}, (), fields)
    if how < 0.9:
        kind = MessageKind.BEAT if rnd.random() < 0.8 else MessageKind.BYE
        head = Header(kind, run_id=RUN_ID, **about, produced_steps=produced)
        return mutator.message(head, None, (), fields)
    head = Header(rnd.choice(list(MessageKind)), run_id=RUN_ID, **about)
    return mutator.message(head, {"have": [1, 1], "want": 1, "spec": None}, (), fields)


# -------------------------------------------------------------------------------------- figures


class Watch:
    """Counts messages, what was raised, and resident memory over a phase."""

    def __init__(self, messages: int) -> None:
        self.faults: Counter[str] = Counter()
        self._every = max(1, messages // SAMPLES)
        self._memory: list[tuple[int, int]] = []
        self._next = messages // 10  # caches are warm by then
        self._began_s = time.perf_counter()
        self.done = 0

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call it; what it raises is a fault."""
        try:
            function(*args)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            self.fault(f"{type(error).__name__} at {place}: {str(error)[:120]}")

    def fault(self, text: str) -> None:
        self.faults[text] += 1

    def count(self, messages: int = 1) -> None:
        self.done += messages
        if self.done >= self._next:
            self._next += self._every
            self._memory.append((self.done, rss_nbytes()))

    def result(self, rejected: Mapping[str, int], honest: Honest) -> dict[str, Any]:
        seconds = time.perf_counter() - self._began_s
        reasons = Counter(rejected)
        at, used = np.array(self._memory, np.float64).T
        late = slice(len(at) // 2, None)
        slope = float(np.polyfit(at[late], used[late], 1)[0]) if len(at) > 3 else 0.0
        grown = float(used[-1] - used[len(at) // 2])
        return {
            "messages": self.done,
            "messages_per_s": self.done / seconds,
            "refused": sum(reasons.values()),
            "reasons": dict(reasons.most_common()),
            "faults": sum(self.faults.values()),
            "fault_kinds": dict(self.faults.most_common(10)),
            "honest_slots": honest.arrived,
            "honest_slots_per_s": honest.arrived / seconds,
            "honest_lost": honest.lost,
            "rss_before_mb": used[0] / 1e6,
            "rss_after_mb": used[-1] / 1e6,
            "rss_slope_mb_per_million": slope,
            "sound": not self.faults and honest.arrived > 0 and not honest.lost
            and grown < FLAT_NBYTES,
        }  # fmt: skip


def rss_nbytes() -> int:
    return int(psutil.Process().memory_info().rss)


class Honest:
    """What became of the honest peer's slots."""

    def __init__(self) -> None:
        self.arrived = 0
        self.lost = 0


# ------------------------------------------------------------------------------------ connector


class Learner:
    """Takes slots from a store as a learner does, and counts their steps."""

    def __init__(self, folder: Path, watch: Watch, honest: Honest, layout: ParamLayout) -> None:
        self.store = SlotStore(SPEC, SLOTS)
        self._board = WeightsBoard.create(layout.size)
        self._weights = np.zeros(layout.size, np.float32)
        self.publish(1)
        self.path = folder / "learner.sock"
        welcome = Welcome(RUN_ID, 1, SPEC, layout, {"env": {"id": "Test-v0"}})
        self._host = ShmHost(self.path, welcome, [self._board], self.store)
        self.accounting = Accounting(SPEC.unroll * SPEC.envs)
        self._queue = SlotQueue(self.store, self.accounting, max_policy_lag=1 << 40)
        self._page, descriptor = StatusPage.create()
        os.close(descriptor)
        self._watch, self._honest = watch, honest

    def publish(self, version: int) -> None:
        self._board.publish(self._weights, Stamp(1, version))

    def serve(self) -> None:
        self._host.poll(0)

    def turn(self, ended: Sequence[dict[str, int]]) -> None:
        """Take all that has come, and account for streams that have ended."""
        self._host.poll(0)
        while slots := self._queue.take(1, 1):
            slot = slots[0]
            if int(slot.header["actor"]) == HONEST:
                self._check(slot)
            self.accounting.trained += int(slot.header["steps"])
            self._queue.release(slots)
        for end in ended:
            self.accounting.ended(
                end["actor"], end["incarnation"], end["sequence"], end["produced_steps"]
            )
        self._page.produced_steps = self.accounting.produced
        self._page.trained_steps = self.accounting.trained
        if self.accounting.balance(self._queue.in_flight_steps()):
            self._watch.fault("the accounting does not balance")

    def _check(self, slot: Any) -> None:
        mark = mark_of(int(slot.header["sequence"]))
        if any((block != mark).any() for block in slot.payload):
            self._watch.fault("an honest slot has arrived changed")
        self._honest.arrived += 1

    def close(self) -> None:
        self._host.close()
        self.store.close()
        self._board.close()


class LocalReceiver(Receiver):
    """Takes attackers that have no connection for connected ones."""

    def _send(
        self, peer: bytes, parts: wire.Parts, *, tracked: bool = False
    ) -> tuple[int, IsReleased]:
        if peer in LOCAL_PEERS:
            return SENT, lambda: True
        return super()._send(peer, parts, tracked=tracked)

    def _connected(self, stream: ActorStream) -> bool:
        return stream.peer in LOCAL_PEERS or super()._connected(stream)


class HonestActor(threading.Thread):
    """Joins through the socket, sends whatever is granted, and says every second where it is."""

    def __init__(self, address: str, curve: Path | None) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._curve = curve
        self.sent = 0
        self.stop = threading.Event()

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = dealer(
            context, self._address, keys.load_actor(self._curve) if self._curve else None
        )
        sequence, limit, joined, say_s = 0, 0, False, 0.0
        while not self.stop.is_set():
            if time.monotonic() >= say_s:
                say_s = time.monotonic() + 0.5
                self._say(socket, sequence, joined)
            if sequence < limit:
                head, meta, frames = slot_of(HONEST, 0, sequence, 32 * (sequence + 1))
                socket.send_multipart(wire.encode(head, meta, frames))
                sequence += 1
                self.sent = sequence
            elif not socket.poll(20):
                continue
            while socket.poll(0):
                head = wire.decode(socket.recv_multipart()).head
                if head.kind in (MessageKind.WELCOME, MessageKind.GRANT):
                    joined, limit = True, max(limit, head.sequence)
                elif head.kind == MessageKind.WHO:
                    joined, limit, say_s = False, sequence, 0.0
        socket.close(3000)  # ms for what is on its way
        context.term()

    def _say(self, socket: Any, sequence: int, joined: bool) -> None:
        about = {"actor": HONEST, "sequence": sequence, "produced_steps": 32 * sequence}
        if joined:
            socket.send_multipart(wire.encode(Header(MessageKind.BEAT, run_id=RUN_ID, **about)))
        else:
            meta = {"spec": SPEC.to_dict(), "want": 4}
            socket.send_multipart(wire.encode(Header(MessageKind.HELLO, **about), meta))


@contextmanager
def connector(
    watch: Watch, honest: Honest, layout: ParamLayout = LAYOUT, curve: bool = False
) -> Iterator[tuple[Receiver, Learner, HonestActor, str]]:
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        learner = Learner(Path(name), watch, honest, layout)
        links: list[ShmLink] = []
        joining = threading.Thread(
            target=lambda: links.append(ShmLink(learner.path, None, want=0, lane=True))
        )
        joining.start()
        while joining.is_alive():
            learner.serve()

        address = f"ipc://{name}/wire"
        folder = None
        if curve:
            address = f"tcp://127.0.0.1:{free_port()}"
            folder = Path(name, "keys")
            keys.make_keys(folder)

        receiver = LocalReceiver(
            links[0], address, learner.path, process=_check_columns, curve=folder
        )
        actor = HonestActor(address, folder)
        actor.start()
        try:
            yield receiver, learner, actor, address
        finally:
            actor.stop.set()
            actor.join()
            receiver.close()
            links[0].close()
            learner.close()


def _check_columns(columns: dict[str, npt.NDArray[Any]]) -> None:
    """As an algorithm does."""
    if not np.isfinite(columns["reward"]).all():
        raise ValueError("a reward that is not finite")


def ended_streams(receiver: Receiver) -> list[dict[str, int]]:
    ended = receiver.grants.ended
    streams = [stream.final_counters() for stream in ended]
    ended.clear()
    json.dumps(streams)
    return streams


def connector_phase(messages: int, seed: int) -> dict[str, Any]:
    watch, honest, mutator = Watch(messages), Honest(), Mutator(seed)
    with connector(watch, honest) as (receiver, learner, actor, _):
        streams: dict[int, tuple[int, int, int]] = {}
        while watch.done < messages:
            for _ in range(64):
                number = mutator.random.randrange(len(LOCAL_PEERS))
                own = {key: stood for key, stood in streams.items() if key % 8 == number}
                parts = at_connector(mutator, own, number)
                watch.call(receiver.handle, LOCAL_PEERS[number], parts)
            watch.count(64)
            streams = {
                actor_id: (stream.incarnation, stream.next, stream.produced_steps)
                for actor_id, stream in list(receiver.grants.streams.items())[-32:]
                if actor_id != HONEST
            }
            watch.call(receiver.turn, 0)
            watch.call(learner.turn, ended_streams(receiver))
        _drain(receiver, learner, actor, watch, honest)
        return watch.result(receiver.rejected, honest)


def _drain(
    receiver: Receiver, learner: Learner, actor: HonestActor, watch: Watch, honest: Honest
) -> None:
    """Until all that the honest actor has sent is there."""
    actor.stop.set()
    actor.join()
    ends_s = time.monotonic() + 3.0
    while honest.arrived < actor.sent and time.monotonic() < ends_s:
        watch.call(receiver.turn, 0.01)
        watch.call(learner.turn, ended_streams(receiver))
    honest.lost = actor.sent - honest.arrived


def sockets_phase(messages: int, seed: int) -> dict[str, Any]:
    watch, honest = Watch(messages), Honest()
    with connector(watch, honest) as (receiver, learner, actor, address):
        spawn = mp.get_context("spawn")
        attackers = [
            spawn.Process(
                target=attack, args=(address, seed + 10 + k, messages // ATTACKERS), daemon=True
            )
            for k in range(ATTACKERS)
        ]
        for attacker in attackers:
            attacker.start()
        count = receiver.turn(1.0)
        while any(attacker.is_alive() for attacker in attackers) or count:
            count = 0
            try:
                count = receiver.turn(0.01)
            except Exception as error:
                watch.call(_raise, error)
            watch.count(count)
            watch.call(learner.turn, ended_streams(receiver))
        _drain(receiver, learner, actor, watch, honest)
        return watch.result(receiver.rejected, honest)


def weights_phase(messages: int, seed: int) -> dict[str, Any]:
    watch, honest = Watch(messages), Honest()
    with connector(watch, honest, LARGE_LAYOUT, curve=True) as (receiver, learner, actor, address):
        folder = learner.path.parent / "keys"
        hoarder = mp.get_context("spawn").Process(
            target=hoard, args=(address, folder, messages), daemon=True
        )
        hoarder.start()

        version = 1
        publish_s = 0.0
        while watch.done < messages and hoarder.is_alive():
            if time.monotonic() >= publish_s:
                publish_s = time.monotonic() + PUBLISH_S
                version += 1
                learner.publish(version)
            watch.count(receiver.turn(0.01))
            watch.call(learner.turn, ended_streams(receiver))

        hoarder.kill()
        _drain(receiver, learner, actor, watch, honest)
        return watch.result(receiver.rejected, honest)


def hoard(address: str, folder: Path, messages: int) -> None:
    """Request weights over more and more connections, claim to have them, and read none."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []
    head = Header(MessageKind.WEIGHTS_GET, run_id=RUN_ID)
    for number in range(messages):
        if number % 40 == 0 and len(sockets) < MOST_CONNECTIONS:
            sockets.append(dealer(context, address, keys.load_actor(folder), received=1))
        claimed = {"have": [1, number // 20 % 1000]}
        with suppress(zmq.Again):
            sockets[-1 - number % min(len(sockets), 5)].send_multipart(
                wire.encode(head, claimed), zmq.NOBLOCK
            )
        time.sleep(0.002)


def _raise(error: Exception) -> None:
    raise error


def attack(address: str, seed: int, messages: int) -> None:
    """An attacker's process: it reads what it is granted, and sends as fast as it can."""
    mutator = Mutator(seed)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.connect(address)
    streams = {seed * 100 + k: (0, 0, 0) for k in range(8)}
    for number in range(messages):
        socket.send_multipart(at_connector(mutator, streams) or [b""])
        if number % 16 == 0:
            while socket.poll(0):
                try:
                    head = wire.decode(socket.recv_multipart()).head
                except wire.WireError:
                    continue
                if head.kind in (MessageKind.GRANT, MessageKind.WELCOME) and head.actor in streams:
                    sequence = max(0, head.sequence - 1)
                    streams[head.actor] = (head.incarnation, sequence, 32 * sequence % 2**40)
    socket.close(10_000)
    context.term()


# --------------------------------------------------------------------------------------- replay

REPLAY_COLUMNS: dict[str, Any] = {
    "obs": {"image": ("|u1", (3, 12, 12)), "speed": ("<f4", (4,))},
    "action": ("<i8", ()),
}
CAPACITY = 4096


class LocalServer(ReplayServer):
    """Takes attackers that have no connection for ones that read."""

    def _send(self, name: bytes, parts: wire.Parts) -> tuple[int, IsReleased]:
        return (SENT, lambda: True) if name in LOCAL_PEERS else super()._send(name, parts)


class HonestClient(threading.Thread):
    """Adds rows and samples them through the socket."""

    def __init__(self, address: str, honest: Honest, watch: Watch) -> None:
        super().__init__(daemon=True)
        self._address, self._honest, self._watch = address, honest, watch
        self.stop = threading.Event()

    def run(self) -> None:
        self._watch.call(self._use)

    def _use(self) -> None:
        flags = np.zeros(4, bool)
        with ReplayClient(self._address, prefetch=2, patience_s=60.0) as client:
            while not self.stop.is_set():
                for _ in range(8):
                    client.add(
                        obs={
                            "image": np.full((4, 3, 12, 12), 201, np.uint8),
                            "speed": np.ones((4, 4), np.float32),
                        },
                        next_obs={
                            "image": np.full((4, 3, 12, 12), 201, np.uint8),
                            "speed": np.ones((4, 4), np.float32),
                        },
                        action=np.full(4, 4242),
                        reward=np.ones(4, np.float32),
                        terminated=flags,
                        truncated=flags,
                    )
                client.flush(60.0)
                self._honest.arrived += 1
                batch = client.sample(16, timeout_s=60.0)
                rows = batch["obs"]["image"][batch["action"] == 4242]
                if (rows != 201).any():
                    self._watch.fault("an honest row has come back changed")


def replay_phase(messages: int, seed: int) -> dict[str, Any]:
    watch, honest, mutator = Watch(messages), Honest(), Mutator(seed + 5)
    replay = Replay(
        REPLAY_COLUMNS, CAPACITY, envs=4, unroll=8, shared=True, frame_stack=3, n_step=2,
        autoreset="same_step", sampler=Prioritized(),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        server = LocalServer(replay, f"ipc://{name}/replay")
        client = HonestClient(server.address, honest, watch)
        client.start()
        try:
            _attack_replay(server, replay, watch, mutator, messages)
            client.stop.set()
            while client.is_alive():
                watch.call(server.turn, 0.01)
        finally:
            server.close()
            replay.close()
        return watch.result(server.rejected, honest)


def _attack_replay(
    server: ReplayServer, replay: Replay, watch: Watch, mutator: Mutator, messages: int
) -> None:
    rnd, spec = mutator.random, replay.layout.spec
    run_id = server._service._run_id
    following: Counter[bytes] = Counter()
    blank = [block.nbytes for block in spec.blocks]
    while watch.done < messages:
        for _ in range(64):
            peer = rnd.choice(LOCAL_PEERS)
            how = rnd.random()
            about = {"spec_hash": spec.hash, "run_id": run_id}
            if how < 0.5:
                frames = strange_rows(spec, rnd) if rnd.random() < 0.5 else [*map(bytes, blank)]
                head = Header(
                    MessageKind.SLOT, **about, sequence=following[peer], generation=8, steps=32,
                    produced_steps=32, raw_nbytes=spec.payload_nbytes,
                )  # fmt: skip
                meta = [["raw", size] for size in blank]
                if rnd.random() < 0.5:
                    parts = sign(
                        head._replace(frames=len(frames), coded_nbytes=sum(blank)),
                        msgpack.packb(meta), frames,
                    )  # fmt: skip
                else:
                    parts = mutator.message(head, meta, frames)
            elif how < 0.75:
                ask = {"batch": rnd.choice((1, 16, 4096)), "count": 1, "stacked": True}
                head = Header(MessageKind.SAMPLE, **about, sequence=rnd.getrandbits(40))
                parts = mutator.message(head, ask)
            elif how < 0.85:
                keys = np.array([mutator.number(63) for _ in range(4)], np.int64)
                head = Header(MessageKind.UPDATE, **about)
                numbers = np.array([rnd.choice((1.0, *FLOATS)) for _ in range(4)])
                parts = mutator.message(head, None, [keys.tobytes(), numbers.tobytes()])
            elif how < 0.9:
                parts = sign(Header(MessageKind.JOIN), msgpack.packb(_joining(peer)), [])
            else:
                parts = mutator.message(
                    Header(rnd.choice(list(MessageKind)), **about), {"batch": 1}
                )
            watch.call(server.handle, peer, parts)
        watch.count(64)
        watch.call(server.turn, 0)
        for peer in LOCAL_PEERS:
            following[peer] = _next(server, peer)
        if watch.done % 4096 == 0 and len(replay) > 64:
            watch.call(_sample, replay)


def _joining(peer: bytes) -> dict[str, Any]:
    return {"version": REPLAY_VERSION, "token": peer.hex()}


def _next(server: ReplayServer, peer: bytes) -> int:
    """The sequence that the server wants next of a peer."""
    connected = server._service._peers.connected.get(peer)
    return connected.stream.expected_sequence if connected else 0


def _sample(replay: Replay) -> None:
    with suppress(ReplayError):
        replay.sample(32)


def strange_rows(spec: SlotSpec, rnd: random.Random) -> list[bytes]:
    """Frames whose bookkeeping columns hold strange numbers."""
    payload = spec.zeros()
    columns = spec.views(payload)
    for name in rnd.sample(sorted(columns), 2):
        column = columns[name]
        if column.dtype.kind in "iu":
            info = np.iinfo(column.dtype)
            column[...] = min(
                max(rnd.choice((-3, -1, 0, 1, 2, 9, 300, *LIMITS)), info.min), info.max
            )
        elif column.dtype.kind == "f":
            column[...] = np.float64(rnd.choice((1.0, 1e38, float("nan"), float("inf"))))
    if "alive" in columns and rnd.random() < 0.8:
        columns["alive"][...] = 1
    return [block.tobytes() for block in payload]


if __name__ == "__main__":
    main()
