from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.configs.errors import UserError
from penstock.core.run_dir import Resume
from penstock.launch.seeds import together, train


def summary(reason: str, solved_at_s: float | None, mean: float) -> dict[str, Any]:
    error = "learner-0: was killed" if reason == "fault" else None
    figures = {"solved_at_s": solved_at_s, "episode_return_mean": mean}
    return {"error": error, "exit_reason": reason, **figures}


def test_what_runs_of_a_group_have_in_common() -> None:
    runs = {
        0: summary("return", 2.0, 480.0),
        1: summary("return", 4.0, 500.0),
        2: summary("env_steps", None, 400.0),
        3: summary("fault", 1.0, 1.0),
        4: summary("interrupted", None, 12.0),
        5: summary("terminated", None, 13.0),
    }
    found = together(runs, 475.0)
    assert (found["goal"], found["solved"], found["finished"]) == (475.0, 2, 3)
    assert found["return"]["mean"] == 460.0
    # Deviation of 480, 500, 400: sqrt((20² + 40² + 60²) / 2); Student's t for two degrees: 4.303.
    assert found["return"]["half"] == pytest.approx(4.303 * (2800 / 3) ** 0.5)
    assert found["solved_at_s"] == {"mean": 3.0, "half": pytest.approx(12.706)}


@pytest.mark.parametrize(("resume", "taken"), [("no", 2), ("must", 0)])
def test_a_folder_that_cannot_be_used_is_told_of_before_the_first_run(
    tmp_path: Path, resume: Resume, taken: int
) -> None:
    (tmp_path / f"seed-{taken}" / "checkpoints" / "last").mkdir(parents=True)
    with pytest.raises(UserError, match=r"seed-\d (already holds a run|has no checkpoint)"):
        train("cartpole", [f"run.dir={tmp_path}"], 3, resume, as_json=True)
    assert [path.name for path in tmp_path.iterdir()] == [f"seed-{taken}"]


def test_of_no_run_nothing_is_known() -> None:
    assert together({}, None) == {
        "return": None,
        "goal": None,
        "solved": 0,
        "solved_at_s": None,
        "finished": 0,
    }
