from __future__ import annotations

import pytest

from penstock.replay.errors import ReplayError
from penstock.replay.schedules import Constant, Linear, as_schedule


@pytest.mark.parametrize(
    ("drawn", "value"), [(0, 0.4), (250, 0.55), (500, 0.7), (1000, 1.0), (5000, 1.0)]
)
def test_linear_goes_from_start_to_end_and_stays(drawn: int, value: float) -> None:
    assert Linear(0.4, 1.0, 1000)(drawn) == pytest.approx(value, abs=1e-12)


def test_linear_reaches_its_end_exactly_and_may_fall() -> None:
    assert Linear(0.1, 0.3, 3)(3) == 0.3
    assert Linear(1.0, 0.0, 4)(1) == 0.75


def test_linear_over_nothing_is_refused() -> None:
    with pytest.raises(ReplayError, match="over 0 transitions has no slope"):
        Linear(0.4, 1.0, 0)


def test_a_number_is_a_schedule_and_a_schedule_stays_itself() -> None:
    assert as_schedule(0.4) == Constant(0.4)
    assert as_schedule(0.4)(10**9) == 0.4
    linear = Linear(0.4, 1.0, 10)
    assert as_schedule(linear) is linear
