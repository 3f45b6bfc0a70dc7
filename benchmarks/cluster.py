"""A simulated cluster: 10, 100 and 1,000 light actors over ZeroMQ, and what they cost a learner.

    clients (two processes) ══ ZeroMQ, TCP ══ connector process ── slots in shared memory ── here

The connector is the role that a run has, the clients (benchmarks/cluster_clients.py) speak its
protocol, and this process is the learner's side, which reads headers, frees slots and publishes
weights once a second. For each number of actors three things are measured: at the same total rate
for all, the processor time of the connector for a message of any kind; flat out, messages a second;
and over both, how much the connector's own memory grows, once ZeroMQ has filled its buffers. In the
end every agent step that the clients say they produced must have arrived, or be counted.

    python benchmarks/cluster.py [--seconds 15] [--rounds 3] [--json] [--save]
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from cluster_clients import serve
from common import finish, free_port, parser
from penstock.configs.schema import Config
from penstock.core.interfaces import Welcome
from penstock.core.params import ParamLayout, Stamp
from penstock.core.role_spec import RoleSpec, Stage
from penstock.core.specs import Column, SlotSpec
from penstock.launch.engines.local import LocalHandle
from penstock.launch.topology import role_arguments
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.zmq.client import REPEAT_S

ACTORS = (10, 100, 1000)
PROCESSES = 2
RATE = 1000.0  # unrolls per second of all actors together, where they are paced
UNROLL, ENVS = 20, 8
SPEC = SlotSpec(
    UNROLL,
    ENVS,
    (
        Column("obs", "<f4", (4,), "unroll+1"),
        Column("action", "<i4"),
        Column("reward", "<f4"),
        Column("logits", "<f4", (2,)),
    ),
)
LAYOUT = ParamLayout((("w", (64, 64)),))
RUN_ID = 1
WEIGHTS_EVERY_S = 1.0
FILLING_SLOTS = 300  # of each actor, after which ZeroMQ has all memory that it wants for it
JOIN_S = 60.0


class Learner:
    """The learner's side: what arrived, by actor, and the connector's reports."""

    def __init__(self, folder: Path, slots: int, child: LocalHandle) -> None:
        self.arrived_steps = 0
        self.gaps = 0
        self.reports: dict[str, Any] = {}
        self._next: dict[int, int] = {}
        self.child = child
        self._store = SlotStore(SPEC, slots)
        self._board = WeightsBoard.create(LAYOUT.size)
        self._version, self._publish_s = 0, 0.0
        welcome = Welcome(RUN_ID, 0, SPEC, LAYOUT, {})
        self._host = ShmHost(folder / "learner-0.sock", welcome, [self._board], self._store)

    def turn(self) -> None:
        """Take what has arrived, free its slots, hear the connector."""
        self._host.poll(0.005)
        self._store.collect()
        while self._store.ready:
            header = self._store.slots[self._store.ready[0]].header
            actor, sequence = int(header["actor"]), int(header["sequence"])
            self.arrived_steps += int(header["steps"])
            self.gaps += sequence - self._next.get(actor, 0)
            self._next[actor] = sequence + 1
            self._store.release(self._store.ready.popleft())
        if time.monotonic() > self._publish_s:
            self._publish_s = time.monotonic() + WEIGHTS_EVERY_S
            self._version += 1
            self._board.publish(np.zeros(LAYOUT.size, np.float32), Stamp(0, self._version))
        for message in self.child.channel.receive():
            if message["kind"] == "connector":
                self.reports = message

    def serve(self, seconds: float) -> None:
        """Do so for a while."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            self.turn()

    def close(self) -> None:
        self._host.close()
        self._store.close()
        self._board.close()


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=15.0)
    arguments.add_argument("--rounds", type=int, default=3)
    args = arguments.parse_args()
    runs: dict[int, list[dict[str, float]]] = {actors: [] for actors in ACTORS}
    for _ in range(args.rounds):
        for actors in ACTORS:
            runs[actors].append(measure(actors, args.seconds))
    rows: list[list[Any]] = [
        ["actors", "paced/s", "cpu us/message", "flat out/s", "cpu us/message", "memory MB",
         "grew MB", "lost steps", "joined in s"]
    ]  # fmt: skip
    result: dict[str, Any] = {}
    for actors, found in runs.items():
        middle = {key: statistics.median(run[key] for run in found) for key in found[0]}
        result[str(actors)] = {**middle, "runs": found}
        m = middle
        rows.append(
            [actors, m["paced_rate"], m["paced_us"], m["flat_rate"], m["flat_us"], m["rss_mb"],
             m["grew_mb"], m["lost_steps"], m["join_s"]]
        )  # fmt: skip
    finish("cluster", {"rate": RATE, "slot_nbytes": SPEC.payload_nbytes, **result}, rows, args)


def measure(actors: int, seconds: float) -> dict[str, float]:
    """One number of actors, from their coming to their going."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = f"tcp://127.0.0.1:{free_port()}"
        child = stack.enter_context(connector(folder, address))
        learner = Learner(folder, 2 * actors, child)
        stack.callback(learner.close)
        crowd = stack.enter_context(_crowd(address, actors))
        began_s = time.monotonic()
        while learner.reports.get("actors", 0) < actors:
            learner.turn()
            assert time.monotonic() < began_s + JOIN_S, learner.reports
        join_s = time.monotonic() - began_s
        said = _order(learner, crowd, "pace", 0.0)
        while said.get("slots", 0) < FILLING_SLOTS * actors:
            learner.serve(0.5)
            said = _order(learner, crowd, "count")
        flat = _window(learner, crowd, 0.0, seconds)
        paced = _window(learner, crowd, actors / RATE, seconds)
        said = _order(learner, crowd, "pace", 1e6)
        learner.serve(2 * REPEAT_S)
        said = _order(learner, crowd, "stop")
        learner.serve(2 * REPEAT_S)
        reports = learner.reports
    return {
        "join_s": join_s,
        "paced_rate": paced["rate"],
        "paced_us": paced["us"],
        "others_per_slot": paced["others_per_slot"],
        "flat_rate": flat["rate"],
        "flat_us": flat["us"],
        "rss_mb": paced["rss_mb"],
        "grew_mb": paced["grew_mb"] + flat["grew_mb"],
        "produced_steps": said["produced_steps"],
        "arrived_steps": learner.arrived_steps,
        "lost_steps": said["produced_steps"] - learner.arrived_steps,
        "counted_steps": learner.gaps * UNROLL * ENVS,
        "rejected": sum(reports["rejected"].values()),
        "forgotten": said.get("forgotten", 0),
        "left": reports["actors"],
    }


def _window(
    learner: Learner, crowd: list[Connection], interval_s: float, seconds: float
) -> dict[str, float]:
    """What the connector does over a while of one pace, once that has settled."""
    _order(learner, crowd, "pace", interval_s)
    learner.serve(max(3.0, seconds / 5))
    pid = learner.child.pid
    before, cpu_s, rss, began_s = (
        _order(learner, crowd, "count"),
        _cpu_s(pid),
        _rss(pid),
        time.monotonic(),
    )
    learner.serve(seconds)
    after, wall_s = _order(learner, crowd, "count"), time.monotonic() - began_s
    slots = after["slots"] - before["slots"]
    others = after["others"] - before["others"]
    return {
        "rate": slots / wall_s,
        "us": (_cpu_s(pid) - cpu_s) / (slots + others) * 1e6,
        "others_per_slot": others / slots,
        "rss_mb": _rss(pid) / 1e6,
        "grew_mb": (_rss(pid) - rss) / 1e6,
    }


def _order(learner: Learner, crowd: list[Connection], *command: Any) -> dict[str, int]:
    """Tell all client processes, and add up what they answer."""
    for connection in crowd:
        connection.send(command)
    total: dict[str, int] = {}
    for connection in crowd:
        while not connection.poll():
            learner.turn()
        for key, value in connection.recv().items():
            total[key] = total.get(key, 0) + value
    return total


@contextmanager
def _crowd(address: str, actors: int) -> Iterator[list[Connection]]:
    spawn = mp.get_context("spawn")
    ends, processes = [], []
    for i in range(PROCESSES):
        here, there = spawn.Pipe()
        theirs = range(i, actors, PROCESSES)
        processes.append(spawn.Process(target=serve, args=(there, address, SPEC, theirs)))
        processes[-1].start()
        ends.append(here)
    try:
        yield ends
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def connector(folder: Path, address: str) -> Iterator[LocalHandle]:
    """The connector as a run starts it, but for the algorithm's work on a slot."""
    config = Config.model_validate(
        {"env": {"id": "CartPole-v1"}, "run": {"interval_s": 0.2}, "transport": {"insecure": True}}
    )
    arguments = role_arguments(folder, folder) | {
        "config": config.model_dump(mode="json"),
        "run_id": RUN_ID,
        "grace_s": 10.0,
    }
    main = "penstock.transport.zmq.connector:run"
    spec = RoleSpec("connector", 0, main, Stage.CARRIERS, address=address)
    child = LocalHandle(spec, 0, arguments, folder / "connector.log")
    try:
        yield child
    finally:
        child.signal(signal.SIGKILL)
        child.reap()


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process, all its threads."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _rss(pid: int) -> int:
    """Bytes of a process' own memory in use; slots are shared and not of it."""
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


if __name__ == "__main__":
    main()
