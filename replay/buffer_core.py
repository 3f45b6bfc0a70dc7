"""The core of a replay buffer, apart from the `Replay` object: table, lock, limiter, threads.

The buffer's own threads refer to this and not to the `Replay`. So a Replay that is
garbage-collected ends them, and frees descriptors, threads and memory as `close` would have.
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
    """One ``table`` and every operation on it besides sampling."""

    def __init__(
        self, table: Table, layout: Layout, autoreset: Autoreset, cuts: EvictionPolicy
    ) -> None:
        self.table = table
        self._about = {"autoreset": autoreset, "frame_stack": layout.frame_stack}
        self.lock = FairLock()
        self.flow: RateLimitedTable | None = None
        self.streams = OwnStreams(table, layout, autoreset)
        self.ended: Exception | None = None  # why adding and sampling are no longer possible
        self._cutter = Evictor(cuts, table)
        # other processes publish slots, or rows become too old while nothing is added
        is_shared = table.store.arena.fd is not None
        self._needs_collect_before_draw = is_shared or cuts != EvictionPolicy()
        self._server: StoreServer | None = None
        self._pid = os.getpid()
        self._prefault = Prefault(table.store.arena)

    def collect(self) -> None:
        """Take in published slots, and evict what is too old. Needs `lock`."""
        self.streams.close_ended()
        self.table.collect()
        self._cutter.cut()
        if self.flow is not None:
            self.flow.note()

    def collect_for_draw(self) -> None:
        """As `collect`, without what cannot change the rows of a draw. Needs `lock`.

        Rows of writers in this process count as soon as they are written, and their streams collect
        their slots.
        """
        if self._needs_collect_before_draw or self.flow is not None:
            self.collect()
        else:
            self.streams.close_ended()

    def check(self) -> None:
        """Raise ReplayError where this buffer is closed, or its service thread failed."""
        if self.ended is not None:
            raise ReplayError(str(self.ended)) from self.ended.__cause__

    def serve(self, path: str | Path | None) -> StoreServer:
        """Let processes of this host write. Raises ReplayError where the memory is private."""
        self.check()
        if self._server is None:
            self._server = self._serve(None if path is None else Path(path))
        return self._server

    @property
    def writers(self) -> int:
        """The number of processes that may write now."""
        return self._server.writers if self._server else 0

    def close(self) -> None:
        """Detach writers, end the threads, and free the memory."""
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
        """Record why the service thread ended: rows may be missing from now on, so every call
        raises.
        """
        told = ReplayError(
            f"other processes can no longer add to this replay: what served them failed with "
            f"{type(error).__name__}: {error}; save() what is stored and make another replay"
        )
        told.__cause__ = error
        self.ended = self.ended or told


class FairLock:
    """A lock for ``with`` that lets waiting threads go first.

    A thread that holds a plain `threading.Lock` most of the time, as a loop of adds does, gets it
    again before a waiting thread has woken: a snapshot beside such a loop took a minute. Here a
    thread that waits for ``inner`` holds ``turn``, where all others wait.
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
    """An object that exists as long as its thread."""


class OwnStreams:
    """The streams of threads that call `Replay.add`: one per thread, opened at its first step.

    When a thread has ended, its stream is closed at the next collect, so that the rows of its last
    slot can be evicted like all others. Used under the buffer's lock. ``here.writer`` is the writer
    of the calling thread.
    """

    def __init__(self, table: Table, layout: Layout, autoreset: Autoreset) -> None:
        self._stands_on = table, layout, autoreset
        self._ended: deque[StepWriter] = deque()  # of threads that have ended; any thread appends
        self.here = threading.local()

    def make(self) -> StepWriter:
        """Open a stream that belongs to no thread."""
        return StepWriter(*self._stands_on)

    def begin(self) -> StepWriter:
        """Open a stream for the calling thread."""
        self.close_ended()
        made: StepWriter = self.make()
        self.here.writer, self.here.presence = made, _Presence()
        weakref.finalize(self.here.presence, self._ended.append, made).atexit = False
        return made

    def close_ended(self) -> None:
        """Publish the last rows of ended threads, and free their lanes."""
        while self._ended:
            self._ended.popleft().close()
