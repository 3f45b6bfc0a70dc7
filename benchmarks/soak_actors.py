"""Light actors of benchmarks/soak.py: they join, send a few unrolls, and leave.

Each speaks docs/protocol.md by a DEALER of its own: HELLO, SLOT as granted, BEAT once a second. A
third says BYE, a third closes its connection without a word, and a third stands behind a proxy that
lets nothing through any more, as a host that has lost its power.

    python benchmarks/soak_actors.py PORT ACTORS_PER_SECOND
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack

import numpy as np
import zmq

from faults.proxy import Proxy
from penstock.core.specs import HEADER, SlotSpec
from penstock.transport import wire
from penstock.transport.wire import Header, MessageKind, WireError
from penstock.transport.zmq.sockets import Socket, dealer, receive

PROXIES = 4
OPEN_S = 5.0  # how long each proxy lets through, and how long it then stands still
WANT = 2
SLOTS = 3  # unrolls of an actor
LIFE_S = 10.0  # within which it leaves, whatever it was granted
BEAT_S = 1.0
FIRST = 1 << 40  # actors' ids; those of the run are small
TURN_S = 0.01


class Light:
    """One actor; ``leaving`` is how it ends: "bye", "close" or "half-open"."""

    def __init__(self, socket: Socket, actor: int, leaving: str) -> None:
        self.socket = socket
        self.actor = actor
        self.leaving = leaving
        self.began_s = time.monotonic()
        self.beat_s = 0.0
        self.run_id = self.version = self.next = self.limit = self.produced_steps = 0
        self.spec: SlotSpec | None = None
        self.joined = False
        self.weighed = False  # whether it has the version of the weights that it claims to play by

    def turn(self) -> bool:
        """Read and send what is due; whether it goes on."""
        self._read()
        now_s = time.monotonic()
        if now_s - self.began_s > LIFE_S or self.next >= SLOTS:
            if self.leaving == "bye" and self.joined:
                self._say(MessageKind.BYE)
            return False
        if self.joined and self.weighed and self.next < self.limit:
            self._send_slot()
        elif now_s >= self.beat_s:
            self.beat_s = now_s + BEAT_S
            self._repeat()
        return True

    def _repeat(self) -> None:
        if self.spec is None:
            self._say(MessageKind.HELLO, {"spec": None, "want": 0})
        elif not self.joined:
            self._say(MessageKind.HELLO, {"spec": self.spec.to_dict(), "want": WANT})
        else:
            self._say(MessageKind.BEAT)
            if not self.weighed:
                self._say(MessageKind.WEIGHTS_GET, {"have": None})

    def _read(self) -> None:
        while (parts := receive(self.socket)) is not None:
            try:
                message = wire.decode(parts)
                head = message.head
                if head.kind == MessageKind.WEIGHTS:
                    self.version, self.weighed = head.version, True
                elif head.kind == MessageKind.WELCOME and self.spec is None:
                    self.spec = SlotSpec.from_dict(wire.verify(message)["spec"])
                    self.beat_s = 0.0
                elif head.kind == MessageKind.WELCOME:
                    self.run_id, self.joined, self.beat_s = head.run_id, True, 0.0
                elif head.kind == MessageKind.WHO:
                    self.run_id, self.joined, self.beat_s = 0, False, 0.0
                if head.kind in (MessageKind.WELCOME, MessageKind.GRANT):
                    self.limit = max(self.limit, head.sequence)
            except WireError:
                continue

    def _send_slot(self) -> None:
        assert self.spec is not None
        payload = self.spec.zeros()
        columns = self.spec.views(payload)
        columns["alive"][...] = True
        columns["behaviour_logp"][...] = -1.0
        columns["policy_version"][...] = self.version
        header = np.zeros((), HEADER)
        steps = int(columns["alive"].size)
        header["actor"], header["sequence"], header["version"] = self.actor, self.next, self.version
        header["steps"], header["produced_steps"] = steps, self.produced_steps + steps
        encoder = wire.SlotEncoder(self.spec, "auto")
        if self._send(encoder.encode(header, payload, self.run_id)):
            self.next += 1
            self.produced_steps += steps

    def _say(self, kind: MessageKind, meta: object = None) -> bool:
        head = Header(
            kind,
            spec_hash=self.spec.hash if self.spec else 0,
            run_id=self.run_id,
            actor=self.actor,
            sequence=self.next,
            produced_steps=self.produced_steps,
        )
        return self._send(wire.encode(head, meta))

    def _send(self, parts: wire.Parts) -> bool:
        try:
            self.socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def main() -> None:
    port, per_s = int(sys.argv[1]), float(sys.argv[2])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    context: zmq.Context[Socket] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(port)) for _ in range(PROXIES)]
        churn(context, port, per_s, proxies, stop)


def churn(
    context: zmq.Context[Socket],
    port: int,
    per_s: float,
    proxies: list[Proxy],
    stop: threading.Event,
) -> None:
    """Until told to stop."""
    lights: list[Light] = []
    silent: deque[tuple[float, Socket]] = deque()  # half-open: when to forget them
    began_s, made = time.monotonic(), 0
    while not stop.is_set():
        now_s = time.monotonic()
        turn = int((now_s - began_s) / OPEN_S)
        for i, proxy in enumerate(proxies):  # one at a time lets through, in turn
            proxy.mode = "pass" if turn % PROXIES == i else "hold"
            if (turn + 1) % PROXIES == i:
                proxy.mode = "cut"
        while made < (now_s - began_s) * per_s:
            leaving = ("bye", "close", "half-open")[made % 3]
            where = proxies[turn % PROXIES].port if leaving == "half-open" else port
            socket = dealer(context, f"tcp://127.0.0.1:{where}", None)
            lights.append(Light(socket, FIRST + made, leaving))
            made += 1
        staying = []
        for light in lights:
            if light.turn():
                staying.append(light)
            elif light.leaving == "half-open":
                silent.append((now_s + OPEN_S * PROXIES, light.socket))
            else:
                light.socket.close(1000 if light.leaving == "bye" else 0)
        lights = staying
        while silent and silent[0][0] < now_s:
            silent.popleft()[1].close(0)
        time.sleep(TURN_S)
    print(f"{made} actors came", flush=True)
    for socket in [light.socket for light in lights] + [socket for _, socket in silent]:
        socket.close(0)
    context.term()


if __name__ == "__main__":
    main()
