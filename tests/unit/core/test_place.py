"""The place of an error in the user's own code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from penstock.core.place import brief_with_place, place, place_of, users_traceback

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


def test_place_is_the_last_line_outside_libraries(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "bad"}
    exec(compile(GAME, str(tmp_path / "bad.py"), "exec"), names)
    env = gymnasium.wrappers.TransformReward(names["Bad"](), float)
    assert place(raised(env.step, 0)) == "bad.py:8, in step"


def test_traceback_has_only_frames_of_user_code(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "bad"}
    exec(compile(GAME, str(tmp_path / "bad.py"), "exec"), names)
    text = users_traceback(
        raised(gymnasium.wrappers.TransformReward(names["Bad"](), float).step, 0)
    )
    assert text.startswith(
        f'Traceback (most recent call last):\n  File "{tmp_path}/bad.py", line 8'
    )
    assert text.endswith("JSONDecodeError: Expecting value: line 1 column 1 (char 0)")
    assert "gymnasium" not in text


def test_stop_iteration_keeps_its_name_and_place_through_a_generator(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "bad"}
    exec(compile("def stop():\n    next(iter(()))", str(tmp_path / "bad.py"), "exec"), names)
    error = raised(next, (names["stop"]() for _ in "a"))
    assert isinstance(error, RuntimeError)
    assert brief_with_place(error) == "StopIteration (bad.py:2, in stop)"


def test_error_without_a_traceback_has_no_place() -> None:
    assert place(ValueError("never raised")) == ""


def test_place_of_a_thread_is_its_current_line() -> None:
    frame = sys._getframe()
    line = frame.f_lineno + 1
    assert place_of(frame) == f"test_place.py:{line}, in {frame.f_code.co_name}"
