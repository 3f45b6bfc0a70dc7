"""An attachment to a learner (or relay) of the same host, through its Unix socket."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from penstock.configs.schema import Config
from penstock.core.interfaces import LearnerGoneError, LearnerInfo, Link, RunOverError
from penstock.core.params import POLICY_ID, Float32, Stamp
from penstock.core.role import RoleContext, learner_socket
from penstock.core.specs import SlotSpec
from penstock.transport.shm.attach import AttachClient, close_all
from penstock.transport.shm.store import Slot, SlotWriter
from penstock.transport.shm.weights_board import WeightsBoard, board_of
from penstock.transport.wire import read_welcome, release_of


class ShmLink:
    """A `Link` over shared memory; ``want=0`` attaches only to the weights."""

    fills_store = True

    def __init__(
        self, path: Path, spec: SlotSpec | None, want: int, *, lane: bool | None = None
    ) -> None:
        """Attach to the learner at ``path``.

        Args:
            path: of its Unix socket.
            spec: of the slots; None takes the learner's.
            want: slots to hold at a time.
            lane: whether to open a lane; a writer that wants no slots yet needs one too. None: if
                ``want`` is above 0.

        Raises:
            OSError: no learner listens or answers.
            UserError: the learner refuses.
            LearnerGoneError: the learner ended meanwhile.
        """
        if lane is None:
            lane = want > 0
        request = {"spec": spec.to_dict() if spec else None, "want": want, "lane": lane}
        try:
            self._attachment = AttachClient(path, request)
        except EOFError as error:
            raise LearnerGoneError(str(error)) from error

        reply = self._attachment.reply
        fds = self._attachment.fds
        self.welcome = read_welcome(reply["run_id"], reply["generation"], reply)
        self.release = release_of(reply)
        """The learner's release of Penstock; empty from 0.1.0, which does not send it."""
        self.writer: SlotWriter | None = None
        """The writer of the lane, if there is one."""

        # What was opened is closed where a later step fails, and otherwise by `close`.
        with ExitStack() as opening:
            opening.callback(self._attachment.leave)
            board_fds = fds[: 1 + self.welcome.chairs]
            opening.callback(close_all, board_fds)
            size = self.welcome.layout.size
            self.boards = [WeightsBoard.attach(fd, size) for fd in board_fds]
            """The weights; ``boards[i]`` has those of policy i."""
            if lane:
                writer = SlotWriter.attached(self.welcome.spec, reply, fds[len(board_fds) :])
                self.writer = opening.enter_context(writer)
            self._stack = opening.pop_all()

    @property
    def spec(self) -> SlotSpec:
        """The layout of a slot."""
        return self.welcome.spec

    def slot(self, timeout_s: float) -> AbstractContextManager[Slot | None]:
        """Lend a slot, as `Link.slot`. Raises LearnerGoneError, and RunOverError where it said so.

        Slots that were lent before the learner's end are still filled.
        """
        assert self.writer is not None, "attached to the weights alone"
        if not self.writer.available and self.learner_gone():
            if self._attachment.owner_over:
                raise RunOverError("the run is over")
            raise LearnerGoneError("the learner ended")
        return self.writer.slot(timeout_s)

    def beat(self) -> None:
        """Does nothing: slots are taken back only after the confirmed death of a process."""

    def read_weights(
        self, out: Float32, newer_than: Stamp | None, policy_id: int = POLICY_ID
    ) -> Stamp | None:
        """Copy the newest weights, as `Link.read_weights`."""
        return board_of(self.boards, policy_id).read(out, newer_than, policy_id)

    def learner_gone(self) -> bool:
        """Whether the learner closed the connection, which it does only by ending."""
        return self._attachment.owner_gone

    def close(self) -> None:
        """Leave: the learner takes the lane back."""
        self._stack.close()


def attach_lane(ctx: RoleContext) -> ShmLink | None:
    """Attach a connector's lane to its learner as soon as that listens.

    Returns None if the role is asked to stop before.
    """
    path = learner_socket(ctx.runtime_dir, ctx.learner)
    while not ctx.stopping():
        ctx.status.beat()
        try:
            return ShmLink(path, None, want=0, lane=True)
        except (OSError, LearnerGoneError):
            time.sleep(0.05)
    return None


class ShmTransport:
    """Joins by the learner's shared memory; an address is the path of its Unix socket."""

    def ask(self, ctx: RoleContext, address: str) -> LearnerInfo:
        """Fetch the description of the learner at ``address``, as `Transport.ask`."""
        link = ShmLink(Path(address), None, want=0)
        link.close()
        return LearnerInfo(link.welcome.config, unix_path=address, release=link.release)

    def connect(
        self, ctx: RoleContext, address: str, config: Config, spec: SlotSpec, actor: int
    ) -> Link:
        """Join the learner at ``address``, as `Transport.connect`."""
        try:
            return ShmLink(Path(address), spec, config.transport.slots)
        except LearnerGoneError as error:  # it ended meanwhile: a successor may listen soon
            raise ConnectionError(str(error)) from error
