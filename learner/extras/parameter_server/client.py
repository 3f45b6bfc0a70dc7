"""A learner's side of the parameter server.

    client = ServerClient(addresses, rank, optimizer, config.learner)
    while client.pull(0.2) is None: ...    # current parameters; again before each batch
    ... loss.backward() ...                # adds to optimizer.grads, summed over ``samples``
    client.push(samples, tally)            # in place of optimizer.step

By `learner.pull` a pull is asked for while the step before it is computed (`ask_ahead`), or left
out while the parameters are new enough (`needs_pull`). The parameters here contain the own pushes
all the same (`OwnSteps`), so that a worker reads its writes.

Under the pace asp (approximate synchronous parallel) a push takes the optimizer's step here and
sends the changes (`LocalCopy`); else the server takes the step and the optimizer here only holds
parameters and gradients. No call waits longer than its timeout: a learner that must wait calls
again, and sends heartbeats meanwhile.

Read `ServerClient` first. It has one `_Shard` for each server, and each of these at most one
`ShardRequest` that is not answered yet.
"""

from __future__ import annotations

import operator
import secrets
import time
from collections.abc import Sequence
from functools import reduce
from math import isfinite, nan
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from penstock.configs.errors import UserError
from penstock.configs.sections import LearnerConfig
from penstock.learner.extras.parameter_server import protocol
from penstock.learner.extras.parameter_server.parameters import (
    ServerState,
    pack_state,
    part_of,
    template,
    unpack_state,
)
from penstock.learner.extras.parameter_server.protocol import (
    NOTHING,
    Flag,
    Floats,
    Packed,
    ServerHeader,
    ServerMessage,
    ServerMessageKind,
    Tally,
)
from penstock.learner.extras.parameter_server.server import MAX_FRAME_NBYTES, STEPS
from penstock.learner.optimizers.flat_optimizer import CLIP_MARGIN, FlatOptimizer
from penstock.learner.progress import BOOKED
from penstock.transport.wire import WireError
from penstock.transport.zmq.keys import load_learners
from penstock.transport.zmq.sockets import dealer

JOIN_S = 0.1  # period of requests to a server that has not started yet
REPEAT_S = 1.0  # to one that may have ended
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED  # with keys: each side has the right ones
ANSWERS: dict[ServerMessageKind | None, ServerMessageKind] = {
    ServerMessageKind.PULL: ServerMessageKind.VALUES,
    ServerMessageKind.ASK_STATE: ServerMessageKind.STATE,
}


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


class Unreached(NamedTuple):
    """A shard to which there is no connection."""

    shard: int
    """Its number."""
    seconds: float
    """Seconds since the connection has ended, or since the client was made."""
    was_reached: bool
    """Whether there was a connection before."""


class ServerClient:
    """A worker's connections to all shards of the server. One thread at a time."""

    def __init__(
        self,
        addresses: Sequence[str],
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

        ``version``, ``samples`` and ``tally`` are the history of the parameters and state in
        ``optimizer``. The server continues with the state of the worker that has the most updates.

        Args:
            addresses: those of the shards, in order.
            rank: the learner's.
            optimizer: holds the parameters and their gradients.
            cfg: the section `learner` of the config.
            version: updates of the parameters so far.
            samples: samples whose gradients were applied to them.
            tally: the run's counts so far, as `Progress.growth`.
            curve: folder of keys, with the learner's secret one; None: connect without keys.
        """
        self.said = "no parameter server has answered yet"
        """The server's last answer to a learner that waits for it."""
        self._optimizer, self._cfg = optimizer, cfg
        size = optimizer.values.numel()
        self._copy = LocalCopy(optimizer, cfg.significance) if cfg.pace == "asp" else None
        self._own = None if cfg.pull == "newest" else OwnSteps(optimizer)
        self.last = Reply(version, samples, tally, None, 1, False, False)
        self._residual = np.zeros(size, np.float32) if cfg.reduce.codec == "bf16" else None
        self._counts = np.zeros(len(BOOKED))  # of this learner since the client was made
        self._clock = version // cfg.most_count
        self._asked: ServerMessageKind | None = None
        self._is_fresh, self._spare = False, 0  # for the next step, and for so many after it
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = load_learners(curve)[1] if curve else None
        self._poller = zmq.Poller()
        self._shards: list[_Shard] = []
        token = secrets.randbits(63) | 1
        for number, address in enumerate(addresses):
            part = part_of(size, number, len(addresses))
            join = ServerHeader(
                ServerMessageKind.JOIN,
                rank=rank,
                session=token,
                entries=part.stop - part.start,
                rules=protocol.rules(cfg, number),
            )
            resumed = ServerHeader(
                ServerMessageKind.VALUES, version=version, samples=samples, tally=tally
            )
            # A state has the optimizer's arrays too, and may be larger than any weights.
            socket = dealer(self._context, address, keys, max_frame_nbytes=MAX_FRAME_NBYTES)
            shard = _Shard(socket, part, join, resumed)
            self._poller.register(shard.socket, zmq.POLLIN)
            self._shards.append(shard)
        self._shards[0].clock = 0

    def push(
        self,
        samples: int,
        tally: Tally = NOTHING,
        *,
        stop: bool = False,
        nan: bool = False,
    ) -> Tensor | None:
        """Send the gradient in ``optimizer.grads``, summed over ``samples``.

        Args:
            samples: 0 where there was no data in time: that counts as a turn, so that no other
                worker waits; where nothing was pulled since the last push, only the counts are
                sent.
            tally: counts since the last push.
            stop: tell all learners to stop.
            nan: tell all learners that a number was not finite.

        Returns:
            The norm of the mean gradient, float32 ``[]``; None for no samples.
        """
        self._is_fresh = self._spare > 0
        self._spare = max(0, self._spare - 1)
        flags = (Flag.STOP if stop else Flag.NONE) | (Flag.NAN if nan else Flag.NONE)
        self._counts += tally[: len(BOOKED)]
        total = (*self._counts.tolist(), *tally[len(BOOKED) :])
        head = ServerHeader(ServerMessageKind.PUSH, flags, samples=samples, tally=total)
        for shard in self._shards:
            shard.tally = total
        if not samples:
            for shard in self._shards:
                shard.send(head)
            return None
        steps = int(self.last.tally[STEPS] + tally[STEPS])
        if self._copy is not None:
            return self._push_changes(head, self._copy, steps)
        norm: Tensor = torch.linalg.vector_norm(self._optimizer.grads) / samples
        gradient = self._optimizer.grads.cpu().numpy()
        if len(self._shards) > 1 or self._residual is not None:
            gradient = gradient * self._clip_factor(float(norm))
        self._push_gradient(head, gradient)
        if self._own is not None:
            self._own.step(samples, steps, self.last.version)
        return norm

    def pull(self, timeout_s: float) -> Reply | None:
        """Update ``optimizer.values`` to the current parameters, as soon as the pace allows.

        After `ask_ahead` it takes the parameters that were asked for there.

        Returns:
            The answer; None where the pace does not allow it within ``timeout_s`` seconds. Then
            call again.

        Raises:
            UserError: for a problem that the user must correct.
        """
        if not self._ask(ServerMessageKind.PULL, timeout_s):
            return None
        heads = [shard.answer for shard in self._shards]
        told = Flag(reduce(operator.or_, (head.flags for head in heads)))
        first = heads[0]  # all count the same pushes
        self._spare = min(head.rules for head in heads) if self._cfg.pull == "cached" else 0
        self._is_fresh = True
        self.last = Reply(
            first.version,
            first.samples,
            first.tally,
            first.lag if first.lag >= 0 else None,
            first.workers,
            Flag.STOP in told,
            Flag.NAN in told,
        )
        return self.last

    def ask_ahead(self) -> None:
        """Ask for the parameters of the step after the next push, unless those here will do then.

        The next `pull` takes them, after that push.
        """
        if self._spare or self._asked is not None or self._own is None:
            return
        self._asked = ServerMessageKind.PULL
        self._own.begin()
        for shard in self._shards:
            shard.ask(ServerMessageKind.PULL, Flag.AHEAD)
            shard.say()

    @property
    def has_asked(self) -> bool:
        """Whether a pull has begun and is not answered."""
        return self._asked is ServerMessageKind.PULL

    @property
    def needs_pull(self) -> bool:
        """Whether the next step needs a pull, by `learner.pull`."""
        return self.has_asked or not self._is_fresh or self._cfg.pull == "newest"

    def unreached(self) -> Unreached | None:
        """Returns the shard that has been without a connection for the longest time.

        None if all are connected. A shard whose host vanishes loses its connections after about
        seven seconds, by heartbeats.
        """
        for shard in self._shards:
            shard.look()
        away = [(s.away_since_s, n) for n, s in enumerate(self._shards) if s.away_since_s]
        if not away:
            return None
        since_s, number = min(away)
        seconds = time.monotonic() - since_s
        return Unreached(number, seconds, self._shards[number].was_reached)

    def fetch(self, timeout_s: float) -> ServerState | None:
        """Get the server's state of the run, for a checkpoint.

        It is also put into ``optimizer``, whose moments stay its own under asp. With several shards
        a push in transit may be in the state of one and not of another.

        Returns:
            The state; None where no answer came within ``timeout_s`` seconds. Then call again.
        """
        if self._asked is not ServerMessageKind.ASK_STATE:
            for shard in self._shards:
                shard.state = None
        self._ask(ServerMessageKind.ASK_STATE, timeout_s)
        self._spare, self._is_fresh = 0, False  # a push must not be of newer values than pulled
        states = [shard.state for shard in self._shards if shard.state is not None]
        if len(states) < len(self._shards):
            return None
        arrays = {
            name: np.concatenate([state.arrays[name] for state in states]) if array.ndim else array
            for name, array in states[0].arrays.items()
        }
        values = np.concatenate([state.values for state in states])
        self._optimizer.values.copy_(torch.from_numpy(values))
        if self._copy is None:
            self._optimizer.load_state_dict(arrays)
        return states[0]._replace(values=values, arrays=arrays)

    def close(self) -> None:
        """Leave the server and close the connections."""
        for shard in self._shards:
            shard.send(ServerHeader(ServerMessageKind.BYE))
            shard.close()
        self._context.term()

    def _push_gradient(self, head: ServerHeader, gradient: Floats) -> None:
        """Send each shard its part; what bf16 rounds away is added to the next gradient."""
        residual = self._residual
        if residual is not None:
            gradient = gradient + residual
        for shard in self._shards:
            part = gradient[shard.part]
            packed = protocol.pack_dense(part, bf16=residual is not None)
            if residual is not None:
                lost = part - protocol.unrounded(packed.payload, packed.flags)
                residual[shard.part] = lost if np.isfinite(lost).all() else 0.0
            shard.send(head, packed)

    def _clip_factor(self, norm: float) -> np.float32:
        """Returns the factor by which this learner clips a gradient whose mean has that norm.

        It clips where there are several shards, as each of them knows only a part of the gradient,
        and where there is a residual, in which an outlier would stay. The factor is NaN for a norm
        that is not finite, so that every shard refuses its part.
        """
        if not isfinite(norm):
            return np.float32(nan)
        clip = self._cfg.grad_clip
        return np.float32(1.0 if clip is None else min(1.0, clip / (norm + CLIP_MARGIN)))

    def _push_changes(self, head: ServerHeader, copy: LocalCopy, steps: int) -> Tensor:
        """Take the optimizer's step here, after ``steps`` agent steps, and send the significant
        changes of parameters."""
        norm = copy.step(head.samples, steps)
        self._clock += 1
        found, changed = copy.significant(self._clock)
        indices, changes = found.cpu().numpy(), changed.cpu().numpy()
        for shard in self._shards:
            first, last = np.searchsorted(indices, (shard.part.start, shard.part.stop))
            own = (indices[first:last] - shard.part.start).astype(np.uint32)
            shard.send(head, protocol.pack_sparse(own, changes[first:last]))
        return norm

    def _ask(self, kind: ServerMessageKind, timeout_s: float) -> bool:
        """Send a request to all shards, if it was not sent yet; returns whether they answered."""
        if self._asked != kind:
            self._asked = kind
            if self._own is not None:
                self._own.begin()
            for shard in self._shards:
                shard.ask(kind)
        ends_s = time.monotonic() + timeout_s
        while waiting := [shard for shard in self._shards if shard.asked is not None]:
            now_s = time.monotonic()
            for shard in waiting:
                if now_s >= shard.again_s:
                    shard.say()
            next_s = min(shard.again_s for shard in waiting)
            ready = dict(self._poller.poll(round(1000 * max(0.0, min(ends_s, next_s) - now_s))))
            for shard in self._shards:
                if shard.socket in ready:
                    self._receive(shard)
            if not ready and now_s >= ends_s:
                return False
        self._asked = None
        return True

    def _receive(self, shard: _Shard) -> None:
        """Receive one message of a shard and handle it."""
        frames = shard.socket.recv_multipart(copy=False)
        try:
            self._take(shard, protocol.decode([frame.buffer for frame in frames]))
        except WireError as error:
            self.said = f"the parameter server sent what cannot be used: {error}"
            if shard.asked is not None:  # it may be the answer
                shard.renew()

    def _take(self, shard: _Shard, message: ServerMessage) -> None:
        head = message.head
        if head.kind == ServerMessageKind.WELCOME:
            self._welcome(shard, head)
        elif head.kind == ServerMessageKind.WHO and head.session == shard.session:
            shard.session = 0
            self._join_again()
        elif head.kind == ServerMessageKind.BUSY:
            self.said = protocol.text(message)
        elif head.kind == ServerMessageKind.REFUSE:
            raise UserError(protocol.text(message))
        elif head.kind == ANSWERS.get(shard.asked) and head.number == shard.number:
            if head.kind == ServerMessageKind.VALUES:
                self._pulled(shard, message)
            else:
                shard.state = unpack_state(message, shard.size, template(shard.size, self._cfg))
            shard.asked = None

    def _welcome(self, shard: _Shard, head: ServerHeader) -> None:
        if head.session == shard.session:
            return
        self.said = "the others are behind, or have not begun"
        was_joined = shard.session != 0
        shard.session, shard.again_s, shard.have = head.session, 0.0, -1
        shard.flags = Flag.NONE  # this session has not seen the step that a pull was ahead of
        if was_joined:
            self._join_again()
            return
        if shard is self._shards[0]:
            for other in self._shards[1:]:
                other.clock, other.again_s = head.number, 0.0
        if head.flags & Flag.WANTED:
            state = {} if self._copy else self._optimizer.state_dict()
            arrays = {name: a[shard.part] if a.ndim else a for name, a in state.items()}
            offer = ServerHeader(
                ServerMessageKind.STATE,
                version=shard.answer.version,
                samples=shard.answer.samples,
                tally=shard.answer.tally,
            )
            held = self._copy.shared if self._copy else self._optimizer.values
            values = held[shard.part].cpu().numpy()
            shard.send(offer, pack_state(values, arrays))
        if shard.tally[: len(BOOKED)] != shard.counted:  # a push before may have been lost
            shard.send(ServerHeader(ServerMessageKind.PUSH, tally=shard.tally))

    def _join_again(self) -> None:
        """Join all shards again, so that they count this worker's turns from the same clock."""
        for shard in self._shards:
            shard.send(ServerHeader(ServerMessageKind.BYE))
            shard.session = 0
            shard.clock = 0 if shard is self._shards[0] else None
            if self._asked is not None:
                shard.ask(self._asked)

    def _pulled(self, shard: _Shard, message: ServerMessage) -> None:
        where: slice | Tensor = shard.part
        if message.head.flags & Flag.SPARSE:
            raw, values = protocol.sparse(message, shard.size)
            where = torch.from_numpy(raw.astype(np.int64) + shard.part.start)
        else:
            values = protocol.dense(message, shard.size)
        fresh = torch.from_numpy(np.array(values, np.float32))
        if self._copy is not None:
            self._copy.pulled(where, fresh)
        else:
            self._optimizer.values[where] = fresh.to(self._optimizer.values.device)
        if self._own is not None and message.head.flags & Flag.AHEAD:
            self._own.add_to(shard.part)
        shard.have, shard.answer = message.head.version, message.head
        shard.counted = shard.asked_with


class _Shard:
    """A worker's connection to one shard of the server, which holds the parameters of ``part``."""

    def __init__(
        self, socket: zmq.Socket[bytes], part: slice, join: ServerHeader, resumed: ServerHeader
    ) -> None:
        """Prepare to join a shard.

        Args:
            socket: connected to the shard, or connecting.
            part: the range of the parameters that the shard holds.
            join: head of the message that joins it, but for what is only known later.
            resumed: version, samples and tally of the parameters that the run begins with.
        """
        self.socket, self.part = socket, part
        self.size = part.stop - part.start
        self.session = 0
        self.clock: int | None = None  # to join with; unknown until the first shard has sent it
        self.number = 0
        self.have = -1  # the version of the session that is here
        self.asked: ServerMessageKind | None = None
        self.again_s = 0.0
        self.answer = resumed  # later the head of the answer to the last pull
        self.tally = NOTHING  # of the worker's last push
        # The worker's counts that the last answer includes, and that the next one will include.
        self.counted = self.asked_with = self.tally[: len(BOOKED)]
        self.state: ServerState | None = None
        self._join = join
        self.flags = Flag.NONE  # of the request
        self.away_since_s: float | None = time.monotonic()  # None while there is a connection
        self.was_reached = False
        self._events = socket.get_monitor_socket(CONNECTED | zmq.EVENT_DISCONNECTED)

    def look(self) -> None:
        """Note which connections were made or have ended since the last call."""
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            self.was_reached |= event == CONNECTED
            if event == CONNECTED:
                self.away_since_s = None
            elif self.away_since_s is None:  # a refused handshake ends with this event too
                self.away_since_s = time.monotonic()

    def close(self) -> None:
        self.socket.disable_monitor()
        self._events.close(0)
        self.socket.close(500)  # ms for what is on its way

    def ask(self, kind: ServerMessageKind, flags: Flag = Flag.NONE) -> None:
        """Begin a request; `say` sends it."""
        self.asked, self.again_s, self.flags = kind, 0.0, flags
        self.asked_with = self.tally[: len(BOOKED)]
        self.number += 1

    def renew(self) -> None:
        """Give the request another number, as the server answers each number once.

        It is sent when it would have been repeated. The push that it was ahead of has been sent.
        """
        assert self.asked is not None
        again_s = self.again_s
        self.ask(self.asked)
        self.again_s = again_s

    def say(self) -> None:
        """Send JOIN, with the version of the worker's parameters, or the request."""
        if not self.session:
            if self.clock is not None:
                tally = (*self.counted, *NOTHING[len(BOOKED) :])
                version = self.answer.version
                self.send(self._join._replace(version=version, number=self.clock, tally=tally))
            self.again_s = time.monotonic() + JOIN_S
            return
        assert self.asked is not None
        self.send(ServerHeader(self.asked, self.flags, number=self.number, version=self.have))
        self.again_s = time.monotonic() + REPEAT_S

    def send(self, head: ServerHeader, packed: Packed | None = None) -> None:
        """Send a message; one that cannot be sent now is lost, as with a broken connection."""
        if head.kind != ServerMessageKind.JOIN:
            if not self.session:
                return
            head = head._replace(session=self.session)
        try:
            frames = protocol.encode(head, packed)
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            pass


class OwnSteps:
    """This worker's steps that the server's parameters may lack, taken here too.

    Stale synchronous parallel lets a worker read its own writes whatever it reads of the others
    (Ho et al. 2013, section 3). With `learner.pull` ahead or cached the parameters here are older
    than this worker's last pushes, so each push takes the optimizer's step here as well. It is the
    server's own step for an optimizer without moments; else the moments here are of this worker's
    gradients alone (and, after `ServerClient.fetch`, the server's), and the step is an estimate,
    which the server's parameters replace.

    All pushes before a request are in its answer, as one connection keeps their order. The push
    after a request is lacking where the answer has the flag AHEAD.
    """

    def __init__(self, optimizer: FlatOptimizer) -> None:
        self._optimizer = optimizer
        self._change = torch.zeros_like(optimizer.values)  # by the pushes since the last request
        self._samples = self._pushes = 0

    def begin(self) -> None:
        """Note that a request is sent now."""
        self._change.zero_()

    def step(self, samples: int, steps: int, updates: int) -> None:
        """Take the step of a push over ``samples``, after ``steps`` agent steps and at least
        ``updates`` updates of the server's parameters.

        A push is weighted by its share of samples, as in `parameters.Summed.update`.
        """
        self._samples += samples
        self._pushes += 1
        # The warm-up of the learning rate counts the updates of all workers.
        self._optimizer.updates = max(self._optimizer.updates, updates)
        _step_and_add(self._optimizer, self._samples / self._pushes, steps, self._change)

    @torch.no_grad()
    def add_to(self, part: slice) -> None:
        """Add the steps since the last request to a range of pulled parameters."""
        self._optimizer.values[part] += self._change[part]


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
    `server_pace.Bounded`; its selective barrier is not needed, since one server orders all
    messages. Each worker has its own optimizer with its own moments: the server only adds.
    """

    def __init__(self, optimizer: FlatOptimizer, significance: float) -> None:
        self._optimizer = optimizer
        self._significance = significance
        self.shared = optimizer.values.clone()
        """The shared values, as last pulled."""
        self._unsent = torch.zeros_like(optimizer.values)

    def step(self, samples: int, steps: int) -> Tensor:
        """Take the optimizer's step here; returns the gradient's norm."""
        return _step_and_add(self._optimizer, samples, steps, self._unsent)

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
    def pulled(self, where: slice | Tensor, values: Tensor) -> None:
        """Take in the shared values of a range, or those at some indices."""
        device = self.shared.device
        where = where.to(device) if isinstance(where, Tensor) else where
        self.shared[where] = values.to(device)
        torch.add(self.shared, self._unsent, out=self._optimizer.values)


@torch.no_grad()
def _step_and_add(optimizer: FlatOptimizer, count: float, steps: int, change: Tensor) -> Tensor:
    """Take a step, after ``steps`` agent steps, and add what it changes to ``change``; returns the
    gradient's norm."""
    before = optimizer.values.clone()
    norm = optimizer.step(count, steps)
    change += optimizer.values - before
    return norm
