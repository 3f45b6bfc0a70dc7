"""How soon the weights of a learner are on many hosts, over links of 1 Gbit/s.

    learner's host ── 1 Gbit/s ── switch ── hosts 1 to N, each with actors that read one copy

The learner's host has the connector of a run. All hosts are network namespaces of this machine.
Each number of hosts is measured in two ways:

    flat    each host has a client that asks for weights as a relay did that knows no tree, so the
            connector sends each a copy
    tree    each host has what a relay has between its sockets (`WeightsPuller`), so it fetches the
            weights from the connector or another host, verifies them and sends them on

Measured from the publishing of a version until the last host has all of its bytes, beside what the
links alone need; the connector's processor time for a version; and what a host then does with it:
decoding, and publishing in shared memory, which all of its actors read. The processors of this
machine do the work of all hosts. Needs root.

    python benchmarks/weights_fanout.py [--hosts 10 100] [--rounds 5] [--json] [--save]
"""

from __future__ import annotations

import ctypes
import os
import queue
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zmq

from cluster import connector
from common import finish, parser
from hosts import Hosts, NoHostsError, hosts
from penstock.core.control import Channel, Message
from penstock.core.descriptors import raise_limit
from penstock.core.interfaces import Welcome
from penstock.core.params import ParamLayout, Stamp
from penstock.core.role import RoleContext
from penstock.core.specs import Column, SlotSpec
from penstock.profiling.status import StatusPage
from penstock.transport import wire
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.wire import Header, MessageKind
from penstock.transport.zmq.client import Client
from penstock.transport.zmq.relay_peers import WeightsPuller
from penstock.transport.zmq.relay_tree import RelayTree
from penstock.transport.zmq.sockets import Socket, dealer, receive

PARAMETERS = 1_700_000  # of the Nature CNN
LINK, BITS_PER_S = "1gbit", 1e9
PORT = 7700
WAIT_S = 60.0
SETTLE_S = 0.5  # before a version, so that all hosts wait for it
POLL_S = 0.02  # between two turns of a host without an event
THREADS = 2  # that do the work of all hosts
NBYTES = 2 * PARAMETERS  # bf16
COPY_S = NBYTES * 8 / BITS_PER_S
CLONE_NEWNET = 0x40000000
LIBC = ctypes.CDLL(None, use_errno=True)
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
                for way in ("flat", "tree"):
                    found.append(measure(made, count, options.rounds, way))
        except NoHostsError as error:
            sys.exit(f"no hosts, because {error}")
    rows: list[list[Any]] = [
        [
            *("hosts", "way", "s until the last has them", "slowest", "of the links"),
            *("connector ms a version", "from other hosts"),
        ]
    ]
    rows += [
        [
            f["hosts"],
            f["way"],
            f["median_s"],
            max(f["seconds"]),
            f["link_s"] / f["median_s"],
            f["connector_ms"],
            f["from_hosts"],
        ]
        for f in found
    ]
    result = {"parameters": PARAMETERS, "link": LINK, "decode_ms": decode_ms, "rows": found}
    finish("weights_fanout", result, rows, options)
    text = f"decoding and publishing on a host: {decode_ms:.2f} ms"
    print(text, file=sys.stderr if options.json else sys.stdout)


def serve() -> None:
    """The learner's side: publish a version for each line of standard input."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        with connector(folder, f"tcp://0.0.0.0:{PORT}") as child:
            board, store = WeightsBoard.create(LAYOUT.size), SlotStore(SPEC, 4)
            host = ShmHost(
                folder / "learner-0.sock", Welcome(RUN_ID, 0, SPEC, LAYOUT, {}), [board], store
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


class Fetching(Protocol):
    """The hosts that fetch weights."""

    def fetch(self, version: int) -> float: ...
    def close(self) -> None: ...

    @property
    def from_hosts(self) -> int: ...


def measure(made: Hosts, count: int, rounds: int, way: str) -> dict[str, Any]:
    made.limit(LINK)
    command = made.command(0, [sys.executable, __file__, "--serve"])
    learner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert learner.stdin is not None
    assert learner.stdout is not None
    assert learner.stdout.readline() == "ready\n"
    relays: Fetching = TreeRelays(made, count) if way == "tree" else Relays(made, count)
    try:
        relays.fetch(0)
        seconds, cpu, before = [], [], relays.from_hosts
        for version in range(1, rounds + 1):
            time.sleep(SETTLE_S)
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
    return {
        "hosts": count,
        "way": way,
        "seconds": seconds,
        "median_s": statistics.median(seconds),
        "link_s": tree_link_s(count) if way == "tree" else count * COPY_S,
        "connector_ms": (cpu[-1] - cpu[0]) / (rounds - 1) * 1e3,
        "from_hosts": (relays.from_hosts - before) / rounds,
    }


def tree_link_s(count: int) -> float:
    """What the links need for a version in a tree: copies of a host share its link evenly."""
    tree = RelayTree(NBYTES)
    names = [b"%04d" % number for number in range(count)]
    for name in names:
        tree.on_request(name, name.decode(), "", "", 0.0)
    tree.on_new_version(0.0)
    above: dict[str, str] = {}
    for name in names:
        parent = tree.place(name, 0.0)
        above[name.decode()] = parent.address if parent else ""
    copies = {name: list(above.values()).count(name) for name in ("", *above)}

    def ready_s(name: str) -> float:
        return ready_s(above[name]) + copies[above[name]] * COPY_S if name else 0.0

    return max(map(ready_s, above))


class Relays:
    """A client on each host but the learner's, all in this thread; the connector sends copies."""

    from_hosts = 0

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
        enter(made, host)
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


class TreeRelays:
    """What a relay has between its sockets, on each host but the learner's, in a few threads."""

    def __init__(self, made: Hosts, count: int) -> None:
        raise_limit()
        self._stop = False
        self._have: dict[int, tuple[int, float]] = {}  # version, and when, by host
        self._relays: list[WeightsPuller] = []
        self._failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=[made, range(1 + k, count + 1, THREADS)])
            for k in range(THREADS)
        ]
        self._count = count
        for thread in self._threads:
            thread.start()

    @property
    def from_hosts(self) -> int:
        """Number of copies that came from another host than the learner's."""
        return sum(relay.from_relays for relay in self._relays)

    def fetch(self, version: int) -> float:
        """Wait until all hosts have a version; when the last had it, on the monotonic clock."""
        ends_s = time.monotonic() + WAIT_S
        while sum(v == version for v, _ in list(self._have.values())) < self._count:
            if not self._failures.empty():
                raise self._failures.get()
            if time.monotonic() > ends_s:
                raise RuntimeError(f"not all of {self._count} hosts have {version}")
            time.sleep(0.002)
        return max(at_s for _, at_s in self._have.values())

    def _work(self, made: Hosts, hosts: range) -> None:
        clients: list[Client] = []
        try:
            self._serve(made, hosts, clients)
        except BaseException as error:
            self._failures.put(error)
        finally:
            for client in clients:
                client.close()

    def _serve(self, made: Hosts, hosts: range, clients: list[Client]) -> None:
        epoll, pullers = select.epoll(), {}
        events: dict[int, int] = {}  # host by descriptor
        for host in hosts:
            enter(made, host)  # sockets belong to the namespace of the thread that opens them
            client = Client(relay_context(), f"tcp://{made.addresses[0]}:{PORT}")
            clients.append(client)
            client.join()
            watch, unwatch = watching(epoll, events, host)
            watch(client.socket.FD)
            pullers[host] = WeightsPuller(client, watch, unwatch, print)
        self._relays += pullers.values()
        busy, look_s = set(pullers), 0.0
        while not self._stop:
            ready = {events[fd] for fd, _ in epoll.poll(0 if busy else POLL_S) if fd in events}
            if time.monotonic() >= look_s:
                ready, look_s = set(pullers), time.monotonic() + POLL_S
            again = set()
            for host in ready | busy:
                enter(made, host)
                fresh, more = pullers[host].turn()
                if fresh is not None:
                    self._have[host] = fresh[0].version, time.monotonic()
                if more:
                    again.add(host)
            busy = again
        for puller in pullers.values():
            puller.close()

    def close(self) -> None:
        self._stop = True
        for thread in self._threads:
            thread.join()


class NoChannel(Channel):
    """In place of a supervisor."""

    def __init__(self) -> None:
        self.closed = False

    def send(self, message: Message, patience_s: float = 0.0, fds: Sequence[int] = ()) -> bool:
        return True

    def receive(self, most: int | None = None) -> list[Message]:
        return []


def relay_context() -> RoleContext:
    page, descriptor = StatusPage.create()
    os.close(descriptor)
    return RoleContext("relay", 0, 0, RUN_ID, Path(), Path(), NoChannel(), page)


def watching(
    epoll: select.epoll, events: dict[int, int], host: int
) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """Functions that watch a descriptor for a host, and cease to."""

    def watch(fd: int) -> None:
        events[fd] = host
        epoll.register(fd, select.EPOLLIN | select.EPOLLET)

    def unwatch(fd: int) -> None:
        del events[fd]
        epoll.unregister(fd)

    return watch, unwatch


def enter(made: Hosts, host: int) -> None:
    """Move this thread to a host; its sockets and threads from now on are there."""
    with open(f"/proc/{made._pids[host]}/ns/net") as namespace:
        if LIBC.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


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
