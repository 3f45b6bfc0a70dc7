"""Many games of balancing a pole in one process, each with a connection and a pace of its own.

    python benchmarks/pole_clients.py PORT GAMES PERIOD_S KILLED_PER_MINUTE

Each game steps once in PERIOD_S, and connects again when it has lost the service. So many a minute
are killed in the middle of an episode: the connection is reset without a word, and another game
takes its place. A line of JSON every few seconds says what the games have seen; the environment
variable PENSTOCK_TOKEN has the token.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
import struct
import sys
import time
from dataclasses import dataclass, field

HELLO, WELCOME, STEP, ACT, FAULT, END = range(1, 7)
FIRST, TERMINATED, TRUNCATED = 1, 2, 4
REPORT_S = 5.0
PAUSES_S = (0.1, 2.0)
# A STEP of one row without its length: kind, rows, seat, flags, reward and the four numbers.
STEP_FORMAT = struct.Struct("<IIIB3xf4x4f")
MOST_STEPS = 500


class Pole:
    """A pole on a cart: the equations of Barto, Sutton and Anderson (1983)."""

    def __init__(self) -> None:
        self.state = [random.uniform(-0.05, 0.05) for _ in range(4)]
        self.steps = 0

    def step(self, action: int) -> int:
        """Push right (1) or left (0) for 20 ms; returns the flags of the row that follows."""
        x, speed, angle, turn = self.state
        force = 10.0 if action else -10.0
        mass, pole_mass, length = 1.1, 0.1, 0.5
        common = (force + pole_mass * length * turn**2 * math.sin(angle)) / mass
        inertia = length * (4 / 3 - pole_mass * math.cos(angle) ** 2 / mass)
        turning = (9.8 * math.sin(angle) - math.cos(angle) * common) / inertia
        pushing = common - pole_mass * length * turning * math.cos(angle) / mass
        self.state = [
            x + 0.02 * speed,
            speed + 0.02 * pushing,
            angle + 0.02 * turn,
            turn + 0.02 * turning,
        ]
        self.steps += 1
        if abs(self.state[0]) > 2.4 or abs(self.state[2]) > 12 * math.pi / 180:
            return TERMINATED
        return TRUNCATED if self.steps == MOST_STEPS else 0


@dataclass
class Seen:
    """What the games have seen since the last report."""

    connected: int = 0
    """Games with a connection now."""
    latencies_s: list[float] = field(default_factory=list)
    """The time from each STEP to its ACT."""
    returns: list[int] = field(default_factory=list)
    """Of finished episodes."""
    faults: int = 0
    lost: int = 0
    killed: int = 0

    def report(self) -> str:
        """Returns a line of JSON, and begins anew."""
        latencies_s = sorted(self.latencies_s)
        line = {
            "connected": self.connected,
            "answers": len(latencies_s),
            "p50_ms": _quantile_ms(latencies_s, 0.5),
            "p99_ms": _quantile_ms(latencies_s, 0.99),
            "longest_ms": _quantile_ms(latencies_s, 1.0),
            "episodes": len(self.returns),
            "steps_of_episodes": sum(self.returns),
            "faults": self.faults,
            "lost": self.lost,
            "killed": self.killed,
        }
        self.latencies_s.clear()
        self.returns.clear()
        self.faults = self.lost = self.killed = 0
        return json.dumps(line)


def _quantile_ms(sorted_s: list[float], q: float) -> float | None:
    """Returns a quantile in milliseconds; None of nothing."""
    if not sorted_s:
        return None
    return round(1e3 * sorted_s[min(int(q * len(sorted_s)), len(sorted_s) - 1)], 3)


class Connection:
    """A game's connection, with one seat."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def opened(cls, port: int) -> Connection:
        """Connect, and say HELLO. Raises ConnectionError if nobody serves."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connection = cls(reader, writer)
        hello = {"protocol": 1, "token": os.environ.get("PENSTOCK_TOKEN")}
        connection._send(struct.pack("<I", HELLO) + json.dumps(hello).encode())
        kind, body = await connection._receive()
        if kind != WELCOME:
            connection.close()
            raise ConnectionError(body)
        return connection

    async def step(self, state: list[float], flags: int, reward: float) -> int | None:
        """Send a row, and return its action; None of a row that ends, or is at fault."""
        self._send(STEP_FORMAT.pack(STEP, 1, 0, flags, reward, *state))
        if flags & (TERMINATED | TRUNCATED):
            return None
        kind, body = await self._receive()
        if kind == END:
            raise ConnectionError(body)
        return body[12] if kind == ACT else None

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    def kill(self) -> None:
        """Reset the connection, as a process that is killed does with unread data."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def _send(self, message: bytes) -> None:
        self._writer.write(struct.pack("<I", len(message)) + message)

    async def _receive(self) -> tuple[int, bytes]:
        """Returns the kind and the body of the next message."""
        try:
            (length,) = struct.unpack("<I", await self._reader.readexactly(4))
            message = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the connection was lost") from error
        return struct.unpack_from("<I", message)[0], message[4:]


async def play(port: int, period_s: float, kill_s: float, seen: Seen) -> None:
    """Be one game after another, for ever; each is killed after about ``kill_s`` seconds."""
    await asyncio.sleep(random.uniform(0.0, period_s))
    while True:
        connection = await connected(port)
        seen.connected += 1
        dies_s = time.monotonic() + random.expovariate(1.0 / kill_s)
        try:
            await play_connection(connection, period_s, dies_s, seen)
            connection.kill()
            seen.killed += 1
        except (ConnectionError, OSError):
            connection.close()
            seen.lost += 1
        finally:
            seen.connected -= 1


async def connected(port: int) -> Connection:
    """Returns a connection as soon as there is one."""
    pause_s, longest_s = PAUSES_S
    while True:
        try:
            return await Connection.opened(port)
        except (ConnectionError, OSError):
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, longest_s)


async def play_connection(
    connection: Connection, period_s: float, dies_s: float, seen: Seen
) -> None:
    """Play until the game is killed, in the middle of an episode."""
    pole = Pole()
    flags = FIRST
    next_s = time.monotonic()
    while True:
        began_s = time.monotonic()
        reward = 0.0 if flags == FIRST else 1.0
        action = await connection.step(pole.state, flags, reward)
        if flags & (TERMINATED | TRUNCATED):
            seen.returns.append(pole.steps)
            pole = Pole()
            flags = FIRST
            continue
        seen.latencies_s.append(time.monotonic() - began_s)
        if action is None:
            seen.faults += 1
            pole = Pole()
            flags = FIRST
        else:
            flags = pole.step(action)
        if time.monotonic() >= dies_s:
            return
        next_s = max(next_s + period_s, time.monotonic() - period_s)
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))


async def main() -> None:
    """Play for ever, and report."""
    port, games, period_s, killed_per_minute = (float(text) for text in sys.argv[1:])
    kill_s = 60.0 * games / killed_per_minute if killed_per_minute else math.inf
    seen = Seen()
    tasks = [
        asyncio.create_task(play(int(port), period_s, min(kill_s, 1e9), seen))
        for _ in range(int(games))
    ]
    while True:
        await asyncio.sleep(REPORT_S)
        if failed := [task for task in tasks if task.done()]:
            failed[0].result()
        print(seen.report(), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
