"""How fast one receiving core takes unrolls of Atari frames off the wire, against snappy alone.

    sender process ── ZeroMQ, snappy ── connector process ── slots in shared memory ── this process

The yardstick is the connector process decompressing the same frames into memory of the same kind,
with nothing else to do, in turns with the transfer. The sender sends unrolls that were encoded
beforehand (only the header is new each time), so that the receiver is what is measured. "Per core"
counts the processor time of the whole connector process: ZeroMQ's thread and the kernel included.

A second table compares one connector with two, in turns, with two senders: slots per second, and
the connectors' processor time per slot.

    python benchmarks/wire.py [--seconds 3] [--rounds 3] [--json] [--save]
"""

from __future__ import annotations

import multiprocessing as mp
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cramjam
import numpy as np
import numpy.typing as npt
import psutil

from common import finish, parser, print_table
from penstock.core.control import Channel
from penstock.core.interfaces import Welcome
from penstock.core.memory import keep_freed_memory
from penstock.core.params import ParamLayout
from penstock.core.role import RoleContext
from penstock.core.specs import HEADER, Column, SlotSpec
from penstock.profiling.status import StatusPage
from penstock.transport import wire
from penstock.transport.addresses import address_of_rank
from penstock.transport.shm.arena import Arena
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.zmq.client import Client
from penstock.transport.zmq.receiver import ActorShare, Receiver

UNROLL = 20
SIZES = (4, 16)  # environments of one unroll
UNROLLS = 4  # different ones, sent in turn
SLOTS = 8
ENDS: list[socket.socket] = []  # of supervisors; a role whose supervisor's end is closed leaves

Frames = npt.NDArray[np.uint8]


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    args.add_argument("--rounds", type=int, default=3, help="measurements; the median counts")
    args.add_argument("--game", default="pong")
    options = args.parse_args()
    results = [measure(options.game, e, options.seconds, options.rounds) for e in SIZES]
    several = compare_connectors(options.game, options.seconds, options.rounds)
    rows: list[list[Any]] = [
        ["MB", "ratio", "alone GB/s", "wire GB/s", "wire/alone", "per core GB/s", "per core/alone"]
    ]
    rows += [list(result.values()) for result in results]
    file = sys.stderr if options.json else None
    print_table(
        [["connectors", "slots/s", "core-ms a slot"], *(list(r.values()) for r in several)], file
    )
    values = {"game": options.game, "unrolls": results, "asked": 0.8, "connectors": several}
    finish("wire", values, rows, options)


def measure(game: str, envs: int, seconds: float, rounds: int) -> dict[str, float]:
    """Medians over the rounds, for unrolls of ``envs`` environments."""
    spec = make_spec(envs)
    spawn = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "frames.npy", play(game, envs))
        store, board = SlotStore(spec, SLOTS), WeightsBoard.create(1)
        welcome = Welcome(1, 0, spec, ParamLayout((("w", (1,)),)), {})
        host = ShmHost(folder / "learner.sock", welcome, [board], store)
        here, there = spawn.Pipe()
        children = [
            spawn.Process(target=receive, args=(there, folder, spec, seconds, rounds)),
            spawn.Process(target=send, args=(folder, spec), daemon=True),
        ]
        for child in children:
            child.start()
        while not here.poll():
            host.poll(0.1)
            store.collect()
            while store.ready:
                store.release(store.ready.popleft())
        result: dict[str, float] = here.recv()
        children[1].terminate()
        for child in children:
            child.join()
        host.close()
    return {"mb": spec.payload_nbytes / 1e6, **result}


def compare_connectors(game: str, seconds: float, rounds: int) -> list[dict[str, float]]:
    """Medians over the rounds for one connector and for two, with two senders."""
    spec = make_spec(SIZES[0])
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name:
        np.save(Path(name) / "frames.npy", play(game, SIZES[0]))
        for number in range(rounds):
            for count, measured in found.items():
                folder = Path(name) / f"{number}-{count}"
                folder.mkdir()
                (folder / "frames.npy").symlink_to(Path(name) / "frames.npy")
                measured.append(slots_through(count, spec, folder, seconds))
    return [
        {
            "connectors": count,
            "slots_s": statistics.median(rate for rate, _ in measured),
            "core_ms": statistics.median(core_ms for _, core_ms in measured),
        }
        for count, measured in found.items()
    ]


def slots_through(count: int, spec: SlotSpec, folder: Path, seconds: float) -> tuple[float, float]:
    """Slots per second through ``count`` connectors, and their processor time for one, in ms."""
    spawn = mp.get_context("spawn")
    store, board = SlotStore(spec, 2 * SLOTS), WeightsBoard.create(1)
    welcome = Welcome(1, 0, spec, ParamLayout((("w", (1,)),)), {})
    host = ShmHost(folder / "learner.sock", welcome, [board], store)
    connectors = [
        spawn.Process(target=connect, args=(folder, count, i), daemon=True) for i in range(count)
    ]
    senders = [
        spawn.Process(target=send, args=(folder, spec, actor), daemon=True) for actor in range(2)
    ]
    for child in (*connectors, *senders):
        child.start()

    def serve(until_s: float, least: int = 0) -> int:
        taken = 0
        while time.perf_counter() < until_s or taken < least:
            host.poll(0.1)
            store.collect()
            while store.ready:
                store.release(store.ready.popleft())
                taken += 1
        return taken

    try:
        serve(0.0, least=20 * SLOTS)
        before_s, started_s = sum(map(core_s, connectors)), time.perf_counter()
        taken = serve(started_s + seconds)
        wall_s = time.perf_counter() - started_s
        return taken / wall_s, (sum(map(core_s, connectors)) - before_s) / taken * 1000
    finally:
        for child in (*connectors, *senders):
            child.terminate()
            child.join()
        host.close()
        store.close()
        board.close()


def core_s(process: BaseProcess) -> float:
    """Processor time of a process so far, in seconds."""
    times = psutil.Process(process.pid).cpu_times()
    return float(times.user + times.system)


def connect(folder: Path, count: int, index: int) -> None:
    """One of ``count`` connectors."""
    keep_freed_memory()
    link = ShmLink(folder / "learner.sock", None, want=0, lane=True)
    addresses = tuple(address_of_rank(address(folder), i) for i in range(count))
    share = ActorShare(addresses, index)
    receiver = Receiver(link, addresses[index], folder / "learner.sock", share=share)
    while True:
        receiver.turn(0.01)


def make_spec(envs: int) -> SlotSpec:
    return SlotSpec(UNROLL, envs, (Column("obs", "|u1", (4, 84, 84), "unroll+1"),))


def play(game: str, envs: int) -> Frames:
    """``[UNROLLS, UNROLL + 1, envs, 4, 84, 84]`` of a game played at random."""
    from ale_py import AtariVectorEnv

    vector = AtariVectorEnv(game, envs)
    rng = np.random.default_rng(0)
    actions = rng.integers(getattr(vector.single_action_space, "n"), size=(4000, envs))  # noqa: B009
    obs, _ = vector.reset(seed=0)
    frames = np.empty((UNROLLS, UNROLL + 1, *obs.shape), np.uint8)
    for row, action in zip(frames.reshape(-1, *obs.shape), actions, strict=False):
        row[...] = vector.step(action)[0]
    vector.close()
    return frames


def encode_all(folder: Path, spec: SlotSpec) -> list[wire.Parts]:
    """Messages of the unrolls, each with memory of its own."""
    messages: list[wire.Parts] = []
    for frames in np.load(folder / "frames.npy"):
        parts = wire.SlotEncoder(spec, "snappy").encode(
            np.zeros((), HEADER), [frames.reshape(-1)], run_id=1
        )
        messages.append([bytes(part) for part in parts])
    return messages


def send(folder: Path, spec: SlotSpec, actor: int = 1) -> None:
    """Send the unrolls in turn, as granted."""
    messages = encode_all(folder, spec)
    client = Client(context(folder), address(folder), actor=actor, spec=spec, want=SLOTS)
    client.join()
    while True:
        if client.wait_turn(1.0):
            parts = messages[client.stream.next % UNROLLS]
            head = wire.decode(parts).head._replace(actor=actor, sequence=client.stream.next)
            client.send_slot(wire.encode(head, wire.verify(wire.decode(parts)), parts[2:]), 0)


def receive(results: Connection, folder: Path, spec: SlotSpec, seconds: float, rounds: int) -> None:
    """The connector process: measure in turns."""
    keep_freed_memory()  # as the connector does
    link = ShmLink(folder / "learner.sock", None, want=0, lane=True)
    coded = [parts[2] for parts in encode_all(folder, spec)]
    receiver = Receiver(link, address(folder), folder / "learner.sock")
    alone, through, per_core = [], [], []
    for _ in range(rounds):
        alone.append(decompress_alone(coded, spec, seconds))
        by_wall, by_core = transfer(receiver, seconds)
        through.append(by_wall)
        per_core.append(by_core)
    median = statistics.median
    results.send(
        {
            "compression": UNROLLS * spec.payload_nbytes / sum(map(len, coded)),
            "alone_gb_s": median(alone),
            "wire_gb_s": median(through),
            "wire_ratio": median(t / a for t, a in zip(through, alone, strict=True)),
            "core_gb_s": median(per_core),
            "core_ratio": median(c / a for c, a in zip(per_core, alone, strict=True)),
        }
    )
    receiver.close()
    link.close()


def decompress_alone(coded: list[wire.Buffer], spec: SlotSpec, seconds: float) -> float:
    """GB/s of decompression into slots of shared memory, per core."""
    arena = Arena.shared(SLOTS * spec.payload_nbytes, "yardstick")
    slots = arena.bytes.reshape(SLOTS, -1)
    slots[...] = 0
    done, started_s = 0, time.process_time()
    while time.process_time() < started_s + seconds:
        cramjam.snappy.decompress_raw_into(coded[done % UNROLLS], slots[done % SLOTS].data)
        done += 1
    rate = done * spec.payload_nbytes / (time.process_time() - started_s) / 1e9
    arena.close()
    return rate


def transfer(receiver: Receiver, seconds: float) -> tuple[float, float]:
    """GB/s of unrolls stored: by the clock, and by the processor time of this process."""
    while receiver.received["slots"] < 2 * SLOTS:
        receiver.turn(0.01)
    before = receiver.received["raw_nbytes"]
    wall_s, core_s = time.perf_counter(), time.process_time()
    while time.perf_counter() < wall_s + seconds:
        receiver.turn(0.01)
    stored = (receiver.received["raw_nbytes"] - before) / 1e9
    return stored / (time.perf_counter() - wall_s), stored / (time.process_time() - core_s)


def address(folder: Path) -> str:
    return f"ipc://{folder}/wire"


def context(folder: Path) -> RoleContext:
    page, _ = StatusPage.create()
    channel, end = Channel.pair()
    ENDS.append(end)
    return RoleContext("actor", 0, 0, 1, folder, folder, channel, page)


if __name__ == "__main__":
    main()
