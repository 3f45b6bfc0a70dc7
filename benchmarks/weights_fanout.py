"""How soon the weights of a learner are on many hosts, over links of 1 Gbit/s.

    learner's host ── 1 Gbit/s ── switch ── hosts 1 to N, each with actors that read one copy

The learner's host has the connector of a run, and each other host a client that asks for weights as
the relay of its actors does. All hosts are network namespaces of this machine. Measured from the
publishing of a version until the last host has all of its bytes, beside what the link alone needs;
the connector's processor time for a copy; and what a host then does with it: decoding, and
publishing in shared memory, which all of its actors read. Needs root.

    python benchmarks/weights_fanout.py [--hosts 10 100] [--rounds 5] [--json] [--save]
"""

from __future__ import annotations

import ctypes
import os
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from cluster import connector
from common import finish, parser
from hosts import Hosts, NoHostsError, hosts
from penstock.core.interfaces import Welcome
from penstock.core.params import ParamLayout, Stamp
from penstock.core.specs import Column, SlotSpec
from penstock.transport import wire
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.wire import Header, MessageKind
from penstock.transport.zmq.sockets import Socket, dealer, receive

PARAMETERS = 1_700_000  # of the Nature CNN
LINK, BITS_PER_S = "1gbit", 1e9
PORT = 7700
WAIT_S = 60.0
CLONE_NEWNET = 0x40000000
LAYOUT = ParamLayout((("w", (PARAMETERS,)),))
SPEC = SlotSpec(2, 1, (Column("obs", "<f4", (4,), "unroll+1"),))
RUN_ID = 1


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--hosts", type=int, nargs="+", default=[10, 100])
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--serve", action="store_true", help="be the learner's host")
    options = args.parse_args()
    if options.serve:
        serve()
        return
    decode_ms = decoding_ms()
    found = []
    for count in options.hosts:
        try:
            with hosts(count + 1) as made:
                found.append(measure(made, count, options.rounds))
        except NoHostsError as error:
            sys.exit(f"no hosts, because {error}")
    rows: list[list[Any]] = [
        ["hosts", "s until the last has them", "slowest", "of the link", "connector ms a copy"]
    ]
    rows += [
        [
            f["hosts"],
            f["median_s"],
            max(f["seconds"]),
            f["link_s"] / f["median_s"],
            f["connector_ms"],
        ]
        for f in found
    ]
    result = {"parameters": PARAMETERS, "link": LINK, "decode_ms": decode_ms, "rows": found}
    finish("weights_fanout", result, rows, options)
    print(f"decoding and publishing on a host: {decode_ms:.2f} ms")


def serve() -> None:
    """The learner's side: publish a version for each line of standard input."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        with connector(folder, f"tcp://0.0.0.0:{PORT}") as child:
            board, store = WeightsBoard.create(LAYOUT.size), SlotStore(SPEC, 4)
            host = ShmHost(
                folder / "learner-0.sock", Welcome(RUN_ID, 0, SPEC, LAYOUT, {}), board, store
            )
            values, version = np.random.default_rng(0).normal(size=LAYOUT.size), 0
            values = values.astype(np.float32)
            board.publish(values, Stamp(0, version))
            print("ready", flush=True)
            os.set_blocking(sys.stdin.fileno(), False)
            while True:
                host.poll(0.005)
                child.channel.receive()
                line = sys.stdin.readline()
                if line == "publish\n":
                    version += 1
                    board.publish(values, Stamp(0, version))
                    print(time.monotonic(), cpu_of(child.pid), flush=True)
                elif line == "stop\n":
                    break
            host.close()
            store.close()
            board.close()


def cpu_of(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(made: Hosts, count: int, rounds: int) -> dict[str, Any]:
    made.limit(LINK)
    command = made.command(0, [sys.executable, __file__, "--serve"])
    learner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert learner.stdin is not None
    assert learner.stdout is not None
    assert learner.stdout.readline() == "ready\n"
    relays = Relays(made, count)
    try:
        relays.fetch(0)
        seconds, cpu = [], []
        for version in range(1, rounds + 1):
            learner.stdin.write("publish\n")
            learner.stdin.flush()
            began_s, cpu_s = map(float, learner.stdout.readline().split())
            cpu.append(cpu_s)
            seconds.append(relays.fetch(version) - began_s)
        learner.stdin.write("stop\n")
        learner.stdin.flush()
        learner.wait(WAIT_S)
    finally:
        relays.close()
        learner.kill()
        learner.wait()
    link_s = count * 2 * PARAMETERS * 8 / BITS_PER_S  # bf16
    return {
        "hosts": count,
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "link_s": link_s,
        "connector_ms": (cpu[-1] - cpu[0]) / (rounds - 1) / count * 1e3,
    }


class Relays:
    """A client on each host but the learner's, all in this thread."""

    def __init__(self, made: Hosts, count: int) -> None:
        self._sockets: list[Socket] = []
        self._contexts: list[zmq.Context[Socket]] = []
        address = f"tcp://{made.addresses[0]}:{PORT}"
        for host in range(1, count + 1):
            thread = threading.Thread(target=self._join, args=[made, host, address])
            thread.start()  # a thread of its own enters the namespace, and its sockets with it
            thread.join()
        self._joined = dict.fromkeys(range(count), False)
        self._run_id = 0
        self._epoll = select.epoll()
        self._of = {socket.FD: number for number, socket in enumerate(self._sockets)}
        for fd in self._of:
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    def _join(self, made: Hosts, host: int, address: str) -> None:
        with open(f"/proc/{made._pids[host]}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        context: zmq.Context[Socket] = zmq.Context()
        self._contexts.append(context)
        self._sockets.append(dealer(context, address, None))

    def fetch(self, version: int) -> float:
        """Wait until all hosts have a version; when the last had it, on the monotonic clock."""
        have: dict[int, bool] = {}
        ends_s, again_s = time.monotonic() + WAIT_S, 0.0
        while len(have) < len(self._sockets):
            now_s = time.monotonic()
            if now_s > ends_s:
                raise RuntimeError(f"{len(have)} of {len(self._sockets)} hosts have {version}")
            if now_s > again_s:
                again_s = now_s + 1.0
                for number, joined in self._joined.items():
                    if not joined:
                        self._say(number, MessageKind.HELLO, {"spec": None, "want": 0})
            self._epoll.poll(0.005)
            for number, socket in enumerate(self._sockets):
                while (parts := receive(socket)) is not None:
                    head = wire.decode(parts).head
                    if head.kind == MessageKind.WELCOME:
                        self._run_id, self._joined[number] = head.run_id, True
                        self._ask(number, None)
                    elif head.kind == MessageKind.WEIGHTS:
                        self._ask(number, (head.generation, head.version))
                        if head.version == version:
                            have[number] = True
        return time.monotonic()

    def _ask(self, number: int, have: tuple[int, int] | None) -> None:
        self._say(number, MessageKind.WEIGHTS_GET, {"have": have})

    def _say(self, number: int, kind: MessageKind, meta: object) -> None:
        head = Header(kind, run_id=self._run_id, spec_hash=SPEC.hash, actor=number)
        try:
            self._sockets[number].send_multipart(wire.encode(head, meta), zmq.NOBLOCK)
        except zmq.Again:  # not connected yet
            self._joined[number] = False

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        for context in self._contexts:
            context.term()


def decoding_ms() -> float:
    """What a host does with a version that has arrived."""
    values = np.random.default_rng(0).normal(size=LAYOUT.size).astype(np.float32)
    parts = wire.encode_weights(values, Stamp(0, 1), "bf16", LAYOUT, RUN_ID)
    board = WeightsBoard.create(LAYOUT.size)
    took = []
    for version in range(20):
        began_s = time.perf_counter()
        _, payload = wire.decode_weights(wire.decode([bytes(p) for p in parts]), LAYOUT)
        board.publish(payload, Stamp(0, version))
        took.append(time.perf_counter() - began_s)
    board.close()
    return statistics.median(took) * 1e3


if __name__ == "__main__":
    main()
