"""When the learner writes a checkpoint for an evaluation, and what it does with the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.algos.slots import UnrollSummary
from penstock.configs.load import resolve
from penstock.core.control import Message
from penstock.learner.evaluation_requests import (
    AGAIN_S,
    CLOSING,
    FIRST,
    FIRST_S,
    LOST_S,
    PAUSE,
    POINT,
    POSTPONED_S,
    EvaluationRequests,
)
from penstock.learner.progress import Progress


class Run:
    """A learner's counters and a clock, both set by the test."""

    def __init__(self, *options: str, has_opponents: bool = False) -> None:
        config = resolve("cartpole", ["eval.every_steps=100", "stop.return=10", *options])
        self.progress = Progress(config.stop, 1)
        self.now_s = 1000.0
        self.requests = EvaluationRequests(
            config, self.progress, clock=lambda: self.now_s, has_opponents=has_opponents
        )

    def hear(self, kind: str, **fields: Any) -> None:
        message: Message = {"kind": kind, **fields}
        self.requests.handle_messages([message])

    def idle(self, done: int = 0, every: int = 100, play: Any = None) -> None:
        self.hear("evaluator", every=every, done=done, play=play)

    def evaluated(self, mean: float, done: int = 0) -> None:
        """The evaluator is idle after an evaluation with this mean return in the better way."""
        play = {"way": "sampled", "sampled": {"mean": mean}, "greedy": {"mean": mean - 1}}
        self.idle(done=done, play=play)

    def trained(self, steps: int) -> str | None:
        """The request after a turn that ends at so many steps."""
        self.progress.trained_steps = steps
        self.requests.turn()
        return self.requests.due()

    def reach(self, mean: float = 10.0) -> None:
        """A hundred episodes in training have this mean."""
        arrays = {
            "alive": np.ones((1, 100), bool),
            "policy_version": np.zeros((1, 100), np.uint32),
            "terminated": np.ones((1, 100), bool),
            "truncated": np.zeros((1, 100), bool),
            "episode_return": np.full((1, 100), mean, np.float32),
            "episode_length": np.full((1, 100), 7, np.int32),
        }
        self.progress.count_unrolls(UnrollSummary.of(arrays), 0)
        self.progress.commit(self.progress.growth(), self.progress.growth())


def test_evaluation_checkpoint_is_due_when_a_multiple_is_crossed() -> None:
    run = Run()
    assert run.trained(150) is None  # the evaluator is not ready yet
    run.idle()
    assert run.trained(190) is None  # 100 was passed before
    assert run.trained(205) == POINT
    assert run.trained(230) is None


def test_no_evaluation_checkpoint_is_due_while_the_evaluator_works() -> None:
    run = Run()
    run.idle()
    assert run.trained(100) == POINT
    run.requests.on_requested(POINT)
    run.idle(done=0)  # sent before it saw the checkpoint
    assert run.trained(205) is None
    run.idle(done=100)
    assert run.trained(290) is None
    assert run.trained(300) == POINT


def test_evaluator_sets_the_interval_of_evaluations() -> None:
    run = Run()
    run.idle(every=400)
    assert [run.trained(steps) for steps in (100, 200, 390, 410, 500)] == [
        *(None, None, None),
        POINT,
        None,
    ]


def test_lost_request_is_repeated() -> None:
    run = Run()
    run.idle()
    assert run.trained(100) == POINT
    run.requests.on_requested(POINT)
    run.now_s += LOST_S  # the evaluator has been killed and started again
    run.idle(done=0)
    assert run.trained(200) == POINT


def test_way_to_play_follows_the_last_evaluation() -> None:
    run = Run()
    assert run.requests.play is None
    run.idle(play={"way": "sampled"})
    run.idle()  # a new process of the evaluator
    assert run.requests.play == {"way": "sampled"}


def test_training_return_only_requests_a_confirmation() -> None:
    run = Run()
    run.idle()
    assert run.trained(10) is None
    run.reach()
    assert run.progress.goal.reached_at_s is not None
    assert (run.progress.goal.solved_at_s, run.progress.stop_reason()) == (None, None)
    assert run.trained(20) == CLOSING
    run.requests.on_requested(CLOSING)
    assert run.trained(30) is None
    run.hear("verdict", trained_steps=20, solved=True, seconds=1.0)
    assert run.progress.stop_reason() == "return"
    assert run.progress.goal.solved_at_s is not None
    run.idle(done=20)
    assert run.trained(40) is None


def test_in_a_game_of_several_sides_an_evaluation_requests_a_confirmation() -> None:
    run = Run(has_opponents=True)
    run.idle()
    run.reach(20.0)  # in training, against oneself
    assert run.trained(10) is None
    run.evaluated(9.9)
    run.reach(20.0)
    assert run.trained(20) is None
    run.evaluated(10.0)
    run.reach(-20.0)
    assert run.progress.goal.reached_at_s is not None
    assert run.trained(30) == CLOSING
    run.requests.on_requested(CLOSING)
    run.hear("verdict", trained_steps=30, solved=False, seconds=1.0)
    run.now_s += 10.0
    run.evaluated(9.0, done=30)  # by all episodes of the closing evaluation
    assert run.trained(40) is None
    run.evaluated(10.0, done=30)
    assert run.trained(50) == CLOSING
    run.requests.on_requested(CLOSING)
    run.hear("verdict", trained_steps=50, solved=True, seconds=1.0)
    assert run.progress.stop_reason() == "return"


def test_without_confirmation_an_evaluation_of_several_sides_ends_the_run() -> None:
    run = Run("stop.confirm_episodes=0", has_opponents=True)
    run.reach(20.0)
    assert run.progress.stop_reason() is None
    run.evaluated(10.0)
    run.reach(-20.0)
    assert run.progress.stop_reason() == "return"


def test_a_lost_evaluator_lets_no_return_against_oneself_end_the_run(notes: list[str]) -> None:
    run = Run(has_opponents=True)
    run.hear("gone", role="evaluator")
    run.reach(20.0)
    assert run.progress.stop_reason() is None
    assert "stop.return cannot be reached" in notes[0]


def test_refuted_goal_is_evaluated_again_after_a_pause() -> None:
    run = Run()
    run.idle()
    run.reach()
    assert run.trained(20) == CLOSING
    run.requests.on_requested(CLOSING)
    run.hear("verdict", trained_steps=20, solved=False, seconds=3.0)
    run.idle(done=20)
    assert run.progress.stop_reason() is None
    run.now_s += PAUSE * 3.0 - 0.1
    assert run.trained(30) is None
    run.now_s += 0.2
    assert run.trained(40) == CLOSING
    run.reach(9.0)  # the return in training has fallen
    assert run.trained(50) is None
    run.reach(11.0)
    assert run.trained(60) == CLOSING


def test_verdict_on_other_weights_is_ignored() -> None:
    """As of a request before a resume, or of one that was taken for lost."""
    run = Run()
    run.idle()
    run.reach()
    run.hear("verdict", trained_steps=20, solved=True, seconds=1.0)
    assert run.progress.stop_reason() is None
    assert run.trained(25) == CLOSING
    run.requests.on_requested(CLOSING)
    run.hear("verdict", trained_steps=20, solved=True, seconds=1.0)
    assert run.progress.stop_reason() is None


def test_training_return_decides_without_an_evaluator(notes: list[str]) -> None:
    run = Run()
    run.reach()
    run.hear("gone", role="evaluator")
    assert run.progress.stop_reason() == "return"
    assert run.progress.goal.solved_at_s == run.progress.goal.reached_at_s
    assert len(notes) == 1
    run.hear("gone", role="evaluator")
    assert len(notes) == 1


def test_refuted_return_does_not_solve_a_run_that_lost_its_evaluator() -> None:
    run = Run()
    run.idle()
    run.reach()
    assert run.trained(25) == CLOSING
    run.requests.on_requested(CLOSING)
    run.hear("verdict", trained_steps=25, solved=False, seconds=1.0)
    run.reach(-5.0)
    run.hear("gone", role="evaluator")
    assert run.progress.goal.solved_at_s is None
    run.reach()
    assert run.progress.stop_reason() == "return"
    assert run.progress.goal.solved_at_s == run.progress.time_s


@pytest.mark.parametrize(
    "option", ["stop.confirm_episodes=0", "transport.kind=inproc", "stop.return=9"]
)
def test_run_without_confirmation_stops_at_the_training_return(option: str) -> None:
    run = Run(option)
    run.reach()
    confirms = option == "stop.return=9"
    assert run.progress.stop_reason() == (None if confirms else "return")


def test_the_pause_of_hold_s_comes_before_the_confirmation() -> None:
    run = Run("stop.hold_s=1000")
    run.idle()
    run.reach()
    assert run.trained(20) is None


def test_full_disk_is_not_retried_in_every_turn() -> None:
    run = Run()
    run.idle()
    assert run.trained(100) == POINT
    run.requests.postpone()
    assert run.trained(200) is None
    run.now_s += POSTPONED_S
    assert run.trained(300) == POINT


def test_evaluations_by_time_ignore_multiples_of_steps() -> None:
    run = Run("eval.every_s=5")
    run.idle()
    assert run.trained(100) is None
    run.reach()
    assert run.trained(110) == CLOSING


def test_resumed_run_is_evaluated_at_the_next_multiple() -> None:
    config = resolve("cartpole", ["eval.every_steps=100"])
    progress = Progress(config.stop, 1)
    progress.trained_steps = 150
    requests = EvaluationRequests(config, progress, {"way": "sampled"}, clock=lambda: 0.0)
    assert requests.play == {"way": "sampled"}
    requests.handle_messages([{"kind": "evaluator", "every": 100, "done": 0, "play": None}])
    requests.turn()
    assert requests.due() is None
    progress.trained_steps = 200
    requests.turn()
    assert requests.due() == POINT


def test_first_evaluation_is_requested_soon_after_training_began() -> None:
    run = Run()
    run.idle()
    run.now_s += FIRST_S
    assert run.trained(10) is None  # the first steps
    run.now_s += FIRST_S - 0.1
    assert run.trained(20) is None
    run.now_s += 0.1
    assert run.trained(30) == FIRST
    run.requests.on_requested(FIRST)
    run.idle(done=30)  # no episode has ended
    assert run.trained(40) is None
    run.now_s += AGAIN_S
    assert run.trained(50) == FIRST
    run.requests.on_requested(FIRST)
    run.idle(done=50, play={"way": "greedy"})
    run.now_s += 10 * FIRST_S
    assert run.trained(60) is None
    assert run.trained(110) == POINT


@pytest.mark.parametrize("option", ["eval.share=null", "eval.every_s=5", "eval.every_steps=null"])
def test_custom_evaluation_times_prevent_the_early_first_evaluation(option: str) -> None:
    run = Run(option)
    run.idle()
    assert run.trained(10) is None
    run.now_s += 2 * FIRST_S
    assert run.trained(20) is None
