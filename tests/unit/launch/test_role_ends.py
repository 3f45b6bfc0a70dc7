"""What a role reports to its supervisor when it ends."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core.control import Channel
from penstock.core.role import EXIT_REJOIN
from penstock.launch import role


@pytest.mark.parametrize(
    ("code", "exit_code", "messages"),
    [
        (EXIT_REJOIN, EXIT_REJOIN, []),
        (0, 2, ["its code called sys.exit(0) at test_role_ends.py:"]),
        (None, 2, ["its code called sys.exit() at test_role_ends.py:"]),
        ("no licence", 2, ["its code called sys.exit('no licence') at test_role_ends.py:"]),
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
    assert role._run_main("penstock.launch.role:leave", ctx) == exit_code
    assert [report["message"].partition(":")[0] + ":" for report in reports] == messages
    assert all(report["user"] for report in reports)


def test_error_report_accepts_text_of_any_characters(
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
    assert role._run_main("penstock.launch.role:fail", ctx) == 1
    [message] = supervisor.receive()
    assert message["message"].startswith("ValueError: ")
    supervisor.close()
    own.close()
