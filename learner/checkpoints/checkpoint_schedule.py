"""When a learner is saved.

A save is due after `checkpoint.every_s` seconds, after `checkpoint.every_steps` optimizer steps,
and when a user orders it with `penstock save`. Both distances begin at the last attempt to save,
also if it failed. A schedule decides only; `CheckpointManager` writes the checkpoint.
"""

from __future__ import annotations

from penstock.configs.schema import Config


class CheckpointSchedule:
    """Decides whether a save is due.

        schedule = CheckpointSchedule(config, now_s=time.monotonic())
        if schedule.is_due(now_s=time.monotonic(), learner_steps=progress.learner_steps):
            ...                                    # write the checkpoint
            schedule.begin_interval(now_s=time.monotonic(), learner_steps=progress.learner_steps)

    ``now_s`` is a time of CLOCK_MONOTONIC in seconds, ``learner_steps`` the run's optimizer steps.
    """

    def __init__(self, config: Config, *, now_s: float) -> None:
        every_s = config.checkpoint.every_s
        # Each evaluation by time plays a new checkpoint.
        self._every_s = min(every_s, config.eval.every_s or every_s)
        self._every_steps = config.checkpoint.every_steps
        self._interval_began_s = now_s
        self._interval_began_steps = 0
        self.is_ordered = False
        """Whether a user has ordered a save that no learner has carried out yet."""

    def is_due(self, *, now_s: float, learner_steps: int, by_time: bool = True) -> bool:
        """Whether to save now.

        Args:
            now_s: the present time.
            learner_steps: optimizer steps so far.
            by_time: whether `checkpoint.every_s` and `eval.every_s` count too. Lockstep mode leaves
                them out, since a run must not depend on the speed of its machine.
        """
        if self.is_ordered:
            return True
        if by_time and now_s - self._interval_began_s >= self._every_s:
            return True
        if self._every_steps is None:
            return False

        # Saves are at multiples of the distance, whatever the steps of the last one.
        multiple = learner_steps // self._every_steps
        return multiple > self._interval_began_steps // self._every_steps

    def begin_interval(self, *, now_s: float, learner_steps: int) -> None:
        """Count time and steps to the next save from now on."""
        self._interval_began_s = now_s
        self._interval_began_steps = learner_steps

    def resume(self, learner_steps: int) -> None:
        """Count the steps to the next save from those of the resumed checkpoint."""
        self._interval_began_steps = learner_steps
