"""Light actors for benchmarks/cluster.py: many of the wire's clients in one process, no games.

Each has a DEALER of its own and says what a real one says (`penstock.transport.zmq.client`): HELLO,
SLOT as granted, BEAT once a second while it waits for a grant, BYE. Each twentieth asks for weights
too, as the relay of a host with twenty actors does. All share one ZeroMQ context and one loop;
unrolls are encoded beforehand, and only headers are new. An actor makes an unroll every
``interval_s`` and holds one back until it is granted; with 0 it sends whatever is granted at once.
"""

from __future__ import annotations

import heapq
import select
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import zmq

from penstock.core.specs import HEADER, SlotSpec
from penstock.transport import wire
from penstock.transport.wire import Header, MessageKind
from penstock.transport.zmq.sockets import Socket, dealer, receive

WANT = 2  # transport.slots
RELAY_EVERY = 20
BEAT_S = 1.0
RETRY_S = 0.05
NEVER_S = 1e9


def serve(commands: Connection, address: str, spec: SlotSpec, actors: Sequence[int]) -> None:
    """The process: do what ``commands`` says until it says "stop", answering each with counts."""
    crowd = Crowd(address, spec, actors)
    while True:
        crowd.turn(0.02)
        while commands.poll():
            command, *values = commands.recv()
            if command == "pace":
                crowd.pace(*values)
            elif command == "stop":
                crowd.stop()
            commands.send(crowd.counts())
            if command == "stop":
                return


class Light:
    """One actor: where its stream stands."""

    def __init__(self, socket: Socket, actor: int) -> None:
        self.socket = socket
        self.actor = actor
        self.joined = False
        self.next = self.limit = self.produced_steps = 0
        self.due_s = NEVER_S  # when the next unroll has been played
        self.repeat_s = 0.0
        self.ask_s = 0.0 if actor % RELAY_EVERY == 0 else NEVER_S  # for weights
        self.have: tuple[int, int] | None = None


class Crowd:
    """All actors of a process. ``interval_s`` is None until `pace`: then nobody plays."""

    def __init__(self, address: str, spec: SlotSpec, actors: Sequence[int]) -> None:
        self._spec = spec
        self._steps = spec.unroll * spec.envs
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, len(actors) + 1)
        self._interval_s: float | None = None
        self._run_id = 0
        self._sent: Counter[str] = Counter()
        self._epoll = select.epoll()
        self._lights: dict[int, Light] = {}
        self._timers: list[tuple[float, int]] = []
        rng = np.random.default_rng(0)
        payload = [
            rng.integers(0, 3, block.nbytes, np.uint8, endpoint=True) for block in spec.blocks
        ]
        encoder = wire.SlotEncoder(spec, "auto")
        message = wire.decode(encoder.encode(np.zeros((), HEADER), payload, run_id=1))
        self._head, self._meta = message.head, wire.verify(message)
        self._frames = [bytes(frame) for frame in message.frames]
        for actor in actors:
            light = Light(dealer(self._context, address, None), actor)
            fd = light.socket.FD
            self._lights[fd] = light
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)
            heapq.heappush(self._timers, (0.0, fd))

    def pace(self, interval_s: float) -> None:
        """From now on each makes an unroll every ``interval_s``, not all at the same moment."""
        now_s = time.monotonic()
        self._interval_s = interval_s
        for i, (fd, light) in enumerate(self._lights.items()):
            light.due_s = now_s + interval_s * i / len(self._lights)
            heapq.heappush(self._timers, (light.due_s, fd))

    def turn(self, timeout_s: float) -> None:
        """Handle what has come and what is due; wait for it up to ``timeout_s``."""
        now_s = time.monotonic()
        if self._timers:
            timeout_s = min(timeout_s, max(0.0, self._timers[0][0] - now_s))
        for fd, _ in self._epoll.poll(timeout_s):
            self._act(fd)
        now_s = time.monotonic()
        while self._timers and self._timers[0][0] <= now_s:
            self._act(heapq.heappop(self._timers)[1], again=True)

    def counts(self) -> dict[str, int]:
        """Of all actors since the start: joined, messages by kind, agent steps produced."""
        lights = self._lights.values()
        return {
            "joined": sum(light.joined for light in lights),
            "produced_steps": sum(light.produced_steps for light in lights),
            **self._sent,
        }

    def stop(self) -> None:
        """Leave, as actors do: what was sent is still delivered."""
        for light in self._lights.values():
            self._say(light, MessageKind.BYE)
            light.socket.close()
        self._context.term()

    def _act(self, fd: int, *, again: bool = False) -> None:
        """Read, then send what may be sent. ``again`` where the actor's timer has come."""
        light = self._lights[fd]
        now_s = time.monotonic()
        self._read(light)
        if not light.joined:
            self._repeat(light, now_s, MessageKind.HELLO)
        while light.joined and light.due_s <= now_s and light.next < light.limit:
            if not self._send_slot(light, now_s):
                break
            self._read(light)  # its descriptor tells of new events only
        if light.joined and light.due_s <= now_s:
            self._repeat(light, now_s, MessageKind.BEAT)
        if light.joined and light.ask_s <= now_s:
            self._sent["others"] += self._say(light, MessageKind.WEIGHTS_GET, {"have": light.have})
            light.ask_s = now_s + BEAT_S
        if again:
            waits = not light.joined or light.due_s <= now_s
            at_s = light.repeat_s if waits else min(light.due_s, now_s + BEAT_S)
            heapq.heappush(self._timers, (max(min(at_s, light.ask_s), now_s + 1e-4), fd))

    def _send_slot(self, light: Light, now_s: float) -> bool:
        head = self._head._replace(
            run_id=self._run_id,
            actor=light.actor,
            sequence=light.next,
            steps=self._steps,
            produced_steps=light.produced_steps + self._steps,
        )
        if not self._send(light, wire.encode(head, self._meta, self._frames)):
            return False
        self._sent["slots"] += 1
        light.next += 1
        light.produced_steps += self._steps
        assert self._interval_s is not None
        light.due_s = max(light.due_s + self._interval_s, now_s)
        light.repeat_s = now_s + BEAT_S
        return True

    def _repeat(self, light: Light, now_s: float, kind: MessageKind) -> None:
        """Say where the actor stands, where that was not said lately."""
        if now_s < light.repeat_s:
            return
        hello = {"spec": self._spec.to_dict(), "want": WANT} if kind == MessageKind.HELLO else None
        said = self._say(light, kind, hello)
        light.repeat_s = now_s + (BEAT_S if said else RETRY_S)
        self._sent["others"] += said

    def _say(self, light: Light, kind: MessageKind, meta: object = None) -> bool:
        head = Header(
            kind,
            run_id=self._run_id,
            spec_hash=self._spec.hash,
            actor=light.actor,
            sequence=light.next,
            produced_steps=light.produced_steps,
        )
        return self._send(light, wire.encode(head, meta))

    def _send(self, light: Light, parts: wire.Parts) -> bool:
        try:
            light.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _read(self, light: Light) -> None:
        while (parts := receive(light.socket)) is not None:
            head = wire.decode(parts).head
            if head.kind == MessageKind.WELCOME:
                self._run_id, light.joined = head.run_id, True
            elif head.kind == MessageKind.WEIGHTS:
                light.have, light.ask_s = (head.generation, head.version), 0.0
                self._sent["weights"] += 1
                continue
            elif head.kind not in (MessageKind.GRANT, MessageKind.WHO):
                raise RuntimeError(f"actor {light.actor} was told {bytes(parts[1])!r}")
            elif head.kind == MessageKind.WHO:
                light.joined = False
                self._sent["forgotten"] += 1
            light.limit = max(light.limit, head.sequence)
