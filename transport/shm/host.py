"""Serves a learner's memory to processes of this host: lanes of its store, and its weights.

Everything runs in the thread that calls `poll`, which owns the store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.interfaces import Welcome
from penstock.core.params import Stamp
from penstock.core.specs import SlotSpec
from penstock.transport.shm.attach import Attached, AttachServer
from penstock.transport.shm.store import SlotStore, drain_event
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.wire import STRANGE, welcome_meta


class ShmHost:
    """Serves a weights board, and a store where there is one (a relay has none)."""

    def __init__(
        self, path: Path, welcome: Welcome, board: WeightsBoard, store: SlotStore | None = None
    ) -> None:
        self._welcome = welcome
        self._board = board
        self._store = store
        self._actor_lanes: set[int] = set()  # without a connector's lane, which serves many actors
        self._door = AttachServer(path, self._attach, self._left)
        if store is not None:
            self.watch(store.filled_event, lambda: drain_event(store.filled_event))

    def watch(self, fd: int, callback: Callable[[], None] | None = None) -> None:
        """Make `poll` return when ``fd`` is readable, and call ``callback`` if given."""
        self._door.watch(fd, callback)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        self._door.unwatch(fd)

    def poll(self, timeout_s: float) -> None:
        """Handle filled slots and writers that attach or end, for up to ``timeout_s`` seconds."""
        self._door.poll(timeout_s)
        if self._store is not None:
            self._store.lend()  # a writer may want more slots than before

    @property
    def published(self) -> Stamp | None:
        """The version of the newest weights on the board; None before the first."""
        return self._board.stamp

    @property
    def actors(self) -> int:
        """The number of actors on this host that hold a lane now."""
        return len(self._actor_lanes)

    def close(self, *, over: bool = False) -> None:
        """Close all connections. ``over``: the run is over, which the actors are told."""
        self._door.close(over=over)

    def _attach(self, request: dict[str, Any]) -> Attached:
        welcome = self._welcome
        reply = welcome_meta(welcome) | {
            "run_id": welcome.run_id,
            "generation": welcome.generation,
        }
        assert self._board.arena.fd is not None
        fds = [self._board.arena.fd]
        if not request["lane"]:
            return Attached(None, fds, reply)
        check_spec(welcome.spec, request["spec"])
        if self._store is None:
            raise UserError("this address serves weights only; connect to the learner's")
        lane, store_fds, where = self._store.offer_lane(request["want"])
        if request["spec"] is not None:
            self._actor_lanes.add(lane)
        return Attached(lane, fds + store_fds, reply | where)

    def _left(self, lane: int) -> None:
        assert self._store is not None
        self._store.close_lane(lane)
        self._actor_lanes.discard(lane)


def check_spec(mine: SlotSpec, theirs: dict[str, Any] | None) -> None:
    """Refuse an actor with another spec, naming the difference. None takes the learner's spec."""
    if theirs is None:
        return
    try:
        difference = mine.difference(SlotSpec.from_dict(theirs))
    except STRANGE as error:
        raise UserError(
            f"the actor's description of its slots cannot be read ({error}); use the same release "
            "of Penstock in both processes"
        ) from error
    if difference:
        raise UserError(
            f"actor and learner disagree on what a slot holds ({difference}); "
            "start both with the same config and the same version of the environment"
        )
