"""When a save is due: by time, by optimizer steps, or by order."""

from __future__ import annotations

from penstock.configs.load import resolve
from penstock.learner.checkpoints.checkpoint_schedule import CheckpointSchedule


def schedule(*options: str) -> CheckpointSchedule:
    return CheckpointSchedule(resolve("cartpole", list(options)), now_s=100.0)


def test_a_save_is_due_after_the_seconds_between_checkpoints() -> None:
    by_time = schedule("checkpoint.every_s=10")
    assert not by_time.is_due(now_s=109.0, learner_steps=0)
    assert by_time.is_due(now_s=110.0, learner_steps=0)
    assert not by_time.is_due(now_s=110.0, learner_steps=0, by_time=False)
    by_time.begin_interval(now_s=111.0, learner_steps=0)
    assert not by_time.is_due(now_s=120.0, learner_steps=0)


def test_evaluations_by_time_shorten_the_interval() -> None:
    assert schedule("eval.every_s=5").is_due(now_s=105.0, learner_steps=0)


def test_a_save_is_due_at_multiples_of_the_steps_between_checkpoints() -> None:
    by_steps = schedule("checkpoint.every_steps=10")
    by_steps.resume(learner_steps=25)
    assert not by_steps.is_due(now_s=100.0, learner_steps=29)
    assert by_steps.is_due(now_s=100.0, learner_steps=30)


def test_an_ordered_save_is_due_at_once() -> None:
    ordered = schedule()
    ordered.is_ordered = True
    assert ordered.is_due(now_s=100.0, learner_steps=0, by_time=False)
