"""Which checkpoint is the best of a run, as far as the learner decides that.

The evaluator writes `checkpoints/best` by the mean return of its evaluations. Before the first of
these, the learner writes it by the mean return in training. That mean counts only once it is of
enough episodes.
"""

from __future__ import annotations

from pathlib import Path

from penstock.configs.sections import EnvConfig
from penstock.core.params import ParamLayout
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_history import (
    ENV,
    EVALUATION,
    best_locked,
    usable_best_meta,
)
from penstock.learner.progress import Progress


class BestCheckpoint:
    """The best checkpoint of a run, in ``folder``.

    Args:
        folder: `checkpoints/best`.
        layout: of the run's network; a best checkpoint of another one is moved aside.
        env: the run's environment; a best checkpoint of another one is moved aside.
        has_evaluator: whether the run has an evaluator, which may replace the checkpoint.
        has_opponents: whether the policy plays several sides of a game, so that its mean return in
            training ranks nothing, and evaluations alone find the best.
    """

    def __init__(
        self,
        folder: Path,
        layout: ParamLayout,
        env: EnvConfig,
        *,
        has_evaluator: bool,
        has_opponents: bool = False,
    ) -> None:
        self._folder = folder
        self._layout = layout
        self._env = env
        self._has_evaluator = has_evaluator
        self._has_opponents = has_opponents
        self._return_to_beat: float | None = None  # None: read it from the disk

    def return_to_beat(self) -> float | None:
        """Returns the highest mean return in training at the time of a save; None if there is none.

        It is read from the checkpoint where this process does not know it.
        """
        if self._return_to_beat is None:
            meta = usable_best_meta(self._folder, self._layout, self._env)
            # A checkpoint that was trained in another environment may be evaluated in this one. Its
            # return in training does not count here.
            if meta is not None and self._env.is_same(meta.get(ENV, {})):
                self._return_to_beat = meta.get("best_return")
        return self._return_to_beat

    def is_beaten_by(self, progress: Progress) -> bool:
        """Whether the mean return in training is higher than ever at a save."""
        if self._has_opponents:
            return False
        return_to_beat = self.return_to_beat()
        return_mean = progress.return_mean
        if return_mean is None or not progress.returns.is_full:
            return False
        return return_to_beat is None or return_mean > return_to_beat

    def replace(self, checkpoint: Checkpoint, return_mean: float | None) -> bool:
        """Write ``checkpoint`` as the best one, whose mean return is the next one to beat.

        Returns whether it was written: not if the evaluator has written the best one, or is writing
        it now. Raises UserError where it cannot be written.
        """
        with best_locked(self._folder, wait=False) as is_locked:
            writes = is_locked and not self._is_evaluated()
            if writes:
                checkpoint_format.save(self._folder, checkpoint)
        self._return_to_beat = return_mean
        return writes

    def forget_return(self) -> None:
        """Read the return to beat from the disk again: another learner may have saved."""
        self._return_to_beat = None

    def _is_evaluated(self) -> bool:
        """Whether the evaluator has written the best checkpoint, in this environment."""
        if not self._has_evaluator:
            return False
        meta = usable_best_meta(self._folder, self._layout, self._env)
        return meta is not None and EVALUATION in meta
