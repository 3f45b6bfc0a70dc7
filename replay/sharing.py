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

SOCKET = "store"  # in the private folder
WRITER_SLOTS = 2  # slots that a writer may hold: one to fill, and one lent ahead
GATE_S = 0.005  # between two checks of a rate limiter that holds writers back


class StoreServer:
    """Serves ``store`` from a thread of its own until `close`.

    Args:
        store: the store that other processes write to.
        lock: guards the store's consumer side.
        path: of the Unix socket; None: in a new private folder, removed on `close`.
        collect: takes in published slots; called with ``lock`` held.
        failed: called with the error that ended the thread.
        may_lend: whether writers may have slots now; called with ``lock`` held.
        about: JSON values that a writer gets when it attaches.

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
        failed: Callable[[BaseException], None],
        may_lend: Callable[[], bool] = lambda: True,
        about: dict[str, Any] | None = None,
    ) -> None:
        self._store = store
        self._lock = lock
        self._collect = collect
        self._failed = failed
        self._may_lend = may_lend
        self._about = about or {}
        self._guests: set[int] = set()  # lanes of other processes
        self._streams = 0
        self._stop = False
        self._then: Callable[[], None] | None = None
        self._pid = os.getpid()
        self._folder: RuntimeFolder | None = None
        try:
            self._folder = RuntimeFolder() if path is None else None
            self.path = self._folder.path / SOCKET if self._folder else Path(path or "")
            self._door = AttachServer(self.path, self._attach, self._left)
        except UserError as error:
            self._remove_folder()
            raise ReplayError(str(error)) from error
        self._door.watch(store.filled_event, self._filled)
        self._thread = threading.Thread(target=self._run, name="replay-server", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """The argument for `Writer.attach`."""
        return str(self.path)

    @property
    def writers(self) -> int:
        """The number of processes that hold a lane now."""
        return len(self._guests)

    def close(self, then: Callable[[], None] | None = None) -> None:
        """Accept no more writers, and detach the present ones; then call ``then``.

        The thread itself cannot wait for ``then``.
        """
        if self._stop or os.getpid() != self._pid:  # a fork of this process owns nothing
            return
        self._stop = True
        os.eventfd_write(self._store.filled_event, 1)
        if threading.current_thread() is self._thread:
            self._then = then
            return
        self._thread.join()
        if then is not None:
            then()

    def _run(self) -> None:
        try:
            while not self._stop:
                self._door.poll(GATE_S if self._store.held_back else None)
                with self._lock:
                    self._tend()
        except BaseException as error:
            self._failed(error)
        finally:
            self._door.close()
            del self._door  # it refers to this object, and would keep the memory
            self._remove_folder()
            if self._then is not None:
                self._then()

    def _filled(self) -> None:
        drain_event(self._store.filled_event)

    def _tend(self) -> None:
        self._gate()
        self._collect()
        self._store.lend()

    def _gate(self) -> None:
        """Update whether slots may be lent; called before any is."""
        if self._may_lend():
            self._store.held_back -= self._guests
        else:
            self._store.held_back |= self._guests

    def _attach(self, request: dict[str, Any]) -> Attached:
        if request["lane"] != "writer":
            raise UserError("this address serves a replay buffer; it has no weights and no learner")
        with self._lock:
            lane, fds, where = self._store.offer_lane(0)
            self._guests.add(lane)
            self._gate()
            self._store.geometry.lane(self._store.arena, lane).want = WRITER_SLOTS
            self._store.lend()
            self._streams += 1
        spec = self._store.geometry.spec.to_dict()
        return Attached(lane, fds, {**where, **self._about, "spec": spec, "stream": self._streams})

    def _left(self, lane: int) -> None:
        with self._lock:
            self._collect()
            self._store.close_lane(lane)
            self._guests.discard(lane)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.remove()
