"""What a host supervisor reports to its engine."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.core.control import Channel, Message, encoded
from penstock.core.interfaces import Liveness
from penstock.launch.engines.host_supervisor import HostSupervisor


def test_a_message_too_long_for_a_report_holds_up_no_other(tmp_path: Path) -> None:
    engine, theirs = Channel.pair()
    channel = Channel(theirs)
    long = {"kind": "event", "text": ""}
    long["text"] = "x" * (channel.most_nbytes - len(encoded(long)))  # a role can send that
    messages: list[Message] = [long, {"kind": "ready"}]
    role: Any = SimpleNamespace(liveness=lambda: Liveness.ALIVE, receive=lambda: messages)
    supervisor = HostSupervisor(channel, tmp_path)
    supervisor._handles["actor-0/1"] = role
    supervisor._snapshot_s = math.inf
    supervisor._look()
    said = [report["message"] for report in engine.receive()]
    assert [message["kind"] for message in said] == ["ready", "note"]
    assert "actor-0: a message of " in said[1]["text"]
    engine.close()
    channel.close()
