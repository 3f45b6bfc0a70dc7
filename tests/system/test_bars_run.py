"""benchmarks/bars.py trains a bar, continues it after a cut, and evaluates its checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bars import BarFolder, LearningBar, measure_seed

pytestmark = [pytest.mark.system]

BAR = LearningBar(
    "cartpole",
    ("algo.reward_scale=0.1", "run.interval_s=0.2"),
    seeds=(3,),
    steps=60_000,
    goal=60.0,
    every=10_000,
    every_s=0.2,
    episodes=5,
)


def test_a_cut_bar_continues_and_gives_the_steps_to_its_goal(tmp_path: Path) -> None:
    folder = BarFolder(tmp_path, "cartpole", 3)
    measure_seed(folder, BAR, 3, deadline_s=time.monotonic() + 5.0)
    assert not folder.is_complete
    begun = BarFolder(tmp_path, "cartpole", 3)
    measure_seed(begun, BAR, 3, deadline_s=float("inf"))

    record = BarFolder(tmp_path, "cartpole", 3).record
    reached = record["steps_to_goal"]
    assert record["evaluations"][str(reached)]["return"] >= BAR.goal
    assert reached <= record["trained_steps"] <= 70_000
    assert {str(steps) for steps in begun.checkpoints()} == set(record["evaluations"])
