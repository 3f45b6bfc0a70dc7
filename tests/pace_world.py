"""Two learners of one pace, each in a thread: a real group between them, or a real server."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.control import Channel
from penstock.core.params import Arrays, Floats
from penstock.core.role import RoleContext
from penstock.envs import probe
from penstock.learner.extras.parameter_server.server import ParameterServer
from penstock.learner.group.collective import GroupCollective
from penstock.learner.sync.gradient_sync import ControlMessage, GradientSync
from penstock.learner.sync.pace import Pace, PaceContext
from penstock.learner.sync.registry import make_pace
from penstock.learner.trainer import Trainer
from penstock.profiling.status import StatusPage

WORLD = 2
SAMPLES = 10.0
MAKING = threading.Lock()  # a trainer seeds the generator of the whole process
FEW, MOST = 4, 60  # turns until rank 0 stops, and until both must have heard of it
SMALL = ("actors.envs=2", "actors.unroll=4", "learner.device=cpu", "learner.updates_per_batch=1")


class ThreadGroup:
    """A `LearnerGroup` of threads, as far as a pace uses it."""

    def __init__(self, store: Any, rank: int) -> None:
        self.world, self.rank, self.members = WORLD, rank, tuple(range(WORLD))
        self.control = _collective(store, "control", rank)
        self.gradients = _collective(store, "gradients", rank)

    def collect_states(self, own: Arrays) -> Arrays:
        return own

    def restore_own(self, states: Arrays) -> Arrays:
        return states

    def close(self) -> None:
        pass


def _collective(store: Any, name: str, rank: int) -> GroupCollective:
    own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    group: Any = dist.ProcessGroupGloo(own, rank, WORLD, timedelta(seconds=20))
    return GroupCollective(group)


class Learner(NamedTuple):
    """What a learner has when it has ended."""

    start: Floats
    values: Floats
    norms: list[float]
    heard_stop: bool
    state: Arrays | None
    world: int


def config_of(pace: str, *options: str) -> Config:
    count = (f"learner.count={WORLD}", f"actors.count={WORLD}", f"learner.pace={pace}")
    return resolve("cartpole", [*SMALL, *count, *options])


@contextmanager
def pace_of(
    folder: Path, config: Config, rank: int, servers: tuple[str, ...]
) -> Iterator[tuple[Pace, RoleContext, Trainer]]:
    """The pace of one learner, which has not joined the others."""
    page, descriptor = StatusPage.create()
    ours, theirs = Channel.pair()
    channel = Channel(theirs)
    ctx = RoleContext("learner", rank, 0, 1, folder, folder, channel, page, config, learner=rank)
    ctx.servers = servers
    try:
        with MAKING:
            trainer = Trainer(config, probe(config.env), ctx.ledger)
        yield make_pace(PaceContext(ctx, config, trainer)), ctx, trainer
    finally:
        ours.close()
        channel.close()
        page.close()
        os.close(descriptor)


@contextmanager
def server_of(folder: Path, config: Config) -> Iterator[tuple[str, ...]]:
    """The address of a parameter server in a thread; none for a pace that needs none."""
    if not config.learner.served:
        yield ()
        return
    address, ends = f"ipc://{folder}/server", threading.Event()
    server = ParameterServer(config.learner, address)

    def run() -> None:
        while not ends.is_set():
            server.turn(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield (address,)
    finally:
        ends.set()
        thread.join()
        server.close()


def train_two(folder: Path, config: Config) -> list[Learner]:
    """Both learners join, step in the order of calls of the seam, and stop by rank 0's word."""
    store, joined = dist.HashStore(), threading.Barrier(WORLD)  # type: ignore[attr-defined]
    with server_of(folder, config) as servers, ThreadPoolExecutor(WORLD) as pool:

        def one(rank: int) -> Learner:
            with pace_of(folder, config, rank, servers) as (pace, _, trainer):
                group: Any = None if config.learner.served else ThreadGroup(store, rank)
                start = trainer.optimizer.values.numpy().copy()
                sync = pace.join(group, 0)
                assert sync is not None
                joined.wait()
                try:
                    return _work(sync, trainer, rank, start)
                finally:
                    sync.close()

        return list(pool.map(one, range(WORLD)))


def _work(sync: GradientSync, trainer: Trainer, rank: int, start: Floats) -> Learner:
    optimizer, progress, norms = trainer.optimizer, trainer.progress, list[float]()
    stops = False
    for turn in range(MOST):
        own = ControlMessage(np.array([SAMPLES]), progress.growth(), stop=rank == 0 and turn >= FEW)
        control = sync.sync_control(own)
        progress.commit(own.growth, control.growth)
        stops = control.stop
        if stops:
            break
        total = float(control.counts.sum())
        optimizer.zero_grad()
        sync.prepare_backward(optimizer, total)
        optimizer.grads.fill_(0.1 * (rank + 1) * SAMPLES)
        norms.append(float(sync.step(optimizer, total, 0)))
    state = sync.state_dict(saves=rank == 0)
    values = optimizer.values.numpy().copy()
    return Learner(start, values, norms, stops, state, sync.world)
