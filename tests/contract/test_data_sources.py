"""What every data source that actors feed must do: `core.interfaces.DataSource` over each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.configs.load import resolve
from penstock.core.interfaces import StepResult
from penstock.envs import probe
from penstock.launch.lockstep import FreshUnrolls
from penstock.learner.factory import AnyTrainer, make_trainer
from penstock.learner.sources.source import ActorSource
from penstock.learner.sources.transitions import ReplayDataSource
from penstock.learner.sources.unrolls import UnrollSource
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Accounting
from penstock.transport.link import Welcome
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.slot_writer import SlotWriter
from penstock.transport.shm.weights_board import WeightsBoard

STEPS = 8  # of a slot: 4 of 2 environments
SMALL = (
    *("actors.envs=2", "actors.unroll=4", "actors.count=1", "transport.slots=3"),
    *("model.hidden=[8]", "learner.device=cpu"),
)
REPLAY = (
    *("replay.capacity=64", "replay.min_size=16", "replay.batch_size=8"),
    "replay.samples_per_insert=2",
)
FRESH = ("learner.batch_slots=1",)

Make = Callable[[Any, AnyTrainer, Accounting], ActorSource[Any]]
SOURCES: dict[str, tuple[str, tuple[str, ...], Make]] = {
    "unrolls": (
        "cartpole",
        (*FRESH, "learner.prefetch=0"),
        lambda config, trainer, counts: UnrollSource(config, trainer, counts, 1, 1, TimeLedger()),
    ),
    "unrolls ahead": (
        "cartpole",
        (*FRESH, "learner.prefetch=2"),
        lambda config, trainer, counts: UnrollSource(config, trainer, counts, 1, 1, TimeLedger()),
    ),
    "fresh unrolls": ("cartpole", FRESH, FreshUnrolls),
    "replay": (
        "cartpole_dqn",
        (*REPLAY, "replay.prioritized=false"),
        lambda config, trainer, counts: ReplayDataSource(
            config, trainer, counts, 1, 1, TimeLedger()
        ),
    ),
    "prioritized replay": (
        "cartpole_dqn",
        (*REPLAY, "replay.prioritized=true"),
        lambda config, trainer, counts: ReplayDataSource(
            config, trainer, counts, 1, 1, TimeLedger()
        ),
    ),
}


@dataclass
class World:
    source: ActorSource[Any]
    trainer: AnyTrainer
    accounting: Accounting
    writer: SlotWriter
    published: int = 0

    def publish(self) -> None:
        """Play into a slot, if one is lent."""
        if isinstance(self.source, FreshUnrolls):
            self.source.store.lend()  # no thread and no socket does it
        with self.writer.slot(0.2) as slot:
            if slot is None:
                return
            for column in slot.columns.values():
                column[...] = 0
            slot.columns["alive"][...] = True
            if "priority" in slot.columns:
                slot.columns["priority"][...] = 1.0
            header = slot.header
            header["actor"] = header["incarnation"] = header["rows"] = 0
            header["sequence"], header["steps"] = self.published, STEPS
            header["produced_steps"] = (self.published + 1) * STEPS
            header["started_s"] = header["published_s"] = time.monotonic()
        self.published += 1

    def next(self) -> Any:
        """A batch, for which as much is played as the source asks for."""
        ends_s = time.monotonic() + 10.0
        self.publish()
        while (batch := self.source.next(0.1)) is None:
            assert time.monotonic() < ends_s
            self.publish()
        return batch


@pytest.fixture(params=SOURCES)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    target, options, make = SOURCES[request.param]
    config = resolve(target, [*SMALL, *options])
    trainer = make_trainer(config, probe(config.env))
    accounting = Accounting()
    with ExitStack() as held:
        source = make(config, trainer, accounting)
        held.callback(source.store.close)
        board = WeightsBoard.create(trainer.layout.size)
        held.callback(board.close)
        welcome = Welcome(1, 0, trainer.spec, trainer.layout, {})
        host = ShmHost(tmp_path / "s", welcome, board, source.store)
        held.callback(host.close)
        source.open(host)
        held.callback(source.close)
        store = source.store
        lane = store.open_lane(2)
        event = store.lane_event(lane)
        writer = SlotWriter(store.arena, store.geometry, lane, event, store.filled_event)
        yield World(source, trainer, accounting, writer)


def test_there_is_no_batch_before_anything_was_played(world: World) -> None:
    began_s = time.monotonic()
    assert world.source.next(0.05) is None
    assert time.monotonic() - began_s < 2.0
    assert world.source.in_flight_steps() == 0


def test_what_is_played_comes_out_is_trained_on_and_adds_up(world: World) -> None:
    for _ in range(6):
        batch = world.next()
        world.source.release(batch, world.trainer.step(batch))
    assert world.trainer.progress.learner_steps == 6
    world.source.stop()
    assert world.accounting.produced == world.published * STEPS
    assert world.accounting.balance(world.source.in_flight_steps()) == 0
    assert world.accounting.dropped.total() == 0
    assert 0 <= world.source.fill_fraction() <= 1
    assert all(np.isfinite(value) for value in world.source.figures().values())


def test_memory_is_free_again_after_a_release(world: World) -> None:
    for _ in range(3 * len(world.source.store.slots)):
        batch = world.next()  # plays into a slot; none would be left if releases freed nothing
        world.source.release(batch, world.trainer.step(batch))


def test_a_batch_that_was_not_trained_on_counts_as_dropped_or_stays(world: World) -> None:
    """Where the group of learners is lost: a replay keeps its rows, fresh unrolls are gone."""
    batch = world.next()
    world.trainer.plan_updates(batch)
    world.source.release(batch, StepResult(0))
    world.source.stop()
    kept = world.accounting.trained  # of a replay, which counts a step when it is taken in
    waiting = world.source.in_flight_steps()
    lost = world.accounting.dropped["group_lost"]
    assert lost + kept + waiting == world.published * STEPS
    assert lost == (0 if kept else STEPS)
    assert world.accounting.balance(world.source.in_flight_steps()) == 0


def test_saving_and_restoring_is_possible_always(world: World, tmp_path: Path) -> None:
    world.publish()
    world.source.save(tmp_path / "kept", lambda: None)
    assert isinstance(world.source.restore(tmp_path / "nowhere"), str)
