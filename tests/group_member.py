"""A member of a group of learners: ``python group_member.py DIR RANK WORLD SCENARIO ...``.

It trains a small network on batches made from a seed and its rank, and writes what it has to
DIR/<name>-<rank>.npy; tests compare the members with each other and with one learner alone.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.algos.slots import RETURN
from penstock.configs.load import resolve
from penstock.core.specs import HEADER
from penstock.envs import probe
from penstock.learner.group.process_group import LearnerGroup, meet, use_interface
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.sync.bsp import Bsp
from penstock.learner.sync.gradient_sync import ControlMessage, GroupLostError
from penstock.learner.trainer import Trainer
from penstock.profiling.ledger import TimeLedger
from penstock.transport.shm.store import Slot

ENVS, UNROLL = 8, 6
OPTIONS = (f"actors.envs={ENVS}", f"actors.unroll={UNROLL}", "learner.reduce.bucket_mb=0.005")


def make_trainer(*options: str, envs: int = ENVS) -> Trainer:
    config = resolve("cartpole", [*OPTIONS, f"actors.envs={envs}", *options])
    return Trainer(config, probe(config.env))


def make_slot(trainer: Trainer, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Columns of one slot, by a seed."""
    rng = np.random.default_rng(seed)
    columns = trainer.spec.views(trainer.spec.zeros())
    columns["obs"][...] = rng.normal(size=columns["obs"].shape)
    columns["action"][...] = rng.integers(0, 2, columns["action"].shape)
    columns["reward"][...] = rng.normal(size=columns["reward"].shape)
    columns["behaviour_logp"][...] = np.log(0.5)
    columns["alive"][...] = rng.random(columns["alive"].shape) < 0.5 + 0.1 * (seed % 5)
    if RETURN in columns:
        columns[RETURN][...] = rng.normal(size=columns[RETURN].shape)
    return columns


def stage(trainer: Trainer, slots: list[dict[str, np.ndarray[Any, Any]]]) -> StagingBatch:
    """Slots side by side."""
    staged = StagingBatch(trainer.spec, len(slots), trainer.device)
    held = []
    for columns in slots:
        header = np.zeros((), HEADER)
        header["steps"] = np.count_nonzero(columns["alive"])
        held.append(Slot(0, header, (), columns))
    staged.gather(held)
    return staged


class Member:
    """One rank of a group of ``world``."""

    def __init__(self, where: Path, rank: int, world: int, *options: str) -> None:
        use_interface("lo")
        self.where, self.rank = where, rank
        own = [each.removeprefix(f"{rank}:") for each in options]  # "1:a.b=c" is of rank 1 alone
        options = tuple(each for each in own if not each[0].isdigit())
        self.trainer = make_trainer(*options, f"learner.count={world}", f"actors.count={world}")
        self.enter(0, list(range(world)))

    def enter(self, epoch: int, members: list[int]) -> None:
        path = str(self.where / f"group-{epoch}")
        store = dist.FileStore(path, len(members))  # type: ignore[attr-defined]
        meet(store, members, self.rank, {}, 30.0, lambda: True)
        cfg = self.trainer.config.learner
        self.group = LearnerGroup(store, epoch, members, self.rank, self.trainer.device, cfg.reduce)
        self.trainer.sync = Bsp(
            self.group,
            self.trainer.optimizers(),
            cfg,
            TimeLedger(),
            reducing=TimeLedger(),
            shared=self.trainer.shared_statistics(),
            drain=self.trainer.queue.drain,
        )

    def step(self, seed: int | None) -> float:
        """One batch together with the others, without one of its own where ``seed`` is None; the
        samples of all."""
        trainer = self.trainer
        batch = None if seed is None else stage(trainer, [make_slot(trainer, seed)])
        plan = trainer.plan_updates(batch)
        word = ControlMessage(plan.counts, trainer.progress.growth())
        said = trainer.sync.sync_control(word)
        trainer.progress.commit(word.growth, said.growth)
        trainer.step(batch, plan, totals=said.counts)
        return float(said.counts.sum())

    def write(self, name: str, values: Any) -> None:
        np.save(self.where / f"{name}-{self.rank}.npy", np.asarray(values))


def equal(member: Member, *_: str) -> None:
    """Three steps; in the second, rank 1 has no samples."""
    for number in range(3):
        member.write(f"values{number}", member.trainer.optimizer.values.numpy())
        member.step(None if number == 1 and member.rank == 1 else 10 * number + member.rank)
        member.write(f"grads{number}", member.trainer.optimizer.grads.numpy())
    member.write("values", member.trainer.optimizer.values.numpy())
    member.write("steps", member.trainer.progress.trained_steps)


def killed(member: Member, when: str) -> None:
    """The last rank is killed in its third step; the others go on without it."""
    world = member.group.world
    trainer = member.trainer
    for number in range(6):
        try:
            if number == 2 and member.rank == int(when.partition("@")[2] or world - 1):
                _die(member, when.partition("@")[0])
            member.step(10 * number + member.rank)
        except GroupLostError:
            assert isinstance(trainer.sync, Bsp)
            trainer.sync.close()
            trainer.on_regroup()
            gone = int(when.partition("@")[2] or world - 1)
            member.enter(1, [rank for rank in range(world) if rank != gone])
            places = member.group.gather([trainer.progress.learner_steps])
            source = places.index(max(places))
            values = {"values": trainer.optimizer.values.numpy()}
            got = member.group.broadcast(values, source)
            trainer.optimizer.values.copy_(torch.from_numpy(got["values"]))
    member.write("values", trainer.optimizer.values.numpy())


def _die(member: Member, when: str) -> None:
    """At a point of the step: before all others hear of it, in its middle, or near its end."""

    def kill(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if when == "control":
        kill()
    elif when == "collective":  # after the first bucket has been reduced
        sync = member.trainer.sync
        assert isinstance(sync, Bsp)
        codec = next(iter(sync._reducers.values())).codec
        reduce, calls = codec.reduce, []

        def once(*args: Any) -> None:
            calls.append(1)
            reduce(*args) if len(calls) == 1 else kill()

        codec.reduce = once  # type: ignore[assignment, method-assign]
    elif when == "optimizer":  # between backward and optimizer step
        member.trainer.optimizer.step = kill  # type: ignore[assignment, method-assign]


def apart(member: Member, *_: str) -> None:
    """Rank 1 comes apart in one value; the check must say where."""
    member.step(member.rank)
    if member.rank == 1:
        span = member.trainer.optimizer.parts[2]
        member.trainer.optimizer.values[span.start] += 1e-3
    try:
        member.trainer.sync.check_equal()  # type: ignore[attr-defined]
    except RuntimeError as error:
        member.write("said", str(error))


def statistics_apart(member: Member, name: str) -> None:
    """Rank 1 comes apart in a statistic, after a step that left them equal."""
    trainer = member.trainer
    member.step(member.rank)
    trainer.sync.check_equal()  # type: ignore[attr-defined]
    if member.rank == 1:
        trainer.shared_statistics()[name][0] += 1e-3
    try:
        trainer.sync.check_equal()  # type: ignore[attr-defined]
    except RuntimeError as error:
        member.write("said", f"equal | {error}")


SCENARIOS: dict[str, Any] = {
    "equal": equal,
    "killed": killed,
    "apart": apart,
    "statistics_apart": statistics_apart,
}


def main() -> None:
    where, rank, world, scenario, *rest = sys.argv[1:]
    options = [word for word in rest if "=" in word]
    words = [word for word in rest if "=" not in word]
    torch.set_num_threads(1)
    member = Member(Path(where), int(rank), int(world), *options)
    SCENARIOS[scenario](member, *words or [""])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
