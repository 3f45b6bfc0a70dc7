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

from penstock.actors.matches import make_environments
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
from penstock.envs.saved_state import NotSavableError
from penstock.envs.seats import check_options, ranking_note
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.factory import AnyTrainer, make_trainer, network_of
from penstock.learner.league import League, make_league
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

STATE = "lockstep"
"""Name of this state in a checkpoint, among what each learner keeps for itself."""
FORMAT = 1
"""Version of the form of this state."""
TESTED_ENVS = 2
"""Number of environments that are played to find out whether they can be saved."""
MISFITS = (NotSavableError, ReplayError, ArithmeticError, LookupError, TypeError, ValueError)
"""Errors of a saved state that does not fit the resumed run."""


def run(ctx: RoleContext) -> None:
    """Train in lockstep mode until the run ends: the main function of its only role.

    The role then waits until the supervisor stops it.
    """
    config = ctx.config
    assert config is not None
    spaces = probe(config.env, config.actors.env_threads)
    check_options(config, spaces.seating)
    logger.info("%s", spaces.how)
    if note := ranking_note(config, spaces.seating):
        logger.info("%s", note)

    # The learner's state is resumed first, and then what the next turn needs beside it.
    trainer = make_trainer(config, spaces, ctx.ledger)
    logger.info("%s", network_of(config, spaces, trainer))
    league = make_league(trainer, ctx.run_dir, ctx.event, shared=False)
    checkpoints = CheckpointManager(ctx.run_dir, trainer, ctx.report, ctx.event, league)
    checkpoints.resume(ctx.resume)
    if league is not None:
        league.open(beat=ctx.status.beat, stopping=ctx.stopping)
    lockstep = Lockstep(config, trainer, ctx, checkpoints, league)
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
    if league is not None:
        league.close()

    while not ctx.stopping():
        ctx.status.beat()
        time.sleep(0.01)


class LockstepSource:
    """Data source that plays one unroll of each actor for a batch, or reads a data set.

    It is made anew for each run, also for a resumed one, and then continues where the checkpoint
    was written, as far as possible.
    """

    def __init__(
        self,
        config: Config,
        trainer: AnyTrainer,
        ctx: RoleContext,
        checkpoints: CheckpointManager,
        league: League | None = None,
    ) -> None:
        """Make the source, and restore its state if the run is resumed.

        Args:
            config: the config of the run.
            trainer: the trainer, whose state is restored already.
            ctx: the context of the role.
            checkpoints: has the checkpoint that is resumed, if any.
            league: of the run, with the boards of its chairs; None in a game of one side.
        """
        self._config = config
        self._trainer = trainer
        self._ctx = ctx
        self._checkpoints = checkpoints
        self._resumes = bool(trainer.progress.generation) and checkpoints.resumes_same_env()
        self.note = ""
        """What the user should know about a resumed run."""
        self.published = False
        """Whether `board` has the weights that the saved run's actors had."""

        # The generation is 0 whatever was resumed: environments are seeded by the step count alone.
        self.board = WeightsBoard.create(trainer.layout.size, shared=False)
        self._boards = [self.board, *(() if league is None else league.boards)]
        chairs = len(self._boards) - 1
        self._welcome = Welcome(ctx.run_id, 0, trainer.spec, trainer.layout, {}, chairs=chairs)
        self._links: list[InprocLink] = []
        self.players: list[Player] = []
        self._inner: UnrollSource | ReplayDataSource | DatasetSource | None = None
        self._data = algorithm(config.algo).data(config.algo)

        self._make_env = partial(make, config.env, threads=config.actors.env_threads)
        self._not_savable = ""
        """Why environments cannot be saved; empty if they can, or if there are none."""
        if not isinstance(self._data, Dataset):
            self._not_savable = why_not_savable(
                lambda: self._make_env(TESTED_ENVS, whole_games=True)
            )
        self.drained = True
        """Whether `next` has returned all batches that can be trained on now."""
        self._begin()

    @property
    def inner(self) -> ActorSource[Any] | DatasetSource:
        """The source that holds the played data, or reads the data set."""
        assert self._inner is not None
        return self._inner

    @property
    def may_pause(self) -> bool:
        """Whether the run may be saved or end now.

        It may between turns. With a replay it also may within a turn, which can take minutes.
        """
        return self.drained or not isinstance(self._data, Unrolls)

    def next(self, timeout_s: float) -> Any:
        """Returns the next batch; None once after each turn of the actors.

        The first call after that plays one unroll of each actor.
        """
        if self.drained:
            for player in self.players:
                self._ctx.status.beat()
                assert player.play(timeout_s=0.0), "the learner freed every slot"

        batch = self.inner.next(0.0)
        self.drained = batch is None
        return batch

    def release(self, batch: Any, result: StepResult) -> None:
        """Free a batch that was trained on."""
        self.inner.release(batch, result)

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run needs beside the learner's state and a replay, as plain data.

        If an environment cannot be saved, that is its reason under "not_savable", and little else.
        """
        state: dict[str, Any] = {"format": FORMAT, "fits": self._fits(), "drained": self.drained}
        try:
            if self._not_savable:
                raise NotSavableError(self._not_savable)
            state["players"] = [player.state_dict() for player in self.players]
        except NotSavableError as error:
            return state | {"not_savable": str(error)}

        state["unfinished"] = self._trainer.unfinished_update()

        # The weights that actors have are saved if they are not the learner's. Also those of the
        # same version may differ: a batch of an unfinished update (`learner.accumulate`) has moved
        # the normaliser.
        weights = np.empty(self.board.size, np.float32)
        stamp = self.board.read(weights)
        if stamp is not None:
            is_older = stamp.version != self._trainer.progress.version
            if is_older or not np.array_equal(weights, weights_of(self._trainer)):
                state["published"] = [stamp.version, weights]

        if isinstance(self.inner, UnrollSource | DatasetSource):
            state["data"] = self.inner.state_dict()
        return state

    def _begin(self) -> None:
        """Begin the run, or continue it where its checkpoint was written, as far as possible.

        If the saved state does not fit, environments begin anew, and `note` says why.
        """
        self._open()
        if not self._resumes:
            return

        difference = "the resumed run is not bit for bit one without a stop"
        try:
            if not self._continue(self._saved_state()):
                self.note += f"; {difference}"
        except MISFITS as error:
            self._close()
            self._open()
            if self.players:
                step = self._trainer.progress.learner_steps
                if self.note:
                    self.note += "; "
                self.note += (
                    f"episodes begin anew at optimizer step {step}, so {difference}: {error}"
                )

    def _saved_state(self) -> dict[str, Any]:
        """Returns the state in the resumed checkpoint.

        Raises:
            ValueError: this run cannot continue from it; the message is the reason for the user.
        """
        stored = self._checkpoints.resumed_group_state.get(STATE)
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
        """Returns what a resumed run must have in common with the saved one, as JSON."""
        return json.dumps([self._config.first_actors, self._trainer.spec.to_dict()])

    def _continue(self, state: dict[str, Any]) -> bool:
        """Restore a saved state.

        Args:
            state: the state, from `state` of the saved run.

        Returns: whether the run continues bit for bit; False if the replay is not as it was.

        Raises:
            Exception: the state does not fit; one of `MISFITS`.
        """
        is_exact = True
        for player, player_state in zip(self.players, state["players"], strict=True):
            player.load_state_dict(player_state)
        if "published" in state:
            version, weights = state["published"]
            self.board.publish(weights, Stamp(self._trainer.progress.generation, int(version)))

        match self.inner:
            case UnrollSource() as unrolls:
                unrolls.load_state_dict(state["data"], self._links)
            case DatasetSource() as dataset:
                dataset.load_state_dict(state["data"])
            case ReplayDataSource() as replay:
                is_exact = replay.continue_streams()

        self._trainer.load_unfinished(state["unfinished"])
        self.drained = bool(state["drained"])
        self.published = "published" in state
        return is_exact

    def _open(self) -> None:
        """Make the inner source, and environments seeded by the learner's step count.

        A data set needs no environments.
        """
        self.accounting = Accounting()
        if isinstance(self._data, Dataset):
            assert isinstance(self._trainer, OffPolicyTrainer)
            self._inner = DatasetSource(self._config, self._trainer, self._ctx.ledger)
            return

        actors = self._config.first_actors
        if isinstance(self._data, Unrolls):
            unrolls = self._make_unroll_source(actors)
            self._inner = unrolls
            store = unrolls.store
            slots_per_actor = len(store.slots) // actors
        else:
            replay = self._make_replay_source(actors)
            self._inner = replay
            store = replay.store
            slots_per_actor = self._config.transport.slots

        self._links = [
            InprocLink(self._welcome, store, self._boards, slots_per_actor) for _ in range(actors)
        ]
        self.players = [self._make_player(actor, link) for actor, link in enumerate(self._links)]

    def _make_unroll_source(self, actors: int) -> UnrollSource:
        """Returns the source of an algorithm that trains on unrolls, for so many actors."""
        return UnrollSource(
            self._config,
            self._trainer,
            self.accounting,
            actors=actors,
            lanes=actors,
            ledger=self._ctx.ledger,
            shared=False,
        )

    def _make_replay_source(self, actors: int) -> ReplayDataSource:
        """Returns the source of an algorithm with a replay, which is restored in a resumed run."""
        assert isinstance(self._trainer, OffPolicyTrainer)
        replay = ReplayDataSource(
            self._config,
            self._trainer,
            self.accounting,
            actors=actors,
            lanes=actors,
            ledger=self._ctx.ledger,
            shared=False,
        )
        folder = self._checkpoints.replay_folder()
        if plan := replay.plan_checkpoints(folder):
            logger.info("%s", plan)
        if self._resumes:
            self.note = replay.restore(folder, self._ctx.status.beat)
        return replay

    def _make_player(self, actor: int, link: InprocLink) -> Player:
        """Returns an actor with its environments."""
        return Player(
            self._config,
            link,
            make_environments(self._config, actor, self._ctx.ledger, timed=False),
            actor=actor,
            incarnation=self._trainer.progress.learner_steps,
            status=self._ctx.status,
            ledger=self._ctx.ledger,
        )

    def _close(self) -> None:
        """Close players and inner source, before they are made again."""
        for player in self.players:
            player.close()
        self.inner.close()
        self.players = []

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        """Save a replay to ``folder``, and call ``beat`` again and again meanwhile."""
        self.inner.save(folder, beat)

    def restore(self, folder: Path, beat: Callable[[], None] = lambda: None) -> str:
        """Do nothing, as a source is restored when it is made."""
        return ""

    def close(self) -> None:
        self.inner.close()


class Lockstep(TrainingLoop[Any]):
    """The training loop of lockstep mode: players, source and trainer in one thread."""

    def __init__(
        self,
        config: Config,
        trainer: AnyTrainer,
        ctx: RoleContext,
        checkpoints: CheckpointManager,
        league: League | None = None,
    ) -> None:
        """Make the source, and publish the first weights to its actors.

        Args:
            config: the config of the run.
            trainer: the trainer, whose state is restored already.
            ctx: the context of the role.
            checkpoints: writes the checkpoints of the run.
            league: of the run; None in a game of one side.
        """
        self._ctx = ctx
        self._checkpoints = checkpoints
        self._lockstep_source = LockstepSource(config, trainer, ctx, checkpoints, league)
        super().__init__(
            trainer,
            self._lockstep_source,
            Publisher(trainer.published_tensors(), self._lockstep_source.board),
            NonFiniteGuard(trainer, ctx.event),
            ctx.ledger,
            ctx.status,
            league,
        )
        if not self._lockstep_source.published:
            self._publish()

    @property
    def accounting(self) -> Accounting:
        """What has become of the steps that were played."""
        return self._lockstep_source.accounting

    @property
    def note(self) -> str:
        """What the user should know about a resumed run; may be empty."""
        return self._lockstep_source.note

    @property
    def sync(self) -> GradientSync:
        return self._trainer.sync

    @property
    def leads(self) -> bool:
        return True

    def begin_turn(self) -> bool:
        """Whether the run has reached its end, has diverged or was stopped."""
        has_reached_end = self._progress.stop_reason() is not None
        if has_reached_end and self._lockstep_source.may_pause:
            return True
        return bool(self.diverged) or self._ctx.stopping()

    def next_batch(self) -> Any:
        """Returns the next batch; None also if a save or a rollback is due first."""
        self._ledger.switch(Part.WAIT)
        self._ctx.status.beat()
        if self._nonfinite.needs_rollback or self._save_due:
            return None
        return self._source.next(0.0)

    @property
    def _save_due(self) -> bool:
        """Whether a checkpoint is due, and may be written now."""
        return self._lockstep_source.may_pause and self._checkpoints.is_due(by_time=False)

    def make_control_message(self, counts: Floats, stop: bool) -> ControlMessage:
        """Returns what this turn of the loop is to do, after the messages that have arrived.

        Args:
            counts: counts of the batch; all 0 without one.
            stop: whether the loop ends.
        """
        self._progress.count_env_steps(self.accounting)
        self._ctx.status.trained_steps = self.accounting.trained
        growth = self._progress.growth()
        self._checkpoints.handle_messages(self._ctx.messages())
        return ControlMessage(
            counts,
            growth,
            stop=stop,
            nan=self._nonfinite.needs_rollback,
            checkpoint=self._save_due and not counts.any(),
        )

    def capture_state(self, *, save: bool) -> None:
        """Write a checkpoint if it is due."""
        if not self._save_due:
            return

        try:
            self.save()
        except UserError as error:  # a disk that is full now may have room later
            self._checkpoints.postpone(str(error))
            logger.info("this checkpoint could not be saved, and the run continues: %s", error)
        self._nonfinite.copy_state()

    def on_stop(self) -> None:
        """The loop has ended: report why, unless the supervisor has stopped it."""
        reason = DIVERGED if self.diverged else self._progress.stop_reason()
        if reason is not None:
            self._ctx.report("stop", reason=reason, error=self.diverged)

    def save(self) -> None:
        """Write a checkpoint, complete before this returns."""
        self._checkpoints.save({STATE: to_bytes(self._lockstep_source.state())})
        self._checkpoints.on_order_done()
        self._source.save(self._checkpoints.replay_folder(), self._ctx.status.beat)

    def in_flight_steps(self) -> int:
        """Agent steps that were played and not yet trained on."""
        return self._lockstep_source.inner.in_flight_steps()

    def report(self) -> None:
        """Report the metrics of the interval."""
        interval = self._progress.interval(self._ledger)
        self._nonfinite.report_skipped()

        figures: dict[str, Any] = {"actors_alive": len(self._lockstep_source.players)}
        figures |= self._lockstep_source.inner.figures()
        figures |= self._nonfinite.figures()
        if self._league is not None:
            figures |= self._league.figures()

        statistics = self._trainer.statistics(wait=True)
        dropped = dict(self.accounting.dropped)
        self._ctx.report("metrics", **interval, **figures, dropped=dropped, lost={}, **statistics)

    def _publish(self) -> None:
        """Publish the weights, and wait until actors have them."""
        super()._publish()
        self._publisher.flush(wait=True)
