from __future__ import annotations

from typing import Any

import pytest

from penstock.launch.seeds import together


def test_what_runs_of_a_group_have_in_common() -> None:
    runs: dict[int, dict[str, Any]] = {
        0: {"error": None, "solved_at_s": 2.0, "episode_return_mean": 480.0},
        1: {"error": None, "solved_at_s": 4.0, "episode_return_mean": 500.0},
        2: {"error": None, "solved_at_s": None, "episode_return_mean": 400.0},
        3: {"error": "learner-0: was killed", "solved_at_s": 1.0, "episode_return_mean": 1.0},
    }
    found = together(runs, 475.0)
    assert (found["goal"], found["solved"], found["finished"]) == (475.0, 2, 3)
    assert found["return"]["mean"] == 460.0
    # Deviation of 480, 500, 400: sqrt((20² + 40² + 60²) / 2); Student's t for two degrees: 4.303.
    assert found["return"]["half"] == pytest.approx(4.303 * (2800 / 3) ** 0.5)
    assert found["solved_at_s"] == {"mean": 3.0, "half": pytest.approx(12.706)}


def test_of_no_run_nothing_is_known() -> None:
    assert together({}, None) == {
        "return": None,
        "goal": None,
        "solved": 0,
        "solved_at_s": None,
        "finished": 0,
    }
