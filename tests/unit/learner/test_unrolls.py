"""The source of fresh unrolls: gathering, prefetching, backpressure, a failing feeder thread."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.algos.slots import FLAGS
from penstock.bench.ceiling import made_up
from penstock.configs.load import resolve
from penstock.core.interfaces import StepResult, Welcome
from penstock.core.params import ParamLayout, Stamp
from penstock.core.specs import Column, SlotSpec
from penstock.device.choice import pick_device
from penstock.envs import probe
from penstock.learner.progress import Progress
from penstock.learner.sources.staging import StagingBatch, torch_dtype
from penstock.learner.sources.unrolls import UnrollSource
from penstock.learner.trainer import Trainer
from penstock.profiling.ledger import Part, TimeLedger
from penstock.replay import Accounting, prefetch
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import SlotWriter
from penstock.transport.shm.weights_board import WeightsBoard
from waiting import wait_until

SPEC = SlotSpec(
    3,
    2,
    (
        Column("obs", "|u1", (5, 4), "unroll+1"),
        Column("big", "<f4", (40,)),
        Column("action", "<i4"),
        *(Column(flag, "|b1") for flag in FLAGS),
        Column("episode_return", "<f4"),
        Column("episode_length", "<i4"),
        Column("policy_version", "<u4"),
        Column("policy_id", "<u2", rows="slot"),
    ),
)

CPU = torch.device("cpu")


class Rig:
    """A source with one writer in this thread."""

    def __init__(
        self, folder: Path, *, slots: int, batch_slots: int, prefetch: int, paced: bool = False
    ) -> None:
        lag = 9 if paced else 100  # below the ten updates of a batch slots are lent by batch
        config = resolve(
            "cartpole",
            [
                f"transport.slots={slots}",
                f"transport.max_policy_lag={lag}",
                f"learner.batch_slots={batch_slots}",
                f"learner.prefetch={prefetch}",
                "learner.updates_per_batch=10",
                "actors.count=1",
                "actors.envs=10",
            ],
        )
        self.progress = Progress(config.stop, 1)
        consumer: Any = SimpleNamespace(spec=SPEC, progress=self.progress, device=CPU)
        self.ledger = TimeLedger(part=Part.WAIT)  # of this thread, which takes the batches
        self.accounting = Accounting()
        self.source = UnrollSource(config, consumer, self.accounting, 1, 2, self.ledger)
        self.store, self.queue = self.source.store, self.source._queue
        self.board = WeightsBoard.create(1)
        layout = ParamLayout((("w", (1,)),))
        welcome = Welcome(1, 0, SPEC, layout, {})
        self.host = ShmHost(folder / "s", welcome, [self.board], self.store)
        lane = self.store.open_lane(slots)
        event = self.store.lane_event(lane)
        geometry = self.store.geometry
        self.writer = SlotWriter(self.store.arena, geometry, lane, event, self.store.filled_event)
        self.sequence = 0

    @contextmanager
    def feeding(self) -> Iterator[None]:
        self.source.open(self.host)
        try:
            yield
        finally:
            self.source.close()

    def take(self, timeout_s: float) -> StagingBatch | None:
        return self.source.next(timeout_s)

    def give_back(self, batch: StagingBatch) -> None:
        self.source.release(batch, StepResult(batch.steps))

    def staged_steps(self) -> int:
        return self.source.in_flight_steps() - self.queue.in_flight_steps()

    def write(self, timeout_s: float = 0.0) -> bool:
        with self.writer.slot(timeout_s) as slot:
            if slot is None:
                return False
            rng = np.random.default_rng(self.sequence)
            for raw in slot.payload:
                raw[...] = rng.integers(0, 2, raw.size, np.uint8)
            slot.header["sequence"], slot.header["steps"] = self.sequence, 6
            slot.header["version"] = self.progress.version
            slot.header["produced_steps"] = 6 * (self.sequence + 1)
            slot.header["started_s"] = 100.0 - self.sequence
        self.sequence += 1
        return True

    def publish(self) -> None:
        self.board.publish(np.zeros(1, np.float32), Stamp(0, self.progress.version))

    def close(self) -> None:
        self.host.close()
        self.store.close()
        self.board.close()


def expected(sequence: int) -> dict[str, Any]:
    rng = np.random.default_rng(sequence)
    return SPEC.views([rng.integers(0, 2, raw.size, np.uint8) for raw in SPEC.zeros()])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_paced_batch_is_lent_once_the_weights_of_the_last_are_published(
    rig: Callable[..., Rig],
) -> None:
    r = rig(slots=5, batch_slots=2, prefetch=0, paced=True)
    with r.feeding():
        r.take(0.0)
        assert not r.write(0.1)  # nothing is published yet
        r.publish()
        for _ in range(3):
            r.take(0.0)
            assert [r.write(0.5), r.write(0.5)] == [True, True]
            assert not r.write(0.1)  # the batch has its slots
            batch = r.take(1.0)
            assert batch is not None
            r.take(0.0)
            assert not r.write(0.1)  # in training
            r.progress.version += 1
            r.give_back(batch)
            r.take(0.0)
            assert not r.write(0.1)  # the weights that it made are not published
            r.publish()


def test_paced_batch_may_be_lent_while_the_previous_one_trains(
    rig: Callable[..., Rig],
) -> None:
    r = rig(slots=5, batch_slots=2, prefetch=0, paced=True)
    with r.feeding():
        r.publish()
        r.take(0.0)
        for _ in range(3):
            assert [r.write(0.5), r.write(0.5)] == [True, True]
            batch = r.take(1.0)
            assert batch is not None
            r.store.set_quota(2)
            assert [r.write(0.5), r.write(0.5), r.write(0.1)] == [True, True, False]
            r.progress.version += 1
            r.publish()
            r.give_back(batch)
            batch = r.take(1.0)  # the batch that was played meanwhile
            assert batch is not None
            assert not r.write(0.1)
            r.give_back(batch)
            r.take(0.0)


def test_a_paced_batch_that_changes_no_weights_is_followed_by_another(
    rig: Callable[..., Rig],
) -> None:
    r = rig(slots=2, batch_slots=1, prefetch=0, paced=True)
    r.publish()
    with r.feeding():
        for _ in range(3):  # batches whose gradients add up to one step
            r.take(0.0)
            assert r.write(0.5)
            batch = r.take(1.0)
            assert batch is not None
            r.give_back(batch)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_batches_hold_slots_side_by_side_in_order(rig: Callable[..., Rig], prefetch: int) -> None:
    r = rig(slots=4, batch_slots=2, prefetch=prefetch)
    with r.feeding():
        for first in range(0, 12, 2):
            assert r.write(1.0)
            assert r.write(1.0)
            batch = r.take(5.0)
            assert batch is not None
            assert batch.steps == 12
            assert batch.started_s == 100.0 - (first + 1)
            for name, array in batch.arrays.items():
                parts = [expected(first + i)[name] for i in (0, 1)]
                np.testing.assert_array_equal(
                    array, np.concatenate(parts, min(1, parts[0].ndim - 1))
                )
                assert batch.tensors[name].data_ptr() == array.ctypes.data
            r.give_back(batch)


def test_waiting_for_actors_is_separate_from_waiting_for_the_thread(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = StagingBatch.gather

    def slowly(batch: StagingBatch, slots: Any) -> None:
        time.sleep(0.2)
        gather(batch, slots)

    monkeypatch.setattr(StagingBatch, "gather", slowly)
    r = rig(slots=2, batch_slots=1, prefetch=1)
    played = threading.Timer(0.2, r.write)
    with r.feeding():
        played.start()
        batch = r.take(5.0)
        r.ledger.switch(Part.COUNT)
        played.join()
        assert batch is not None
        spent = r.ledger.snapshot()
        assert spent["wait"] > 0.15, "nothing was played"
        assert spent["gather"] > 0.15
        assert r.write()  # is gathered while the learner trains
        time.sleep(0.4)
        r.ledger.switch(Part.WAIT)
        r.give_back(batch)
        assert r.take(5.0) is not None
        r.ledger.switch(Part.COUNT)
        after = r.ledger.snapshot()
        assert after["wait"] + after["gather"] - spent["wait"] - spent["gather"] < 0.1


def test_prefetch_gathers_only_its_number_of_batches_ahead(rig: Callable[..., Rig]) -> None:
    r = rig(slots=2, batch_slots=1, prefetch=1)
    with r.feeding():
        written = 0
        while r.write(0.3):
            written += 1
        assert written == 4  # two batches staged, two slots filled, and then it holds back
        assert r.staged_steps() == 12
        batch = r.take(1.0)
        assert batch is not None
        r.give_back(batch)
        assert r.write(1.0)
    assert r.source.in_flight_steps() == 6 * (written + 1) - 6


def test_a_batch_gathered_before_the_version_leaps_is_dropped_as_too_old(
    rig: Callable[..., Rig],
) -> None:
    run = rig(slots=4, batch_slots=1, prefetch=1)
    with run.feeding():
        run.write()
        wait_until(lambda: run.staged_steps() == 6)
        run.progress.version += 101  # a league's reset, with a limit of 100
        assert run.take(5.0) is None

        for _ in range(2):
            run.write()
            batch = run.take(5.0)
            assert batch is not None
            assert batch.version == 101
            run.give_back(batch)

        assert run.accounting.dropped == {"lag": 6}
        assert run.accounting.trained == 12
        assert run.staged_steps() == 0


@pytest.mark.parametrize("taken", [1, 2])
def test_a_returned_batch_wakes_the_thread_only_where_no_other_is_ready(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    monkeypatch.setattr(prefetch, "POLL_S", 60.0)  # nothing but an event wakes the thread
    r = rig(slots=3, batch_slots=1, prefetch=1)
    with r.feeding():
        assert [r.write(1.0) for _ in range(2)] == [True, True]
        wait_until(lambda: r.staged_steps() == 12)
        assert r.write(1.0)
        wait_until(lambda: len(r.queue._waiting) == 1)  # it is collected, and there is no room
        batches = [r.take(5.0) for _ in range(taken)]
        assert batches[0] is not None
        r.give_back(batches[0])
        if taken == 1:  # the other batch is ready, and the learner's next backward pass is awaited
            time.sleep(0.2)
            assert r.staged_steps() == 6
            r.source.on_backward()
        wait_until(lambda: r.staged_steps() == 12)


def test_a_thread_is_woken_without_giving_up_the_interpreter_lock(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "POLL_S", 60.0)
    r, looks = rig(slots=2, batch_slots=1, prefetch=1), list[int]()
    monkeypatch.setattr(r.queue, "collect", lambda: looks.append(1))
    interval_s = sys.getswitchinterval()
    with r.feeding():
        time.sleep(0.2)  # the thread waits
        before = len(looks)
        sys.setswitchinterval(10.0)
        try:
            assert r.source._feeder is not None
            ends_s = time.perf_counter() + 0.2
            while time.perf_counter() < ends_s:
                r.source._feeder.wake()
            during = len(looks) - before
        finally:
            sys.setswitchinterval(interval_s)
        time.sleep(0.2)
        assert not during
        assert len(looks) > before


def test_no_batch_is_gathered_ahead_without_prefetch(
    rig: Callable[..., Rig],
) -> None:
    r = rig(slots=2, batch_slots=1, prefetch=0)
    with r.feeding():
        assert r.write()
        assert r.write()
        assert not r.write(0.05)
        assert r.take(1.0) is not None
        assert r.staged_steps() == 6


@pytest.mark.parametrize("prefetch", [0, 1])
def test_actor_can_join_while_data_never_runs_out(
    rig: Callable[..., Rig], tmp_path: Path, prefetch: int
) -> None:
    r = rig(slots=4, batch_slots=1, prefetch=prefetch)
    joined: list[ShmLink] = []
    joiner = threading.Thread(
        target=lambda: joined.append(ShmLink(tmp_path / "s", SPEC, want=1)), daemon=True
    )
    with r.feeding():
        r.write()
        r.write()
        joiner.start()
        ends_s = time.monotonic() + 10
        while joiner.is_alive() and time.monotonic() < ends_s:
            batch = r.take(1.0)
            assert batch is not None
            r.give_back(batch)
            assert r.write(1.0)  # so that the next batch is there at once
        joiner.join(1.0)
        assert joined
        joined[0].close()


def test_take_without_data_times_out(rig: Callable[..., Rig]) -> None:
    r = rig(slots=2, batch_slots=2, prefetch=1)
    with r.feeding():
        r.write()
        began_s = time.monotonic()
        assert r.take(0.1) is None
        assert 0.05 <= time.monotonic() - began_s < 5


def test_fault_in_the_feeder_thread_is_raised_in_the_learner(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    r = rig(slots=2, batch_slots=1, prefetch=1)

    def broken(*_: object) -> None:
        raise RuntimeError("gather failed")

    monkeypatch.setattr(StagingBatch, "gather", broken)
    with r.feeding():
        r.write()
        with pytest.raises(RuntimeError, match="gather failed"):
            r.take(5.0)
        with pytest.raises(RuntimeError, match="gather failed"):
            r.source.stop()  # also where nobody waits for a batch any more


@pytest.mark.parametrize("dtype", ["|u1", "|b1", "<f4", "<f8", "<i4", "<u2", "<u4", "<u8"])
def test_every_numpy_dtype_has_a_torch_dtype_of_its_size(dtype: str) -> None:
    found = torch_dtype(dtype)
    assert found.itemsize == np.dtype(dtype).itemsize
    assert found.is_floating_point == (np.dtype(dtype).kind == "f")


@pytest.mark.gpu
def test_gpu_upload_is_intact_while_the_next_batch_is_filled(
    rig: Callable[..., Rig],
) -> None:
    r = rig(slots=2, batch_slots=1, prefetch=0)
    batches = [StagingBatch(SPEC, 1, pick_device("cuda")) for _ in range(2)]
    assert all(t.is_pinned() for t in batches[0]._host.values())
    for sequence in range(20):
        assert r.write()
        slots = r.queue.take(1, 0)
        batch = batches[sequence % 2]
        batch.gather(slots)
        r.queue.release(slots)
        batch.wait_on_device()
        torch.cuda._sleep(1_000_000)  # the learner is still busy when the next copy is queued
        for name, tensor in batch.tensors.items():
            array = expected(sequence)[name]
            np.testing.assert_array_equal(tensor.cpu().numpy().view(array.dtype), array)
        batch.on_last_use()


def test_lent_slots_stay_within_the_lag_limit(tmp_path: Path) -> None:
    options = ["actors.count=8", "actors.envs=4", "actors.unroll=8", "learner.device=cpu"]
    bind = f"transport.bind=ipc://{tmp_path}/wire"  # a store that grows
    for limits, most in ((["transport.max_policy_lag=4"], 3), ([], 8)):
        config = resolve("cartpole", [*options, bind, *limits])
        trainer = Trainer(config, probe(config.env))
        source = UnrollSource(config, trainer, Accounting(), 1, 9, TimeLedger())
        store = source.store
        lanes = [store.open_lane(1) for _ in range(8)]
        assert sum(len(store._lanes[lane].lent) for lane in lanes) == most
        assert source.figures()["policy_lag_limit"] == config.transport.max_policy_lag
        store.close()


def test_latency_covers_trained_steps_until_the_wait_for_other_learners_ends(
    tmp_path: Path,
) -> None:
    options = ("actors.envs=4", "actors.unroll=8", "learner.prefetch=0", "learner.device=cpu")
    config = resolve("cartpole", options)
    info = probe(config.env)
    trainer = Trainer(config, info)
    source = UnrollSource(config, trainer, Accounting(), 1, 1, TimeLedger())
    store, board = source.store, WeightsBoard.create(trainer.layout.size)
    host = ShmHost(tmp_path / "s", Welcome(1, 0, trainer.spec, trainer.layout, {}), [board], store)
    source.open(host)
    lane = store.open_lane(1)
    event = store.lane_event(lane)
    writer = SlotWriter(store.arena, store.geometry, lane, event, store.filled_event)
    with writer.slot(1.0) as slot:
        assert slot is not None
        made_up(trainer.spec, slot.payload, info)
        slot.header["steps"] = slot.header["produced_steps"] = 32
        slot.header["started_s"] = slot.header["published_s"] = time.monotonic()
    batch = source.next(5.0)
    assert batch is not None
    plan = trainer.plan_updates(batch)
    assert trainer.progress.latency.counts == {}  # the other learners may be far behind
    time.sleep(0.05)
    source.release(batch, trainer.step(batch, plan))
    assert sum(trainer.progress.latency.counts.values()) == pytest.approx(32)
    figures = trainer.progress.interval(TimeLedger())
    assert figures["latency_p50_s"] > 0.04
    source.close()
    host.close()
    store.close()
    board.close()
