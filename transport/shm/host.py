"""The Unix socket where processes of this host get a learner's memory: lanes and weights.

The socket lies in a directory of mode 0700. Whoever connects sends one message and gets one back,
with descriptors: the slots, the board and the two events of its lane. The connection stays open:
its end tells a client that the learner is gone. The learner, in turn, watches each writer's pidfd
and takes a lane back when, and only when, the kernel says that the writer has ended.

Everything runs in the thread that calls `poll`, which is the one that owns the store.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from penstock.configs.errors import UserError
from penstock.core.specs import SlotSpec
from penstock.transport.base import Welcome
from penstock.transport.shm.board import WeightsBoard
from penstock.transport.shm.store import SlotStore, drain_event

ATTACH_VERSION = 1
MESSAGE_NBYTES = 1 << 17


class ShmHost:
    """Serves a board, and a store where there is one (a relay has none)."""

    def __init__(
        self, path: Path, welcome: Welcome, board: WeightsBoard, store: SlotStore | None = None
    ) -> None:
        self._path = path
        self._welcome = welcome
        self._board = board
        self._store = store
        self._selector = selectors.DefaultSelector()
        self._actor_lanes: set[int] = set()  # a connector's lane serves many
        self._peers: dict[int, tuple[socket.socket, int | None]] = {}  # pidfd -> peer, lane
        self._listener = _listen(path)
        self._watch(self._listener, self._accept)
        if store is not None:
            self._watch(store.filled_event, lambda: drain_event(store.filled_event))

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Have `poll` call ``callback`` when ``fd`` is readable."""
        self._watch(fd, callback)

    def unwatch(self, fd: int) -> None:
        """Forget what `watch` was told."""
        self._selector.unregister(fd)

    def poll(self, timeout_s: float) -> None:
        """Handle what happened: slots filled, writers that came or ended."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        if self._store is not None:
            self._store.lend()  # a writer may want more than before

    @property
    def actors(self) -> int:
        """Actors of this host that hold a lane now."""
        return len(self._actor_lanes)

    def close(self) -> None:
        for pidfd, (peer, _) in self._peers.items():
            peer.close()
            os.close(pidfd)
        self._peers.clear()
        self._listener.close()
        self._selector.close()
        self._path.unlink(missing_ok=True)

    def _watch(self, fileobj: Any, callback: Callable[[], None]) -> None:
        self._selector.register(fileobj, selectors.EVENT_READ, callback)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:  # it left, or this process is out of descriptors: they try again
            return
        peer.setblocking(False)
        self._watch(peer, lambda: self._serve(peer))

    def _serve(self, peer: socket.socket) -> None:
        """Answer a peer's one message; from then on its pidfd tells of its end."""
        self._selector.unregister(peer)
        try:
            request = msgpack.unpackb(peer.recv(MESSAGE_NBYTES))
            pid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):  # it left, or it is no client of ours
            peer.close()
            return
        try:
            lane, fds, reply = self._attach(request)
        except (UserError, OSError) as error:
            lane, fds, reply = None, [], {"error": str(error)}
        except (KeyError, TypeError, ValueError, AttributeError):
            lane, fds, reply = None, [], {"error": "this is no request to attach"}
        self._peers[pidfd] = (peer, lane)
        self._watch(pidfd, lambda: self._ended(pidfd))
        with suppress(OSError):  # its pidfd will tell
            socket.send_fds(peer, [msgpack.packb(reply)], fds)

    def _attach(self, request: dict[str, Any]) -> tuple[int | None, list[int], dict[str, Any]]:
        if request.get("attach") != ATTACH_VERSION:
            raise UserError(
                f"attach version {request.get('attach')!r} is not {ATTACH_VERSION}; "
                "use the same release of Penstock for actors and learner"
            )
        welcome = self._welcome
        reply: dict[str, Any] = {
            "run_id": welcome.run_id,
            "generation": welcome.generation,
            "spec": welcome.spec.to_dict(),
            "layout": welcome.layout.to_list(),
            "config": welcome.config,
        }
        assert self._board.arena.fd is not None
        fds = [self._board.arena.fd]
        if not request["lane"]:
            return None, fds, reply
        check_spec(welcome.spec, request["spec"])
        store = self._store
        if store is None or store.arena.fd is None:
            raise UserError("this address serves weights only; connect to the learner's")
        lane = store.open_lane(request["want"])
        if request["spec"] is not None:
            self._actor_lanes.add(lane)
        reply |= {"lane": lane, "slots": len(store.slots), "lanes": store.geometry.lanes}
        fds += [store.arena.fd, store.lane_event(lane), store.filled_event]
        return lane, fds, reply

    def _ended(self, pidfd: int) -> None:
        peer, lane = self._peers.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        peer.close()
        if lane is not None and self._store is not None:
            self._store.close_lane(lane)
            self._actor_lanes.discard(lane)


def check_spec(mine: SlotSpec, theirs: dict[str, Any] | None) -> None:
    """Refuse an actor whose slots differ, naming what differs. None takes the learner's spec."""
    if theirs is None:
        return
    difference = mine.difference(SlotSpec.from_dict(theirs))
    if difference:
        raise UserError(
            f"actor and learner disagree on what a slot holds ({difference}); "
            "start both with the same config and the same version of the environment"
        )


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        return probe.connect_ex(str(path)) == 0


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > 107:
        raise UserError(
            f"the socket path {path} is longer than the 107 bytes that the system allows; "
            "set XDG_RUNTIME_DIR or TMPDIR to a shorter folder"
        )
    if path.is_socket() and not _answers(path):
        path.unlink()  # left by one that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen at {path} ({error.strerror}); another learner may be using it: "
            "stop that one first"
        ) from error
    listener.listen(128)
    listener.setblocking(False)
    return listener
