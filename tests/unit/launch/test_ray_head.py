"""The threads of the Ray engine: one asks the head node of the cluster, one takes reports."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

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


def test_no_host_is_silent_because_others_took_long_to_be_found() -> None:
    """When the engine begins to listen, an agent's first answer may be old."""
    import ray

    def take_answers(calls: object) -> int:
        begins._closing.set()
        return 1  # of another agent

    late = Mock(gone=False)
    begins: Any = object.__new__(RayEngine)
    begins._ray = SimpleNamespace(nodes=list, exceptions=ray.exceptions)
    begins._agents, begins._listened, begins._resumed_s = [late], [0.0], float("-inf")
    begins._wake, begins._closing = os.eventfd(0, os.EFD_NONBLOCK), threading.Event()
    begins._await_hosts = begins._ask_head = lambda *_: None
    begins._take_answers = take_answers
    begins._thread = threading.Thread(target=begins._listen)
    begins.reserve([])
    begins._thread.join()
    os.close(begins._wake)
    assert begins._listened == [0.0]
