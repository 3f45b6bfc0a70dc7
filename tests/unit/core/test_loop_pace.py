"""Pauses of a loop that may use a given share of a core."""

from __future__ import annotations

import pytest

from penstock.core.loop_pace import LoopPace


def test_a_loop_rests_in_proportion_to_its_processor_time() -> None:
    used_s = [0.0]
    pace = LoopPace(0.1, lambda: used_s[0])
    used_s[0] += 0.02
    assert pace.rest_s(10.0) == pytest.approx(0.18)  # 0.02 s of 0.2 s
    assert pace.rest_s(10.0) == 0.0
    used_s[0] += 5.0
    assert pace.rest_s(1.0) == 1.0
