"""A client of `penstock replay serve` in a chaos session: adds and samples until it is ended.

It appends lines like those of a run's metrics to a file that all clients share.

    python benchmarks/faults/replay_client.py ADDRESS FILE
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress

import numpy as np

from penstock.configs.errors import UserError
from penstock.replay.errors import ReplayError
from penstock.serving import ReplayClient

ENVS, BATCH = 4, 32
INTERVAL_S = 0.1
PATIENCE_S = 5.0
PAUSE_S = 0.002
ERRORS = (ReplayError, UserError, TimeoutError)


def main() -> None:
    address, path = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    while True:
        with suppress(*ERRORS), ReplayClient(address, patience_s=PATIENCE_S) as client:
            work(client, out)


def work(client: ReplayClient, out: int) -> None:
    """Until the server is gone, or is another one."""
    rng = np.random.default_rng(os.getpid())
    told_s = 0.0
    obs = rng.random((ENVS, 4), np.float32)
    while True:
        following = rng.random((ENVS, 4), np.float32)
        ended = rng.random(ENVS) < 0.05
        client.add(
            obs=obs,
            action=rng.integers(0, 2, ENVS),
            reward=np.ones(ENVS, np.float32),
            terminated=ended,
            truncated=np.zeros(ENVS, bool),
            next_obs=following,
        )
        obs = following
        batch = client.sample(BATCH, timeout_s=PATIENCE_S)
        if not np.isfinite(batch.obs).all():
            raise SystemExit(f"a batch holds {batch.obs}")
        client.update_priorities(batch.keys, rng.random(BATCH))
        now_s = time.monotonic()
        if now_s - told_s >= INTERVAL_S:
            told_s = now_s
            # Counters of all clients: time, which only grows while batches come.
            figure = time.monotonic_ns() // 1_000_000
            line = dict.fromkeys(("env_steps", "trained_steps", "learner_steps"), figure)
            os.write(out, json.dumps(line).encode() + b"\n")
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
