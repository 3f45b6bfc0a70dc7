"""The lockstep mode: actors and learner take turns in one process, deterministically.

In each turn every actor plays one unroll with the newest weights, then the learner trains on them.
Nothing depends on timing, so the same config gives the same run, bit for bit. In general,
environments cannot be saved: at every checkpoint, which lockstep writes by steps only, and at a
resume they are made anew, seeded by the step count. A replay is then made anew too: empty, or from
the checkpoint (`replay.checkpoint`). 100 steps, a resume and 100 more steps equal 200 steps if
`checkpoint.every_steps` divides 100.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.actors.role import Player
from penstock.algos.registry import algorithm
from penstock.configs.schema import Config
from penstock.core.interfaces import Dataset, StepResult, Unrolls, Welcome
from penstock.core.notes import note_logger
from penstock.core.params import Floats
from penstock.core.role import RoleContext
from penstock.envs import make, probe
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.factory import AnyTrainer, make_trainer, network_of
from penstock.learner.loop import TrainingLoop
from penstock.learner.nonfinite import DIVERGED, NonFiniteGuard
from penstock.learner.publisher import Publisher
from penstock.learner.sources.dataset import DatasetSource
from penstock.learner.sources.replay import ReplayDataSource
from penstock.learner.sources.source import ActorSource, Consumer
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.state import learning_rate_of
from penstock.learner.sync.gradient_sync import ControlMessage, GradientSync
from penstock.profiling.ledger import Part
from penstock.replay import Accounting, SlotQueue
from penstock.transport.inproc import InprocLink
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard

logger = note_logger(__name__)


def run(ctx: RoleContext) -> None:
    """Main function of the only role of a lockstep run."""
    config = ctx.config
    assert config is not None
    info = probe(config.env, config.actors.env_threads)
    logger.info("%s", info.how)
    trainer = make_trainer(config, info, ctx.ledger)
    logger.info("%s", network_of(config, info, trainer))
    checkpoints = CheckpointManager(ctx.run_dir, trainer, ctx.report, ctx.event)
    checkpoints.resume(ctx.resume)
    lockstep = Lockstep(config, trainer, ctx, checkpoints)
    if lockstep.note:
        logger.info("%s", lockstep.note)
    ctx.report("ready")
    trainer.progress.start(time.monotonic())
    next_report_s = time.monotonic() + config.run.interval_s
    while lockstep.turn():
        if time.monotonic() >= next_report_s:
            next_report_s = time.monotonic() + config.run.interval_s
            lockstep.report()
    lockstep.report()
    ctx.report("final", accounting=lockstep.accounting.to_dict(lockstep.in_flight_steps()))
    lockstep.save()
    while not ctx.stopping():
        ctx.status.beat()
        time.sleep(0.01)


class FreshUnrolls:
    """Data source of unrolls that are trained on at once: a queue and staging batches, without a
    thread."""

    def __init__(self, config: Config, consumer: Consumer, accounting: Accounting) -> None:
        actors, self._batch_slots = config.actors.count, config.learner.batch_slots
        # Enough for one turn's unrolls and the rest of the last batch.
        slots = actors * (1 + -(-self._batch_slots // actors))
        self.store = SlotStore(consumer.spec, slots, lanes=actors, shared=False)
        self._queue = SlotQueue(self.store, accounting, max_policy_lag=1 << 62)
        self._free: list[StagingBatch] = []
        self._staged_steps = 0  # of batches that are out
        self._consumer = consumer
        self._accounting = accounting

    def next(self, timeout_s: float) -> StagingBatch | None:
        slots = self._queue.take(self._batch_slots, self._consumer.progress.version)
        if not slots:
            return None
        batch = self._free.pop() if self._free else self._staging()
        batch.gather(slots)
        self._queue.release(slots)
        self._staged_steps += batch.steps
        return batch

    def _staging(self) -> StagingBatch:
        return StagingBatch(self._consumer.spec, self._batch_slots, self._consumer.device)

    def release(self, batch: StagingBatch, result: StepResult) -> None:
        self._accounting.used(batch.steps, result.trained_steps)
        self._staged_steps -= batch.steps
        batch.let_go()
        self._free.append(batch)

    def restore(self, folder: Path) -> str:
        return ""

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        """Nothing to save: unrolls that are not trained on yet are lost."""

    def close(self) -> None:
        """Nothing to close: the memory belongs to the store."""

    def open(self, host: ShmHost) -> None:
        """Nothing to open: no other process sends data."""

    def stop(self) -> None:
        """Nothing to stop: there is no thread."""

    def in_flight_steps(self) -> int:
        return self._queue.in_flight_steps() + self._staged_steps

    def figures(self) -> dict[str, float]:
        return {}

    def fill_fraction(self) -> float:
        return self.store.fill_fraction()


class LockstepSource:
    """Data source that plays one unroll of each actor when a batch is requested; or that reads a
    data set."""

    def __init__(
        self, config: Config, trainer: AnyTrainer, ctx: RoleContext, checkpoints: CheckpointManager
    ) -> None:
        self._config, self._trainer, self._ctx = config, trainer, ctx
        self._checkpoints = checkpoints
        self._resumes = bool(trainer.progress.generation) and checkpoints.goes_on_in_its_game()
        self.note = ""  # for the user: what the replay began with
        self.accounting = Accounting()
        # Generation 0 whatever was resumed: games are seeded by the step count alone.
        self._welcome = Welcome(ctx.run_id, 0, trainer.spec, trainer.layout, {})
        self.board = WeightsBoard.create(trainer.layout.size, shared=False)
        self._links: list[InprocLink] = []
        self.players: list[Player] = []
        self._inner: ActorSource[Any] | DatasetSource | None = None
        self._data = algorithm(config.algo).data(config.algo)
        self._out: list[Any] = []  # batches of `inner` that were not released
        self.drained = True
        """Whether `next` has returned all batches that can be trained on now."""

    @property
    def inner(self) -> ActorSource[Any] | DatasetSource:
        """The source of the played data; available after `begin_anew`."""
        assert self._inner is not None
        return self._inner

    @property
    def may_pause(self) -> bool:
        """Whether the run may be saved or end now. Waiting unrolls would be missing in a resumed
        run, so they are trained on first. With a replay they are stored, and a turn can take
        minutes."""
        return self.drained or not isinstance(self._data, Unrolls)

    def next(self, timeout_s: float) -> Any:
        """The next batch; None once after each turn of the actors."""
        if self.drained:
            for player in self.players:
                self._ctx.status.beat()
                assert player.play(timeout_s=0.0), "the learner freed every slot"
        batch = self.inner.next(0.0)
        self.drained = batch is None
        if batch is not None:
            self._out.append(batch)
        return batch

    def release(self, batch: Any, result: StepResult) -> None:
        """Release a batch; a batch of a replay that was replaced is ignored."""
        if any(other is batch for other in self._out):
            self._out = [other for other in self._out if other is not batch]
            self.inner.release(batch, result)

    def begin_anew(self) -> None:
        """New environments, random generators and replay, seeded by the learner's step count."""
        config, step = self._config, self._trainer.progress.learner_steps
        for player in self.players:
            player.close()
        self._renew()
        self.drained = True
        self.players = [
            Player(
                config,
                link,
                make(config.env, config.actors.envs, config.actors.env_threads),
                actor,
                step,
                self._ctx.status,
                self._ctx.ledger,
            )
            for actor, link in enumerate(self._links)
        ]

    def _renew(self) -> None:
        """Make the replay that a resumed run would have, or at the start a queue; the contents of a
        queue are kept."""
        config, trainer, actors = self._config, self._trainer, self._config.actors.count
        fresh = isinstance(self._data, Unrolls)
        if self._inner is not None:
            if fresh:
                return
            self._inner.close()
            self._out = []
        if isinstance(self._data, Dataset):
            self._inner = DatasetSource(config, trainer, self._ctx.ledger)
            return
        inner: ActorSource[Any]
        if fresh:
            inner = FreshUnrolls(config, trainer, self.accounting)
            want = len(inner.store.slots) // actors
        else:
            inner = ReplayDataSource(
                config, trainer, self.accounting, actors, actors, self._ctx.ledger, shared=False
            )
            if self._resumes:
                self.note = inner.restore(self._checkpoints.shard())
            self._resumes = True
            want = config.transport.slots
        self._inner, store = inner, inner.store
        self._links = [InprocLink(self._welcome, store, self.board, want) for _ in range(actors)]

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        self.inner.save(folder, beat)

    def restore(self, folder: Path) -> str:
        """Nothing to do: `begin_anew` restores."""
        return ""

    def close(self) -> None:
        self.inner.close()


class Lockstep(TrainingLoop[Any]):
    """Players, source and trainer in one thread."""

    def __init__(
        self, config: Config, trainer: AnyTrainer, ctx: RoleContext, checkpoints: CheckpointManager
    ) -> None:
        self._ctx = ctx
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._lockstep = source = LockstepSource(config, trainer, ctx, checkpoints)
        publisher = Publisher(trainer.published(), source.board)
        guard = NonFiniteGuard(trainer, ctx.event)
        super().__init__(trainer, source, publisher, guard, ctx.ledger, ctx.status)
        self._begin_anew()

    @property
    def accounting(self) -> Accounting:
        return self._lockstep.accounting

    @property
    def note(self) -> str:
        return self._lockstep.note

    @property
    def sync(self) -> GradientSync:
        return self._trainer.sync

    @property
    def leads(self) -> bool:
        return True

    def must_stop(self) -> bool:
        ends = self._progress.stop_reason() is not None and self._lockstep.may_pause
        return ends or bool(self.diverged) or self._ctx.stopping()

    def next_batch(self) -> Any:
        """The next batch; None also if a save or a rollback is due first."""
        self._ledger.switch(Part.WAIT)
        self._ctx.status.beat()
        return None if self._nonfinite.due or self._save_due else self._source.next(0.0)

    @property
    def _save_due(self) -> bool:
        return self._lockstep.may_pause and self._checkpoints.due(by_time=False)

    def control(self, counts: Floats, stop: bool) -> ControlMessage:
        self._progress.arrived(self.accounting)
        self._ctx.status.trained_steps = self.accounting.trained
        growth = self._progress.growth()
        nan, save = self._nonfinite.due, self._save_due and not counts.any()
        return ControlMessage(counts, growth, stop=stop, nan=nan, checkpoint=save)

    def keep(self, *, save: bool) -> None:
        """Write a checkpoint if it is due, and make environments anew, as a resume does."""
        if self._save_due:
            self.save()
            self._begin_anew()

    def stopped(self) -> None:
        reason = DIVERGED if self.diverged else self._progress.stop_reason()
        if reason is not None:
            self._ctx.report("stop", reason=reason, error=self.diverged)

    def save(self) -> None:
        """Write a checkpoint, complete before this returns."""
        self._checkpoints.save()
        self._nonfinite.keep()
        self._source.save(self._checkpoints.shard(), self._ctx.status.beat)

    def in_flight_steps(self) -> int:
        """Agent steps that were played and not yet trained on."""
        return self._lockstep.inner.in_flight_steps()

    def report(self) -> None:
        """Report the metrics of the interval."""
        source = self._lockstep.inner
        counts = {"actors_alive": len(self._lockstep.players), "queue_fill": source.fill_fraction()}
        interval = self._progress.interval(self._ledger)
        self._nonfinite.tell_skipped()
        counts |= source.figures() | self._nonfinite.figures()
        counts["learning_rate"] = learning_rate_of(self._trainer)
        statistics = self._trainer.statistics(wait=True)
        self._ctx.report("metrics", **interval, **counts, dropped={}, lost={}, **statistics)

    def _begin_anew(self) -> None:
        self._publish()  # as a resumed run would
        self._lockstep.begin_anew()

    def _publish(self) -> None:
        super()._publish()
        self._publisher.flush(wait=True)
