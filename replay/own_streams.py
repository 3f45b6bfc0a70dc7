"""The streams of threads that call `Replay.add`: one each, begun at its first step.

A thread that has ended adds no more: its stream is closed when anybody looks, so that the rows of
its last slot may leave like all others. Used under the buffer's lock.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

from penstock.replay.layout import Layout
from penstock.replay.steps import Autoreset, StepWriter
from penstock.replay.table import Table


class _Presence:
    """A thread has it for as long as it lives."""


class OwnStreams:
    """``here.writer`` is the calling thread's own, where it has one."""

    def __init__(self, table: Table, layout: Layout, autoreset: Autoreset) -> None:
        self._stands_on = table, layout, autoreset
        self._ended: deque[StepWriter] = deque()  # of threads that have; any thread appends
        self.here = threading.local()

    def make(self) -> StepWriter:
        """A stream of nobody's own."""
        return StepWriter(*self._stands_on)

    def begin(self) -> StepWriter:
        """One for the calling thread."""
        self.close_ended()
        made: StepWriter = self.make()
        self.here.writer, self.here.presence = made, _Presence()
        weakref.finalize(self.here.presence, self._ended.append, made).atexit = False
        return made

    def close_ended(self) -> None:
        """Publish what threads that have ended wrote last, and free their lanes."""
        while self._ended:
            self._ended.popleft().close()
