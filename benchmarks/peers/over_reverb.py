"""Reverb over localhost, measured as benchmarks/replay_network.py measures ours.

Not part of the package: it runs under a Python of its own, since Reverb brings TensorFlow, which
wants another numpy than the other peers (`pip install "dm-reverb[tensorflow]"`), and is called by
`benchmarks/replay.py --reverb PYTHON`:

    python benchmarks/peers/reverb.py f32 --seconds 2

prints one JSON object with transitions per second, added and sampled. Server and client are
processes of their own; of Reverb's two ways to sample, the faster counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import reverb

BATCH, CAPACITY = 256, 100_000
TABLE = "replay"


def step_of(kind: str) -> list[Any]:
    """A transition: obs, next_obs, action, reward, terminated."""
    obs = np.zeros(4, np.float32)
    if kind == "atari":
        obs = np.random.default_rng(0).integers(0, 255, (4, 84, 84), np.uint8)
    return [obs, obs, np.int64(0), np.float32(0), np.bool_(False)]


def serve() -> None:
    """Until killed; says its port first."""
    sampler, remover = reverb.selectors.Uniform(), reverb.selectors.Fifo()
    limiter = reverb.rate_limiters.MinSize(1)
    server = reverb.Server([reverb.Table(TABLE, sampler, remover, CAPACITY, limiter)])
    print(server.port, flush=True)
    server.wait()


def rate(rows: int, call: Callable[[], object], seconds: float) -> float:
    count, began_s = 0, time.perf_counter()
    while time.perf_counter() < began_s + seconds:
        call()
        count += rows
    return count / (time.perf_counter() - began_s)


def added(client: Any, step: list[Any], seconds: float) -> float:
    with client.trajectory_writer(num_keep_alive_refs=1) as writer:

        def add() -> None:
            for _ in range(BATCH):
                writer.append(step)
                writer.create_item(TABLE, 1.0, [column[-1:] for column in writer.history])
            writer.flush()

        return rate(BATCH, add, seconds)


def sampled(client: Any, address: str, step: list[Any], seconds: float) -> float:
    import tensorflow as tf

    by_client = rate(BATCH, lambda: list(client.sample(TABLE, BATCH)), seconds)
    data = reverb.TrajectoryDataset(
        address,
        TABLE,
        dtypes=tuple(tf.as_dtype(np.asarray(column).dtype) for column in step),
        shapes=tuple(tf.TensorShape((1, *np.shape(column))) for column in step),
        max_in_flight_samples_per_worker=2 * BATCH,
    ).batch(BATCH)
    batches = iter(data)
    next(batches)
    return max(by_client, rate(BATCH, lambda: next(batches), seconds))


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("kind", choices=["f32", "atari", "serve"])
    args.add_argument("--seconds", type=float, default=2.0)
    options = args.parse_args()
    if options.kind == "serve":
        serve()
    command = [sys.executable, __file__, "serve"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = f"localhost:{int(server.stdout.readline())}"
        client, step = reverb.Client(address), step_of(options.kind)
        client.server_info(timeout=30)
        rates = {"added": added(client, step, options.seconds)}
        rates["sampled"] = sampled(client, address, step, options.seconds)
        print(json.dumps(rates))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
