"""The lockstep mode: actors and learner take turns in one process, and the same run comes out.

In each turn every actor plays one unroll with the newest weights, then the learner trains on them.
Nothing depends on timing, so the same config gives the same run, bit for bit. Environments cannot
be saved in general: at every checkpoint, which here is by steps only, they begin anew, seeded by
the step count, and so they do on a resume. 100 steps, resume and 100 more equal 200 where
`checkpoint.every_steps` divides 100.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.actors.main import Player
from penstock.configs.schema import Config
from penstock.core.role import RoleContext
from penstock.envs import make, probe
from penstock.learner.checkpoints import Checkpoints
from penstock.learner.publish import Publisher
from penstock.learner.staging import StagingBatch
from penstock.learner.trainer import Trainer
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Accounting, SlotQueue
from penstock.transport.base import Stamp, Welcome
from penstock.transport.inproc import InprocLink
from penstock.transport.shm.board import WeightsBoard
from penstock.transport.shm.store import SlotStore


def run(ctx: RoleContext) -> None:
    """The main function of the one role that there is."""
    config = ctx.config
    assert config is not None
    info = probe(config.env)
    ctx.report("note", text=info.how)
    trainer = Trainer(config, info)
    checkpoints = Checkpoints(ctx.run_dir, trainer)
    checkpoints.resume(ctx.resume)
    lockstep = Lockstep(config, trainer, ctx.run_id, ctx.status.beat)
    ledger = TimeLedger()
    ctx.report("ready")
    trainer.progress.start(time.monotonic())
    next_report_s = time.monotonic() + config.run.interval_s
    reason = None
    while reason is None and not ctx.stopping():
        lockstep.turn(ledger)
        if checkpoints.save_if_due(by_time=False):
            lockstep.begin_anew()
        if time.monotonic() >= next_report_s:
            next_report_s = time.monotonic() + config.run.interval_s
            ctx.report("metrics", **lockstep.metrics(ledger), **trainer.statistics())
        reason = trainer.progress.stop_reason()
    if reason is not None:
        ctx.report("stop", reason=reason)
    ctx.report("metrics", **lockstep.metrics(ledger))
    ctx.report("final", accounting=lockstep.accounting.to_dict(lockstep.queue.in_flight_steps()))
    checkpoints.save()
    while not ctx.stopping():
        ctx.status.beat()
        time.sleep(0.01)


class Lockstep:
    """Players, queue and trainer in one thread."""

    def __init__(
        self, config: Config, trainer: Trainer, run_id: int, beat: Callable[[], None]
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._beat = beat
        self._batch_slots = config.learner.batch_slots
        self.accounting = Accounting()
        self._store = SlotStore(
            trainer.spec, self._slots(), lanes=config.actors.count, shared=False
        )
        self.queue = SlotQueue(self._store, self.accounting, max_policy_lag=1 << 62)
        self._board = WeightsBoard.create(trainer.layout.size, shared=False)
        self._publisher = Publisher(trainer.published(), self._board)
        self._batch = StagingBatch(trainer.spec, self._batch_slots, trainer.device)
        # Generation 0 whatever was resumed: games are seeded by the step count alone.
        welcome = Welcome(run_id, 0, trainer.spec, trainer.layout, {})
        self._links = [
            InprocLink(welcome, self._store, self._board, self._slots() // config.actors.count)
            for _ in range(config.actors.count)
        ]
        self.begin_anew()

    def turn(self, ledger: TimeLedger) -> None:
        """Every actor plays one unroll, then the learner trains on what has come together."""
        ledger.switch("wait_data")
        for player in self._players:
            self._beat()
            assert player.play(timeout_s=0.0), "the learner freed every slot"
        progress = self._trainer.progress
        while slots := self.queue.take(self._batch_slots, progress.version):
            ledger.switch("compute")
            self._batch.gather(slots)
            self.queue.release(slots)
            due = self._trainer.train(self._batch)
            self.accounting.trained += self._batch.steps
            self._batch.let_go()
            if due:
                ledger.switch("publish")
                self._publish()
        progress.arrived(self.accounting)
        ledger.switch("other")

    def metrics(self, ledger: TimeLedger) -> dict[str, object]:
        """What metrics.jsonl wants to know; there is no queue to be full."""
        counts = {"actors_alive": len(self._players), "queue_fill": self._store.fill_fraction()}
        return self._trainer.progress.interval(ledger) | counts | {"dropped": {}, "lost": {}}

    def _slots(self) -> int:
        """Enough that nobody waits: a turn's unrolls and what is left of the last batch."""
        actors = self._config.actors.count
        return actors * (1 + -(-self._batch_slots // actors))

    def begin_anew(self) -> None:
        """New environments and random generators, seeded by the learner's step count."""
        self._publish()  # as a resumed run would
        config, step = self._config, self._trainer.progress.learner_steps
        for player in getattr(self, "_players", []):
            player.close()
        self._players = [
            Player(
                config,
                link,
                make(config.env, config.actors.envs, config.actors.env_threads),
                actor,
                step,
                self._beat,
            )
            for actor, link in enumerate(self._links)
        ]

    def _publish(self) -> None:
        progress = self._trainer.progress
        self._publisher.publish(Stamp(progress.generation, progress.version))
        self._publisher.flush(wait=True)
