"""A learner's side of the parameter server.

    client = ServerClient(address, rank, optimizer, config.learner)
    while client.pull(0.2) is None: ...    # current parameters; again before each batch
    ... loss.backward() ...                # adds to optimizer.grads, summed over ``samples``
    client.push(samples, growth)           # in place of optimizer.step

Under asp a push takes the optimizer's step here and sends the changes (`LocalCopy`); else the
server takes the step and the optimizer here only holds parameters and gradients. No call waits
longer than its timeout: a learner that must wait calls again, and sends heartbeats meanwhile.
"""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import zmq
from torch import Tensor

from penstock.configs.errors import UserError
from penstock.configs.sections import LearnerConfig
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.parameter_server import protocol
from penstock.learner.parameter_server.members import rules
from penstock.learner.parameter_server.parameters import (
    ServerState,
    pack_state,
    template,
    unpack_state,
)
from penstock.learner.parameter_server.protocol import (
    NOTHING,
    Flag,
    Packed,
    ServerHeader,
    ServerMessage,
    ServerMessageKind,
    Tally,
)
from penstock.learner.parameter_server.server import STEPS
from penstock.transport.wire import WireError
from penstock.transport.zmq.keys import load_actor
from penstock.transport.zmq.sockets import dealer

JOIN_S = 0.1  # period of requests to a server that has not started yet
REPEAT_S = 1.0  # to one that may have ended
STATE_REPEAT_S = 30.0  # for the whole state, which may be gigabytes


class Reply(NamedTuple):
    """The server's answer to a pull, besides the parameters."""

    version: int
    """Updates of the parameters, by all learners."""
    samples: int
    """Samples whose gradients were applied to them."""
    tally: Tally
    """The counts of all learners, as `Progress.growth`."""
    lag: int | None
    """Staleness of the last push, in updates; None where it was discarded, lost, or not made."""
    workers: int
    """Number of living learners."""
    stop: bool
    """Whether some learner stops, so that all must."""
    nan: bool
    """Whether some learner found a number that is not finite."""
    checkpoint: bool
    """Whether another learner asked all to save."""


class ServerClient:
    """A worker's connection to the server. One thread at a time."""

    def __init__(
        self,
        address: str,
        rank: int,
        optimizer: FlatOptimizer,
        cfg: LearnerConfig,
        *,
        version: int = 0,
        samples: int = 0,
        tally: Tally = NOTHING,
        curve: Path | None = None,
    ) -> None:
        """Make the client of learner ``rank``.

        ``version``, ``samples``, ``tally``: the history of the parameters and state in
        ``optimizer``. The server continues with the state of the worker that has the most updates.
        """
        self.said = "no parameter server has answered yet"
        """The server's last answer to a learner that waits for it."""
        self._rank, self._optimizer, self._cfg = rank, optimizer, cfg
        self._size = optimizer.values.numel()
        self._copy = LocalCopy(optimizer, cfg.significance) if cfg.pace == "asp" else None
        self.last = Reply(version, samples, tally, None, 1, False, False, False)
        self._clock = version // cfg.count
        self._have = -1  # the version of the session that is here
        self._token = secrets.randbits(63) | 1
        self._session = 0
        self._number = 0
        self._asked: ServerMessageKind | None = None
        self._again_s = 0.0
        self._state: ServerState | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dealer(self._context, address, load_actor(curve) if curve else None)

    def push(
        self,
        samples: int,
        tally: Tally = NOTHING,
        *,
        stop: bool = False,
        nan: bool = False,
        checkpoint: bool = False,
    ) -> Tensor | None:
        """Send the gradient in ``optimizer.grads``, summed over ``samples``.

        Args:
            samples: 0 where there was no data in time: that counts as a turn, so that no other
                worker waits; where nothing was pulled since the last push, only the counts are
                sent.
            tally: counts since the last push.
            stop: tell all learners to stop.
            nan: tell all learners that a number was not finite.
            checkpoint: tell all learners to save.

        Returns:
            The norm of the mean gradient, float32 ``[]``; None for no samples.
        """
        norm, packed = None, None
        if samples and self._copy is not None:
            norm = self._copy.step(samples, int(self.last.tally[STEPS] + tally[STEPS]))
            self._clock += 1
            indices, changes = self._copy.significant(self._clock)
            packed = protocol.pack_sparse(
                indices.cpu().numpy().astype(np.uint32), changes.cpu().numpy()
            )
        elif samples:
            norm = torch.linalg.vector_norm(self._optimizer.grads) / samples
            packed = protocol.pack_dense(self._optimizer.grads.cpu().numpy())
        said = {Flag.STOP: stop, Flag.NAN: nan, Flag.CHECKPOINT: checkpoint}
        flags = sum(flag for flag, is_said in said.items() if is_said)
        self._send(
            ServerHeader(ServerMessageKind.PUSH, flags, samples=samples, tally=tally), packed
        )
        return norm

    def pull(self, timeout_s: float) -> Reply | None:
        """Update ``optimizer.values`` to the current parameters, as soon as the pace allows.

        None where it does not within ``timeout_s`` seconds; then call again. Raises UserError for a
        problem that the user must correct.
        """
        return self.last if self._ask(ServerMessageKind.PULL, timeout_s) else None

    def fetch(self, timeout_s: float) -> ServerState | None:
        """The server's state of the run, for a checkpoint; None where no answer came.

        It is also put into ``optimizer``, whose moments stay its own under asp.
        """
        self._state = None
        self._ask(ServerMessageKind.ASK_STATE, timeout_s)
        return self._state

    def close(self) -> None:
        self._send(ServerHeader(ServerMessageKind.BYE))
        self._socket.close(500)  # ms for what is on its way
        self._context.term()

    def _ask(self, kind: ServerMessageKind, timeout_s: float) -> bool:
        """Send a request, unless it was sent already; returns whether the answer has arrived."""
        if self._asked != kind:
            self._asked, self._again_s = kind, 0.0
            self._number += 1
        ends_s = time.monotonic() + timeout_s
        while self._asked is not None:
            now_s = time.monotonic()
            if now_s >= self._again_s:
                self._say()
            wait_s = max(0.0, min(ends_s, self._again_s) - now_s)
            if self._socket.poll(round(1000 * wait_s)):
                self._receive()
            elif now_s >= ends_s:
                return False
        return True

    def _say(self) -> None:
        """Send JOIN or the request."""
        if self._session:
            assert self._asked is not None
            self._send(ServerHeader(self._asked, number=self._number, version=self._have))
            asks_for_all = self._asked is ServerMessageKind.ASK_STATE
            self._again_s = time.monotonic() + (STATE_REPEAT_S if asks_for_all else REPEAT_S)
            return
        join = ServerHeader(
            ServerMessageKind.JOIN,
            rank=self._rank,
            session=self._token,
            version=self.last.version,
            entries=self._size,
            rules=rules(self._cfg),
        )
        self._send(join)
        self._again_s = time.monotonic() + JOIN_S

    def _send(self, head: ServerHeader, packed: Packed | None = None) -> None:
        """Send a message; one that cannot be sent now is lost, as with a broken connection."""
        if head.kind != ServerMessageKind.JOIN:
            if not self._session:
                return
            head = head._replace(session=self._session)
        try:
            frames = protocol.encode(head, packed)
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            pass

    def _receive(self) -> None:
        frames = self._socket.recv_multipart(copy=False)
        try:
            self._take(protocol.decode([frame.buffer for frame in frames]))
        except WireError as error:
            self.said = f"the parameter server sent what cannot be used: {error}"

    def _take(self, message: ServerMessage) -> None:
        head = message.head
        if head.kind == ServerMessageKind.WELCOME:
            self._welcome(head)
        elif head.kind == ServerMessageKind.WHO and head.session == self._session:
            self._session, self._again_s = 0, 0.0
        elif head.kind == ServerMessageKind.BUSY:
            self.said = protocol.text(message)
        elif head.kind == ServerMessageKind.REFUSE:
            raise UserError(protocol.text(message))
        elif head.kind == self._answer and head.number == self._number:
            self._asked = None
            if head.kind == ServerMessageKind.VALUES:
                self._pulled(message)
            else:
                self._fetched(message)

    @property
    def _answer(self) -> ServerMessageKind | None:
        """The kind of message that answers the present request."""
        if self._asked is None:
            return None
        return (
            ServerMessageKind.VALUES
            if self._asked == ServerMessageKind.PULL
            else ServerMessageKind.STATE
        )

    def _welcome(self, head: ServerHeader) -> None:
        if head.session == self._session:
            return
        self.said = "the others are behind, or have not begun"
        self._session, self._again_s, self._have = head.session, 0.0, -1
        if head.flags & Flag.WANTED:
            arrays = {} if self._copy else self._optimizer.state_dict()
            offer = ServerHeader(
                ServerMessageKind.STATE,
                version=self.last.version,
                samples=self.last.samples,
                tally=self.last.tally,
            )
            self._send(offer, pack_state(self._optimizer.values.cpu().numpy(), arrays))

    def _pulled(self, message: ServerMessage) -> None:
        head = message.head
        indices = None
        if head.flags & Flag.SPARSE:
            raw, values = protocol.sparse(message, self._size)
            indices = torch.from_numpy(raw.astype(np.int64))
        else:
            values = protocol.dense(message, self._size)
        fresh = torch.from_numpy(np.array(values, np.float32))
        if self._copy is not None:
            self._copy.pulled(indices, fresh)
        else:
            self._optimizer.values.copy_(fresh)
        self._have = head.version
        self.last = Reply(
            head.version,
            head.samples,
            head.tally,
            head.lag if head.lag >= 0 else None,
            head.workers,
            bool(head.flags & Flag.STOP),
            bool(head.flags & Flag.NAN),
            bool(head.flags & Flag.CHECKPOINT),
        )

    def _fetched(self, message: ServerMessage) -> None:
        state = unpack_state(message, self._size, template(self._size, self._cfg))
        self._optimizer.values.copy_(torch.from_numpy(state.values))
        if self._copy is None:
            self._optimizer.load_state_dict(state.arrays)
        self._state = state


class LocalCopy:
    """The parameters of ``optimizer``, as a worker's local copy of the shared ones under asp.

    Gaia's approximate synchronous parallel (Hsieh et al. 2017, "Gaia: Geo-Distributed Machine
    Learning Approaching LAN Speeds"): each data centre updates a copy of the parameters, and sends
    the others only changes that are significant relative to the changed value. Here a worker is a
    data centre, and the parameter server adds up the changes of all workers:

        local copy = shared values, as last pulled + own changes that were not sent yet
        own changes add up until |change| > significance / sqrt(t) * |value|, and then are sent

    ``t`` is the worker's clock, so that every change is sent in the end, which Gaia's proof of
    convergence needs. Its mirror clock, the bound on how far workers drift apart, is
    `pace.Bounded`; its selective barrier is not needed, since one server orders all messages. Each
    worker has its own optimizer with its own moments: the server only adds.
    """

    def __init__(self, optimizer: FlatOptimizer, significance: float) -> None:
        self._optimizer = optimizer
        self._significance = significance
        self._shared = optimizer.values.clone()
        self._unsent = torch.zeros_like(optimizer.values)

    @torch.no_grad()
    def step(self, samples: int, steps: int) -> Tensor:
        """Take the optimizer's step here; returns the gradient's norm."""
        values = self._optimizer.values
        before = values.clone()
        norm = self._optimizer.step(samples, steps)
        self._unsent += values - before
        return norm

    @torch.no_grad()
    def significant(self, clock: int) -> tuple[Tensor, Tensor]:
        """Indices (int64, ascending) and changes to send at ``clock`` (from 1), marked as sent."""
        threshold = self._significance / clock**0.5
        values = self._optimizer.values
        indices = (self._unsent.abs() > threshold * values.abs()).nonzero().flatten()
        changes = self._unsent[indices]
        self._unsent[indices] = 0.0
        return indices, changes

    @torch.no_grad()
    def pulled(self, indices: Tensor | None, values: Tensor) -> None:
        """Take in the shared values, all or those at some indices."""
        if indices is None:
            self._shared.copy_(values)
        else:
            device = self._shared.device
            self._shared[indices.to(device)] = values.to(device)
        torch.add(self._shared, self._unsent, out=self._optimizer.values)
