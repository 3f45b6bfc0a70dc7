"""The thread of the Ray engine that asks the head node of the cluster."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from penstock.launch.engines.ray_engine import RayEngine


class Turns(threading.Event):
    """Is set after so many waits."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def wait(self, timeout: float | None = None) -> bool:
        self._left -= 1
        return self._left < 0


def engine(answers: list[Any]) -> Any:
    """An engine whose head node gives these answers, or raises them."""

    def get_draining_nodes() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    engine = object.__new__(RayEngine)
    state = SimpleNamespace(state=SimpleNamespace(get_draining_nodes=get_draining_nodes))
    engine._ray = SimpleNamespace(_private=SimpleNamespace(state=state))
    engine._closing = Turns(len(answers))
    engine._draining, engine._head_s, engine._head_error = frozenset(), 0.0, ""
    return engine


def test_after_an_error_the_head_node_is_asked_again() -> None:
    asked = engine([{}, RuntimeError("first line\nthe GCS is away"), {"a": 1}])
    asked._ask_head()
    assert (asked._draining, asked._head_error) == ({"a"}, "")
    assert time.monotonic() - asked._head_s < 60


@pytest.mark.parametrize(
    ("error", "why"), [(RuntimeError("one\ntwo"), "two"), (KeyError, "KeyError")]
)
def test_the_last_error_is_kept_for_the_user(error: Any, why: str) -> None:
    asked = engine([error if isinstance(error, Exception) else error()])
    asked._ask_head()
    assert (asked._head_s, asked._head_error) == (0.0, why)
