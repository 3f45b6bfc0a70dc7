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
    COUNTS,
    NOTHING,
    TRAINED_STEPS,
    Flag,
    Floats,
    Packed,
    ServerHeader,
    ServerMessage,
    ServerMessageKind,
    Tally,
)
from penstock.learner.extras.parameter_server.server import MAX_FRAME_NBYTES
from penstock.learner.optimizers.flat_optimizer import CLIP_MARGIN, FlatOptimizer
from penstock.transport.wire import WireError
from penstock.transport.zmq.keys import load_learners
from penstock.transport.zmq.sockets import dealer

JOIN_S = 0.1  # seconds between requests to join a server that has not started yet
REPEAT_S = 1.0  # seconds between requests to a server that may have ended
CLOSE_MS = 500  # milliseconds for messages that are on their way when a connection is closed

# The event of a connection that is ready. If there are keys, each side has the right ones.
CONNECTED = zmq.EVENT_HANDSHAKE_SUCCEEDED

# The kind of the answer to each kind of request.
ANSWERS: dict[ServerMessageKind, ServerMessageKind] = {
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
        self._optimizer = optimizer
        self._cfg = cfg
        self._local_copy: LocalCopy | None = None  # only under asp
        if cfg.pace == "asp":
            self._local_copy = LocalCopy(optimizer, cfg.significance)
        self._own_steps: OwnSteps | None = None  # only where parameters may lack own pushes
        if cfg.pull != "newest":
            self._own_steps = OwnSteps(optimizer)
        self._residual: Floats | None = None  # what bf16 has rounded away so far, ``[size]``
        if cfg.reduce.codec == "bf16":
            self._residual = np.zeros(optimizer.values.numel(), np.float32)

        self.last = Reply(version, samples, tally, lag=None, workers=1, stop=False, nan=False)
        """The answer to the last pull; before the first one, what the run begins with."""
        self.last_notice = "no parameter server has answered yet"
        """The server's last answer to a learner that waits for it."""
        self._counts = np.zeros(COUNTS)  # this learner's counts since the client was made
        self._clock = version // cfg.most_count  # pushes so far, only under asp
        self._requested: ServerMessageKind | None = None  # the request that is not answered yet
        # Whether the parameters here will do for the next step, and for how many steps after it.
        self._is_fresh = False
        self._spare_steps = 0

        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        resumed = ServerHeader(
            ServerMessageKind.VALUES, version=version, samples=samples, tally=tally
        )
        self._shards = self._connect(addresses, rank, resumed=resumed, curve=curve)
        self._shards[0].clock = 0  # the first shard sets the clock

    def _connect(
        self, addresses: Sequence[str], rank: int, *, resumed: ServerHeader, curve: Path | None
    ) -> list[_Shard]:
        """Begin to connect to all shards.

        Args:
            addresses: those of the shards, in order.
            rank: the learner's.
            resumed: version, samples and tally of the parameters that the run begins with.
            curve: folder of keys, with the learner's secret one; None: connect without keys.
        """
        keys = load_learners(curve)[1] if curve else None
        token = secrets.randbits(63) | 1  # the server knows the worker by it after a reconnection
        shards = []
        for number, address in enumerate(addresses):
            # A state has the optimizer's arrays too, and may be larger than any weights.
            socket = dealer(self._context, address, keys, max_frame_nbytes=MAX_FRAME_NBYTES)
            part = part_of(self._optimizer.values.numel(), number, len(addresses))
            join = ServerHeader(
                ServerMessageKind.JOIN,
                rank=rank,
                session=token,
                entries=part.stop - part.start,
                rules=protocol.rules(self._cfg, number),
            )
            self._poller.register(socket, zmq.POLLIN)
            shards.append(_Shard(socket, part, join, resumed))
        return shards

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
        self._is_fresh = self._spare_steps > 0
        self._spare_steps = max(0, self._spare_steps - 1)

        # Each push has all counts of its worker, so that those of a lost one are not lost.
        self._counts += tally[:COUNTS]
        total: Tally = (*self._counts.tolist(), *tally[COUNTS:])
        for shard in self._shards:
            shard.pushed_tally = total
        flags = (Flag.STOP if stop else Flag.NONE) | (Flag.NAN if nan else Flag.NONE)
        head = ServerHeader(ServerMessageKind.PUSH, flags, samples=samples, tally=total)
        if not samples:
            for shard in self._shards:
                shard.send(head)
            return None

        trained_steps = int(self.last.tally[TRAINED_STEPS] + tally[TRAINED_STEPS])
        if self._local_copy is not None:
            return self._push_changes(head, self._local_copy, trained_steps)

        norm: Tensor = torch.linalg.vector_norm(self._optimizer.grads) / samples
        gradient = self._optimizer.grads.cpu().numpy()
        if len(self._shards) > 1 or self._residual is not None:
            gradient = gradient * self._clip_factor(float(norm))
        self._push_gradient(head, gradient)
        if self._own_steps is not None:
            self._own_steps.step(samples, trained_steps, self.last.version)
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
        if not self._request(ServerMessageKind.PULL, timeout_s):
            return None

        heads = [shard.answer for shard in self._shards]
        flags = Flag(reduce(operator.or_, (head.flags for head in heads)))
        # A VALUES has in ``rules`` for how many further steps its parameters will do.
        self._spare_steps = min(head.rules for head in heads) if self._cfg.pull == "cached" else 0
        self._is_fresh = True
        first = heads[0]  # all shards count the same pushes
        self.last = Reply(
            first.version,
            first.samples,
            first.tally,
            lag=first.lag if first.lag >= 0 else None,
            workers=first.workers,
            stop=Flag.STOP in flags,
            nan=Flag.NAN in flags,
        )
        return self.last

    def ask_ahead(self) -> None:
        """Ask for the parameters of the step after the next push, unless those here will do then.

        The next `pull` takes them, after that push.
        """
        if self._spare_steps or self._requested is not None or self._own_steps is None:
            return
        self._requested = ServerMessageKind.PULL
        self._own_steps.on_request()
        for shard in self._shards:
            shard.begin_request(ServerMessageKind.PULL, Flag.AHEAD)
            shard.send_request()

    @property
    def has_pull_pending(self) -> bool:
        """Whether a pull has begun and is not answered."""
        return self._requested is ServerMessageKind.PULL

    @property
    def needs_pull(self) -> bool:
        """Whether the next step needs a pull, by `learner.pull`."""
        return self.has_pull_pending or not self._is_fresh or self._cfg.pull == "newest"

    def unreached(self) -> Unreached | None:
        """Returns the shard that has been without a connection for the longest time.

        None if all are connected. A shard whose host vanishes loses its connections after about
        seven seconds, by heartbeats.
        """
        for shard in self._shards:
            shard.connection.read_events()
        away = [
            (shard.connection.away_since_s, number)
            for number, shard in enumerate(self._shards)
            if shard.connection.away_since_s
        ]
        if not away:
            return None

        since_s, number = min(away)
        was_reached = self._shards[number].connection.was_reached
        return Unreached(number, time.monotonic() - since_s, was_reached)

    def fetch(self, timeout_s: float) -> ServerState | None:
        """Get the server's state of the run, for a checkpoint.

        It is also put into ``optimizer``, whose moments stay its own under asp. With several shards
        a push in transit may be in the state of one and not of another.

        Returns:
            The state; None where no answer came within ``timeout_s`` seconds. Then call again.
        """
        if self._requested is not ServerMessageKind.ASK_STATE:
            for shard in self._shards:
                shard.state = None
        self._request(ServerMessageKind.ASK_STATE, timeout_s)
        # A push must not be of newer values than were pulled.
        self._spare_steps = 0
        self._is_fresh = False
        states = [shard.state for shard in self._shards if shard.state is not None]
        if len(states) < len(self._shards):
            return None

        # Numbers, such as a count of steps, are the same in all shards.
        arrays = {
            name: np.concatenate([state.arrays[name] for state in states]) if array.ndim else array
            for name, array in states[0].arrays.items()
        }
        values = np.concatenate([state.values for state in states])
        self._optimizer.values.copy_(torch.from_numpy(values))
        if self._local_copy is None:
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
                rounded_away = part - protocol.unrounded(packed.payload, packed.flags)
                is_finite = np.isfinite(rounded_away).all()
                residual[shard.part] = rounded_away if is_finite else 0.0
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

    def _push_changes(
        self, head: ServerHeader, local_copy: LocalCopy, trained_steps: int
    ) -> Tensor:
        """Take the optimizer's step here, and send the significant changes of parameters.

        Returns the norm of the mean gradient, float32 ``[]``.
        """
        norm = local_copy.step(head.samples, trained_steps)
        self._clock += 1
        significant = local_copy.take_significant(self._clock)
        indices = significant.indices.cpu().numpy()
        changes = significant.changes.cpu().numpy()

        for shard in self._shards:
            first, end = np.searchsorted(indices, (shard.part.start, shard.part.stop))
            indices_in_part = (indices[first:end] - shard.part.start).astype(np.uint32)
            shard.send(head, protocol.pack_sparse(indices_in_part, changes[first:end]))
        return norm

    def _request(self, kind: ServerMessageKind, timeout_s: float) -> bool:
        """Send a request to all shards, if it was not sent yet, and wait for the answers.

        Returns whether all shards have answered within ``timeout_s`` seconds. If not, call again:
        the request stays.
        """
        if self._requested != kind:
            self._requested = kind
            if self._own_steps is not None:
                self._own_steps.on_request()
            for shard in self._shards:
                shard.begin_request(kind)

        deadline_s = time.monotonic() + timeout_s
        while waiting := [shard for shard in self._shards if shard.request is not None]:
            now_s = time.monotonic()
            for shard in waiting:
                if now_s >= shard.next_send_s:
                    shard.send_request()

            wake_s = min(deadline_s, *(shard.next_send_s for shard in waiting))
            ready = dict(self._poller.poll(round(1000 * max(0.0, wake_s - now_s))))
            for shard in self._shards:
                if shard.socket in ready:
                    self._receive(shard)
            if not ready and now_s >= deadline_s:
                return False
        self._requested = None
        return True

    def _receive(self, shard: _Shard) -> None:
        """Receive one message of a shard and handle it."""
        frames = shard.socket.recv_multipart(copy=False)
        try:
            self._handle(shard, protocol.decode([frame.buffer for frame in frames]))
        except WireError as error:
            self.last_notice = f"the parameter server sent what cannot be used: {error}"
            if shard.request is not None:  # it may be the answer
                shard.renew_request()

    def _handle(self, shard: _Shard, message: ServerMessage) -> None:
        """Handle a message. One that answers no present request is ignored.

        Raises:
            WireError: if the message cannot be used.
            UserError: if the server refuses this worker for good.
        """
        head = message.head
        if head.kind == ServerMessageKind.WELCOME:
            self._on_welcome(shard, head)
        elif head.kind == ServerMessageKind.WHO and head.session == shard.session:
            shard.session = 0
            self._join_again()
        elif head.kind == ServerMessageKind.BUSY:
            self.last_notice = protocol.text(message)
        elif head.kind == ServerMessageKind.REFUSE:
            raise UserError(protocol.text(message))
        elif shard.request is not None and shard.request.is_answered_by(head):
            if head.kind == ServerMessageKind.VALUES:
                self._store_values(shard, shard.request, message)
            else:
                shard.state = unpack_state(message, shard.size, template(shard.size, self._cfg))
            shard.request = None

    def _on_welcome(self, shard: _Shard, head: ServerHeader) -> None:
        """Begin the session that a shard names; give the shard parameters and counts if it lacks
        them."""
        if head.session == shard.session:
            return
        self.last_notice = "the others are behind, or have not begun"
        was_joined = shard.session != 0
        shard.begin_session(head.session)
        if was_joined:
            self._join_again()
            return

        # The other shards are joined at the clock of the first.
        if shard is self._shards[0]:
            for other in self._shards[1:]:
                other.clock = head.number
                other.next_send_s = 0.0

        if head.flags & Flag.WANTED:
            self._offer_state(shard)
        if shard.pushed_tally[:COUNTS] != shard.answered_counts:  # a push may have been lost
            shard.send(ServerHeader(ServerMessageKind.PUSH, tally=shard.pushed_tally))

    def _offer_state(self, shard: _Shard) -> None:
        """Send a shard its part of the parameters and of the optimizer's state here."""
        if self._local_copy is None:
            all_values = self._optimizer.values
            state = self._optimizer.state_dict()
        else:
            all_values = self._local_copy.shared
            state = {}

        values = all_values[shard.part].cpu().numpy()
        arrays = {name: array[shard.part] if array.ndim else array for name, array in state.items()}
        offer = ServerHeader(
            ServerMessageKind.STATE,
            version=shard.answer.version,
            samples=shard.answer.samples,
            tally=shard.answer.tally,
        )
        shard.send(offer, pack_state(values, arrays))

    def _join_again(self) -> None:
        """Join all shards again, so that they count this worker's turns from the same clock."""
        for shard in self._shards:
            shard.send(ServerHeader(ServerMessageKind.BYE))
            shard.session = 0
            shard.clock = 0 if shard is self._shards[0] else None
            if self._requested is not None:
                shard.begin_request(self._requested)

    def _store_values(self, shard: _Shard, request: ShardRequest, message: ServerMessage) -> None:
        """Take a shard's parameters from the answer to ``request``."""
        where: slice | Tensor = shard.part
        if message.head.flags & Flag.SPARSE:
            indices, values = protocol.sparse(message, shard.size)
            where = torch.from_numpy(indices.astype(np.int64) + shard.part.start)
        else:
            values = protocol.dense(message, shard.size)

        fresh = torch.from_numpy(np.array(values, np.float32))
        if self._local_copy is not None:
            self._local_copy.set_shared(where, fresh)
        else:
            self._optimizer.values[where] = fresh.to(self._optimizer.values.device)
        if self._own_steps is not None and message.head.flags & Flag.AHEAD:
            self._own_steps.add_to(shard.part)

        shard.answer = message.head
        shard.answered_counts = request.counts
        shard.version_here = message.head.version


class ShardRequest(NamedTuple):
    """A request to one shard, which is sent again until it is answered."""

    kind: ServerMessageKind
    number: int
    """The shard answers each number once."""
    counts: Tally
    """The worker's counts that the answer will include."""
    flags: Flag = Flag.NONE

    def is_answered_by(self, head: ServerHeader) -> bool:
        """Whether a message with this head is the answer."""
        return head.kind == ANSWERS[self.kind] and head.number == self.number


class ConnectionMonitor:
    """Whether a socket has a connection, and since when it has none."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.away_since_s: float | None = time.monotonic()  # None while there is a connection
        self.was_reached = False  # whether there has ever been a connection
        self._socket = socket
        self._events = socket.get_monitor_socket(CONNECTED | zmq.EVENT_DISCONNECTED)

    def read_events(self) -> None:
        """Note which connections were made or have ended since the last call."""
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())["event"]
            if event == CONNECTED:
                self.was_reached = True
                self.away_since_s = None
            elif self.away_since_s is None:  # a refused handshake ends with this event too
                self.away_since_s = time.monotonic()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close(0)


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
        self.socket = socket
        self.connection = ConnectionMonitor(socket)
        self.part = part
        self.size = part.stop - part.start

        self._join = join
        self.session = 0
        """The session to name in messages; 0 while this worker has not joined."""
        self.clock: int | None = None
        """The clock to join with; None until the first shard has sent it."""

        self.request: ShardRequest | None = None
        """The request that waits for its answer."""
        self.requests = 0
        """Number of requests so far, and the number of the last one."""
        self.next_send_s = 0.0
        """When to send JOIN or the request again, of CLOCK_MONOTONIC."""

        self.answer = resumed
        """Head of the answer to the last pull."""
        self.answered_counts = NOTHING[:COUNTS]
        """The worker's counts that this answer includes."""
        self.version_here = -1
        """Version of the parameters that were pulled in this session; -1 for none."""
        self.pushed_tally = NOTHING
        """The tally of the worker's last push."""
        self.state: ServerState | None = None
        """The shard's part of the run's state, when it was fetched."""

    def begin_request(self, kind: ServerMessageKind, flags: Flag = Flag.NONE) -> None:
        """Begin a request, in place of any other; `send_request` sends it."""
        self.requests += 1
        counts = self.pushed_tally[:COUNTS]
        self.request = ShardRequest(kind, self.requests, counts, flags)
        self.next_send_s = 0.0

    def renew_request(self) -> None:
        """Give the request another number, as the server answers each number once.

        It is sent when it would have been repeated. The push that it was ahead of has been sent.
        """
        assert self.request is not None
        next_send_s = self.next_send_s
        self.begin_request(self.request.kind)
        self.next_send_s = next_send_s

    def send_request(self) -> None:
        """Send the request; before this worker has joined, send JOIN in its place."""
        if not self.session:
            self._send_join()
            self.next_send_s = time.monotonic() + JOIN_S
            return

        request = self.request
        assert request is not None
        self.send(
            ServerHeader(
                request.kind, request.flags, number=request.number, version=self.version_here
            )
        )
        self.next_send_s = time.monotonic() + REPEAT_S

    def _send_join(self) -> None:
        """Send JOIN with the version of the worker's parameters, once the clock is known."""
        if self.clock is not None:
            self.send(
                self._join._replace(
                    version=self.answer.version,
                    number=self.clock,
                    tally=(*self.answered_counts, *NOTHING[COUNTS:]),
                )
            )

    def begin_session(self, session: int) -> None:
        """Note that the shard has let this worker join; send the request at once."""
        self.session = session
        self.next_send_s = 0.0
        self.version_here = -1
        # This session has not seen the push that a pull was ahead of.
        if self.request is not None:
            self.request = self.request._replace(flags=Flag.NONE)

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

    def close(self) -> None:
        self.connection.close()
        self.socket.close(CLOSE_MS)


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
        # Sum of the steps of the pushes since the last request, ``[size]``.
        self._change = torch.zeros_like(optimizer.values)
        self._samples = 0  # samples of all pushes
        self._pushes = 0

    def on_request(self) -> None:
        """Note that a request is sent now: its answer has all pushes so far."""
        self._change.zero_()

    def step(self, samples: int, trained_steps: int, updates: int) -> None:
        """Take the step of a push here.

        The push is weighted by its share of samples, as in `parameters.Summed.update`.

        Args:
            samples: those of the push.
            trained_steps: agent steps trained on so far, which determine the learning rate.
            updates: least number of updates of the server's parameters so far.
        """
        self._samples += samples
        self._pushes += 1
        # The warm-up of the learning rate counts the updates of all workers.
        self._optimizer.updates = max(self._optimizer.updates, updates)
        mean_samples = self._samples / self._pushes
        _step_and_add(self._optimizer, mean_samples, trained_steps, change=self._change)

    @torch.no_grad()
    def add_to(self, part: slice) -> None:
        """Add the steps since the last request to a range of pulled parameters."""
        self._optimizer.values[part] += self._change[part]


class SignificantChanges(NamedTuple):
    """Changes of parameters that are sent to the server."""

    indices: Tensor
    """Indices of the parameters, int64 ``[n]``, ascending."""
    changes: Tensor
    """Their changes, float32 ``[n]``."""


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
        """The shared values, as last pulled, float32 ``[size]``."""
        self._unsent = torch.zeros_like(optimizer.values)  # own changes that were not sent yet

    def step(self, samples: int, trained_steps: int) -> Tensor:
        """Take the optimizer's step here, after ``trained_steps`` agent steps.

        Returns the norm of the mean gradient, float32 ``[]``.
        """
        return _step_and_add(self._optimizer, samples, trained_steps, change=self._unsent)

    @torch.no_grad()
    def take_significant(self, clock: int) -> SignificantChanges:
        """Returns the changes to send at ``clock`` (from 1), which count as sent from now on."""
        threshold = self._significance / clock**0.5
        values = self._optimizer.values
        indices = (self._unsent.abs() > threshold * values.abs()).nonzero().flatten()
        changes = self._unsent[indices]
        self._unsent[indices] = 0.0
        return SignificantChanges(indices, changes)

    @torch.no_grad()
    def set_shared(self, where: slice | Tensor, values: Tensor) -> None:
        """Take in the shared values of a range, or those at some indices."""
        device = self.shared.device
        where = where.to(device) if isinstance(where, Tensor) else where
        self.shared[where] = values.to(device)
        torch.add(self.shared, self._unsent, out=self._optimizer.values)


@torch.no_grad()
def _step_and_add(
    optimizer: FlatOptimizer, samples: float, trained_steps: int, *, change: Tensor
) -> Tensor:
    """Take a step, and add what it changes to ``change``.

    Args:
        optimizer: holds the gradient, a sum over ``samples``.
        samples: number by which that sum is divided.
        trained_steps: agent steps trained on so far, which determine the learning rate.
        change: the sum of changes, float32 ``[size]``.

    Returns:
        The norm of the mean gradient, float32 ``[]``.
    """
    previous_values = optimizer.values.clone()
    norm = optimizer.step(samples, trained_steps)

    change += optimizer.values - previous_values
    return norm
