"""What a buffer holds, without the buffer: rows, who keeps them in step, and the lock around both.

The buffer's own threads hold this and not the `Replay`, so that a Replay which nobody refers to any
more ends them and gives descriptors, threads and memory back, as `close` would have.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from pathlib import Path

from penstock.replay.errors import ReplayError
from penstock.replay.eviction import EvictionPolicy, Evictor
from penstock.replay.layout import Layout
from penstock.replay.rate_limited_table import RateLimitedTable
from penstock.replay.sharing import StoreServer
from penstock.replay.steps import Autoreset, StepWriter
from penstock.replay.table import Table
from penstock.transport.shm.arena import Prefault


class BufferCore:
    """One ``table`` and all that is done to it besides sampling."""

    def __init__(
        self, table: Table, layout: Layout, autoreset: Autoreset, cuts: EvictionPolicy
    ) -> None:
        self.table = table
        self._about = {"autoreset": autoreset, "frame_stack": layout.frame_stack}
        self.lock = FairLock()
        self.flow: RateLimitedTable | None = None
        self.streams = OwnStreams(table, layout, autoreset)
        self.ended: Exception | None = None  # why nobody may add or sample any more
        self._cutter = Evictor(cuts, table)
        self._server: StoreServer | None = None
        self._pid = os.getpid()
        self._prefault = Prefault(table.store.arena)

    def collect(self) -> None:
        """Take in what others published, and let go of what is too old. Under `lock`."""
        self.streams.close_ended()
        self.table.collect()
        self._cutter.cut()
        if self.flow is not None:
            self.flow.note()

    def check(self) -> None:
        """Raise ReplayError where this buffer is closed, or what served it failed."""
        if self.ended is not None:
            raise ReplayError(str(self.ended)) from self.ended.__cause__

    def serve(self, path: str | Path | None) -> StoreServer:
        """Let processes of this host write. ReplayError where the memory is private."""
        self.check()
        if self._server is None:
            self._server = self._serve(None if path is None else Path(path))
        return self._server

    @property
    def writers(self) -> int:
        """Processes that may write now."""
        return self._server.writers if self._server else 0

    def close(self) -> None:
        """Let writers go, end the threads, and give the memory back."""
        if os.getpid() != self._pid:  # a fork has neither the threads nor, perhaps, the lock
            return
        self.ended = self.ended or ReplayError("this replay is closed; make another one")
        self._prefault.stop()
        server, self._server = self._server, None  # the two refer to each other
        if server is not None:
            server.close(then=self._close_store)
        else:
            self._close_store()

    def _close_store(self) -> None:
        with self.lock:
            self.table.store.close()

    def _serve(self, path: Path | None) -> StoreServer:
        if self.table.store.arena.fd is None:
            raise ReplayError(
                "this replay's memory is its own; make it with shared=True to let others write"
            )
        return StoreServer(
            self.table.store,
            self.lock,
            path,
            collect=self.collect,
            failed=self._failed,
            may_lend=self.flow.may_lend if self.flow else lambda: True,
            about=self._about,
        )

    def _failed(self, error: BaseException) -> None:
        """The service thread ended: rows may be missing from now on, so everybody is told."""
        told = ReplayError(
            f"other processes can no longer add to this replay: what served them failed with "
            f"{type(error).__name__}: {error}; save() what is stored and make another replay"
        )
        told.__cause__ = error
        self.ended = self.ended or told


class FairLock:
    """A lock that lets those who wait go first, for `with`.

    Whoever holds a plain `threading.Lock` most of the time, as a loop that adds does, gets it again
    before a thread that waits for it has woken: a snapshot beside such a loop took a minute. Here a
    thread that waits for ``inner`` holds ``turn``, and there all others wait.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.inner = threading.Lock()

    def __enter__(self) -> None:
        with self.turn:
            self.inner.acquire()

    def __exit__(self, *error: object) -> None:
        self.inner.release()


class _Presence:
    """A thread has it for as long as it lives."""


class OwnStreams:
    """The streams of threads that call `Replay.add`: one each, begun at its first step.

    A thread that has ended adds no more: its stream is closed at the next look, so that the rows of
    its last slot may leave like all others. Used under the buffer's lock. ``here.writer`` is the
    calling thread's own, where it has one.
    """

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
