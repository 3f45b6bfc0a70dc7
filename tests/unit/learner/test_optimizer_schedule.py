"""The learning rate of a step, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.configs.sections import LearnerConfig
from penstock.learner.optimizers.flat_optimizer import learning_rate


def test_it_is_constant_without_a_schedule() -> None:
    cfg = LearnerConfig(lr=0.5)
    assert learning_rate(cfg, 0, 1) == learning_rate(cfg, 10**9, 10**6) == 0.5


def test_it_falls_linearly_by_agent_steps_and_stays() -> None:
    cfg = LearnerConfig(lr=0.5, lr_end_fraction=0.2, lr_decay_steps=1000)
    rates = [learning_rate(cfg, steps, 1) for steps in (0, 250, 500, 1000, 5000)]
    assert rates == pytest.approx([0.5, 0.4, 0.3, 0.1, 0.1])


@pytest.mark.parametrize(
    ("scaling", "count", "expected"),
    [("none", 4, 0.1), ("sqrt", 4, 0.2), ("linear", 4, 0.4), ("sqrt", 1, 0.1), ("linear", 1, 0.1)],
)
def test_it_is_scaled_by_learners(scaling: Any, count: int, expected: float) -> None:
    cfg = LearnerConfig(lr=0.1, lr_scaling=scaling, count=count)
    assert learning_rate(cfg, 0, 1) == pytest.approx(expected)


def test_it_warms_up_from_the_rate_of_one_learner() -> None:
    cfg = LearnerConfig(lr=0.1, lr_scaling="linear", count=4, lr_warmup_updates=3)
    rates = [learning_rate(cfg, 0, update) for update in (1, 2, 3, 4, 100)]
    assert rates == pytest.approx([0.2, 0.3, 0.4, 0.4, 0.4])


def test_it_warms_up_from_zero_where_nothing_is_scaled() -> None:
    cfg = LearnerConfig(lr=0.1, lr_scaling="linear", count=1, lr_warmup_updates=5)
    rates = [learning_rate(cfg, 0, update) for update in (1, 2, 5, 6)]
    assert rates == pytest.approx([0.02, 0.04, 0.1, 0.1])


def test_all_of_it_together() -> None:
    cfg = LearnerConfig(
        lr=0.1,
        lr_scaling="sqrt",
        count=9,
        lr_warmup_updates=10,
        lr_end_fraction=0.5,
        lr_decay_steps=100,
    )
    # half-way from 0.1 to 0.3, a fifth of the way from 1 to 0.5
    assert learning_rate(cfg, 20, 5) == pytest.approx(0.2 * 0.9)
    assert learning_rate(cfg, 100, 50) == pytest.approx(0.3 * 0.5)
