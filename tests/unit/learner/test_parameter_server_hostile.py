"""A worker that sends false data is refused, and the parameter server continues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from penstock.configs.load import resolve
from penstock.learner.extras.parameter_server import protocol
from penstock.learner.extras.parameter_server.parameters import template
from penstock.learner.extras.parameter_server.protocol import (
    Flag,
    Packed,
    ServerHeader,
    ServerMessage,
    ServerMessageKind,
    rules,
)
from penstock.learner.extras.parameter_server.server import ParameterServer

SIZE = 8
TALLY = len(protocol.NOTHING)
PACES = ("ssp", "asp", "tap", "backup")
I64 = 1 << 63


class Liar:
    """A worker that says whatever it is asked to, after it has joined properly."""

    def __init__(self, folder: Path, pace: str) -> None:
        config = resolve("cartpole", [f"learner.pace={pace}", "learner.count=2"])
        address = f"ipc://{folder}/server"
        self.cfg = config.learner
        self.server = ParameterServer(self.cfg, address)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)
        self._session = 0
        self._number = 0

    def say(self, head: ServerHeader, packed: Packed | None = None) -> list[ServerMessage]:
        """Send, and let the server work; all that it answers is sound."""
        if head.kind != ServerMessageKind.JOIN:
            head = head._replace(session=self._session)
        self._socket.send_multipart(protocol.encode(head, packed))
        while not self.server.turn(1.0):
            pass
        answers = []
        while self._socket.poll(20):
            answers.append(protocol.decode(self._socket.recv_multipart()))
        return answers

    def join(self, **state: Any) -> None:
        join = ServerHeader(ServerMessageKind.JOIN, session=5, entries=SIZE, rules=rules(self.cfg))
        [welcome] = self.say(join)
        self._session = welcome.head.session
        assert welcome.head.flags & Flag.WANTED
        arrays = template(SIZE, self.cfg).values()
        size = SIZE + sum(int(np.prod(shape)) for shape in arrays)
        self.say(
            ServerHeader(ServerMessageKind.STATE, **state),
            protocol.pack_dense(np.ones(size, np.float32)),
        )

    def push(self, **fields: Any) -> None:
        ones = np.ones(SIZE, np.float32)
        packed = protocol.pack_dense(ones)
        if self.cfg.pace == "asp":
            packed = protocol.pack_sparse(np.arange(SIZE, dtype=np.uint32), ones)
        self.say(ServerHeader(ServerMessageKind.PUSH, **fields), packed)

    def pull(self) -> ServerMessage:
        self._number += 1
        [values] = self.say(ServerHeader(ServerMessageKind.PULL, number=self._number, version=-1))
        assert values.head.kind == ServerMessageKind.VALUES
        return values

    def close(self) -> None:
        self._context.destroy(0)
        self.server.close()


@pytest.fixture(params=PACES)
def liar(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Liar]:
    made = Liar(tmp_path, request.param)
    yield made
    made.close()
