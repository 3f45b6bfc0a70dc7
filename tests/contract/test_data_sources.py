"""Contract of `core.interfaces.DataSource`, over each source that actors feed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from data_algorithms import BURN_IN, train_dqn_on
from penstock.configs.load import resolve
from penstock.configs.policy_lag import batches_ahead
from penstock.configs.schema import Config
from penstock.core.interfaces import (
    SampleSpec,
    StepResult,
    TrainingBatch,
    TransitionSequences,
    Welcome,
)
from penstock.envs import probe
from penstock.learner.factory import AnyTrainer, make_trainer
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.sources.replay import ReplayDataSource
from penstock.learner.sources.source import ActorSource
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.sources.unrolls import UnrollSource
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Accounting, Replay
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotWriter
from penstock.transport.shm.weights_board import WeightsBoard
from waiting import wait_until

VERSION = 5  # of the policy that plays
STEPS = 8  # of a slot: 4 of 2 environments
SMALL = (
    *("actors.envs=2", "actors.unroll=4", "actors.count=1", "transport.slots=3"),
    *("model.hidden=[8]", "learner.device=cpu"),
)
REPLAY = (
    *("replay.capacity=64", "replay.min_size=16", "replay.batch_size=8"),
    *("replay.samples_per_insert=2", "learner.prefetch=0"),
)

AHEAD = ("learner.prefetch=null",)  # as many as suit the source
FRESH = ("learner.batch_slots=1",)

Make = Callable[[Config, AnyTrainer, Accounting], ActorSource[Any]]


def unrolls(config: Config, trainer: AnyTrainer, counts: Accounting) -> ActorSource[Any]:
    return UnrollSource(config, trainer, counts, 1, 1, TimeLedger())


def fresh_unrolls(config: Config, trainer: AnyTrainer, counts: Accounting) -> ActorSource[Any]:
    """As in lockstep mode."""
    return UnrollSource(config, trainer, counts, 1, 1, TimeLedger(), shared=False)


def replay(config: Config, trainer: AnyTrainer, counts: Accounting) -> ActorSource[Any]:
    assert isinstance(trainer, OffPolicyTrainer)
    return ReplayDataSource(config, trainer, counts, 1, 1, TimeLedger())


SEQUENCES = TransitionSequences(length=3, burn_in=BURN_IN, overlap=1)
EVENLY, PRIORITIZED = ("replay.prioritized=false",), ("replay.prioritized=true",)
SOURCES: dict[str, tuple[str, SampleSpec | None, tuple[str, ...], Make]] = {
    "unrolls": ("cartpole", None, (*FRESH, "learner.prefetch=0"), unrolls),
    "unrolls ahead": ("cartpole", None, (*FRESH, "learner.prefetch=2"), unrolls),
    "fresh unrolls": ("cartpole", None, FRESH, fresh_unrolls),
    "replay": ("cartpole_dqn", None, (*REPLAY, *EVENLY), replay),
    "prioritized replay": ("cartpole_dqn", None, (*REPLAY, *PRIORITIZED), replay),
    "replay ahead": ("cartpole_dqn", None, (*REPLAY, *EVENLY, *AHEAD), replay),
    "prioritized replay ahead": ("cartpole_dqn", None, (*REPLAY, *PRIORITIZED, *AHEAD), replay),
    "sequences": ("cartpole_dqn", SEQUENCES, (*REPLAY, *EVENLY), replay),
    "prioritized sequences": ("cartpole_dqn", SEQUENCES, (*REPLAY, *PRIORITIZED), replay),
    "sequences ahead": ("cartpole_dqn", SEQUENCES, (*REPLAY, *PRIORITIZED, *AHEAD), replay),
}


@dataclass
class World:
    source: ActorSource[Any]
    trainer: AnyTrainer
    accounting: Accounting
    writer: SlotWriter
    alone: bool
    """Whether all are in one process."""
    published: int = 0

    def publish(self) -> None:
        """Play into a slot, if one is lent."""
        if self.alone:
            self.source.store.lend()  # no thread and no socket does it
        with self.writer.slot(0.2) as slot:
            if slot is None:
                return
            for column in slot.columns.values():
                column[...] = 0
            slot.columns["alive"][...] = True
            slot.columns["reward"][...] = self.published
            slot.columns["policy_version"][...] = VERSION
            if "priority" in slot.columns:
                slot.columns["priority"][...] = 1.0
            header = slot.header
            header["actor"] = header["incarnation"] = header["rows"] = 0
            header["sequence"], header["steps"] = self.published, STEPS
            header["produced_steps"] = (self.published + 1) * STEPS
            header["started_s"] = header["published_s"] = time.monotonic()
        self.published += 1

    @property
    def rows(self) -> int:
        """Of a batch."""
        return 2 if self.fresh else 8

    @property
    def fresh(self) -> bool:
        return not isinstance(self.source, ReplayDataSource)

    def next(self) -> Any:
        """A batch, for which as much is played as the source asks for."""
        ends_s = time.monotonic() + 10.0
        self.publish()
        while (batch := self.source.next(0.1)) is None:
            assert time.monotonic() < ends_s
            self.publish()
        return batch


class Known(NamedTuple):
    """`HostValues` that no device computes."""

    values: npt.NDArray[np.float32]

    def get(self) -> npt.NDArray[np.float32]:
        return self.values


def rewards(batch: Any) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32]
    found = batch.arrays["reward"] if isinstance(batch, StagingBatch) else batch.data["reward"]
    return found


@pytest.fixture(params=SOURCES)
def world(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    target, draws, options, make = SOURCES[request.param]
    if draws is not None:
        train_dqn_on(draws, monkeypatch)
    config = resolve(target, [*SMALL, *options])
    trainer = make_trainer(config, probe(config.env))
    accounting = Accounting()
    with ExitStack() as held:
        source = make(config, trainer, accounting)
        held.callback(source.store.close)
        board = WeightsBoard.create(trainer.layout.size)
        held.callback(board.close)
        welcome = Welcome(1, 0, trainer.spec, trainer.layout, {})
        host = ShmHost(tmp_path / "s", welcome, [board], source.store)
        held.callback(host.close)
        alone = make is fresh_unrolls
        if not alone:
            source.open(host)
        held.callback(source.close)
        store = source.store
        lane = store.open_lane(2)
        event = store.lane_event(lane)
        writer = SlotWriter(store.arena, store.geometry, lane, event, store.filled_event)
        yield World(source, trainer, accounting, writer, alone)


def test_next_returns_no_batch_before_the_first_slot(world: World) -> None:
    began_s = time.monotonic()
    assert world.source.next(0.05) is None
    assert time.monotonic() - began_s < 2.0
    assert world.source.in_flight_steps() == 0


def test_all_played_steps_are_trained_on_and_accounting_balances(world: World) -> None:
    for _ in range(6):
        batch = world.next()
        world.source.release(batch, world.trainer.step(batch))
    assert world.trainer.progress.learner_steps == 6
    world.source.stop()
    waiting = world.source.in_flight_steps()
    assert world.accounting.produced == world.published * STEPS
    assert world.accounting.balance(waiting) == 0
    assert world.accounting.dropped.total() == 0
    figures = world.source.figures()
    assert 0 <= figures["queue_fill"] <= 1
    assert all(np.isfinite(value) for value in figures.values())


def test_release_frees_the_memory_of_a_batch(world: World) -> None:
    for _ in range(3 * len(world.source.store.slots)):
        batch = world.next()  # plays into a slot; none would be left if releases freed nothing
        world.source.release(batch, world.trainer.step(batch))


def test_each_batch_has_keys_weights_and_versions(world: World) -> None:
    batch: TrainingBatch = world.next()
    assert batch.keys.shape == batch.weights.shape == (world.rows,)
    assert batch.keys.dtype == np.int64
    assert batch.weights.dtype == np.float32
    assert (batch.weights == 1).all(), "all priorities are equal still"
    assert batch.versions.shape[-1] == world.rows
    assert (batch.versions == VERSION).all()
    if world.fresh:
        assert len(set(batch.keys.tolist())) == world.rows


def test_several_batches_may_be_held_and_released_in_order(world: World) -> None:
    """As many as the source has; none of them is written to meanwhile, and all steps add up."""
    fixed = isinstance(world.source, UnrollSource)
    ahead = 0 if world.alone else batches_ahead(world.trainer.config)
    ring = ahead + 1 if fixed else 4
    out = [world.next() for _ in range(ring)]
    seen = [rewards(batch).copy() for batch in out]
    world.publish()
    if fixed:
        assert world.source.next(0.0) is None, "all batches are out"
    for batch, values in zip(out, seen, strict=True):
        assert np.array_equal(rewards(batch), values)
    if world.fresh:
        assert [values.max() for values in seen] == list(range(len(out)))
    for batch in out:
        world.source.release(batch, world.trainer.step(batch))
    batch = world.next()  # memory is there again
    world.source.stop()
    assert world.accounting.balance(world.source.in_flight_steps()) == 0, "while one is out"
    world.source.release(batch, world.trainer.step(batch))
    assert world.accounting.balance(world.source.in_flight_steps()) == 0


def test_priorities_find_the_rows_of_their_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of batches that are released late; rows that were overwritten meanwhile are left out."""
    if world.fresh:
        pytest.skip("fresh unrolls have no priorities")
    given: list[tuple[list[int], list[float]]] = []
    update = Replay.update_priorities
    fresh: list[int] = []

    def note(replay: Replay, keys: Any, values: Any) -> int:
        given.append((keys.tolist(), values.tolist()))
        fresh.append(update(replay, keys, values))
        return fresh[-1]

    monkeypatch.setattr(Replay, "update_priorities", note)
    out = [world.next() for _ in range(3)]
    while world.published < 40:  # into every slot again
        world.source.release(world.next(), StepResult(0))
    for number, batch in enumerate(out):
        errors = np.full(world.rows, 1.0 + number, np.float32)
        world.source.release(batch, StepResult(0, errors=Known(errors)))
    wait_until(lambda: len(fresh) == 3)
    assert [keys for keys, _ in given] == [batch.keys.tolist() for batch in out]
    assert [set(values) for _, values in given] == [{1.0}, {2.0}, {3.0}]
    assert fresh == [0, 0, 0], "their slots hold other steps now"
    for _ in range(3):  # the first ones may have been drawn ahead, of rows that are gone now
        batch = world.next()
    world.source.release(batch, StepResult(0, errors=Known(np.ones(world.rows, np.float32))))
    wait_until(lambda: len(fresh) == 4)
    assert fresh[-1] == world.rows


def test_batches_are_drawn_ahead_only_during_the_backward_pass(world: World) -> None:
    source = world.source
    if world.fresh or batches_ahead(world.trainer.config) < 2:
        pytest.skip("no second batch is drawn ahead from replay")
    assert isinstance(source, ReplayDataSource)
    assert source._feeder is not None
    feeder = source._feeder
    for _ in range(8):  # each is enough for two batches
        world.publish()
        time.sleep(0.02)
    wait_until(lambda: feeder.ready == 2)
    batch = source.next(0.0)
    assert batch is not None
    time.sleep(0.2)
    assert feeder.ready == 1, "it drew during the forward pass"
    source.on_backward()
    wait_until(lambda: feeder.ready == 2)
    source.release(batch, StepResult(0))
    assert source.next(0.0) is not None
    last = source.next(0.0)  # the reserve is used up: it draws at once
    assert last is not None
    world.publish()
    wait_until(lambda: feeder.ready > 0)


def test_a_batch_that_was_not_trained_on_counts_as_dropped_or_stays(world: World) -> None:
    """Where the group of learners is lost: a replay keeps its rows, fresh unrolls are gone."""
    batch = world.next()
    world.trainer.plan_updates(batch)
    world.source.release(batch, StepResult(0))
    world.source.stop()
    waiting = world.source.in_flight_steps()
    kept = world.accounting.trained  # of a replay, which counts a step when it is taken in
    lost = world.accounting.dropped["group_lost"]
    assert lost + kept + waiting == world.published * STEPS
    assert lost == (0 if kept else STEPS)
    assert world.accounting.balance(world.source.in_flight_steps()) == 0


def test_source_can_be_saved_and_restored_in_any_state(world: World, tmp_path: Path) -> None:
    world.publish()
    world.source.save(tmp_path / "kept", lambda: None)
    assert isinstance(world.source.restore(tmp_path / "nowhere"), str)
