"""Where an error came from, in the user's own code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from penstock.core.place import place, place_of

GAME = """
import json
import gymnasium
class Bad(gymnasium.Env):
    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(2)
    def step(self, action):
        return json.loads("no JSON")
"""


def raised(call: Any, *arguments: Any) -> BaseException:
    with pytest.raises(Exception) as found:  # noqa: PT011
        call(*arguments)
    error: BaseException = found.value
    error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]  # without this
    return error


def test_it_is_the_last_line_outside_of_libraries(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "bad"}
    exec(compile(GAME, str(tmp_path / "bad.py"), "exec"), names)
    env = gymnasium.wrappers.TransformReward(names["Bad"](), float)
    assert place(raised(env.step, 0)) == "bad.py:8, in step"


def test_without_a_traceback_there_is_no_place() -> None:
    assert place(ValueError("never raised")) == ""


def test_of_a_thread_it_is_the_line_that_it_is_at() -> None:
    frame = sys._getframe()
    line = frame.f_lineno + 1
    assert place_of(frame) == f"test_place.py:{line}, in {frame.f_code.co_name}"
