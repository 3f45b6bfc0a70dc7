"""Signals of a run are read from an inbox, in the main thread only."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from penstock.launch import signals
from penstock.launch.signals import HeldUpError, SignalInbox


def test_signals_are_read_in_their_order_and_handlers_restored() -> None:
    handlers = [signal.getsignal(signum) for signum in signals.SIGNALS]
    inbox = SignalInbox()
    with inbox.open():
        for signum in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), signum)
        assert len(inbox.filenos()) == 1
        assert inbox.read() == [signal.SIGTERM, signal.SIGINT]
    assert inbox.filenos() == []
    assert [signal.getsignal(signum) for signum in signals.SIGNALS] == handlers


def test_the_inbox_of_another_thread_stays_empty() -> None:
    filenos: list[list[int]] = []

    def open_inbox() -> None:
        inbox = SignalInbox()
        with inbox.open():
            filenos.append(inbox.filenos())

    thread = threading.Thread(target=open_inbox)
    thread.start()
    thread.join()
    assert filenos == [[]]


def test_an_unread_signal_lets_only_the_next_one_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "HELD_UP_S", 0.01)
    inbox = SignalInbox()
    with inbox.open():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)
        with pytest.raises(HeldUpError, match="signal 15"):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
