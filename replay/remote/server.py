"""Serves a replay buffer over ZeroMQ: several writers and readers, on this host or others.

`ReplayServer` holds the sockets around `penstock.replay.remote.service` and does everything in one
thread. Replies to peers that read slowly wait in libzmq, within the limits of the service. libzmq
cannot close a single connection: when peers that do not read hold too much memory, the server
closes all connections, and clients reconnect by themselves.

`Snapshots` saves the buffer while it is served, and restores it when the server is started again. A
snapshot holds the buffer and, for each client's stream, how many of its rows the buffer had at that
instant. A client that reconnects after a restart continues there, and learns how many of its rows
are lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from penstock.configs.value_types import is_local
from penstock.core import descriptors
from penstock.replay.buffer import Replay
from penstock.replay.errors import ReplayError
from penstock.replay.remote.intake import WINDOW
from penstock.replay.remote.peers import ServiceLimits
from penstock.replay.remote.service import ReplayService
from penstock.transport import wire
from penstock.transport.wire import Buffer, Header, MessageKind
from penstock.transport.zmq.keys import load_learner
from penstock.transport.zmq.listener import CHECK_S
from penstock.transport.zmq.server_socket import ServerSocket
from penstock.transport.zmq.sockets import IsReleased, WasWritten, port_of

# Messages that are handled between two checks of everything else.
BATCH = 64

# Period in which slots and requests that wait are tried again.
TICK_S = 0.005

# Longest wait for the address after all connections were closed.
REOPEN_S = 10.0

# Name of the streams' marks in a snapshot.
STREAMS = "streams"

# With keys libzmq holds an encrypted answer for each connection; smaller ones are not counted.
ENCRYPTED_NBYTES = 1 << 18

# A message without effect: it is of no run, so clients drop it.
NOTHING = wire.encode(Header(MessageKind.WAIT), {"reason": ""})
Marks = Callable[[], dict[str, Any]]


class Snapshots:
    """Saves a replay while it is served, in a thread for each snapshot.

    Args:
        replay: the buffer.
        folder: of the snapshot.
        every_s: seconds from the start of one snapshot to that of the next.
        log: takes lines of text.

    Raises:
        ReplayError: ``every_s`` is not above 0.
    """

    def __init__(
        self, replay: Replay, folder: Path, every_s: float, log: Callable[[str], None]
    ) -> None:
        if not every_s > 0:
            raise ReplayError(f"--snapshot-every {every_s:g} must be above 0 seconds")
        self._replay = replay
        self._folder = folder
        self._every_s = every_s
        self._log = log
        self._next_s = time.monotonic() + every_s
        self._thread: threading.Thread | None = None

        self.marks: dict[str, Any] = {}
        """The state of clients' streams in the restored snapshot."""

        self._saved = 0
        """Snapshots that were written."""

        self._failed = 0
        """Snapshots that could not be written."""

        self._last_failure = ""
        """Why the last snapshot could not be written; empty if it was."""

    def restore(self) -> None:
        """Fill the buffer, which must be new, from the folder.

        Raises:
            DamagedSnapshotError: the snapshot is damaged.
            ReplayError: it was saved with other options. The buffer must not be used afterwards.
        """
        self.marks = self._replay.restore(self._folder).get(STREAMS, {})

    def tend(self, marks: Marks) -> None:
        """Begin a snapshot if one is due and none is being written."""
        if time.monotonic() < self._next_s or self.saving:
            return
        self._next_s = time.monotonic() + self._every_s
        self._thread = threading.Thread(
            target=self._save, args=(marks,), name="replay-save", daemon=True
        )
        self._thread.start()

    @property
    def saving(self) -> bool:
        """Whether a snapshot is being written."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, marks: Marks) -> None:
        """Write a final snapshot, and wait for it."""
        if self._thread is not None:
            self._thread.join()
        self._save(marks)

    def figures(self) -> dict[str, int]:
        """Counts of snapshots that were written and that could not be."""
        return {"saved": self._saved, "failed": self._failed}

    def _save(self, marks: Marks) -> None:
        """Write a snapshot; a failure is counted, and logged unless the last had the same text."""
        try:
            self._replay.save(self._folder, more=lambda: {STREAMS: marks()})
        except (ReplayError, MemoryError) as error:
            self._failed += 1
            text = str(error) or "a snapshot needs more memory than is left"
            if text != self._last_failure:
                self._log(f"warning: {text}; the server continues")
            self._last_failure = text
        else:
            self._saved += 1
            self._last_failure = ""


class ReplayServer:
    """Serves ``replay``, which its owner may use meanwhile. Call `turn` repeatedly, or `run`."""

    def __init__(
        self,
        replay: Replay,
        bind: str,
        *,
        curve: Path | None = None,
        insecure: bool = False,
        limits: ServiceLimits | None = None,
        snapshots: Snapshots | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Open the socket.

        Args:
            replay: the buffer.
            bind: address to listen at, ``tcp://HOST:PORT`` or ``ipc://PATH``.
            curve: folder of keys, as `penstock keys new` makes it.
            insecure: allow an address that other hosts reach without keys.
            limits: of memory and peers.
            snapshots: written while serving; clients in the restored one continue where it ends.
            log: takes a line for the first rejection of each kind.

        Raises:
            UserError: the address is invalid or taken, or other hosts reach it without keys.
        """
        if not bind.startswith(("tcp://", "ipc://")):
            raise ReplayError(f"{bind} is not an address; give tcp://HOST:PORT or ipc://PATH")
        if not (curve or insecure or is_local(bind)):
            raise ReplayError(
                f"{bind} can be reached from other hosts, where anyone could change the buffer; "
                "make keys with `penstock keys new` and give their folder as curve (--curve), or "
                "pass insecure=True (--insecure)"
            )

        self._snapshots = snapshots
        self._log = log
        self._has_logged_full = False
        with ExitStack() as opening:
            self._service = ReplayService(
                replay,
                self._send,
                limits=limits,
                log=log,
                marks=None if snapshots is None else snapshots.marks,
                more_figures=self._snapshot_figures,
            )
            opening.callback(self._service.close)

            keys = load_learner(curve) if curve else None
            nbytes = wire.max_frame_nbytes(replay.layout.spec)
            self._socket = ServerSocket(bind, keys, nbytes, received=WINDOW)
            opening.callback(self._socket.close)
            self._stack = opening.pop_all()

        self.address = bind
        """The address for clients of this host."""
        if bind.startswith("tcp://"):
            # The system has chosen the port where ``bind`` names none.
            self.address = f"{bind.rpartition(':')[0]}:{port_of(self._socket.router)}"

    @property
    def rejected(self) -> dict[str, int]:
        """How many messages and slots could not be used, by reason."""
        return self._service.rejected

    def turn(self, timeout_s: float) -> int:
        """Serve what there is to do now.

        Args:
            timeout_s: longest wait for a message, in seconds.

        Returns:
            The number of messages that were handled.
        """
        # What waits in the service is tried again soon, whether or not a message comes.
        if self._service.waiting:
            timeout_s = min(TICK_S, timeout_s)
        self._socket.wait(timeout_s)
        count = 0
        while count < BATCH and (received := self._socket.receive()) is not None:
            sender, parts = received
            self.handle(sender.peer, parts)
            count += 1

        self._service.tend()
        self._turn_away_connections()
        if self._service.stranded_nbytes > self._service.limits.answers_nbytes:
            self._close_connections()
        if self._snapshots is not None:
            self._snapshots.tend(self._service.marks)
        return count

    def run(self, stopping: Callable[[], bool]) -> None:
        """Serve until ``stopping()``."""
        while not stopping():
            self.turn(CHECK_S)

    def handle(self, name: bytes, parts: Sequence[Buffer]) -> None:
        """Handle one message of a peer; a bad one is counted."""
        self._service.handle(name, parts)

    def figures(self) -> dict[str, Any]:
        """Counters of the server itself."""
        return self._service.figures()

    def _snapshot_figures(self) -> dict[str, Any]:
        """Counts of snapshots, if there are any, for the figures of the service."""
        if self._snapshots is None:
            return {}
        return {"snapshots": self._snapshots.figures()}

    def save(self) -> None:
        """Write a final snapshot, if snapshots are written, and wait for it."""
        if self._snapshots is not None:
            self._snapshots.finish(self._service.marks)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> ReplayServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _turn_away_connections(self) -> None:
        """Reject new connections while descriptors are nearly used up; logs it once."""
        self._socket.listener.check_descriptors(time.monotonic())
        if not self._socket.listener.is_shut or self._has_logged_full:
            return
        self._has_logged_full = True
        if self._log is not None:
            self._log(
                f"new connections are turned away, since nearly all {descriptors.limit()} file "
                "descriptors are in use: raise the hard limit (ulimit -Hn), or find out what "
                "connects"
            )

    def _send(self, name: bytes, parts: wire.Parts) -> tuple[int, IsReleased]:
        """Send a message to a peer, for the service; see `Send`.

        With keys a large message counts as released when it is written to its connection.
        """
        outcome, is_released = self._socket.send(name, parts)
        nbytes = sum(memoryview(frame).nbytes for frame in parts[2:])
        if self._socket.has_keys and nbytes > ENCRYPTED_NBYTES:
            send_next = partial(self._socket.send, name, NOTHING, tracked=True)
            is_released = WasWritten(is_released, send_next)
        return outcome, is_released

    def _close_connections(self) -> None:
        """Close every connection, which frees the memory of those that are not read."""
        if self._log is not None:
            self._log("connections that are not read hold too much memory; all clients reconnect")
        self._service.on_disconnected()
        self._socket.reopen(self.address, REOPEN_S)
