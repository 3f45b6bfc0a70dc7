"""Lets other processes of this host write into a store: the consumer's service thread.

    Writer.attach(address) ── Unix socket ── StoreServer ── a lane of the store
    w.slot() ... publish   ── eventfd ────── StoreServer ── collect, under the consumer's lock

The thread sleeps until an event, and then acts under ``lock``, as every user of the store's
consumer side does. The death of a writer is seen by its pidfd, and only then are its lent slots
taken back: a process that is merely stopped may wake up, and still has the memory mapped. If the
thread fails, writers are detached as if the owner had ended, and ``failed`` is called.

The socket lies in a `RuntimeFolder` unless the user names a path.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.runtime_folder import RuntimeFolder
from penstock.replay.errors import ReplayError
from penstock.transport.shm.attach import Attached, AttachServer
from penstock.transport.shm.store import SlotStore, drain_event

# Name of the socket in the private folder.
SOCKET = "store"

# Slots that a writer may hold: one to fill, and one lent ahead.
WRITER_SLOTS = 2

# Time between two checks of a rate limiter that holds writers back.
GATE_S = 0.005


class StoreServer:
    """Serves ``store`` from a thread of its own until `close`.

    Args:
        store: the store that other processes write to.
        lock: guards the store's consumer side.
        path: of the Unix socket; None: in a new private folder, removed on `close`.
        collect: takes in published slots; called with ``lock`` held.
        on_failed: called with the error that ended the thread.
        may_lend: whether writers may have slots now; called with ``lock`` held.
        attach_info: JSON values that a writer gets when it attaches.

    Raises:
        ReplayError: another process listens at ``path``.
    """

    def __init__(
        self,
        store: SlotStore,
        lock: AbstractContextManager[Any],
        path: Path | None,
        *,
        collect: Callable[[], Any],
        on_failed: Callable[[BaseException], None],
        may_lend: Callable[[], bool] = lambda: True,
        attach_info: dict[str, Any] | None = None,
    ) -> None:
        self._store = store
        self._lock = lock
        self._collect = collect
        self._failed = on_failed
        self._may_lend = may_lend
        self._about = attach_info or {}

        self._guest_lanes: set[int] = set()
        """Lanes of the writers in other processes."""

        self._streams = 0
        """Writers that have attached so far; each is a stream of its own."""

        self._stop = False

        self._on_closed: Callable[[], None] | None = None
        """What the thread calls at its end, if `close` was called in the thread itself."""

        # A fork of this process owns nothing.
        self._pid = os.getpid()

        self._folder: RuntimeFolder | None = None
        try:
            self._folder = RuntimeFolder() if path is None else None
            self.path = self._folder.path / SOCKET if self._folder else Path(path or "")
            self._attach_server = AttachServer(self.path, self._on_attach, self._on_left)
        except UserError as error:
            self._remove_folder()
            raise ReplayError(str(error)) from error

        self._attach_server.watch(store.filled_event, self._drain_filled)
        self._thread = threading.Thread(target=self._run, name="replay-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The argument for `Writer.attach`."""
        return str(self.path)

    @property
    def writers(self) -> int:
        """The number of processes that hold a lane now."""
        return len(self._guest_lanes)

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Accept no more writers, and detach the present ones; then call ``then``.

        The thread itself, which cannot wait for its own end, calls ``then`` when it has ended its
        work.
        """
        if self._stop or os.getpid() != self._pid:
            return
        self._stop = True
        os.eventfd_write(self._store.filled_event, 1)
        if threading.current_thread() is self._thread:
            self._on_closed = then
            return

        self._thread.join()
        if then is not None:
            then()

    def _run(self) -> None:
        """Serve writers until `close`; the thread's main function."""
        try:
            while not self._stop:
                self._attach_server.poll(GATE_S if self._store.held_back else None)
                with self._lock:
                    self._tend()
        except BaseException as error:
            self._failed(error)
        finally:
            self._attach_server.close()
            # It refers to this object, and would keep the memory.
            del self._attach_server
            self._remove_folder()
            if self._on_closed is not None:
                self._on_closed()

    def _drain_filled(self) -> None:
        drain_event(self._store.filled_event)

    def _tend(self) -> None:
        """Take in published slots and lend free ones."""
        self._hold_back_or_lend()
        self._collect()
        self._store.lend()

    def _hold_back_or_lend(self) -> None:
        """Update whether slots may be lent; called before any is."""
        if self._may_lend():
            self._store.held_back -= self._guest_lanes
        else:
            self._store.held_back |= self._guest_lanes

    def _on_attach(self, request: dict[str, Any]) -> Attached:
        """Give a writer of another process a lane. Raises UserError for another request."""
        if request["lane"] != "writer":
            raise UserError("this address serves a replay buffer; it has no weights and no learner")
        with self._lock:
            lane, fds, place = self._store.offer_lane(0)
            self._guest_lanes.add(lane)
            self._hold_back_or_lend()
            self._store.geometry.lane(self._store.arena, lane).want = WRITER_SLOTS
            self._store.lend()
            self._streams += 1
            stream = self._streams

        spec = self._store.geometry.spec.to_dict()
        return Attached(lane, fds, {**place, **self._about, "spec": spec, "stream": stream})

    def _on_left(self, lane: int) -> None:
        """Take in what a writer published before it left, and close its lane."""
        with self._lock:
            self._collect()
            self._store.close_lane(lane)
            self._guest_lanes.discard(lane)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()
