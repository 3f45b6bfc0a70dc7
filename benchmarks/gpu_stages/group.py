"""Two learners over gloo on one device.

First each collective that codecs use, between two ranks of this process. Then a run of two
learners, which compares their parameters after every update. NCCL refuses two learners on one GPU,
so their group takes gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu_stages.finding import Finding, Options
from penstock.bench.whole import train
from penstock.device.choice import device_of
from penstock.learner.group.collective import GroupCollective

WORLD, SIZE, UPDATES = 2, 1 << 16, 20
WAIT_S = 30.0


def run(options: Options) -> Iterator[Finding]:
    for name, check in COLLECTIVES.items():
        try:
            yield Finding(f"gloo, {name}", all(on_ranks(check, options)))
        except Exception as error:  # go on with the other checks
            yield Finding(f"gloo, {name}", False, f"{type(error).__name__}: {error}")
    summary = train(
        "synthetic",
        f"learner.count={WORLD}",
        f"learner.device={options.place}",
        f"stop.learner_steps={UPDATES}",
        "learner.reduce.check_every=1",  # fails where parameters differ
        "stop.return=null",
        "run.max_restarts=0",
        "stop.minutes=0.5",  # a group that never forms is tried again and again
    )
    yield Finding("two learners trained", summary["learner_steps"] >= UPDATES)


def on_ranks(check: Callable[[GroupCollective, Tensor], bool], options: Options) -> list[bool]:
    """What ``check`` returns on each rank, a thread of this process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    device = device_of(torch.device(options.place))

    def one(rank: int) -> bool:
        device.enter_thread()
        group: Any = dist.ProcessGroupGloo(store, rank, WORLD, timedelta(seconds=WAIT_S))
        values = torch.full((SIZE,), float(rank + 1), device=options.place)
        return check(GroupCollective(group), values)

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(one, range(WORLD)))


def _sum(ring: GroupCollective, values: Tensor) -> bool:
    ring.all_reduce(values)
    return bool((values == 3).all())


def _maximum(ring: GroupCollective, values: Tensor) -> bool:
    ring.all_reduce_max(values)
    return bool((values == 2).all())


def _all_to_all(ring: GroupCollective, values: Tensor) -> bool:
    out = torch.zeros_like(values)
    ring.all_to_all(out, values)
    return out.view(WORLD, -1)[:, 0].tolist() == [1, 2]


def _all_gather(ring: GroupCollective, values: Tensor) -> bool:
    out = torch.zeros(WORLD * SIZE, device=values.device)
    ring.all_gather(out, values)
    return out.view(WORLD, -1)[:, 0].tolist() == [1, 2]


COLLECTIVES: dict[str, Callable[[GroupCollective, Tensor], bool]] = {
    "all_reduce": _sum,
    "all_reduce_max": _maximum,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
}
