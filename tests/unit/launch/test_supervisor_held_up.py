"""A callback that never returns does not keep signals from ending the run."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.core.interfaces import EngineContext, MetricSink
from penstock.launch import signals
from penstock.launch.engines.local import LocalEngine
from penstock.launch.supervisor import Supervisor
from penstock.launch.supervisor_messages import RestartLimits


class Hangs(MetricSink):
    """What a callback does that waits for what never comes."""

    def tick(self) -> None:
        while True:
            with suppress(Exception):  # as careless ones do
                time.sleep(0.05)


def send(signums: list[int]) -> None:
    for signum in signums:
        time.sleep(0.3)
        os.kill(os.getpid(), signum)


@pytest.mark.parametrize(
    ("last", "code", "reason"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_second_signal_interrupts_a_callback_that_never_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, code: int, reason: str
) -> None:
    monkeypatch.setattr(signals, "HELD_UP_S", 0.05)
    (tmp_path / "logs").mkdir()
    folders = {"run_dir": str(tmp_path), "runtime_dir": str(tmp_path)}
    engine = LocalEngine(EngineContext(tmp_path))
    run = Supervisor([], RestartLimits(), folders, tmp_path / "logs", Hangs(), engine)
    before = signal.getsignal(signal.SIGINT)
    sender = threading.Thread(target=send, args=([signal.SIGINT, last],), daemon=True)
    sender.start()
    outcome = run.run()
    sender.join()
    assert (outcome.exit_code, outcome.reason) == (code, reason)
    assert outcome.failure is not None
    assert "time.sleep(0.05)" in outcome.failure.traceback  # says where it was
    assert signal.getsignal(signal.SIGINT) == before
