"""When a run evaluates its weights, and by how many episodes.

The decisions follow from the steps and seconds of training and from the cost of an episode alone,
so a simulated run tests them as well as a real one. The learner asks for evaluations
(`learner.evaluation_requests`); `EvaluationSchedule` decides which of them are made.

A complete evaluation has `eval.episodes`. Those by steps may have fewer, so that there is one
within two minutes of training, and then at least every five. What decides more than a point of a
curve is complete: the run's last evaluation, and one that is to confirm `stop.return`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.configs.sections import EvalConfig
from penstock.core.formatting import count
from penstock.core.notes import note_logger
from penstock.learner.evaluation_requests import FIRST, POINT

logger = note_logger(__name__)

LONGEST_S = 240.0
"""Time between two evaluations by steps, at most, if they can have fewer episodes."""
FEWEST = 2
"""Episodes of an evaluation in each way, at least: fewer have no standard error."""
FIRST_WITHIN_S = 120.0
"""Seconds of training, of which the first evaluation may take its share."""
SOON_S = 60.0
"""Seconds of training after a first evaluation, within which another one is skipped."""
LAST_S = 300.0
"""Time of the run's last evaluation, which is ended after twice as long."""
NOTED_S = 60.0
"""A longer time between evaluations is noted, with the reason."""


class PairCost(NamedTuple):
    """The time of a pair of episodes, one in each way, on the processor and on the clock."""

    cpu_s: float
    wall_s: float


class Spacing(NamedTuple):
    """Agent steps between two evaluations, and the ``episodes`` of each in either way."""

    every: int
    episodes: int


class EvaluationSchedule:
    """Decides whether an evaluation that the learner asks for is made, and with how many episodes.

    `on_evaluated` reports what each evaluation by steps took; the distance to the next one follows
    from that.
    """

    def __init__(self, settings: EvalConfig) -> None:
        self._settings = settings
        self._next = Spacing(settings.every_steps or 0, settings.episodes)
        # The spacing that the user knows of, from the options or from a note.
        self._noted = self._next
        # The cost by the last evaluation, or estimated before the first one.
        self._cost: PairCost | None = None
        # Seconds of training behind the first evaluation.
        self._first_s: float | None = None

    @property
    def every(self) -> int:
        """Agent steps between two evaluations; 0 if there are none by steps."""
        return self._next.every

    def episodes(
        self, request: str | None, progress: Mapping[str, Any], estimate: Callable[[], PairCost]
    ) -> int | None:
        """Returns the episodes of an evaluation in each way, None if it should be skipped.

        One is skipped if it comes too soon, for instance because it would take more than
        `eval.share` of a core.

        Args:
            request: the kind of the learner's request; None for an evaluation by time.
            progress: the metadata "progress" of the checkpoint: its trained steps, seconds of
                training and the lengths of episodes.
            estimate: returns the cost of a pair of episodes; called if none is known yet.
        """
        settings = self._settings
        complete = settings.episodes
        share = settings.share
        every = settings.every_steps
        if request not in (POINT, FIRST):
            return complete

        assert every is not None
        if self._cost is None:
            if not progress["lengths"]:
                # No episode has ended yet, so its length is unknown.
                return None
            self._cost = estimate()
            self._set_spacing(self._cost, progress)
            # The point of this request need not be one of the new spacing.
            point = progress["trained_steps"] // every * every
            if request == POINT and point % self.every:
                return None

        if request == FIRST and share is not None:
            return episodes_within(complete, self._cost, share=share, seconds=FIRST_WITHIN_S)
        if self._first_s is not None and progress["time_s"] - self._first_s < SOON_S:
            return None
        return self._next.episodes

    def last_episodes(self) -> int:
        """Returns the episodes of the run's last evaluation in each way.

        They are all that fit into `LAST_S`, at least `FEWEST` and at most `eval.episodes`.
        """
        complete = self._settings.episodes
        if self._cost is None:
            return complete
        fitting = int(LAST_S / max(self._cost.wall_s, 1e-9))
        return max(min(fitting, complete), min(FEWEST, complete))

    def on_evaluated(
        self, request: str | None, progress: Mapping[str, Any], cost: PairCost
    ) -> None:
        """An evaluation was made, at this ``cost`` of a pair of episodes.

        ``request`` and ``progress`` are those that `episodes` was called with.
        """
        if request in (POINT, FIRST):
            self._cost = cost
            self._set_spacing(cost, progress)
        if request == FIRST:
            self._first_s = progress["time_s"]

    def _set_spacing(self, cost: PairCost, progress: Mapping[str, Any]) -> None:
        """Set the distance between evaluations, and their episodes, by the ``cost`` of a pair.

        The user gets a note if that has fewer episodes or a longer distance than the last note
        said.
        """
        settings = self._settings
        complete = settings.episodes
        every = settings.every_steps
        assert every is not None
        steps_per_s = max(progress["trained_steps"], 1) / max(progress["time_s"], 1e-3)
        self._next = choose_spacing(
            every, complete, cost, share=settings.share, steps_per_s=steps_per_s
        )

        distance, episodes = self._next
        complete_cpu_s = complete * cost.cpu_s
        if episodes < complete == self._noted.episodes:
            self._noted = self._next
            logger.info(
                "evaluations have fewer episodes than eval.episodes = %d, so that there is one "
                "every %.0f s: one of all episodes takes about %.2g s of CPU time, and eval.share "
                "is %g",
                *(complete, distance / steps_per_s, complete_cpu_s, settings.share),
            )
        elif episodes == complete and distance > max(self._noted.every, NOTED_S * steps_per_s):
            self._noted = self._next
            logger.info(
                "evaluations are %s steps apart instead of eval.every_steps = %s: one takes about "
                "%.2g s of CPU time, and eval.share is %g",
                *(count(distance), count(every), complete_cpu_s, settings.share),
            )


def choose_spacing(
    every: int, episodes: int, cost: PairCost, share: float | None, steps_per_s: float
) -> Spacing:
    """Returns the distance between evaluations, and their episodes.

    Complete evaluations are at ``every`` steps times the smallest power of two with which they take
    at most ``share`` of a core. If these would be more than `LONGEST_S` apart, there are smaller
    evaluations: at ``every`` times the largest power of two, which may be a fraction, that is not
    further apart. Only if even the smallest take more than ``share``, they are further apart.

    With powers of two, the steps of the evaluations of a run with a wider spacing are also those of
    a run with a narrower one, so that seeds can be compared.

    Args:
        every: steps between evaluations that cost nothing.
        episodes: of a complete evaluation, in each way.
        cost: of a pair of episodes.
        share: of a core; None sets no limit, so that all evaluations are complete and at each
            multiple of ``every``.
        steps_per_s: agent steps that are trained on in a second.
    """
    if share is None:
        return Spacing(every, episodes)

    def exponent(seconds: float) -> float:
        """The power of two with which ``every`` steps take so many ``seconds`` of training."""
        return math.log2(max(seconds * steps_per_s / every, 1e-9))

    # Complete evaluations, if they are neither too far apart nor too long.
    distance = every << max(0, math.ceil(exponent(episodes * cost.cpu_s / share)))
    seconds = distance / steps_per_s
    if seconds <= LONGEST_S and episodes * cost.wall_s <= max(seconds, LONGEST_S / 2):
        return Spacing(distance, episodes)

    # Smaller ones: `LONGEST_S` apart, or as far as the smallest possible ones need.
    least_s = min(FEWEST, episodes) * cost.cpu_s / share
    if least_s > LONGEST_S:
        distance = _doubled(every, math.ceil(exponent(least_s)))
    else:
        distance = _doubled(every, math.floor(exponent(LONGEST_S)))
    seconds = distance / steps_per_s
    return Spacing(distance, episodes_within(episodes, cost, share=share, seconds=seconds))


def episodes_within(most: int, cost: PairCost, *, share: float, seconds: float) -> int:
    """Returns the episodes in each way that fit into ``seconds`` of training.

    They take at most ``share`` of a core over these seconds, and at most half of the seconds on the
    clock. The result is between `FEWEST` and ``most``, and ``most`` if that is below `FEWEST`.
    """
    by_cpu = share * seconds / max(cost.cpu_s, 1e-9)
    by_wall = seconds / 2 / max(cost.wall_s, 1e-9)
    return max(int(min(most, by_cpu, by_wall)), min(FEWEST, most))


def _doubled(every: int, times: int) -> int:
    """Returns ``every`` doubled so many ``times``, or halved if they are negative; at least 1."""
    return every << times if times >= 0 else max(1, every >> -times)
