"""The metrics of `env.record`: the values that they average, and notes about unknown keys."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.algos.slots import RecordedSum, UnrollSummary
from penstock.core.notes import notes_to
from penstock.learner.recorded_means import RecentMean, RecordedMeans

NOTHING = RecordedSum(0.0, 0)


def unrolls(episodes: int, **recorded: tuple[RecordedSum, RecordedSum]) -> UnrollSummary:
    none = np.zeros(0, np.int64)
    return UnrollSummary(none, none, [1.0] * episodes, [1] * episodes, recorded=recorded)


def test_recorded_mean_covers_the_interval_and_at_least_a_hundred_values() -> None:
    mean = RecentMean()
    taken = []
    for values in ([(6.0, 3)], [], [(0.0, 97)], [(50.0, 50)] * 3, [(0.0, 1)]):
        for total, count in values:
            mean.add(RecordedSum(total, count))
        taken.append(mean.take())
    # The last is of the hundred before it, too: two of the three that the interval before had.
    assert taken == [2.0, 2.0, pytest.approx(0.06), 1.0, pytest.approx(100 / 101)]


def test_recorded_mean_is_none_before_the_first_value() -> None:
    means = RecordedMeans(["won"])
    means.add(unrolls(0, won=(NOTHING, NOTHING)))
    assert means.interval() == {"env_won_mean": None, "env_won_final_mean": None}
    means.add(unrolls(2, won=(RecordedSum(1.0, 4), RecordedSum(1.0, 2))))
    assert means.interval() == {"env_won_mean": 0.25, "env_won_final_mean": 0.5}
    assert RecordedMeans([]).interval() == {}


def test_a_key_that_no_step_of_a_hundred_episodes_has_is_noted_once() -> None:
    means = RecordedMeans(["won", "wom"])
    notes: list[str] = []
    with notes_to(notes.append):
        for episodes in (99, 1, 100):
            means.add(unrolls(episodes, won=(RecordedSum(1.0, 1), NOTHING), wom=(NOTHING, NOTHING)))
            means.interval()
    assert notes == [
        "env.record: no step has had wom in its info, and 100 episodes have ended; correct the "
        "name: `penstock check-env` lists those that there are"
    ]
