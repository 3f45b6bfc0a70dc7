"""The loop of a learner, for the learner's process and the lockstep mode."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic

from penstock.core.interfaces import B, BatchPlan, DataSource, StepHooks, StepResult
from penstock.core.params import POLICY_ID, Floats, Stamp
from penstock.learner.base_trainer import BaseTrainer
from penstock.learner.league import League
from penstock.learner.nonfinite import NonFiniteGuard
from penstock.learner.publisher import Publisher
from penstock.learner.sync.gradient_sync import ControlMessage, GradientSync, GroupLostError
from penstock.profiling.ledger import Part, TimeLedger
from penstock.profiling.status import Phase, StatusPage


@dataclass(frozen=True)
class PlannedBatch(Generic[B]):
    """A batch that was planned, and not trained on yet."""

    batch: B | None
    """None in a turn in which this learner has no batch."""
    plan: BatchPlan


class TrainingLoop(ABC, StepHooks, Generic[B]):
    """Trains by ``trainer`` on batches of ``source``, in step with other learners.

    Publishes weights. Its own methods are the hooks of the steps.
    """

    def __init__(
        self,
        trainer: BaseTrainer[B],
        source: DataSource[B],
        publisher: Publisher,
        nonfinite: NonFiniteGuard,
        ledger: TimeLedger,
        status: StatusPage,
        league: League | None = None,
    ) -> None:
        """``ledger`` and ``status`` are those of the calling thread and its process; a game of one
        side has no ``league``."""
        self._trainer = trainer
        self._source = source
        self._progress = trainer.progress
        self._publisher = publisher
        self._nonfinite = nonfinite
        self._ledger = ledger
        self._status = status
        self._league = league
        self._planned: PlannedBatch[B] | None = None
        """The batch of the next step. It is kept if the group is lost before it is trained on."""
        self.diverged = ""
        """Why the run must end, if too many updates were skipped."""

    def turn(self) -> bool:
        """Train on one batch together with the other learners; returns whether to continue.

        Raises:
            GroupLostError: another learner has ended, or the members have changed. The next turn
                needs a new `sync`.
        """
        self._ledger.switch(Part.COUNT)
        stop = self.begin_turn()
        if self._planned is None:
            batch = None if stop else self.next_batch()
            self._planned = PlannedBatch(batch, self._trainer.plan_updates(batch))

        # All learners exchange their counts and flags.
        self._status.reduction += 1
        self._status.phase = Phase.REDUCING
        message = self.make_control_message(self._planned.plan.counts, stop)
        control = self.sync.sync_control(message)
        self._ledger.switch(Part.COUNT)
        self._status.phase = Phase.TRAINING
        self._progress.commit(message.growth, control.growth)
        if control.nan and not self.diverged:
            self._roll_back()

        planned, self._planned = self._planned, None
        if any(control.counts.tolist()):  # for few numbers quicker than `ndarray.any`
            self._train(planned, control.counts)
        elif planned.batch is not None and not planned.plan.counts.any():
            # Nothing of it counts. (Else the run stops, and its samples are in flight.)
            self._source.release(planned.batch, StepResult(0))
        self._ledger.switch(Part.OTHER)
        if self._league is not None:
            self._league.turn(self._progress.take_results(), time.monotonic())

        if control.checkpoint or control.stop:
            self._keep_state(write=not control.stop)
        if control.regroup:
            raise GroupLostError("its members have changed")
        if control.stop:
            self.on_stop()
        return not control.stop

    def _roll_back(self) -> None:
        """Return to the last good state, as too many updates in a row were skipped."""
        self._trainer.queue.drain()  # may raise; then the batch is trained on in the next group
        self._ledger.switch(Part.COUNT)
        self._nonfinite.report_skipped()
        self.diverged = self._nonfinite.roll_back(report=self.leads)
        self._publish()

    def _train(self, planned: PlannedBatch[B], totals: Floats) -> None:
        """Train on a batch, publish the weights if that is due, and release the batch.

        ``totals`` are the samples of each update over all learners.
        """
        batch = planned.batch
        try:
            result = self._trainer.step(batch, planned.plan, totals=totals, hooks=self)
        except GroupLostError:
            if batch is not None:
                self._source.release(batch, self._trainer.interrupted_result(planned.plan))
            raise

        # Weights are published before slots are freed, so that these are played with new weights.
        if result.publish_due:
            self._ledger.switch(Part.PUBLISH)
            self._publish()
        if batch is not None:
            self._source.release(batch, result)

    def _keep_state(self, *, write: bool) -> None:
        """Keep the present state, and ``write`` a checkpoint of it."""
        self._trainer.queue.drain()
        self._ledger.switch(Part.SAVE)
        self._status.phase = Phase.SAVING
        self.capture_state(save=write)
        if self._league is not None and self._league.take_reset():
            self._nonfinite.reset_states()
            self._publish()
        self._ledger.switch(Part.OTHER)

    def _publish(self) -> None:
        """Publish the present weights, under the version of this learner's progress."""
        stamp = Stamp(self._progress.generation, self._progress.version)
        self._publisher.publish(POLICY_ID, stamp)

    @property
    @abstractmethod
    def sync(self) -> GradientSync:
        """The connection to the other learners."""

    @property
    @abstractmethod
    def leads(self) -> bool:
        """Whether this learner writes checkpoints and events for all."""

    @abstractmethod
    def begin_turn(self) -> bool:
        """Returns whether this learner must stop training."""

    @abstractmethod
    def next_batch(self) -> B | None:
        """Wait for a batch. Returns None for a turn without one."""

    @abstractmethod
    def make_control_message(self, counts: Floats, stop: bool) -> ControlMessage:
        """Returns the control message for the other learners in this turn.

        ``counts`` are this learner's samples of each update; ``stop`` is whether it must stop.
        """

    @abstractmethod
    def capture_state(self, *, save: bool) -> None:
        """Keep the present state; with ``save`` write a checkpoint."""

    @abstractmethod
    def on_stop(self) -> None:
        """Do what is due when all learners have agreed to stop; called once, at the end."""
