"""A process's attachment to a learner (or relay) of the same host, through its Unix socket."""

from __future__ import annotations

import os
import socket
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import msgpack

from penstock.configs.errors import UserError
from penstock.core.params import Float32, ParamLayout
from penstock.core.specs import SlotSpec
from penstock.transport.base import LearnerGoneError, Stamp, Welcome
from penstock.transport.shm.arena import Arena
from penstock.transport.shm.board import WeightsBoard
from penstock.transport.shm.host import ATTACH_VERSION, MESSAGE_NBYTES
from penstock.transport.shm.store import Geometry, Slot, SlotWriter

MAX_FDS = 4


class ShmLink:
    """`transport.base.Link` over shared memory; ``want=0`` attaches to the weights alone."""

    fills_store = True

    def __init__(
        self, path: Path, spec: SlotSpec | None, want: int, *, lane: bool | None = None
    ) -> None:
        """Raises OSError while no learner listens, UserError when it refuses.

        ``lane`` says whether to open one, as a writer does that wants no slots yet; None: if
        ``want`` is above 0.
        """
        lane = want > 0 if lane is None else lane
        self._stack = ExitStack()
        self._socket = self._stack.enter_context(
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )
        try:
            self._socket.connect(str(path))
            reply, fds = self._handshake(spec, want, lane)
        except BaseException:
            self._stack.close()
            raise
        self.welcome = Welcome(
            reply["run_id"],
            reply["generation"],
            SlotSpec.from_dict(reply["spec"]),
            ParamLayout.from_list(reply["layout"]),
            reply["config"],
        )
        self.board = WeightsBoard(Arena.attach(fds[0]), self.welcome.layout.size)
        self._stack.callback(self.board.close)
        self.writer: SlotWriter | None = None
        if lane:
            self.writer = self._open_writer(reply, fds[1:])

    def _handshake(
        self, spec: SlotSpec | None, want: int, lane: bool
    ) -> tuple[dict[str, Any], list[int]]:
        request = {
            "attach": ATTACH_VERSION,
            "spec": spec.to_dict() if spec else None,
            "want": want,
            "lane": lane,
        }
        self._socket.send(msgpack.packb(request))
        data, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_NBYTES, MAX_FDS)
        if not data:
            raise LearnerGoneError("the learner ended during the handshake")
        reply = msgpack.unpackb(data)
        if "error" in reply:
            raise UserError(reply["error"])
        return reply, fds

    def _open_writer(self, reply: dict[str, Any], fds: list[int]) -> SlotWriter:
        store_fd, lent_event, filled_event = fds
        arena = Arena.attach(store_fd)
        self._stack.callback(arena.close)
        self._stack.callback(os.close, lent_event)
        self._stack.callback(os.close, filled_event)
        geometry = Geometry(self.welcome.spec, reply["slots"], reply["lanes"])
        return SlotWriter(arena, geometry, reply["lane"], lent_event, filled_event)

    @property
    def spec(self) -> SlotSpec:
        return self.welcome.spec

    def slot(self, timeout_s: float) -> AbstractContextManager[Slot | None]:
        assert self.writer is not None, "attached to the weights alone"
        if not self.writer.available and self.learner_gone():
            raise LearnerGoneError("the learner ended")
        return self.writer.slot(timeout_s)

    def read_weights(self, out: Float32, newer_than: Stamp | None) -> Stamp | None:
        return self.board.read(out, newer_than)

    def learner_gone(self) -> bool:
        """True when the learner closed the connection, which it does only by ending."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._stack.close()
