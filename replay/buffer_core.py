"""What a buffer holds, without the buffer: rows, who keeps them in step, and the lock around both.

The buffer's own threads hold this and not the `Replay`, so that a Replay which nobody refers to any
more ends them and gives descriptors, threads and memory back, as `close` would have.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.replay.errors import ReplayError
from penstock.replay.eviction import EvictionPolicy, Evictor
from penstock.replay.fair_lock import FairLock
from penstock.replay.layout import Layout
from penstock.replay.own_streams import OwnStreams
from penstock.replay.prefault import Prefault
from penstock.replay.rate_limited_table import RateLimitedTable
from penstock.replay.sharing import StoreServer
from penstock.replay.steps import Autoreset
from penstock.replay.table import Table


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
