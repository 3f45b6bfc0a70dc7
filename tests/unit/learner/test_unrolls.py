"""The source of fresh unrolls: what it counts of a batch, and when."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from penstock.bench.ceiling import made_up
from penstock.configs.load import resolve
from penstock.core.interfaces import Welcome
from penstock.envs import probe
from penstock.learner.sources.unrolls import UnrollSource
from penstock.learner.trainer import Trainer
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Accounting
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotWriter
from penstock.transport.shm.weights_board import WeightsBoard


def test_latency_is_of_steps_that_are_trained_on_and_ends_with_the_wait_for_others(
    tmp_path: Path,
) -> None:
    options = ("actors.envs=4", "actors.unroll=8", "learner.prefetch=0", "learner.device=cpu")
    config = resolve("cartpole", options)
    info = probe(config.env)
    trainer = Trainer(config, info)
    source = UnrollSource(config, trainer, Accounting(), 1, 1, TimeLedger())
    store, board = source.store, WeightsBoard.create(trainer.layout.size)
    host = ShmHost(tmp_path / "s", Welcome(1, 0, trainer.spec, trainer.layout, {}), board, store)
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
    totals = trainer.plan_updates(batch)
    assert trainer.progress.latency == {}  # the other learners may be far behind
    time.sleep(0.05)
    source.release(batch, trainer.step(batch, totals))
    assert sum(trainer.progress.latency.values()) == pytest.approx(32)
    figures = trainer.progress.interval(TimeLedger())
    assert figures["latency_p50_s"] > 0.04
    source.close()
    host.close()
    store.close()
    board.close()
