"""The loop of a learner, for the learner's process and the lockstep mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic

from penstock.core.interfaces import B, DataSource, StepHooks, StepResult
from penstock.core.params import POLICY_ID, Floats, Stamp
from penstock.learner.base_trainer import BaseTrainer
from penstock.learner.nonfinite import NonFiniteGuard
from penstock.learner.publisher import Publisher
from penstock.learner.sync.gradient_sync import ControlMessage, GradientSync, GroupLostError
from penstock.profiling.ledger import Part, TimeLedger
from penstock.profiling.status import Phase, StatusPage


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
    ) -> None:
        self._trainer, self._source = trainer, source
        self._progress = trainer.progress
        self._publisher = publisher
        self._nonfinite = nonfinite
        self._ledger, self._status = ledger, status
        self._held: tuple[B | None, Floats] | None = None  # planned and not trained on yet
        self.diverged = ""  # why the run must end, where too many updates were skipped

    def turn(self) -> bool:
        """Train on one batch together with the other learners; returns whether to continue.

        Raises:
            GroupLostError: another learner has ended, or the members have changed. The next turn
                needs a new `sync`.
        """
        self._ledger.switch(Part.COUNT)
        stop = self.must_stop()
        if self._held is None:  # else the group was lost before the batch was trained on
            batch = None if stop else self.next_batch()
            self._held = batch, self._trainer.plan_updates(batch)
        self._status.reduction += 1
        self._status.phase = Phase.REDUCING
        own = self.control(self._held[1], stop)
        control = self.sync.sync_control(own)
        self._ledger.switch(Part.COUNT)
        self._status.phase = Phase.TRAINING
        self._progress.commit(own.growth, control.growth)
        if control.nan and not self.diverged:
            self._trainer.queue.drain()  # may raise; then the batch is trained on in the next group
            self._ledger.switch(Part.COUNT)
            self._nonfinite.tell_skipped()
            self.diverged = self._nonfinite.act(tell=self.leads)
            self._publish()
        (batch, counts), self._held = self._held, None
        if any(control.counts.tolist()):  # for few numbers quicker than `ndarray.any`
            self._train(batch, control.counts)
        elif batch is not None and not counts.any():  # else the run stops, and it is in flight
            self._source.release(batch, StepResult(0))
        self._ledger.switch(Part.OTHER)
        if control.checkpoint or control.stop:
            self._trainer.queue.drain()
            self._ledger.switch(Part.SAVE)
            self._status.phase = Phase.SAVING
            self.keep(save=not control.stop)
            self._ledger.switch(Part.OTHER)
        if control.regroup:
            raise GroupLostError("its members have changed")
        if control.stop:
            self.stopped()
        return not control.stop

    def _train(self, batch: B | None, totals: Floats) -> None:
        """Step, publish, release the batch."""
        try:
            result = self._trainer.step(batch, totals, self)
        except GroupLostError:
            if batch is not None:
                self._source.release(batch, self._trainer.interrupted(batch))
            raise
        if result.publish_due:  # before slots are freed, so that these are played with new weights
            self._ledger.switch(Part.PUBLISH)
            self._publish()
        if batch is not None:
            self._source.release(batch, result)

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
    def must_stop(self) -> bool:
        """Returns whether this learner must stop training."""

    @abstractmethod
    def next_batch(self) -> B | None:
        """Wait for a batch. Returns None for a turn without one."""

    @abstractmethod
    def control(self, counts: Floats, stop: bool) -> ControlMessage:
        """Returns the control message for the other learners in this turn.

        ``counts`` are this learner's samples of each update; ``stop`` is whether it must stop.
        """

    @abstractmethod
    def keep(self, *, save: bool) -> None:
        """Keep the present state; with ``save`` write a checkpoint."""

    @abstractmethod
    def stopped(self) -> None:
        """Do what is due when all learners have agreed to stop; called once, at the end."""
