"""The lockstep mode: actors and learner take turns in one process, deterministically.

In each turn every actor plays one unroll with the newest weights, then the learner trains on them.
Nothing depends on timing, so the same config gives the same run, bit for bit. Checkpoints, which
lockstep writes by steps only, change nothing: a run with them equals one without.

A checkpoint also holds what the next turn needs beside the learner's state: environments, unrolls
that are not trained on yet, random generators, recurrent states, the weights that actors have. So
100 steps, a resume and 100 more steps equal 200 steps. That needs environments that can be saved,
which is tested at the start (`envs.checking.saving`), and, with a replay, `replay.checkpoint`.
Where it does not hold, the resumed run begins new episodes, seeded by the step count, and a note
says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock.actors.role import Player
from penstock.algos.registry import algorithm
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.interfaces import Dataset, StepResult, Unrolls, Welcome
from penstock.core.notes import note_logger
from penstock.core.params import Floats, Stamp
from penstock.core.role import RoleContext
from penstock.core.state_bytes import from_bytes, to_bytes
from penstock.envs import make, probe
from penstock.envs.checking.saving import why_not_savable
from penstock.envs.make import first_index
from penstock.envs.saved_state import NotSavableError
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.factory import AnyTrainer, make_trainer, network_of
from penstock.learner.loop import TrainingLoop
from penstock.learner.nonfinite import DIVERGED, NonFiniteGuard
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.publisher import Publisher
from penstock.learner.sources.dataset import DatasetSource
from penstock.learner.sources.replay import ReplayDataSource
from penstock.learner.sources.source import ActorSource
from penstock.learner.sources.unrolls import UnrollSource
from penstock.learner.state import weights_of
from penstock.learner.sync.gradient_sync import ControlMessage, GradientSync
from penstock.profiling.ledger import Part
from penstock.replay import Accounting, ReplayError
from penstock.transport.inproc import InprocLink
from penstock.transport.shm.weights_board import WeightsBoard

logger = note_logger(__name__)

STATE = "lockstep"  # in a checkpoint, among what each learner keeps for itself
FORMAT = 1
TESTED_ENVS = 2  # that are played to find out whether they can be saved
MISFITS = (NotSavableError, ReplayError, ArithmeticError, LookupError, TypeError, ValueError)


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
    checkpoints.close(config.run.grace_s / 2)
    while not ctx.stopping():
        ctx.status.beat()
        time.sleep(0.01)


class LockstepSource:
    """Data source that plays one unroll of each actor when a batch is requested; or that reads a
    data set."""

    def __init__(
        self, config: Config, trainer: AnyTrainer, ctx: RoleContext, checkpoints: CheckpointManager
    ) -> None:
        self._config, self._trainer, self._ctx = config, trainer, ctx
        self._checkpoints = checkpoints
        self._resumes = bool(trainer.progress.generation) and checkpoints.resumes_same_env()
        self.note = ""  # for the user, in a resumed run
        self.published = False  # whether `board` has the weights that the saved run's actors had
        # Generation 0 whatever was resumed: games are seeded by the step count alone.
        self._welcome = Welcome(ctx.run_id, 0, trainer.spec, trainer.layout, {})
        self.board = WeightsBoard.create(trainer.layout.size, shared=False)
        self._links: list[InprocLink] = []
        self.players: list[Player] = []
        self._inner: UnrollSource | ReplayDataSource | DatasetSource | None = None
        self._data = algorithm(config.algo).data(config.algo)
        self._make_env = partial(make, config.env, threads=config.actors.env_threads)
        plays = not isinstance(self._data, Dataset)
        self._not_savable = why_not_savable(lambda: self._make_env(TESTED_ENVS)) if plays else ""
        self.drained = True
        """Whether `next` has returned all batches that can be trained on now."""
        self._begin()

    @property
    def inner(self) -> ActorSource[Any] | DatasetSource:
        """The source of the played data."""
        assert self._inner is not None
        return self._inner

    @property
    def may_pause(self) -> bool:
        """Whether the run may be saved or end now: between turns. With a replay also within one,
        which can take minutes."""
        return self.drained or not isinstance(self._data, Unrolls)

    def next(self, timeout_s: float) -> Any:
        """The next batch; None once after each turn of the actors."""
        if self.drained:
            for player in self.players:
                self._ctx.status.beat()
                assert player.play(timeout_s=0.0), "the learner freed every slot"
        batch = self.inner.next(0.0)
        self.drained = batch is None
        return batch

    def release(self, batch: Any, result: StepResult) -> None:
        self.inner.release(batch, result)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs beside the learner's state and a replay, as plain data."""
        state: dict[str, Any] = {"format": FORMAT, "fits": self._fits(), "drained": self.drained}
        try:
            if self._not_savable:
                raise NotSavableError(self._not_savable)
            state["players"] = [player.state_dict() for player in self.players]
        except NotSavableError as error:
            return state | {"not_savable": str(error)}
        state["unfinished"] = self._trainer.unfinished()
        weights = np.empty(self.board.size, np.float32)
        if (stamp := self.board.read(weights)) is not None and (
            stamp.version != self._trainer.progress.version
            # A batch of an unfinished update (`learner.accumulate`) has moved the normaliser.
            or not np.array_equal(weights, weights_of(self._trainer))
        ):
            state["published"] = [stamp.version, weights]
        if isinstance(self.inner, UnrollSource | DatasetSource):
            state["data"] = self.inner.state_dict()
        return state

    def _begin(self) -> None:
        """Begin the run, or continue it where its checkpoint was written, as far as possible."""
        self._open()
        if not self._resumes:
            return
        differs = "the resumed run is not bit for bit one without a stop"
        try:
            if not self._continue(self._saved_state()):
                self.note += f"; {differs}"
        except MISFITS as error:
            self._close()
            self._open()
            if self.players:
                step = self._trainer.progress.learner_steps
                why = f"episodes begin anew at optimizer step {step}, so {differs}: {error}"
                self.note += f"; {why}" if self.note else why

    def _saved_state(self) -> dict[str, Any]:
        """The state in the resumed checkpoint. Raises ValueError, with the reason for the user,
        where there is none that this run can continue from.
        """
        stored = self._checkpoints.stored.get(STATE)
        if stored is None:
            raise ValueError("the checkpoint was not written in lockstep mode by this version")
        state: dict[str, Any] = from_bytes(stored)
        if state["format"] != FORMAT:
            raise ValueError(f"its environments are saved in format {state['format']}")
        if "not_savable" in state:
            raise ValueError(f"the environment cannot be saved, as {state['not_savable']}")
        if state["fits"] != self._fits():
            raise ValueError("actors.*, or what they record, is not as it was")
        return state

    def _fits(self) -> str:
        """What a resumed run must have in common with the saved one, as JSON."""
        return json.dumps([self._config.first_actors, self._trainer.spec.to_dict()])

    def _continue(self, state: dict[str, Any]) -> bool:
        """Restore `state`; returns False where the replay is another than it was.

        Raises one of `MISFITS` where it does not fit.
        """
        exact = True
        for player, saved in zip(self.players, state["players"], strict=True):
            player.load_state_dict(saved)
        if "published" in state:
            version, weights = state["published"]
            self.board.publish(weights, Stamp(self._trainer.progress.generation, int(version)))
        match self.inner:
            case UnrollSource() as unrolls:
                unrolls.load_state_dict(state["data"], self._links)
            case DatasetSource() as dataset:
                dataset.load_state_dict(state["data"])
            case ReplayDataSource() as replay:
                exact = replay.continue_streams()
        self._trainer.load_unfinished(state["unfinished"])
        self.drained, self.published = bool(state["drained"]), "published" in state
        return exact

    def _open(self) -> None:
        """Make the inner source, and environments seeded by the learner's step count."""
        config, trainer, actors = self._config, self._trainer, self._config.first_actors
        self.accounting = Accounting()
        if isinstance(self._data, Unrolls):
            unrolls = UnrollSource(
                config, trainer, self.accounting, actors, actors, self._ctx.ledger, shared=False
            )
            self._inner, store = unrolls, unrolls.store
            want = len(store.slots) // actors
        else:
            assert isinstance(trainer, OffPolicyTrainer)
            if isinstance(self._data, Dataset):
                self._inner = DatasetSource(config, trainer, self._ctx.ledger)
                return
            replay = ReplayDataSource(
                config, trainer, self.accounting, actors, actors, self._ctx.ledger, shared=False
            )
            if self._resumes:
                self.note = replay.restore(self._checkpoints.shard())
            self._inner, store = replay, replay.store
            want = config.transport.slots
        self._links = [InprocLink(self._welcome, store, self.board, want) for _ in range(actors)]
        step, envs = trainer.progress.learner_steps, config.actor_envs
        self.players = [
            Player(
                config,
                link,
                self._make_env(envs, first=first_index(actor, envs), stagger=True),
                actor,
                step,
                self._ctx.status,
                self._ctx.ledger,
            )
            for actor, link in enumerate(self._links)
        ]

    def _close(self) -> None:
        for player in self.players:
            player.close()
        self.inner.close()
        self.players = []

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        self.inner.save(folder, beat)

    def restore(self, folder: Path) -> str:
        """Nothing to do: it is restored when it is made."""
        return ""

    def close(self) -> None:
        self.inner.close()


class Lockstep(TrainingLoop[Any]):
    """Players, source and trainer in one thread."""

    def __init__(
        self, config: Config, trainer: AnyTrainer, ctx: RoleContext, checkpoints: CheckpointManager
    ) -> None:
        self._ctx = ctx
        self._checkpoints = checkpoints
        self._lockstep = source = LockstepSource(config, trainer, ctx, checkpoints)
        publisher = Publisher(trainer.published(), source.board)
        guard = NonFiniteGuard(trainer, ctx.event)
        super().__init__(trainer, source, publisher, guard, ctx.ledger, ctx.status)
        if not source.published:
            self._publish()

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
        self._checkpoints.handle_messages(self._ctx.messages())
        nan, save = self._nonfinite.due, self._save_due and not counts.any()
        return ControlMessage(counts, growth, stop=stop, nan=nan, checkpoint=save)

    def keep(self, *, save: bool) -> None:
        """Write a checkpoint if it is due."""
        if not self._save_due:
            return
        try:
            self.save()
        except UserError as error:  # a disk that is full now may have room later
            self._checkpoints.postpone(str(error))
            logger.info("this checkpoint could not be saved, and the run continues: %s", error)
        self._nonfinite.keep()

    def stopped(self) -> None:
        reason = DIVERGED if self.diverged else self._progress.stop_reason()
        if reason is not None:
            self._ctx.report("stop", reason=reason, error=self.diverged)

    def save(self) -> None:
        """Write a checkpoint, complete before this returns."""
        self._checkpoints.save({STATE: to_bytes(self._lockstep.state())})
        self._checkpoints.on_order_done()
        self._source.save(self._checkpoints.shard(), self._ctx.status.beat)

    def in_flight_steps(self) -> int:
        """Agent steps that were played and not yet trained on."""
        return self._lockstep.inner.in_flight_steps()

    def report(self) -> None:
        """Report the metrics of the interval."""
        interval = self._progress.interval(self._ledger)
        self._nonfinite.tell_skipped()
        figures = {"actors_alive": len(self._lockstep.players), **self._lockstep.inner.figures()}
        figures |= self._nonfinite.figures()
        statistics = self._trainer.statistics(wait=True)
        dropped = dict(self.accounting.dropped)
        self._ctx.report("metrics", **interval, **figures, dropped=dropped, lost={}, **statistics)

    def _publish(self) -> None:
        super()._publish()
        self._publisher.flush(wait=True)
