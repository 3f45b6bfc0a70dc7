"""Writers of a replay as processes that a test can stop and kill, forked as fast as it asks.

    python replay_writer.py ADDRESS

reads lines from standard input. "add IDENT" starts a writer that adds steps one by one; "hold
IDENT" one that takes a slot, fills half of it, waits, and fills it all. Each answers on standard
output: "pid IDENT PID" when it starts, "rows IDENT N" after its N-th row was published, "holding
IDENT" when half is filled, "wrote IDENT" when all is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib
from typing import Any

import numpy as np

from penstock.replay.writer import Writer

FLOATS = 40  # of an observation: 160 bytes, so that a row is written in several pieces
UNROLL = 8


def row(ident: int, count: int) -> dict[str, Any]:
    """A row that can be told whole from torn."""
    obs = np.random.default_rng((ident, count)).random(FLOATS, np.float32)
    after = obs[::-1].copy()
    return {
        "obs": obs,
        "next_obs": after,
        "action": count,
        "writer": ident,
        "reward": float(count % 1000),
        "checksum": checksum(obs, after, ident, count),
    }


def checksum(obs: Any, after: Any, ident: int, count: int) -> int:
    return zlib.crc32(obs.tobytes() + after.tobytes() + f"{ident} {count}".encode())


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # one write, so that no death tears a line


def add(address: str, ident: int) -> None:
    with Writer.attach(address) as writer:
        count = 0
        while True:
            writer.add(**row(ident, count), terminated=count % 50 == 49, truncated=False)
            count += 1
            if count % UNROLL == 0:
                say(f"rows {ident} {count}")


def hold(address: str, ident: int) -> None:
    with Writer.attach(address) as writer, writer.slot(5.0) as slot:
        half = len(slot.raw("obs")) // 2
        slot.raw("obs")[:half] = b"\xaa" * half
        say(f"holding {ident}")
        time.sleep(0.2)
        slot.raw("obs")[:] = b"\xbb" * (2 * half)
        say(f"wrote {ident}")
        time.sleep(60)


def main() -> None:
    address = sys.argv[1]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    for line in sys.stdin:
        what, ident = line.split()
        pid = os.fork()
        if pid == 0:
            try:
                say(f"pid {ident} {os.getpid()}")
                {"add": add, "hold": hold}[what](address, int(ident))
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
