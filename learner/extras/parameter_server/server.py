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
    NOTHING,
    Flag,
    Packed,
    Payload,
    ServerHeader,
    ServerMessage,
    ServerMessageKind,
    Tally,
)
from penstock.learner.extras.parameter_server.server_pace import make_server_pace
from penstock.learner.progress import BOOKED
from penstock.models.torch_setup import set_up_torch
from penstock.profiling.ledger import Part, TimeLedger
from penstock.profiling.status import Phase
from penstock.transport.addresses import check_bind
from penstock.transport.wire import WireError, other_version
from penstock.transport.zmq.listener import turned_away_note

TICK_S = 0.05
STEPS = BOOKED.index("trained_steps")  # determines the decay of the learning rate
MOST_LEFT = 1024  # workers that have left and whose counts are kept
BATCH = 64  # messages handled between two checks of everything else
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
    assert ctx.config is not None
    assert ctx.address is not None
    set_up_torch(1)
    curve = keys_for(ctx.address, ctx.config.transport.curve)
    check_bind(ctx.address, keys=curve is not None, insecure=ctx.config.transport.insecure)
    cfg = over_run(ctx.config.learner, ctx.config.stop.env_steps)
    server = ParameterServer(cfg, ctx.address, shard=ctx.index, curve=curve, ledger=ctx.ledger)
    try:
        ctx.report("ready")
        ctx.status.phase = Phase.RECEIVING
        report_s = time.monotonic()
        known: Counter[str] = Counter()
        told = 0
        ends_s = inf
        while True:
            ctx.status.beat()
            finish = any(message["kind"] == "finish" for message in ctx.messages())
            if finish and ctx.store is None:
                ends_s = 0.0
            if ctx.stopping():
                now_s = time.monotonic()
                ends_s = min(ends_s, now_s + ctx.config.run.grace_s)
                if now_s >= ends_s or not server.workers:
                    break
            server.turn(TICK_S)
            if time.monotonic() >= report_s:
                report_s = time.monotonic() + ctx.config.run.interval_s
                ctx.report("server", **server.figures())
                for reason, count in (server.rejected - known).items():
                    text = f"the parameter server rejected messages ({reason})"
                    ctx.event("rejected", text, reason=reason, count=count)
                known = server.rejected.copy()
                shed = server.turned_away
                if shed > told:
                    text = turned_away_note(ctx.name)
                    ctx.event("refused", text, reason="descriptors", count=shed - told)
                    told = shed
    finally:
        server.close()


def keys_for(address: str, curve: str | None) -> Path | None:
    """Returns the folder of keys for a shard at ``address``.

    None for a Unix socket: only this user can open its folder.
    """
    return Path(curve) if curve and address.startswith("tcp://") else None


@dataclass
class Member:
    """A living worker."""

    number: int  # its number in the pace
    rank: int
    token: int
    size: int  # of its parameters
    counts: npt.NDArray[np.float64]
    """Those of its counts since it began that the run's counts include, laid out as `BOOKED`."""
    pull: ServerHeader | None = None
    answered: int = 0
    sent_state: int = 0  # number of the last request for the state that was answered
    lag: int = -1
    recent: Tally = NOTHING[len(BOOKED) :]


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
        self._gives_clocks = shard == 0
        self._session = secrets.randbits(63) | 1
        self._members: dict[bytes, Member] = {}
        self._numbers = 0
        self._before = np.zeros(len(BOOKED))  # counts of the state that the run began with
        self._counted = np.zeros(len(BOOKED))  # counts of all workers since then
        # By token: `Member.counts` of workers that have left and may join again.
        self._left: OrderedDict[int, npt.NDArray[np.float64]] = OrderedDict()
        self._told = Flag.NONE  # STOP and NAN, for all workers from now on
        self._parameters: Parameters | None = None
        self.pace = make_server_pace(cfg)
        self.rejected: Counter[str] = Counter()
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
            self._forget(name)
        if gone:
            self._settle()
        count = 0
        while count < BATCH and (received := self._peers.receive()) is not None:
            self.handle(*received)
            count += 1
        return count

    def handle(self, name: bytes, frames: list[Payload]) -> None:
        """Handle one message of a peer; a bad one is counted."""
        try:
            self._dispatch(name, protocol.decode(frames))
        except WireError as error:
            self.rejected[error.reason] += 1
            if error.reason == "version":
                text = other_version("this learner", error.text, "the parameter server")
                self._say(name, ServerMessageKind.REFUSE, text)

    def figures(self) -> dict[str, Any]:
        """Returns counters and the lag of all gradients so far, ready for JSON."""
        pace = self.pace
        clocks = {m.rank: pace.workers[m.number].clock for m in self._members.values()}
        return {
            "version": pace.version,
            "samples": self._parameters.samples if self._parameters else 0,
            "clocks": {str(rank): clocks[rank] for rank in sorted(clocks)},
            "lag_histogram": {str(k): pace.lag[k] for k in sorted(pace.lag)},
            "late_histogram": {str(k): pace.late[k] for k in sorted(pace.late)},
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
            self._push(member, message)
        elif head.kind == ServerMessageKind.PULL:
            if head.number != member.answered:  # else the answer is on its way
                is_new = member.pull is None or member.pull.number != head.number
                if is_new and head.flags & Flag.AHEAD:
                    self.pace.keep(member.number)  # if it works with parameters that it kept
                member.pull = head
        elif head.kind == ServerMessageKind.STATE:
            self._take_state(name, member, message)
        elif head.kind == ServerMessageKind.ASK_STATE:
            if head.number != member.sent_state:  # else the answer is on its way
                member.sent_state = head.number
                self._tell_state(name, head)
        elif head.kind == ServerMessageKind.BYE:
            self._forget(name)
        else:
            raise WireError("kind")
        self._settle()

    def _join(self, name: bytes, head: ServerHeader) -> None:
        """Let a worker join, and ask for its parameters if they are needed.

        A worker that has joined gets the same answer again. Raises WireError for one that may not
        join.
        """
        why = self._misfit(head)
        if why:
            self._refuse(name, head.rank, why)
            raise WireError("refused")
        if name not in self._members:
            self._make_room(name, head)
            self._numbers += 1
            counts = self._left.pop(head.session, np.array(head.tally[: len(BOOKED)]))
            self._members[name] = Member(
                self._numbers, head.rank, head.session, head.entries, counts
            )
            self.pace.join(self._numbers, None if self._gives_clocks else head.number)
        clock = self.pace.workers[self._members[name].number].clock
        is_wanted = self._parameters is None or head.version > self.pace.version
        flags = Flag.WANTED if is_wanted else Flag.NONE
        welcome = ServerHeader(
            ServerMessageKind.WELCOME, flags, number=clock, session=self._session
        )
        self._send(name, welcome)
        self._settle()

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
                self._say(name, ServerMessageKind.BUSY, text)
                raise WireError("taken")
            self._forget(other)

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

    def _push(self, member: Member, message: ServerMessage) -> None:
        parameters, head = self._parameters, message.head
        self._count(member, head)
        member.recent = head.tally[len(BOOKED) :]
        self._told |= Flag(head.flags) & (Flag.STOP | Flag.NAN)
        works = self.pace.workers[member.number].working
        if parameters is None or not (works or (head.samples and self.pace.keep(member.number))):
            if head.samples and not self._told & Flag.STOP:
                raise WireError("not_pulled")
            return  # it only sent counts
        change, samples = None, head.samples
        try:
            change = parameters.read(message) if samples else None
        except WireError as error:  # the worker has still taken its turn
            self.rejected[error.reason] += 1
            samples = 0
        lag = self.pace.push(member.number, samples)
        member.lag = -1 if lag is None or samples != head.samples else lag
        if change is not None and lag is not None:
            parameters.add(change, samples, self.pace.version + 1)

    def _count(self, member: Member, head: ServerHeader) -> None:
        """Add by how much the counts of a worker have grown since its last push."""
        counts = np.maximum(head.tally[: len(BOOKED)], member.counts)
        self._counted += counts - member.counts
        member.counts = counts

    def _settle(self) -> None:
        """Make the updates that are due and let all workers go that may."""
        parameters = self._parameters
        while parameters is not None:
            while self.pace.due():
                steps = int(self._totals()[STEPS])
                self.pace.stepped(parameters.update(alone=self.pace.single_push, steps=steps))
            ready = (name for name, member in self._members.items() if self._may_go(member))
            name = next(ready, None)
            if name is None:
                return
            self._answer(name, self._members[name], parameters)

    def _may_go(self, member: Member) -> bool:
        if member.pull is None:
            return False
        return bool(self._told & Flag.STOP) or self._is_allowed(member, member.pull)

    def _is_allowed(self, member: Member, pull: ServerHeader) -> bool:
        """Whether the pace gives the worker parameters now."""
        if self._is_ahead(member, pull):
            return self.pace.may_go_ahead(member.number)
        return self.pace.may_go(member.number)

    def _is_ahead(self, member: Member, pull: ServerHeader) -> bool:
        """Whether a pull is for the step after the next push, which has not arrived yet."""
        return bool(pull.flags & Flag.AHEAD) and self.pace.workers[member.number].working

    def _answer(self, name: bytes, member: Member, parameters: Parameters) -> None:
        assert member.pull is not None
        have = min(member.pull.version, self.pace.version)
        ahead = self._is_ahead(member, member.pull)
        if self._is_allowed(member, member.pull):  # else it only receives the stop flag
            (self.pace.go_ahead if ahead else self.pace.go)(member.number)
        head = ServerHeader(
            ServerMessageKind.VALUES,
            self._told | (Flag.AHEAD if ahead else Flag.NONE),
            number=member.pull.number,
            version=self.pace.version,
            samples=parameters.samples,
            lag=member.lag,
            workers=len(self._members),
            rules=min(self.pace.spare(member.number), protocol.MAX_SPARE),
            tally=self._tally(),
        )
        member.answered, member.pull = head.number, None
        self._send(name, head, parameters.answer(have, self.pace.version))

    def _take_state(self, name: bytes, member: Member, message: ServerMessage) -> None:
        """Take a worker's parameters, if they are ahead of the server's.

        Raises WireError where they cannot be used.
        """
        version, parameters = message.head.version, self._parameters
        if parameters is not None and version <= self.pace.version:
            return  # another worker was first
        state = unpack_state(message, member.size, template(member.size, self._cfg))
        if parameters is None:
            parameters = self._parameters = make_parameters(member.size, self._cfg)
        else:
            self._begin_session(name)
        parameters.load(state)
        self._before[:] = state.tally[: len(BOOKED)]
        self.pace = make_server_pace(self._cfg, state.version)
        for other, joined in list(self._members.items()):
            self.pace.join(joined.number)
            if why := self._other_size(joined.size):
                self._refuse(other, joined.rank, why)

    def _begin_session(self, name: bytes) -> None:
        """Begin a session: earlier pulls are void, and all workers but ``name`` join again."""
        for other in [n for n in self._members if n != name]:
            self._send(other, ServerHeader(ServerMessageKind.WHO, session=self._session))
            self._forget(other)
        self._session = secrets.randbits(63) | 1
        self._send(name, ServerHeader(ServerMessageKind.WELCOME, session=self._session))

    def _tell_state(self, name: bytes, head: ServerHeader) -> None:
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
        recent = [
            sum(sums) for sums in zip(*(m.recent for m in self._members.values()), strict=True)
        ]
        return (*self._totals().tolist(), *recent)

    def _totals(self) -> npt.NDArray[np.float64]:
        """The run's counts, as laid out in `BOOKED`."""
        return self._before + self._counted

    def _forget(self, name: bytes) -> None:
        member = self._members.pop(name, None)
        if member is not None:
            self.pace.leave(member.number)
            self._left[member.token] = member.counts
            if len(self._left) > MOST_LEFT:
                self._left.popitem(last=False)

    def _refuse(self, name: bytes, rank: int, why: str) -> None:
        self._say(
            name,
            ServerMessageKind.REFUSE,
            f"learner {rank} {why}; start all with the same configuration",
        )
        self._forget(name)

    def _say(self, name: bytes, kind: ServerMessageKind, text: str) -> None:
        self._send(name, ServerHeader(kind), protocol.pack_text(text))

    def _send(self, name: bytes, head: ServerHeader, packed: Packed | None = None) -> None:
        """Send a message.

        One that cannot be sent is dropped: its peer has gone or may join again.
        """
        if not self._peers.send(name, protocol.encode(head, packed)):
            self._forget(name)
