"""The lockstep mode: actors and learner take turns in one process, and the same run comes out.

In each turn every actor plays one unroll with the newest weights, then the learner trains on them.
Nothing depends on timing, so the same config gives the same run, bit for bit. Environments cannot
be saved in general: at every checkpoint, which here is by steps only, they begin anew, seeded by
the step count, and so they do on a resume. A replay begins anew with them: empty, or from what the
checkpoint holds of it (`replay.checkpoint`). 100 steps, resume and 100 more equal 200 where
`checkpoint.every_steps` divides 100.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.actors.role import Player
from penstock.configs.schema import Config
from penstock.core.role import RoleContext
from penstock.envs import make, probe
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.factory import AnyTrainer, make_trainer, network_of
from penstock.learner.nonfinite import DIVERGED, NonFiniteGuard
from penstock.learner.publisher import Publisher
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.sources.transitions import ReplayDataSource
from penstock.learner.sync.gradient_sync import Floats
from penstock.learner.trainer import Trainer
from penstock.profiling.ledger import Part
from penstock.replay import Accounting, SlotQueue
from penstock.transport.inproc import InprocLink
from penstock.transport.link import Stamp, Welcome
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard


def run(ctx: RoleContext) -> None:
    """The main function of the one role that there is."""
    config = ctx.config
    assert config is not None
    info = probe(config.env, config.actors.env_threads)
    ctx.report("note", text=info.how)
    trainer = make_trainer(config, info, ctx.ledger)
    ctx.report("note", text=network_of(config, info, trainer))
    checkpoints = CheckpointManager(ctx.run_dir, trainer, ctx.report, ctx.event)
    checkpoints.resume(ctx.resume)
    lockstep = Lockstep(config, trainer, ctx, checkpoints)
    if lockstep.note:
        ctx.report("note", text=lockstep.note)
    ctx.report("ready")
    trainer.progress.start(time.monotonic())
    next_report_s = time.monotonic() + config.run.interval_s
    reason = None
    while reason is None and not ctx.stopping():
        lockstep.turn()
        if checkpoints.due(by_time=False):
            lockstep.save()
            lockstep.begin_anew()
        if time.monotonic() >= next_report_s:
            next_report_s = time.monotonic() + config.run.interval_s
            ctx.report("metrics", **lockstep.metrics(), **trainer.statistics(wait=True))
        reason = DIVERGED if lockstep.diverged else trainer.progress.stop_reason()
    if reason is not None:
        ctx.report("stop", reason=reason, error=lockstep.diverged)
    ctx.report("metrics", **lockstep.metrics(), **trainer.statistics(wait=True))
    ctx.report("final", accounting=lockstep.accounting.to_dict(lockstep.in_flight_steps()))
    lockstep.save()
    while not ctx.stopping():
        ctx.status.beat()
        time.sleep(0.01)


class FreshUnrolls:
    """Unrolls that are trained on at once: the queue and one staging batch, without a thread."""

    def __init__(self, config: Config, trainer: Trainer, accounting: Accounting) -> None:
        actors, self._batch_slots = config.actors.count, config.learner.batch_slots
        # Enough that nobody waits: a turn's unrolls and what is left of the last batch.
        slots = actors * (1 + -(-self._batch_slots // actors))
        self.store = SlotStore(trainer.spec, slots, lanes=actors, shared=False)
        self._queue = SlotQueue(self.store, accounting, max_policy_lag=1 << 62)
        self._batch = StagingBatch(trainer.spec, self._batch_slots, trainer.device)
        self._trainer = trainer
        self._accounting = accounting

    def get(self, timeout_s: float) -> StagingBatch | None:
        slots = self._queue.take(self._batch_slots, self._trainer.progress.version)
        if not slots:
            return None
        self._batch.gather(slots)
        self._queue.release(slots)
        return self._batch

    def save(self, folder: Path, beat: Callable[[], None]) -> None:
        """What is not trained on yet is in flight, and lost."""

    def plan_updates(self, batch: StagingBatch) -> Floats:
        return self._trainer.plan_updates(batch)

    def train(self, batch: StagingBatch, totals: Floats) -> bool:
        due = self._trainer.train(batch, totals)
        self._accounting.trained += batch.steps
        batch.let_go()
        return due

    def in_flight_steps(self) -> int:
        return self._queue.in_flight_steps()

    def figures(self) -> dict[str, float]:
        return {}

    def fill_fraction(self) -> float:
        return self.store.fill_fraction()


class Lockstep:
    """Players, source and trainer in one thread."""

    def __init__(
        self, config: Config, trainer: AnyTrainer, ctx: RoleContext, checkpoints: CheckpointManager
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._ctx, self._beat = ctx, ctx.status.beat
        self._checkpoints = checkpoints
        self._resumes = bool(trainer.progress.generation) and checkpoints.goes_on_in_its_game()
        self._nonfinite = NonFiniteGuard(trainer, ctx.event)
        self.diverged = ""  # why the run ends, where too many updates were skipped
        self.note = ""  # for the user: what the replay began with
        self.accounting = Accounting()
        # Generation 0 whatever was resumed: games are seeded by the step count alone.
        self._welcome = Welcome(ctx.run_id, 0, trainer.spec, trainer.layout, {})
        self._board = WeightsBoard.create(trainer.layout.size, shared=False)
        self._publisher = Publisher(trainer.published(), self._board)
        self._players: list[Player] = []
        self._source: FreshUnrolls | ReplayDataSource | None = None
        self.begin_anew()

    def turn(self) -> None:
        """Every actor plays one unroll, then the learner trains on what has come together."""
        ledger = self._ctx.ledger
        ledger.switch(Part.WAIT)
        source: Any = self._source
        for player in self._players:
            self._beat()
            assert player.play(timeout_s=0.0), "the learner freed every slot"
        while not self._interrupted() and (batch := source.get(0.0)) is not None:
            ledger.switch(Part.COUNT)
            self._beat()
            totals = source.plan_updates(batch)
            self._grow()
            if source.train(batch, totals):
                ledger.switch(Part.PUBLISH)
                self._publish()
            if self._nonfinite.due:
                self._nonfinite.tell_skipped()
                self.diverged = self._nonfinite.act()
                self._publish()
            ledger.switch(Part.WAIT)
        self._trainer.progress.arrived(self.accounting)
        self._ctx.status.trained_steps = self.accounting.trained
        self._grow()
        ledger.switch(Part.OTHER)

    def _interrupted(self) -> bool:
        """Whether the turn ends here, though the learner may have more to train on: what a replay
        allows it in one turn can take minutes. What unrolls were played is soon trained on, and a
        resumed run would not have those that wait."""
        if self._ctx.stopping() or self.diverged:
            return True
        ends = self._trainer.progress.stop_reason() is not None
        return isinstance(self._source, ReplayDataSource) and (
            ends or self._checkpoints.due(by_time=False)
        )

    def save(self) -> None:
        """Write a checkpoint, complete before this returns."""
        self._checkpoints.save()
        self._nonfinite.keep()
        assert self._source is not None
        self._source.save(self._checkpoints.shard(), self._beat)

    def in_flight_steps(self) -> int:
        """Agent steps that were played and not trained on."""
        assert self._source is not None
        return self._source.in_flight_steps()

    def metrics(self) -> dict[str, object]:
        """What metrics.jsonl wants to know."""
        source = self._source
        assert source is not None
        counts = {"actors_alive": len(self._players), "queue_fill": source.fill_fraction()}
        interval = self._trainer.progress.interval(self._ctx.ledger)
        self._nonfinite.tell_skipped()
        counts |= source.figures() | self._nonfinite.figures()
        return interval | counts | {"dropped": {}, "lost": {}}

    def begin_anew(self) -> None:
        """New environments, random generators and replay, seeded by the learner's step count."""
        self._publish()  # as a resumed run would
        config, step = self._config, self._trainer.progress.learner_steps
        for player in self._players:
            player.close()
        self._renew_source()
        self._players = [
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

    def _renew_source(self) -> None:
        """A replay, as a resumed run would have it, or at the start a queue; what waits in a queue
        stays."""
        config, trainer, actors = self._config, self._trainer, self._config.actors.count
        if isinstance(self._source, FreshUnrolls):
            return
        if self._source is not None:
            self._source.close()
            self._source.store.close()
        if isinstance(trainer, Trainer):
            self._source = FreshUnrolls(config, trainer, self.accounting)
            want = len(self._source.store.slots) // actors
        else:
            self._source = ReplayDataSource(
                config, trainer, self.accounting, actors, actors, self._ctx.ledger, shared=False
            )
            if self._resumes:
                self.note = self._source.resume(self._checkpoints.shard())
            self._resumes = True
            want = config.transport.slots
        store = self._source.store
        self._links = [InprocLink(self._welcome, store, self._board, want) for _ in range(actors)]

    def _grow(self) -> None:
        """What was booked counts at once: there is no other learner."""
        progress = self._trainer.progress
        progress.commit(progress.growth(), progress.growth())

    def _publish(self) -> None:
        progress = self._trainer.progress
        self._publisher.publish(Stamp(progress.generation, progress.version))
        self._publisher.flush(wait=True)
