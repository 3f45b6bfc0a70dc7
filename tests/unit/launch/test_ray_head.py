"""The two threads of the Ray engine: one queries the head node, one receives reports."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from penstock.launch.engines.ray_agent import SILENT_S, PauseWatch
from penstock.launch.engines.ray_engine import HeadNode


class Turns(threading.Event):
    """Is set after so many waits."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def wait(self, timeout: float | None = None) -> bool:
        self._left -= 1
        return self._left < 0


def head_node(answers: list[Any]) -> Any:
    """A head node that has given these answers, or raised them."""

    def get_draining_nodes() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    state = SimpleNamespace(state=SimpleNamespace(get_draining_nodes=get_draining_nodes))
    ray = SimpleNamespace(_private=SimpleNamespace(state=state))
    head: Any = HeadNode(ray, Turns(len(answers)))
    head._answered_s = 0.0
    head._ask()
    return head


def test_head_node_is_queried_again_after_an_error() -> None:
    head = head_node([{}, RuntimeError("first line\nthe GCS is away"), {"a": 1}])
    assert (head.draining, head._error) == ({"a"}, "")
    assert time.monotonic() - head._answered_s < 60


@pytest.mark.parametrize(
    ("error", "why"), [(RuntimeError("one\ntwo"), "two"), (KeyError, "KeyError")]
)
def test_the_last_error_is_kept_for_the_user(error: Any, why: str) -> None:
    head = head_node([error if isinstance(error, Exception) else error()])
    assert (head._answered_s, head._error) == (0.0, why)


def test_slow_reservation_does_not_make_earlier_hosts_silent() -> None:
    """When the engine begins to listen, an agent's first answer may be old."""
    pauses = PauseWatch()
    pauses.begin(now_s=100.0)
    pauses.on_listener_turn(now_s=100.0 + SILENT_S)
    assert pauses.listened_s == 0.0
    pauses.on_listener_turn(now_s=101.0 + SILENT_S)
    assert pauses.listened_s == 101.0 + SILENT_S


@pytest.mark.parametrize(
    ("listener_turns_s", "stopped_s"),
    [([], 20.0), ([104.0, 108.0, 112.0, 116.0], None)],
    ids=["the process", "only the supervisor"],
)
def test_a_stop_of_the_process_is_noticed(
    listener_turns_s: list[float], stopped_s: float | None
) -> None:
    pauses = PauseWatch()
    pauses.begin(now_s=100.0)
    for turn_s in listener_turns_s:
        pauses.on_listener_turn(turn_s)
    assert pauses.on_supervisor_turn(now_s=120.0)
    stop = pauses.recent_stop(now_s=120.0)
    assert (stop and stop.seconds) == stopped_s
    assert pauses.recent_stop(now_s=121.0 + 2 * SILENT_S) is None
