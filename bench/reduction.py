"""The stage `reduction`: two learners on loopback sum gradients of the target's network, in fp32.

    ``python -m penstock.bench.reduction PARENT_PID STORE SECONDS``

is the second learner; it reads the layout of the network from standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.algos.samples import network_shape
from penstock.bench.rates import ROUNDS
from penstock.configs.reduce import ReduceConfig
from penstock.configs.schema import Config
from penstock.core.interfaces import CodecContext
from penstock.core.memory import keep_freed_memory
from penstock.core.params import ParamLayout
from penstock.core.processes import die_with, python
from penstock.envs import probe
from penstock.learner.codecs.buckets import parts_of
from penstock.learner.codecs.registry import make_codec
from penstock.learner.group.collective import GroupCollective

LEARNERS = 2
BURST = 8  # steps back to back; the fastest burst of a round counts
TIMEOUT = timedelta(minutes=4)  # time to import torch and to sum, on a busy machine too


def rounds(config: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Measure reductions of the target's gradients for about ``seconds``.

    Returns:
        Reductions per second in each round, as ``rates``; the number of ``learners``; and the
        number of ``parameters``.
    """
    settings = Config.model_validate(config)
    layout = network_shape(settings, probe(settings.env)).layout

    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        command = python("penstock.bench.reduction", os.getpid(), store, seconds)
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as second_learner:
            try:
                assert second_learner.stdin
                second_learner.stdin.write(json.dumps(layout.to_list()))
                second_learner.stdin.close()
                rates = _rates(store, layout, seconds, rank=0)
            finally:
                second_learner.kill()
    return {"rates": rates, "learners": LEARNERS, "parameters": layout.size}


def _rates(store: Path, layout: ParamLayout, seconds: float, *, rank: int) -> list[float]:
    """Reduce together with the other learner, in `ROUNDS` rounds.

    Args:
        store: file by which the two learners find each other.
        layout: layers of the gradients.
        seconds: duration of all rounds together.
        rank: 0 or 1.

    Returns:
        Reductions per second in each round.
    """
    keep_freed_memory()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=LEARNERS, timeout=TIMEOUT
    )
    assert dist.group.WORLD is not None
    ring = GroupCollective(dist.group.WORLD)

    context = CodecContext(
        cfg=ReduceConfig(codec="none"),
        parts=parts_of((name, torch.empty(shape, device="meta")) for name, shape in layout.entries),
        size=layout.size,
        device=torch.device("cpu"),
        world=LEARNERS,
        rank=rank,
    )
    codec = make_codec(context)
    grads = torch.zeros(layout.size)
    updates = count(1)

    def burst_s() -> float:
        """Returns the seconds that `BURST` reductions take the slower learner.

        Both learners get the same number, so that they end a round together.
        """
        began_s = time.perf_counter()
        for _ in range(BURST):
            codec.begin(next(updates))
            for bucket in codec.buckets:
                codec.reduce(bucket, grads[bucket.start : bucket.stop], ring)
        elapsed_s = torch.tensor([time.perf_counter() - began_s])
        ring.all_reduce_max(elapsed_s)
        return float(elapsed_s)

    burst_s()  # warms up
    rates = []
    for _ in range(ROUNDS):
        bursts = [burst_s()]
        while sum(bursts) < seconds / ROUNDS:
            bursts.append(burst_s())
        rates.append(BURST / min(bursts))
    return rates


def main() -> None:
    """Run the second rank of the measurement, in a process of its own."""
    parent_pid, store, seconds = sys.argv[1:]
    die_with(int(parent_pid), signal.SIGKILL)

    entries = tuple((name, tuple(shape)) for name, shape in json.load(sys.stdin))
    _rates(Path(store), ParamLayout(entries), float(seconds), rank=1)


if __name__ == "__main__":
    main()
