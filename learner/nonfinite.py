"""How a run handles a loss or gradients that are not finite.

1. *Skip.* A loss that is not finite makes every gradient NaN (`backward`), the gradients of all
   learners are summed, so that each has the same norm, and an optimizer takes no step by a norm
   that is not finite. That is decided on the device, without a wait.
2. *Count.* `DeviceStatistics` counts skipped updates where their norms arrive at the host.
3. *Roll back.* After `max_in_row` of them in a row all learners return, in the same turn, to the
   state that each has kept in memory when the run was last saved, and continue at a lower learning
   rate. The state is kept in memory, since only one learner has the file, and a disk may be full.
   Where the same happens before the next checkpoint, the one before is tried.
4. *Stop*, after `max_rollbacks` rollbacks.

Counters, policy versions and random generators do not go back: samples stay accounted for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from penstock.core.params import Arrays
from penstock.learner.base_trainer import BaseTrainer
from penstock.learner.state import (
    WEIGHTS,
    follow_lr_factor,
    learning_rate_of,
    set_weights,
    weights_of,
)

# The exit reason of a run that could not be rolled back.
DIVERGED = "diverged"
# States in memory: one more than the last, which may be from after the trouble began.
KEPT = 2


class NonFiniteGuard:
    """Restores a good state of ``trainer``, or reports that the run must end.

    With several learners each has one, and all call `copy_state` and `roll_back` in the same turns.
    """

    def __init__(self, trainer: BaseTrainer[Any], event: Callable[..., object]) -> None:
        """Keep the present state. ``event`` is `RoleContext.event`."""
        self._trainer = trainer
        self._statistics = trainer.device_statistics
        self._config = trainer.config.learner.nonfinite
        self._event = event

        self._states: deque[Arrays] = deque(maxlen=KEPT)
        """The states to which the run can return, the newest last."""
        self._reported_skips = 0
        """Skipped updates that events were written about."""
        self._rolls_back = not trainer.config.learner.served
        """Whether there are rollbacks; the state of a parameter server is not restored."""
        self.copy_state()

    @property
    def needs_rollback(self) -> bool:
        """Whether so many updates in a row were skipped that `roll_back` must be called."""
        return self._statistics.skipped_in_row >= self._config.max_in_row

    def copy_state(self) -> None:
        """Keep a copy of the present state, which is always finite."""
        if self._rolls_back:
            arrays = {name: array.copy() for name, array in self._trainer.state_dict().items()}
            self._states.append(arrays | {WEIGHTS: weights_of(self._trainer)})

    def reset_states(self) -> None:
        """Drop the states in memory, and keep the present one.

        The learners of a new group start from one state, which only one of them has kept.
        """
        self._states.clear()
        self.copy_state()

    def roll_back(self, *, report: bool = True) -> str:
        """Restore the last good state, at a lower learning rate.

        Args:
            report: whether this learner writes the event.

        Returns:
            Why the run must end, or an empty string.
        """
        progress, cfg = self._trainer.progress, self._config
        self._restore()
        cause = self._statistics.last_skipped or "numbers of another learner that are not finite"
        if not self._rolls_back or progress.rollbacks >= cfg.max_rollbacks:
            return self._end_reason(cause)

        progress.rollbacks += 1
        progress.lr_factor *= cfg.lr_factor
        follow_lr_factor(self._trainer)
        if report:
            self._event(
                "rollback",
                f"{cfg.max_in_row} updates in a row were skipped, as a loss or gradient was not "
                "finite: the learner goes back to its last good state, at a lower learning rate",
                loss=cause,
                step=progress.learner_steps,
                learning_rate=learning_rate_of(self._trainer),
                number=progress.rollbacks,
            )
        return ""

    def report_skipped(self) -> None:
        """Write an event about the updates skipped since the last call, if any."""
        skipped = self._statistics.skipped - self._reported_skips
        self._reported_skips = self._statistics.skipped

        if skipped:
            self._event(
                "note",
                "an update was skipped, as a loss or gradient was not finite; updates_skipped in "
                "the metrics counts them",
                loss=self._statistics.last_skipped,
                step=self._trainer.progress.learner_steps,
                learning_rate=learning_rate_of(self._trainer),
                skipped=skipped,
            )

    def figures(self) -> dict[str, int]:
        """Returns figures for metrics.jsonl."""
        return {
            "updates_skipped": self._statistics.skipped,
            "rollbacks": self._trainer.progress.rollbacks,
        }

    def _restore(self) -> None:
        """Return to the newest state; the next time to the one before, unless that is the last."""
        self._statistics.forget_skipped()
        if not self._states:
            return
        newest = self._states[-1] if len(self._states) == 1 else self._states.pop()
        state = dict(newest)
        set_weights(self._trainer, state.pop(WEIGHTS))
        self._trainer.load_state_dict(state)
        # From now on a lost reduction brings this state back.
        self._trainer.queue.on_batch_queued()
        self._trainer.queue.drain()

    def _end_reason(self, cause: str) -> str:
        """Returns the sentence with which the run ends."""
        cfg, learner = self._config, self._trainer.config.learner
        rollbacks = self._trainer.progress.rollbacks
        after = f", after {rollbacks} rollbacks" if rollbacks else ""
        return (
            f"{cfg.max_in_row} updates in a row were skipped{after}, the last with {cause}; find "
            f"out what is not finite, or lower learner.lr (now {learning_rate_of(self._trainer):g})"
            f" or learner.grad_clip (now {learner.grad_clip}) and resume"
        )
