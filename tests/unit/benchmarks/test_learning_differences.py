"""How two settings of benchmarks/learning.py are compared, and which earlier runs it reuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learning import course_mean, difference_share, known
from penstock.monitor.intervals import iqm, mean

MEASURED: dict[str, Any] = {"target": "cartpole", "steps": 1000, "settings": {"first": []}}
RUN = {"seed": 7, "play": "sampled", "curve": [{"greedy": 1.0, "sampled": 4.0}], "return": 6.0}


def test_a_difference_without_spread_is_its_share_of_the_gain() -> None:
    first, second = np.full(8, 90.0), np.full(8, 110.0)
    # 90 - 110 of a gain of 110 - 10
    assert difference_share([first, second], 10.0, mean) == pytest.approx([-0.2, -0.2])


def test_collapsed_run_widens_the_interval_of_means_but_not_of_interquartile_means() -> None:
    first, second = np.full(16, 100.0), np.full(16, 100.0)
    first[0] = 0.0
    found = difference_share([first, second], 0.0, mean)
    # the number of drawn collapsed runs is binomial(16, 1/16): 0 to 3 within its central 95 %
    assert found == pytest.approx([-3 / 16, 0.0])
    assert difference_share([first, second], 0.0, iqm) == pytest.approx([0.0, 0.0])


def test_mean_over_a_run_uses_the_evaluated_way_to_play() -> None:
    assert course_mean(RUN) == pytest.approx(5.0)


def test_runs_of_the_same_settings_are_reused(tmp_path: Path) -> None:
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(MEASURED | {"runs": {"first": [RUN]}}))
    assert known(path, MEASURED) == {("first", 7): RUN}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps(MEASURED | {"steps": 2000}), "its steps is 2000, and this is 1000"),
        ("{}", "its target is None"),
        ("no JSON", "it must be a file that --save wrote"),
    ],
)
def test_other_results_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "earlier.json"
    path.write_text(text)
    with pytest.raises(SystemExit, match=said):
        known(path, MEASURED)
