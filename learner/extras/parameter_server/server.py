"""The parameter server: a role that holds the parameters of several learners and their pace.

    JOIN, STATE ── members, parameters ── WELCOME
    PUSH        ── add to the parameters as the pace decides
    PULL        ── waits here until the pace lets its worker go ── VALUES

`protocol` defines the messages, `server_pace` which worker may proceed, `parameters` what an update
is. One thread does everything. No received message raises: one that cannot be used is counted by
reason and dropped.

*No worker waits for a dead one.* A worker whose connection ends leaves the pace at once (`peers`).
A host that vanishes is detected by ZeroMQ's heartbeats after ten seconds; a worker that hangs is
ended by its supervisor.

*Shards.* With `learner.server_shards` there are several servers. Each has a range of the parameters
(`parameters.part_of`) and a pace of its own. A worker sends each message to all of them, so that
all count the same pushes, and it goes when all let it go. It joins all at the clock that the first
one gives it, and if one of them does not know it any more, all again: with clocks that differ by
shard, two workers could each wait for the other in another shard. Pushes of two workers may reach
two shards in another order. A pull may then find a gradient in one part of the parameters and not
yet in another, which the paces allow: they bound how old it is.

*Initial parameters.* The server begins with none and takes the first worker's, and later those of a
worker that joins with more updates than its own have (a resumed run, or a restarted server); then a
new session begins, and all others join again and take those.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.configs.schedules import over_run
from penstock.configs.schema import Config
from penstock.configs.sections import LearnerConfig
from penstock.core.role import RoleContext
from penstock.learner.extras.parameter_server import protocol
from penstock.learner.extras.parameter_server.parameters import (
    MAX_SIZE,
    Parameters,
    make_parameters,
    pack_state,
    template,
    unpack_state,
)
from penstock.learner.extras.parameter_server.peers import Peers
from penstock.learner.extras.parameter_server.protocol import (
    COUNTS,
    NOTHING,
    TRAINED_STEPS,
    Flag,
    Packed,
    Payload,
    ServerHeader,
    ServerMessage,
    ServerMessageKind,
    Tally,
)
from penstock.learner.extras.parameter_server.server_pace import make_server_pace
from penstock.models.torch_setup import set_up_torch
from penstock.profiling.ledger import Part, TimeLedger
from penstock.profiling.status import Phase
from penstock.transport.addresses import check_bind
from penstock.transport.wire import WireError, describe_other_version
from penstock.transport.zmq.listener import turned_away_note

TICK_S = 0.05  # longest wait for messages
MAX_LEFT = 1024  # workers that have left and whose counts are kept
MESSAGES_PER_TURN = 64  # messages handled between two checks of everything else
MAX_FRAME_NBYTES = 4 * 4 * MAX_SIZE  # parameters and an optimizer's arrays


def run(ctx: RoleContext) -> None:
    """Serve at ``ctx.address`` until asked to stop.

    Learners fetch its state to save the run, so it must outlive them. At the end of a run the
    supervisor sends {"kind": "finish"} once its learners have ended, and the server ends at once.
    Learners may still live when it is asked to stop in two cases: the supervisor was lost, which
    stops all roles at once, or other supervisors have learners too. Then it serves until all
    learners have left, for at most `run.grace_s` seconds.

    Reports "server" with figures every `run.interval_s`.
    """
    config = ctx.config
    assert config is not None
    assert ctx.address is not None
    set_up_torch(1)

    curve = keys_for(ctx.address, config.transport.curve)
    check_bind(ctx.address, keys=curve is not None, insecure=config.transport.insecure)
    cfg = over_run(config.learner, config.stop.env_steps)
    server = ParameterServer(cfg, ctx.address, shard=ctx.index, curve=curve, ledger=ctx.ledger)

    try:
        ctx.report("ready")
        ctx.status.phase = Phase.RECEIVING
        _serve(ctx, config, server)
    finally:
        server.close()


def _serve(ctx: RoleContext, config: Config, server: ParameterServer) -> None:
    """Handle messages of workers until the role is asked to stop and may."""
    reports = _ServerReports(ctx, server, every_s=config.run.interval_s)
    deadline_s = inf
    while True:
        ctx.status.beat()
        is_finished = any(message["kind"] == "finish" for message in ctx.messages())
        if is_finished and ctx.store is None:
            deadline_s = 0.0  # all learners are the supervisor's own, and have ended
        if ctx.stopping():
            now_s = time.monotonic()
            deadline_s = min(deadline_s, now_s + config.run.grace_s)
            if now_s >= deadline_s or not server.workers:
                return

        server.turn(TICK_S)
        reports.report_if_due()


def keys_for(address: str, curve: str | None) -> Path | None:
    """Returns the folder of keys for a shard at ``address``.

    None for a Unix socket: only this user can open its folder.
    """
    return Path(curve) if curve and address.startswith("tcp://") else None


@dataclass
class Member:
    """A living worker."""

    number: int
    """Its number in the pace."""
    rank: int
    token: int
    """Random number of the worker; it is the same when the worker joins again."""
    size: int
    """Number of its parameters."""
    counts: npt.NDArray[np.float64]
    """Those of its counts since it began that the run's counts include, ``[COUNTS]``."""
    recent_sums: Tally = NOTHING[COUNTS:]
    """The sums of recent episodes in its last push."""
    pull: ServerHeader | None = None
    """Head of the pull that waits for its answer."""
    answered_pull: int = 0
    """Number of the last pull that was answered."""
    answered_ask: int = 0
    """Number of the last request for the state that was answered."""
    lag: int = -1
    """Staleness of its last push, in updates; -1 where that was discarded, or not made."""


class ParameterServer:
    """Serves the workers of one run; call `turn` repeatedly."""

    def __init__(
        self,
        cfg: LearnerConfig,
        bind: str,
        *,
        shard: int = 0,
        curve: Path | None = None,
        ledger: TimeLedger | None = None,
    ) -> None:
        """Open the server's socket.

        Args:
            cfg: the section `learner` of the config.
            bind: the address.
            shard: number of this server among `learner.server_shards`.
            curve: folder of keys; None: let workers in without.
            ledger: where the time of this thread is counted.

        Raises:
            UserError: if the address is taken.
        """
        self._cfg = cfg
        self._ledger = ledger or TimeLedger()
        self._rules = protocol.rules(cfg, shard)
        self._sets_clocks = shard == 0  # whether workers begin at the clock that this shard sets
        self._session = secrets.randbits(63) | 1
        self._members: dict[bytes, Member] = {}  # keys: names of the peers
        self._joined = 0  # number of workers that have joined so far
        self._stop_flags = Flag.NONE  # STOP and NAN, for all workers from now on

        # The run's counts are those of the state that it began with, and those of all workers since
        # then; both ``[COUNTS]``.
        self._initial_counts = np.zeros(COUNTS)
        self._counts_since = np.zeros(COUNTS)
        # By token: `Member.counts` of workers that have left and may join again, the oldest first.
        self._counts_of_left: OrderedDict[int, npt.NDArray[np.float64]] = OrderedDict()

        self._parameters: Parameters | None = None  # None until a worker has sent its own
        self.pace = make_server_pace(cfg)
        self.rejected: Counter[str] = Counter()
        """Number of messages that could not be used, by reason."""
        self._peers = Peers(bind, curve, MAX_FRAME_NBYTES)

    def turn(self, timeout_s: float) -> int:
        """Handle received messages, waiting up to ``timeout_s`` seconds for the first.

        Returns their number.
        """
        self._ledger.switch(Part.WAIT)
        self._peers.wait(timeout_s)
        self._ledger.switch(Part.PROCESS)

        gone = self._peers.gone(self._members)
        for name in gone:
            self._remove(name)
        if gone:
            self._proceed()

        count = 0
        while count < MESSAGES_PER_TURN and (received := self._peers.receive()) is not None:
            name, frames = received
            self.handle(name, frames)
            count += 1
        return count

    def handle(self, name: bytes, frames: list[Payload]) -> None:
        """Handle one message of a peer; a bad one is counted."""
        try:
            self._dispatch(name, protocol.decode(frames))
        except WireError as error:
            self.rejected[error.reason] += 1
            if error.reason == "version":
                text = describe_other_version("this learner", error.text, "the parameter server")
                self._send_text(name, ServerMessageKind.REFUSE, text)

    def figures(self) -> dict[str, Any]:
        """Returns counters and the lag of all gradients so far, ready for JSON."""
        pace = self.pace
        clocks = {
            member.rank: pace.workers[member.number].clock for member in self._members.values()
        }

        return {
            "version": pace.version,
            "samples": self._parameters.samples if self._parameters else 0,
            "clocks": {str(rank): clocks[rank] for rank in sorted(clocks)},
            "lag_histogram": {str(lag): pace.lag[lag] for lag in sorted(pace.lag)},
            "late_histogram": {str(lag): pace.late[lag] for lag in sorted(pace.late)},
            "widest": pace.widest,
            "rejected": dict(self.rejected),
        }

    @property
    def workers(self) -> int:
        """Number of workers that have joined and not left."""
        return len(self._members)

    @property
    def turned_away(self) -> int:
        """`Listener.turned_away` of its port."""
        return self._peers.listener.turned_away

    def close(self) -> None:
        """Close the socket."""
        self._peers.close()

    def _dispatch(self, name: bytes, message: ServerMessage) -> None:
        """Handle a valid message. Raises WireError where it cannot be used."""
        head = message.head
        if head.kind == ServerMessageKind.JOIN:
            self._join(name, head)
            return

        member = self._members.get(name)
        if member is None or head.session != self._session:
            self._send(name, ServerHeader(ServerMessageKind.WHO, session=head.session))
            raise WireError("unknown")

        if head.kind == ServerMessageKind.PUSH:
            self._take_push(member, message)
        elif head.kind == ServerMessageKind.PULL:
            self._take_pull(member, head)
        elif head.kind == ServerMessageKind.STATE:
            self._take_state(name, member, message)
        elif head.kind == ServerMessageKind.ASK_STATE:
            if head.number != member.answered_ask:  # else the answer is on its way
                member.answered_ask = head.number
                self._send_state(name, head)
        elif head.kind == ServerMessageKind.BYE:
            self._remove(name)
        else:
            raise WireError("kind")
        self._proceed()

    def _join(self, name: bytes, head: ServerHeader) -> None:
        """Let a worker join, and ask for its parameters if they are needed.

        A worker that has joined gets the same answer again. Raises WireError for one that may not
        join.
        """
        fault = self._misfit(head)
        if fault:
            self._refuse(name, head.rank, fault)
            raise WireError("refused")

        if name not in self._members:
            self._make_room(name, head)
            self._joined += 1
            # A worker that is not known begins with its own counts that the tally has already.
            counts = self._counts_of_left.pop(head.session, np.array(head.tally[:COUNTS]))
            self._members[name] = Member(
                number=self._joined,
                rank=head.rank,
                token=head.session,
                size=head.entries,
                counts=counts,
            )
            self.pace.join(self._joined, None if self._sets_clocks else head.number)

        clock = self.pace.workers[self._members[name].number].clock
        is_wanted = self._parameters is None or head.version > self.pace.version
        flags = Flag.WANTED if is_wanted else Flag.NONE
        welcome = ServerHeader(
            ServerMessageKind.WELCOME, flags, number=clock, session=self._session
        )
        self._send(name, welcome)
        self._proceed()

    def _make_room(self, name: bytes, head: ServerHeader) -> None:
        """Remove the member with the rank of a worker that joins.

        Another learner that is connected keeps its rank: then the worker is told to wait, and
        WireError raised.
        """
        for other, member in list(self._members.items()):
            if member.rank != head.rank:
                continue

            if member.token != head.session and self._peers.is_there(other):
                text = f"another learner with rank {head.rank} is connected"
                self._send_text(name, ServerMessageKind.BUSY, text)
                raise WireError("taken")
            self._remove(other)

    def _misfit(self, head: ServerHeader) -> str:
        """Returns why a worker can never join; "" if it can."""
        if head.rules != self._rules:
            return "has other settings of learner.* than the parameter server"
        if not 0 < head.entries <= MAX_SIZE or head.rank >= self._cfg.most_count:
            return (
                f"of {head.entries} parameters does not belong to learner.count={self._cfg.count}"
            )
        return self._other_size(head.entries)

    def _other_size(self, size: int) -> str:
        """Returns why a worker with ``size`` parameters can never join; "" if it can."""
        if self._parameters is None or size == self._parameters.size:
            return ""
        return f"has {size} parameters, and the others have {self._parameters.size}"

    def _take_push(self, member: Member, message: ServerMessage) -> None:
        """Take counts and flags of a push, and its gradient if the pace takes it.

        Raises WireError for a gradient of a worker that the pace has not let go.
        """
        head = message.head
        self._add_counts(member, head)
        member.recent_sums = head.tally[COUNTS:]
        self._stop_flags |= Flag(head.flags) & (Flag.STOP | Flag.NAN)

        parameters = self._parameters
        if parameters is None or not self._lets_push(member, head.samples):
            if head.samples and not self._stop_flags & Flag.STOP:
                raise WireError("not_pulled")
            return  # it only sent counts

        change = None
        samples = head.samples
        if samples:
            try:
                change = parameters.read(message)
            except WireError as error:  # the worker has still taken its turn
                self.rejected[error.reason] += 1
                samples = 0

        lag = self.pace.push(member.number, samples)
        if lag is None or samples != head.samples:
            member.lag = -1
        else:
            member.lag = lag
        if change is not None and lag is not None:
            parameters.add(change, samples, self.pace.version + 1)

    def _lets_push(self, member: Member, samples: int) -> bool:
        """Let a worker push, if it has gone.

        It may also push without samples: that is its turn. A worker that has pushed already may
        push a gradient if its parameters are new enough for another step.
        """
        if self.pace.workers[member.number].working:
            return True
        return samples > 0 and self.pace.go_again(member.number)

    def _take_pull(self, member: Member, head: ServerHeader) -> None:
        """Note a pull, which `_proceed` answers when the pace allows it."""
        if head.number == member.answered_pull:  # the answer is on its way
            return
        is_new = member.pull is None or member.pull.number != head.number
        if is_new and head.flags & Flag.AHEAD:
            # The worker may compute a step now with parameters that it has from before.
            self.pace.go_again(member.number)
        member.pull = head

    def _add_counts(self, member: Member, head: ServerHeader) -> None:
        """Add by how much the counts of a worker have grown since its last push."""
        counts = np.maximum(head.tally[:COUNTS], member.counts)
        self._counts_since += counts - member.counts
        member.counts = counts

    def _proceed(self) -> None:
        """Make the updates that are due, and answer the pulls of all workers that may go.

        Each answer may allow another update or worker, so everything is checked again after it.
        """
        parameters = self._parameters
        if parameters is None:
            return
        while True:
            while self.pace.due():
                steps = int(self._run_counts()[TRAINED_STEPS])
                updated = parameters.update(alone=self.pace.single_push, steps=steps)
                self.pace.finish_step(updated=updated)

            answerable = (
                name for name, member in self._members.items() if self._may_answer(member)
            )
            name = next(answerable, None)
            if name is None:
                return
            self._send_values(name, self._members[name], parameters)

    def _may_answer(self, member: Member) -> bool:
        """Whether a worker has a pull that can be answered now."""
        if member.pull is None:
            return False
        # When all stop, no worker waits.
        return Flag.STOP in self._stop_flags or self._is_allowed(member, member.pull)

    def _is_allowed(self, member: Member, pull: ServerHeader) -> bool:
        """Whether the pace gives the worker parameters now."""
        if self._is_ahead(member, pull):
            return self.pace.may_go_ahead(member.number)
        return self.pace.may_go(member.number)

    def _is_ahead(self, member: Member, pull: ServerHeader) -> bool:
        """Whether a pull is for the step after the next push, which has not arrived yet."""
        return bool(pull.flags & Flag.AHEAD) and self.pace.workers[member.number].working

    def _send_values(self, name: bytes, member: Member, parameters: Parameters) -> None:
        """Answer the pull of a worker, and let it go if the pace allows that."""
        pull = member.pull
        assert pull is not None
        is_ahead = self._is_ahead(member, pull)
        if self._is_allowed(member, pull):  # else it only receives the stop flag
            if is_ahead:
                self.pace.go_ahead(member.number)
            else:
                self.pace.go(member.number)

        head = ServerHeader(
            ServerMessageKind.VALUES,
            self._stop_flags | (Flag.AHEAD if is_ahead else Flag.NONE),
            number=pull.number,
            version=self.pace.version,
            samples=parameters.samples,
            lag=member.lag,
            workers=len(self._members),
            rules=min(self.pace.spare(member.number), protocol.MAX_SPARE),
            tally=self._tally(),
        )
        member.answered_pull = pull.number
        member.pull = None
        version_there = min(pull.version, self.pace.version)
        self._send(name, head, parameters.answer(version_there, self.pace.version))

    def _take_state(self, name: bytes, member: Member, message: ServerMessage) -> None:
        """Take a worker's parameters, if they are ahead of the server's.

        Raises WireError where they cannot be used.
        """
        version = message.head.version
        parameters = self._parameters
        if parameters is not None and version <= self.pace.version:
            return  # another worker was first

        state = unpack_state(message, member.size, template(member.size, self._cfg))
        if parameters is None:
            parameters = make_parameters(member.size, self._cfg)
            self._parameters = parameters
        else:
            self._begin_session(name)
        parameters.load(state)
        self._initial_counts[:] = state.tally[:COUNTS]

        self.pace = make_server_pace(self._cfg, state.version)
        for other, other_member in list(self._members.items()):
            self.pace.join(other_member.number)
            if fault := self._other_size(other_member.size):
                self._refuse(other, other_member.rank, fault)

    def _begin_session(self, name: bytes) -> None:
        """Begin a session: earlier pulls are void, and all workers but ``name`` join again."""
        for other in [member_name for member_name in self._members if member_name != name]:
            self._send(other, ServerHeader(ServerMessageKind.WHO, session=self._session))
            self._remove(other)
        self._session = secrets.randbits(63) | 1
        self._send(name, ServerHeader(ServerMessageKind.WELCOME, session=self._session))

    def _send_state(self, name: bytes, head: ServerHeader) -> None:
        """Answer a request for the run's state. Raises WireError where there is none yet."""
        parameters = self._parameters
        if parameters is None:
            raise WireError("not_pulled")

        answer = ServerHeader(
            ServerMessageKind.STATE,
            number=head.number,
            version=self.pace.version,
            samples=parameters.samples,
            tally=self._tally(),
        )
        self._send(name, answer, pack_state(parameters.values, parameters.arrays()))

    def _tally(self) -> Tally:
        """Returns the run's counts, and the sums of recent episodes of all living workers."""
        members = self._members.values()
        recent_sums = [
            sum(sums) for sums in zip(*(member.recent_sums for member in members), strict=True)
        ]
        return (*self._run_counts().tolist(), *recent_sums)

    def _run_counts(self) -> npt.NDArray[np.float64]:
        """Returns the run's counts, ``[COUNTS]``."""
        return self._initial_counts + self._counts_since

    def _remove(self, name: bytes) -> None:
        """Remove a worker, if it has joined. Its counts are kept in case it joins again."""
        member = self._members.pop(name, None)
        if member is None:
            return
        self.pace.leave(member.number)
        self._counts_of_left[member.token] = member.counts
        if len(self._counts_of_left) > MAX_LEFT:
            self._counts_of_left.popitem(last=False)

    def _refuse(self, name: bytes, rank: int, fault: str) -> None:
        """Tell a worker that it can never join, and why; remove it if it has."""
        text = f"learner {rank} {fault}; start all with the same configuration"
        self._send_text(name, ServerMessageKind.REFUSE, text)
        self._remove(name)

    def _send_text(self, name: bytes, kind: ServerMessageKind, text: str) -> None:
        self._send(name, ServerHeader(kind), protocol.pack_text(text))

    def _send(self, name: bytes, head: ServerHeader, packed: Packed | None = None) -> None:
        """Send a message.

        One that cannot be sent is dropped: its peer has gone or may join again.
        """
        if not self._peers.send(name, protocol.encode(head, packed)):
            self._remove(name)


class _ServerReports:
    """Reports a server's figures to the supervisor, and what it has turned away since then."""

    def __init__(self, ctx: RoleContext, server: ParameterServer, every_s: float) -> None:
        self._ctx = ctx
        self._server = server
        self._every_s = every_s
        self._next_s = time.monotonic()
        # The counters of `ParameterServer`, as last reported.
        self._rejected: Counter[str] = Counter()
        self._turned_away = 0

    def report_if_due(self) -> None:
        """Report now, if ``every_s`` seconds have passed since the last time."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        self._ctx.report("server", **self._server.figures())

        rejected = self._server.rejected.copy()
        for reason, count in (rejected - self._rejected).items():
            text = f"the parameter server rejected messages ({reason})"
            self._ctx.event("rejected", text, reason=reason, count=count)
        self._rejected = rejected

        turned_away = self._server.turned_away
        if turned_away > self._turned_away:
            text = turned_away_note(self._ctx.name)
            count = turned_away - self._turned_away
            self._ctx.event("refused", text, reason="descriptors", count=count)
            self._turned_away = turned_away
