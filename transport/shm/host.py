"""Where processes of this host get a learner's memory: lanes of its store, and its weights.

Everything runs in the thread that calls `poll`, which is the one that owns the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.interfaces import Welcome
from penstock.core.specs import SlotSpec
from penstock.transport.shm.attach import Attached, AttachServer
from penstock.transport.shm.lane import offer
from penstock.transport.shm.store import SlotStore, drain_event
from penstock.transport.shm.weights_board import WeightsBoard


class ShmHost:
    """Serves a board, and a store where there is one (a relay has none)."""

    def __init__(
        self, path: Path, welcome: Welcome, board: WeightsBoard, store: SlotStore | None = None
    ) -> None:
        self._welcome = welcome
        self._board = board
        self._store = store
        self._actor_lanes: set[int] = set()  # a connector's lane serves many
        self._door = AttachServer(path, self._attach, self._left)
        if store is not None:
            self.watch(store.filled_event, lambda: drain_event(store.filled_event))

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Have `poll` call ``callback`` when ``fd`` is readable."""
        self._door.watch(fd, callback)

    def unwatch(self, fd: int) -> None:
        """Forget what `watch` was told."""
        self._door.unwatch(fd)

    def poll(self, timeout_s: float) -> None:
        """Handle what happened: slots filled, writers that came or ended."""
        self._door.poll(timeout_s)
        if self._store is not None:
            self._store.lend()  # a writer may want more than before

    @property
    def actors(self) -> int:
        """Actors of this host that hold a lane now."""
        return len(self._actor_lanes)

    @property
    def turned_away(self) -> Counter[str]:
        """Connections that were closed without an answer, by reason: a peer of another user, one
        that was silent, one of a crowd of silent ones, one that left or sent no request."""
        return self._door.turned_away

    def close(self) -> None:
        self._door.close()

    def _attach(self, request: dict[str, Any]) -> Attached:
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
            return Attached(None, fds, reply)
        check_spec(welcome.spec, request["spec"])
        if self._store is None:
            raise UserError("this address serves weights only; connect to the learner's")
        lane, store_fds, where = offer(self._store, request["want"])
        if request["spec"] is not None:
            self._actor_lanes.add(lane)
        return Attached(lane, fds + store_fds, reply | where)

    def _left(self, lane: int) -> None:
        assert self._store is not None
        self._store.close_lane(lane)
        self._actor_lanes.discard(lane)


def check_spec(mine: SlotSpec, theirs: dict[str, Any] | None) -> None:
    """Refuse an actor whose slots differ, naming what differs. None takes the learner's spec."""
    if theirs is None:
        return
    try:
        difference = mine.difference(SlotSpec.from_dict(theirs))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise _unreadable(error) from error
    except RecursionError as error:  # lists in lists, which cannot even be shown
        raise _unreadable("nested too deeply") from error
    if difference:
        raise UserError(
            f"actor and learner disagree on what a slot holds ({difference}); "
            "start both with the same config and the same version of the environment"
        )


def _unreadable(why: object) -> UserError:
    return UserError(
        f"what the actor says of its slots cannot be read ({why}); use the same release of "
        "Penstock in both processes"
    )
