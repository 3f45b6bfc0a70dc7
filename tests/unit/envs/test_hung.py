"""A call that hangs is reported with its name, its duration and its current line."""

from __future__ import annotations

import re
import sys
import time
from types import FrameType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from penstock.envs.checking.checks import Checker
from penstock.envs.checking.hung import call_of, reporting_hung_calls


class Slow(gymnasium.Env[Any, Any]):
    observation_space: Any = spaces.Box(-1, 1, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.inside: FrameType | None = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self._wait()
        return np.zeros(2, np.float32), 1.0, False, False, {}

    def _wait(self) -> None:
        self.inside = sys._getframe()
        time.sleep(self.step_s)


def test_call_of_finds_the_method_that_penstock_called() -> None:
    env = Slow(0.0)
    list(Checker().play(env, 1, 0))
    assert env.inside is not None
    assert call_of(env.inside).f_code is Slow.step.__code__


def test_long_call_is_reported_once() -> None:
    told: list[str] = []
    with reporting_hung_calls(0.3, told.append):
        list(Checker().play(Slow(1.5), 1, 0))
    [clause] = told
    line = Slow._wait.__code__.co_firstlineno + 2
    assert re.match(r"Slow\.step\(\) has not come back for [01] s and is at test_hung\.py:", clause)
    assert clause.endswith(f"test_hung.py:{line}, in _wait")


def test_many_short_calls_are_not_reported() -> None:
    told: list[str] = []
    with reporting_hung_calls(0.5, told.append):
        assert len(list(Checker().play(Slow(0.05), 30, 0))) == 30
    assert told == []


def test_progress_within_a_long_call_prevents_a_report() -> None:
    told: list[str] = []
    with reporting_hung_calls(0.5, told.append) as beat:
        for _ in range(10):
            time.sleep(0.1)
            beat()
    assert told == []
