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
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.replay.errors import ReplayError
from penstock.replay.remote import ReplayClient

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
    obs = rows(rng)
    while True:
        following = rows(rng)
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
        ours = (batch.action == 0) | (batch.action == 1)  # a hostile client's are any numbers
        if (batch.obs != batch.obs[:, :1])[ours].any():
            raise SystemExit(f"a row is torn: {batch.obs[ours]}")
        client.update_priorities(batch.keys, rng.random(BATCH))
        now_s = time.monotonic()
        if now_s - told_s >= INTERVAL_S:
            told_s = now_s
            # Counters of all clients: time, which only grows while batches come.
            figure = time.monotonic_ns() // 1_000_000
            line = dict.fromkeys(("env_steps", "trained_steps", "learner_steps"), figure)
            os.write(out, json.dumps(line).encode() + b"\n")
        time.sleep(PAUSE_S)


def rows(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Observations of equal numbers, so that a row that is torn is seen."""
    return np.repeat(rng.random((ENVS, 1), np.float32), 4, axis=1)


if __name__ == "__main__":
    main()
