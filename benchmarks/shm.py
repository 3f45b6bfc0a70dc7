"""Shared memory: one writer process, one reader that gathers slots into batches.

The writer fills each slot with one copy, as an environment would; the reader copies it into a
staging batch and frees it. So each byte is copied twice, by two processes at once. The limit beside
it is one process that copies into memory of the same size, without any protocol.

Then a large batch such as a GPU takes, 8 slots of 64 environments of Atari frames that are written
once, gathered by one thread and by two in turns, beside one large copy of as many bytes.

    python benchmarks/shm.py [--seconds 5] [--slot-mb 2] [--json] [--save]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import finish, median_of, parser
from penstock.algos.slots import FLAGS
from penstock.core.interfaces import Welcome
from penstock.core.params import ParamLayout, Stamp
from penstock.core.specs import Column, SlotSpec
from penstock.learner.sources.staging import Copier, StagingBatch
from penstock.replay import Accounting, SlotQueue
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard

UNROLL, ENVS = 20, 4
LARGE_ENVS, LARGE_SLOTS, ROUNDS = 64, 8, 60


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=5.0)
    args.add_argument("--slot-mb", type=float, default=2.0)
    args.add_argument("--slots", type=int, default=4)
    args.add_argument("--write-to", help=argparse.SUPPRESS)
    options = args.parse_args()
    spec = make_spec(options.slot_mb)
    if options.write_to:
        write(Path(options.write_to), spec)
        return
    through = transfer(spec, options.slots, options.seconds)
    limit, _ = median_of(lambda: copy_rate(spec.payload_nbytes, options.slots))
    gathering = gather_rates()
    result = {
        "slot_mb": spec.payload_nbytes / 1e6,
        "slots": options.slots,
        "gb_per_s": through,
        "copy_gb_per_s": limit,
        "ratio": through / limit,
        "asked_gb_per_s": 4.0,
        "gather": gathering,
    }
    rows: list[list[Any]] = [
        ["what", "GB/s"],
        [f"writer -> slots -> batch, {spec.payload_nbytes / 1e6:.1f} MB slots", through],
        ["one process copying alone", limit],
        ["ratio", through / limit],
        *([f"large batch: {name}", rate] for name, rate in gathering.items()),
    ]
    finish("shm", result, rows, options)


def make_spec(slot_mb: float) -> SlotSpec:
    cell = int(slot_mb * 1e6 / ((UNROLL + 1) * ENVS))
    return SlotSpec(UNROLL, ENVS, (Column("obs", "u1", (cell,), "unroll+1"),))


def transfer(spec: SlotSpec, slots: int, seconds: float) -> float:
    """GB/s of payload that arrive in batches."""
    store = SlotStore(spec, slots)
    board = WeightsBoard.create(1)
    board.publish(np.zeros(1, np.float32), Stamp(0, 0))
    welcome = Welcome(1, 0, spec, ParamLayout((("w", (1,)),)), {})
    batch = np.empty((UNROLL + 1, ENVS, *spec.columns[0].shape), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "learner.sock"
        host = ShmHost(path, welcome, [board], store)
        queue = SlotQueue(store, Accounting(), max_policy_lag=1 << 60)
        command = [sys.executable, *sys.argv, "--write-to", str(path)]
        writer = subprocess.Popen(command)
        try:
            pump(host, queue, batch, 1.0)
            began_s = time.perf_counter()
            taken = pump(host, queue, batch, seconds)
            return taken * spec.payload_nbytes / (time.perf_counter() - began_s) / 1e9
        finally:
            writer.terminate()
            writer.wait()
            host.close()
            store.close()


def pump(host: ShmHost, queue: SlotQueue, batch: np.ndarray, seconds: float) -> int:
    """Take slots for ``seconds`` from the first one on; returns how many."""
    taken, end_s = 0, None
    while end_s is None or time.perf_counter() < end_s:
        slots = queue.take(1, 0)
        if not slots:
            host.poll(0.1)
            continue
        end_s = end_s or time.perf_counter() + seconds
        np.copyto(batch, slots[0].columns["obs"])
        queue.release(slots)
        taken += 1
    return taken


def write(path: Path, spec: SlotSpec) -> None:
    """Fill slots until terminated."""
    link = ShmLink(path, spec, want=spec.envs)
    source = np.random.default_rng(0).integers(0, 256, spec.payload_nbytes, np.uint8)
    obs = source.reshape(UNROLL + 1, ENVS, -1)
    sequence = 0
    while True:
        with link.slot(1.0) as slot:
            if slot is None:
                continue
            np.copyto(slot.columns["obs"], obs)
            slot.header["sequence"] = sequence
            sequence += 1


def gather_rates() -> dict[str, float]:
    """GB/s of a gather of slots into a batch, by threads, and of one copy; their ratios."""
    frame = Column("obs", "|u1", (84, 84), "unroll+1")
    counted = (
        *(Column(flag, "|b1") for flag in FLAGS),
        Column("policy_version", "<u4"),
        Column("episode_return", "<f4"),
        Column("episode_length", "<i4"),
    )
    spec = SlotSpec(UNROLL, LARGE_ENVS, (frame, *counted))
    store, device = SlotStore(spec, LARGE_SLOTS, shared=True), torch.device("cpu")
    slots = store.slots
    for slot in slots:
        for raw in slot.payload:
            raw[...] = 1
    copiers = {threads: Copier(threads) for threads in (1, 2)}
    batches = {
        threads: StagingBatch(spec, LARGE_SLOTS, device, copier, store=store)
        for threads, copier in copiers.items()
    }
    nbytes = spec.payload_nbytes * LARGE_SLOTS
    source, target = (np.ones(nbytes, np.uint8) for _ in range(2))
    works: dict[str, Callable[[], None]] = {
        "1 thread": lambda: batches[1].gather(slots),
        "2 threads": lambda: batches[2].gather(slots),
        "one copy": lambda: np.copyto(target, source),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            began_s = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began_s)
    for copier in copiers.values():
        copier.close()
    store.close()
    rates = {name: nbytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    best = {name: nbytes / min(times) / 1e9 for name, times in seconds.items()}
    rates |= {f"{name}, at its best": rate for name, rate in best.items()}
    for kind, known in (("", rates), (", at their best", best)):
        rates[f"2 threads / 1 thread{kind}"] = known["2 threads"] / known["1 thread"]
        rates[f"2 threads / one copy{kind}"] = known["2 threads"] / known["one copy"]
    return rates


def copy_rate(nbytes: int, slots: int) -> float:
    """GB/s of one process that copies one buffer into ``slots`` others in turn."""
    source = np.ones(nbytes, np.uint8)
    targets = np.ones((slots, nbytes), np.uint8)
    copies = max(8, int(4e9 / nbytes))
    began_s = time.perf_counter()
    for i in range(copies):
        np.copyto(targets[i % slots], source)
    return copies * nbytes / (time.perf_counter() - began_s) / 1e9


if __name__ == "__main__":
    main()
