"""The check of the messages that roles send to their supervisor."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.control import Channel
from penstock.core.role import EXIT_REJOIN
from penstock.launch import role
from penstock.launch.role_messages import fault_of

CHECKPOINT = {
    "kind": "checkpoint",
    **{"folder": "run/checkpoints/last", "best": False, "time_s": 1.5, "return_mean": None},
    **{"trained_steps": 10, "learner_steps": 1},
}
FINAL = {"kind": "final", "accounting": {"produced": 3, "trained": 3, "in_flight": 0}}


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "ready"},
        {"kind": "a kind of a later release", "any": [1]},
        {"kind": "stop", "reason": "return", "error": ""},
        {"kind": "error", "message": "no such file", "user": True, "traceback": ""},
        {"kind": "metrics", "time_s": 0.5, "episode_return_mean": None, "dropped": {"stale": 3}},
        {"kind": "metrics", "policy_lag_histogram": {"0": 10, "12": 1}, "received": {"slots": 2}},
        CHECKPOINT,
        FINAL,
    ],
)
def test_messages_with_their_fields_are_used(message: dict[str, Any]) -> None:
    assert fault_of(message) == ""


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({}, "'kind' is missing, and must be text"),
        ({"kind": None}, "'kind' is None, and must be text"),
        ({"kind": "stop"}, "'reason' is missing, and must be text"),
        ({"kind": "error", "message": 3}, "'message' is 3, and must be text"),
        ({"kind": "group_failed", "epoch": "1"}, "'epoch' is '1', and must be a whole number"),
        ({"kind": "metrics", "lost": {"a": None}}, "'lost' is {'a': None}, and must be an object"),
        ({"kind": "metrics", "latency_histogram": {"a": 1}}, "must be an object of numbers by wh"),
        ({"kind": "metrics", "policy_lag_histogram": {"--3": 1}}, "is {'--3': 1}, and must be an"),
        ({"kind": "metrics", "policy_lag_histogram": {"9" * 5000: 1}}, "..., and must be an obj"),
        (
            {"kind": "final", "accounting": {"produced": 3}},
            "'accounting' is {'produced': 3}, and must be an object with produced (a whole "
            "number), trained (a whole number), in_flight (a whole number)",
        ),
        ({"kind": "event", "text": "", "data": "x" * 100}, f"'data' is '{'x' * 39}..., and must"),
        (CHECKPOINT | {"best": None}, "'best' is None, and must be true or false"),
    ],
)
def test_what_is_wrong_with_a_message_is_one_sentence(message: dict[str, Any], fault: str) -> None:
    assert fault in fault_of(message)


@pytest.mark.parametrize(
    ("code", "exit_code", "messages"),
    [
        (EXIT_REJOIN, EXIT_REJOIN, []),
        (0, 2, ["its code called sys.exit(0) at test_role_messages.py:"]),
        (None, 2, ["its code called sys.exit() at test_role_messages.py:"]),
        ("no licence", 2, ["its code called sys.exit('no licence') at test_role_messages.py:"]),
    ],
)
def test_exit_that_the_role_did_not_ask_for_is_reported_as_a_mistake(
    code: Any, exit_code: int, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(ctx: object) -> None:
        sys.exit(code)

    monkeypatch.setattr(role, "leave", leave, raising=False)
    reports: list[dict[str, Any]] = []
    ctx: Any = SimpleNamespace(
        name="actor-0",
        status=SimpleNamespace(begin=lambda phase: None),
        report=lambda kind, **fields: reports.append(fields),
    )
    assert role._run("penstock.launch.role:leave", ctx) == exit_code
    assert [report["message"].partition(":")[0] + ":" for report in reports] == messages
    assert all(report["user"] for report in reports)


def test_texts_of_any_characters_fit_the_report_of_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(ctx: object) -> None:
        raise ValueError("\U0001f600" * 100_000)

    monkeypatch.setattr(role, "fail", fail, raising=False)
    supervisor, theirs = Channel.pair()
    own = Channel(theirs)
    ctx: Any = SimpleNamespace(
        name="actor-0",
        status=SimpleNamespace(begin=lambda phase: None),
        report=lambda kind, **fields: own.send({"kind": kind, **fields}),
    )
    assert role._run("penstock.launch.role:fail", ctx) == 1
    [message] = supervisor.receive()
    assert message["message"].startswith("ValueError: ")
    supervisor.close()
    own.close()
