"""Serves a learner's memory to processes of this host: lanes of its store, and its weights.

Everything runs in the thread that calls `poll`, which owns the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.interfaces import Welcome
from penstock.core.params import POLICY_ID, Stamp
from penstock.core.specs import SlotSpec
from penstock.transport.shm.attach import Attached, AttachServer
from penstock.transport.shm.store import SlotStore, drain_event
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.wire import STRANGE, welcome_meta


class ShmHost:
    """Serves weights boards, and a store where there is one (a relay has none)."""

    def __init__(
        self,
        path: Path,
        welcome: Welcome,
        boards: Sequence[WeightsBoard],
        store: SlotStore | None = None,
    ) -> None:
        """Open the socket.

        Args:
            path: of the Unix socket.
            welcome: the description of the learner, which each process is sent.
            boards: the weights; ``boards[i]`` has those of policy i: the run's, then its chairs'.
            store: the slots, if any.

        Raises:
            UserError: another process listens at ``path``.
        """
        assert len(boards) == 1 + welcome.chairs
        self._welcome = welcome
        self._boards = boards
        self._store = store
        # The lanes of actors; that of a connector, which serves many actors, is not among them.
        self._actor_lanes: set[int] = set()
        self._server = AttachServer(path, attach=self._attach, on_leave=self._on_leave)
        if store is not None:
            self.watch(store.filled_event, lambda: drain_event(store.filled_event))

    def watch(self, fd: int, callback: Callable[[], None] | None = None) -> None:
        """Make `poll` return when ``fd`` is readable, and call ``callback`` if given."""
        self._server.watch(fd, callback)

    def unwatch(self, fd: int) -> None:
        """Undo `watch`."""
        self._server.unwatch(fd)

    def poll(self, timeout_s: float) -> None:
        """Handle filled slots and writers that attach or end, for up to ``timeout_s`` seconds."""
        self._server.poll(timeout_s)
        if self._store is not None:
            self._store.lend()  # a writer may want more slots than before

    @property
    def published(self) -> Stamp | None:
        """The version of the run's newest weights; None before the first."""
        return self._boards[POLICY_ID].stamp

    @property
    def actors(self) -> int:
        """The number of actors on this host that hold a lane now."""
        return len(self._actor_lanes)

    def close(self, *, over: bool = False) -> None:
        """Close all connections. ``over``: the run is over, which the actors are told."""
        self._server.close(over=over)

    def _attach(self, request: dict[str, Any]) -> Attached:
        """Answer a process that asks for the weights, and perhaps for a lane.

        Raises UserError for a lane where there is none, or for slots of another spec.
        """
        welcome = self._welcome
        reply = welcome_meta(welcome) | {
            "run_id": welcome.run_id,
            "generation": welcome.generation,
        }
        board_fds = [board.fd for board in self._boards]
        if not request["lane"]:
            return Attached(None, board_fds, reply)

        check_spec(welcome.spec, request["spec"])
        if self._store is None:
            raise UserError("this address serves weights only; connect to the learner's")
        offer = self._store.offer_lane(request["want"])
        # A connector takes the learner's spec; an actor sends its own.
        if request["spec"] is not None:
            self._actor_lanes.add(offer.lane)
        return Attached(offer.lane, board_fds + offer.fds, reply | offer.geometry)

    def _on_leave(self, lane: int) -> None:
        """Take back the lane of a process that has ended."""
        assert self._store is not None
        self._store.close_lane(lane)
        self._actor_lanes.discard(lane)


def check_spec(learner: SlotSpec, actor: dict[str, Any] | None) -> None:
    """Check that an actor fills slots as the learner reads them.

    Args:
        learner: the learner's spec.
        actor: the actor's, as `SlotSpec.to_dict`; None takes the learner's.

    Raises:
        UserError: the specs differ, or the actor's cannot be read.
    """
    if actor is None:
        return

    try:
        difference = learner.difference(SlotSpec.from_dict(actor))
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
