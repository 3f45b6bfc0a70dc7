"""Drawing batches from replay, and waiting between actors and learner, without processes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.actors.rollout import padding
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.interfaces import StepResult
from penstock.device.choice import device_of
from penstock.device.transfers import Download
from penstock.envs import probe
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.sources.batch_sampler import ReplayBatch, make_sampler, seed_of
from penstock.learner.sources.replay import ReplayDataSource
from penstock.profiling.device import DeviceClock
from penstock.profiling.ledger import Part, TimeLedger
from penstock.replay import Accounting, Batch, Prioritized, Replay
from penstock.transport.shm.store import Slot, SlotWriter

OPTIONS = (
    *("actors.envs=2", "actors.unroll=4", "actors.count=1", "transport.slots=1"),
    *("replay.capacity=64", "replay.min_size=16", "replay.batch_size=8", "model.hidden=[8]"),
)


@dataclass
class World:
    """A source and one writer of its store; rewards count the rows from 0."""

    source: ReplayDataSource
    trainer: OffPolicyTrainer
    accounting: Accounting
    writer: SlotWriter
    ledger: TimeLedger
    published: int = 0

    def train(self, batch: ReplayBatch) -> None:
        self.source.release(batch, self.trainer.step(batch))

    def publish(self, **last_row: Any) -> bool:
        """One slot of 8 steps with these values in its last row; False when none was lent."""
        slot = self.writer.acquire(0.0)
        if slot is None:
            return False
        self._fill(slot)
        for name, values in last_row.items():
            slot.columns[name][-1] = values
        self.writer.publish(slot)
        self.published += 1
        return True

    def _fill(self, slot: Slot) -> None:
        for column in slot.columns.values():
            column[...] = 0
        slot.columns["alive"][...] = True
        slot.columns["reward"][...] = self.published * 8 + np.arange(8).reshape(4, 2)
        if "priority" in slot.columns:
            slot.columns["priority"][...] = 1.0
        header = slot.header
        header["actor"] = header["incarnation"] = header["rows"] = 0
        header["sequence"], header["steps"] = self.published, 8
        header["produced_steps"] = (self.published + 1) * 8


def make_world(*options: str, most: int = 1, rank: int = 0) -> World:
    config = resolve("cartpole_dqn", [*OPTIONS, *options])
    trainer = OffPolicyTrainer(config, probe(config.env))
    accounting, ledger = Accounting(), TimeLedger(part=Part.WAIT)
    source = ReplayDataSource(
        config, trainer, accounting, most, 1, ledger, first=1, shared=False, rank=rank
    )
    store = source.store
    lane = store.open_lane(1)
    event = store.lane_event(lane)
    writer = SlotWriter(store.arena, store.geometry, lane, event, store.filled_event)
    return World(source, trainer, accounting, writer, ledger)


@pytest.fixture
def world() -> Iterator[World]:
    made = make_world("replay.samples_per_insert=2")
    yield made
    made.source.close()
    made.source.store.close()


def test_no_batch_is_drawn_before_min_size(world: World) -> None:
    assert world.publish()
    assert world.source.next(0.0) is None
    assert world.publish()
    batch = world.source.next(0.0) or world.source.next(0.0)
    assert batch is not None
    assert batch.data.reward.shape == (8,)
    assert len(batch.data["keys"]) == 8


def test_returns_are_those_of_the_environments_that_explore_least() -> None:
    world = make_world()
    world.publish(truncated=True, episode_length=4, episode_return=[2.0, 8.0])
    assert world.source.next(0.0) is None
    progress = world.trainer.progress
    progress.commit(progress.growth(), progress.growth())
    metrics = progress.interval(world.ledger)
    assert metrics["episode_return_mean"] == 8.0
    assert metrics["episode_return_all_mean"] == 5.0
    world.source.close()
    world.source.store.close()


def test_learners_draw_by_random_numbers_of_their_own() -> None:
    drawn = []
    for rank in (0, 0, 1):
        world = make_world(rank=rank)
        while world.published < 2:
            assert world.publish()
            world.source.next(0.0)
        batch = world.source.next(0.0)
        assert batch is not None
        drawn.append(batch.keys.tolist())
        world.source.close()
        world.source.store.close()
    assert drawn[0] == drawn[1]
    assert drawn[1] != drawn[2]


def test_no_draw_has_the_seed_of_an_actor(world: World) -> None:
    config, progress = resolve("cartpole_dqn"), world.trainer.progress
    of_actor = np.random.SeedSequence([config.run.seed, 0, 0, 0]).generate_state(2).tolist()
    of_draws = [seed_of(config, progress, rank, n) for rank in (0, 1) for n in (0, 1)]
    assert len({*of_actor, *of_draws}) == 6


def test_batch_tensors_share_its_memory_and_are_trained_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    while world.published < 2:
        assert world.publish()
        world.source.next(0.0)
    batch = world.source.next(0.0)
    assert batch is not None
    assert batch.tensors is not None
    assert {"obs", "action", "reward", "next_obs", "discount"} <= set(batch.tensors)
    for name in set(batch.tensors) & set(batch.data):
        assert batch.tensors[name].data_ptr() == batch.data[name].ctypes.data, name
    monkeypatch.delattr(OffPolicyTrainer, "tensors_of")  # needed no more
    world.train(batch)


def test_a_batch_that_was_trained_on_is_freed(world: World) -> None:
    while world.published < 2:
        assert world.publish()
        world.source.next(0.0)
    batch = world.source.next(0.0)
    assert batch is not None
    observations = weakref.ref(batch.data["obs"])
    world.train(batch)
    del batch
    assert observations() is None


def test_repeatedly_drawn_step_counts_as_trained_once(world: World) -> None:
    while world.published < 4:
        world.publish()
        while (batch := world.source.next(0.0)) is not None:
            world.train(batch)
    assert world.accounting.produced == world.accounting.trained == 32
    assert world.accounting.balance(world.source.in_flight_steps()) == 0
    progress = world.trainer.progress
    progress.commit(progress.growth(), progress.growth())
    assert progress.trained_steps == 32
    assert world.trainer.progress.learner_steps > 4


def test_learner_and_actors_wait_for_each_other_by_the_rate_limit(world: World) -> None:
    drawn = 0
    while world.published < 40:
        if not world.publish():
            break
        world.source.next(0.0)  # one batch for each slot is half of what 2 samples an insert ask
        drawn += 1
    assert world.published < 40, "actors ran ahead without bound"
    for _ in range(40):
        while (batch := world.source.next(0.0)) is not None:
            world.train(batch)
        world.publish()
    figures = world.source.figures()
    inserted = world.accounting.trained - 16
    assert figures["samples_per_insert"] * world.accounting.trained == pytest.approx(
        2 * inserted, abs=2 * (8 + 2 * 8)
    )


def test_potential_actors_do_not_widen_the_rate_limit() -> None:
    """As with `actors.count` auto on many cores: 256 may play, and one does."""
    ahead = []
    for most in (1, 256):
        world = make_world("replay.samples_per_insert=2", "replay.capacity=4000", most=most)
        while world.published < 400 and world.publish():
            world.source.serve(0.0)
            assert world.source.in_flight_steps() == 0
        ahead.append(world.published)
        world.source.close()
        world.source.store.close()
    assert ahead[0] == ahead[1] < 400


def test_actor_that_joins_late_waits_for_the_learner(world: World) -> None:
    while world.publish():
        world.source.next(0.0)
    store = world.source.store
    assert store.free
    store.open_lane(1)
    assert store.loans()["lent"] == [[], []]
    while (batch := world.source.next(0.0)) is not None:
        world.train(batch)
    world.source.next(0.0)
    store.lend()  # as `ShmHost.poll` does
    assert [len(lent) for lent in store.loans()["lent"]] == [1, 1]


def test_drawing_is_separate_from_waiting_for_the_rate_limit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, poll = Replay.sample, world.source.serve

    def slowly(replay: Replay, count: int, *, stacked: bool = True) -> Batch:
        time.sleep(0.05)
        return sample(replay, count, stacked=stacked)

    def until(timeout_s: float) -> None:  # no host waits for actors here
        poll(timeout_s)
        time.sleep(timeout_s)

    monkeypatch.setattr(Replay, "sample", slowly)
    monkeypatch.setattr(world.source, "serve", until)
    while world.published < 3:
        world.publish()
        world.source._collect()
    drawn = 0
    while world.source.next(0.3) is not None:
        assert world.ledger.part is Part.COUNT
        drawn += 1
    assert drawn > 1
    spent = world.ledger.snapshot()
    assert 0 <= spent["gather"] - 0.05 * drawn < 0.3
    assert 0 <= spent["wait"] - 0.3 < 0.05 * drawn


def test_writers_are_served_at_the_end_unless_a_snapshot_is_taken(world: World) -> None:
    polled = threading.Event()
    world.source._host = SimpleNamespace(poll=lambda _: polled.set())  # type: ignore[assignment]
    serve = threading.Thread(target=world.source.serve, args=(0.0,))
    with world.source._replay.lock:  # a snapshot's, in its thread
        serve.start()
        assert not polled.wait(0.05)
    serve.join()
    assert polled.is_set()


def test_full_replay_evicts_the_oldest_steps() -> None:
    world = make_world("replay.samples_per_insert=null")
    for _ in range(30):
        assert world.publish()
        world.source.next(0.0)
    stored = world.source.figures()["replay_size"]
    assert 64 <= stored <= 64 + 2 * 8
    rewards = np.concatenate([world.source.next(0.0).data.reward for _ in range(20)])  # type: ignore[union-attr]
    assert rewards.min() >= 30 * 8 - 80
    world.source.store.close()


def test_store_has_slots_for_the_capacity_and_the_actors() -> None:
    """64 steps in slots of 8, and 2 slots for each of 3 actors; lanes for 32 that come and go."""
    config = resolve("cartpole_dqn", [*OPTIONS, "actors.count=3", "transport.slots=2"])
    trainer = OffPolicyTrainer(config, probe(config.env))
    for shared in (True, False):
        source = ReplayDataSource(config, trainer, Accounting(), 3, 35, TimeLedger(), shared=shared)
        assert len(source.store.slots) == 64 // 8 + 3 * 2
        opened = [source.store.open_lane(0) for _ in range(35)]
        assert len(set(opened)) == 35
        source.close()


@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 1)])
def test_replay_resumes_with_another_number_of_actors(
    tmp_path: Path, first: int, then: int
) -> None:
    """As where actors.count is auto, and the machine has other cores than that of the snapshot."""
    options = ("replay.checkpoint=true", "algo.n_step=3", "replay.prioritized=true")
    saved = make_world(*options, most=first)
    for _ in range(20):
        assert saved.publish()
        saved.source.in_flight_steps()
    saved.source.save(tmp_path, lambda: None)
    config = resolve("cartpole_dqn", [*OPTIONS, *options])
    trainer, ledger = OffPolicyTrainer(config, probe(config.env)), TimeLedger()
    resumed = ReplayDataSource(config, trainer, Accounting(), then, 1, ledger, shared=False)
    kept = min(saved.source.figures()["replay_size"], len(resumed.store.slots) * 8)
    assert resumed.restore(tmp_path) == f"the replay continues with {kept:.0f} stored steps"
    assert not resumed.continue_streams()  # they name slots
    batch = resumed.next(0.0)
    assert batch is not None
    first_rewards = batch.data.reward / (1 + 0.99 + 0.99**2)
    assert first_rewards.min() > 20 * 8 - kept
    saved.source.close()
    resumed.close()


def test_one_step_episodes_still_reach_the_largest_allowed_min_size() -> None:
    """Every second row resets."""
    half = ("replay.min_size=32", "replay.batch_size=32", "replay.samples_per_insert=null")
    world = make_world(*half)
    for _ in range(30):
        slot = world.writer.acquire(0.0)
        assert slot is not None
        world._fill(slot)
        slot.columns["alive"][1::2] = False
        slot.columns["terminated"][::2] = True
        slot.header["steps"] = 4
        world.writer.publish(slot)
        world.published += 1
        if (batch := world.source.next(0.0)) is not None:
            break
    assert batch is not None
    world.source.close()


def test_saving_thread_uses_the_device_of_the_learner(tmp_path: Path) -> None:
    """In lockstep a snapshot holds errors that a GPU may still be computing."""
    world = make_world("replay.checkpoint=true")
    threads: list[str] = []
    seam: Any = SimpleNamespace(
        enter_thread=lambda: threads.append(threading.current_thread().name)
    )
    world.source._device = seam
    world.source.save(tmp_path, lambda: None)
    assert threads == ["replay-save"]
    world.source.close()


def test_published_slots_are_collected_once_per_batch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        world.publish()
        world.source.next(0.0)
    counted: list[int] = []
    table = world.source._table
    collect = table.collect

    def count() -> None:
        counted.append(1)
        collect()

    monkeypatch.setattr(table, "collect", count)
    assert world.source.next(0.0) is not None
    assert len(counted) == 1


def test_batch_reports_the_least_probability_of_its_rows() -> None:
    """By which learners divide their weights by the largest of all batches. Weights are (least /
    P)^beta, and of 16 rows one has 9 times the priority of the others: P is 9/24 or 1/24."""
    world = make_world("replay.prioritized=true", "replay.alpha=1", "replay.beta=0.5")
    while world.published < 2:
        assert world.publish()
        world.source.next(0.0)
    first = world.source.next(0.0)
    assert first is not None
    assert first.min_probability == pytest.approx(1 / 16)
    priorities = np.ones(8, np.float32)
    priorities[first.keys == first.keys[0]] = 9.0
    world.source.release(first, StepResult(8, False, Download(torch.from_numpy(priorities))))
    batch = world.source.next(0.0)
    assert batch is not None
    assert batch.min_probability == pytest.approx(1 / 24, rel=1e-4)
    assert batch.beta == 0.5
    np.testing.assert_allclose(
        batch.weights, np.where(batch.keys == first.keys[0], 1 / 3, 1.0), rtol=1e-4
    )
    world.source.close()
    world.source.store.close()


def test_beta_follows_the_optimizer_steps_of_the_whole_run() -> None:
    options = ("replay.beta=0.4", "replay.beta_steps=100", "replay.prioritized=true")
    config = resolve("cartpole_dqn", [*OPTIONS, *options])
    progress = OffPolicyTrainer(config, probe(config.env)).progress
    sampler = make_sampler(config.replay, progress)
    assert isinstance(sampler, Prioritized)
    for steps, beta in ((0, 0.4), (50, 0.7), (100, 1.0), (1000, 1.0)):
        progress.learner_steps = steps
        assert sampler.beta == pytest.approx(beta)


def test_padding_distinguishes_repeated_and_zero_first_frames() -> None:
    frames = np.arange(1, 5, dtype=np.uint8).reshape(1, 4, 1, 1)
    repeated, after_zeros = np.full_like(frames, 7), np.zeros_like(frames)
    after_zeros[:, -1] = 7
    stacks = np.concatenate([repeated, after_zeros, frames])
    before = np.array([1, 0, 1], np.int16)
    known = padding(stacks, np.array([True, True, False]), before)
    assert known.tolist() == [0, 1, 1]
    with pytest.raises(UserError, match="stack of different frames"):
        padding(stacks, np.array([False, False, True]), before)


@pytest.mark.parametrize("prioritized", [True, False])
def test_td_errors_are_fetched_only_for_prioritized_replay(
    prioritized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[np.ndarray] = []
    monkeypatch.setattr(Replay, "update_priorities", lambda _, keys, values: given.append(values))
    world = make_world(f"replay.prioritized={prioritized}".lower())
    while world.trainer.progress.learner_steps < 3:
        world.publish()
        if (batch := world.source.next(0.0)) is not None:
            world.train(batch)
    assert [len(values) for values in given] == [8] * 3 * prioritized
    world.source.close()
    world.source.store.close()


@pytest.mark.gpu
def test_gpu_time_of_replay_training_is_attributed_to_parts() -> None:
    config = resolve("cartpole_dqn", [*OPTIONS, "learner.device=cuda"])
    host, seconds = TimeLedger(), TimeLedger(part=Part.WAIT)
    trainer = OffPolicyTrainer(config, probe(config.env), host)
    source = ReplayDataSource(config, trainer, Accounting(), 1, 1, host, shared=False)
    store = source.store
    lane = store.open_lane(1)
    event = store.lane_event(lane)
    writer = SlotWriter(store.arena, store.geometry, lane, event, store.filled_event)
    world = World(source, trainer, Accounting(), writer, host)
    clock = DeviceClock(host, seconds, partial(device_of(trainer.device).make_event, timed=True))
    host.follow(clock.mark)
    trainer.queue.call_while_waiting(clock.settle)
    while trainer.progress.learner_steps < 30:
        world.publish()
        if (batch := source.next(0.0)) is not None:
            world.train(batch)
            # Those of the batch that may be computed still.
            assert len(source._batches._pending_errors) == 1
    torch.cuda.synchronize()
    host.switch(Part.WAIT)
    clock.settle()
    spent = seconds.snapshot()
    assert all(spent[part] > 0 for part in ("h2d", "forward", "backward", "optimize"))
    assert trainer.statistics(wait=True)["grad_norm"] > 0
    source.close()
    store.close()
