"""The learner's requests to the evaluator: which checkpoints are evaluated, and when.

An evaluation needs a checkpoint, and a checkpoint takes time of the learner. So the learner writes
one for an evaluation only while the evaluator is idle. The evaluator's messages arrive through the
supervisor, at every learner:

    evaluator   it is idle, sent again every second: the distance `every` between evaluations, the
                trained steps `done` of the last checkpoint that it took, and how to play that,
                with the mean returns
    verdict     the result of a closing evaluation, by the `trained_steps` of its checkpoint
    gone        the evaluator keeps failing and is not started again

The checkpoint is in a folder of its own, `REQUESTED`, from which the evaluator moves it away; the
request is an entry of its metadata. So it survives a crash of the evaluator, and `checkpoints/last`
is as frequent as without evaluation.

Requests are at multiples of the distance. An evaluator that has not evaluated anything after
`FIRST_S` of training is asked at once: multiples may be far apart in a slow environment, and the
evaluator passes over those that come too soon for a complete evaluation.

In a game of several sides an evaluation that reaches `stop.return` is what another one must
confirm; elsewhere it is the return in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.configs.schema import Config
from penstock.core.control import Message
from penstock.core.notes import note_logger
from penstock.learner.progress import Progress

logger = note_logger(__name__)

# The kinds of requests.
POINT = "point"  # at a multiple of the distance between evaluations
FIRST = "first"  # an evaluator's first one, `FIRST_S` after the training began
CLOSING = "closing"  # to confirm `stop.return`

# Seconds of training after which an evaluator that has not evaluated anything gets a checkpoint.
FIRST_S = 45.0
# Seconds until the next try, if no episode had ended for a first evaluation.
AGAIN_S = 10.0
# An idle evaluator has missed a request that is older, in seconds.
LOST_S = 10.0
# Seconds without requests after a checkpoint that could not be written.
POSTPONED_S = 10.0
# Pause after a closing evaluation that did not confirm, as a multiple of its duration.
PAUSE = 2.0


class EvaluationRequests:
    """Decides when a checkpoint is written for the evaluator.

    Call `handle_messages` with all messages, and `turn` once in every turn of the learner; what is
    `due` stays due until the next turn.
    """

    def __init__(
        self,
        config: Config,
        progress: Progress,
        play: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_opponents: bool = False,
    ) -> None:
        """Begin at the present steps of ``progress``.

        Args:
            config: of the run.
            progress: of the run, whose goal may need an evaluation to confirm it.
            play: how to play the policy, if an earlier evaluation has found it out.
            clock: returns seconds that never go back.
            has_opponents: whether the policy plays several sides of a game.
        """
        self._progress = progress
        self._clock = clock
        self.play = play
        """How to play the policy, by the last evaluation."""
        progress.goal.needs_confirmation = config.confirms_return
        progress.goal.by_evaluations = has_opponents

        # Requests by trained steps.
        self._by_steps = config.evaluates_by_steps
        self._every = config.eval.every_steps or 0
        """Distance between evaluations, in trained steps."""
        self._previous_steps = progress.trained_steps
        """Trained steps at the last turn."""
        self._crossed = False
        """Whether a multiple of the distance was passed in this turn."""

        # The first request, where `eval.share` limits the time of evaluations.
        self._limited = config.eval.share is not None
        self._unevaluated = False
        """Whether the evaluator has not evaluated anything, by its last message."""
        self._first_s: float | None = None
        """When its first evaluation is due."""

        # The request in evaluation.
        self._idle = False
        """Whether the evaluator waits for a request."""
        self._requested: int | None = None
        """Trained steps of the checkpoint that is evaluated."""
        self._requested_s = 0.0
        self._closing: int | None = None
        """Trained steps of the last checkpoint that was to confirm the return."""
        self._next_closing_s = 0.0
        """Earliest time of the next request to confirm."""
        self._next_request_s = 0.0
        """Earliest time of the next request."""

    def handle_messages(self, messages: Iterable[Message]) -> None:
        """Take the evaluator's messages among those of the supervisor."""
        for message in messages:
            match message["kind"]:
                case "evaluator":
                    self._on_idle(message)
                case "verdict":
                    self._on_verdict(message)
                case "gone" if message["role"] == "evaluator":
                    self._on_gone()

    def _on_idle(self, message: Message) -> None:
        """Note that the evaluator is idle, unless a request is still on its way to it."""
        self._every = message["every"]
        play = message["play"]
        self.play = play or self.play
        if self._progress.goal.by_evaluations and play is not None:
            self._progress.goal.evaluated_mean = play[play["way"]]["mean"]
        self._unevaluated = message["play"] is None
        if not self._unevaluated:
            self._first_s = None

        is_lost = self._clock() - self._requested_s >= LOST_S
        if self._requested is None or message["done"] >= self._requested or is_lost:
            self._requested = None
            self._idle = True

    def _on_verdict(self, message: Message) -> None:
        """Take the result of the last closing evaluation."""
        if message["trained_steps"] != self._closing:
            return
        self._closing = None
        if message["solved"]:
            self._progress.goal.confirm()
        self._next_closing_s = self._clock() + PAUSE * message["seconds"]

    def _on_gone(self) -> None:
        """Make no more requests: the evaluator is not started again."""
        self._idle = False
        self._by_steps = False
        self._first_s = None
        goal = self._progress.goal
        if goal.by_evaluations:
            logger.info(
                "there are no evaluations any more, so nothing ranks the weights of this game of "
                "several sides, and stop.return cannot be reached"
            )
        elif goal.needs_confirmation:
            goal.stop_confirming()
            logger.info(
                "there are no evaluations any more, so the return in training decides "
                "whether stop.return is reached"
            )

    def turn(self) -> None:
        """Compare the steps trained so far with those of the last turn."""
        steps = self._progress.trained_steps
        every = self._every
        self._crossed = False
        if self._by_steps and every > 0:
            self._crossed = steps // every > self._previous_steps // every

        # The time until a first evaluation begins with the training.
        waits_for_first = self._by_steps and self._limited and self._unevaluated
        if waits_for_first and self._first_s is None and steps > self._previous_steps:
            self._first_s = self._clock() + FIRST_S
        self._previous_steps = steps

    def due(self) -> str | None:
        """Returns the request that a checkpoint is due for now; None if it is for none."""
        now_s = self._clock()
        if not self._idle or now_s < self._next_request_s:
            return None
        if self._progress.goal.awaits_confirmation and now_s >= self._next_closing_s:
            return CLOSING
        if self._crossed:
            return POINT
        if self._first_s is not None and now_s >= self._first_s:
            return FIRST
        return None

    def on_requested(self, request: str) -> None:
        """Note that a checkpoint with this request was written."""
        self._idle = False
        self._crossed = False
        self._requested = self._progress.trained_steps
        self._requested_s = self._clock()
        if request == CLOSING:
            self._closing = self._requested
        elif request == FIRST:
            self._first_s = self._requested_s + AGAIN_S

    def postpone(self) -> None:
        """Make no request for a while, as a checkpoint could not be written."""
        self._crossed = False
        self._next_request_s = self._clock() + POSTPONED_S
