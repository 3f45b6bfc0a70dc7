"""An actor's or relay's connection to a connector: one DEALER and the state of the protocol.

No call waits without a bound or beats the status page less than once a second. A connector may be
replaced at any time: unanswered messages are repeated every second, and an actor that the connector
does not know sends HELLO again, with the sequence that it will send next.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import zmq

from penstock import __version__
from penstock.configs.errors import UserError, printable
from penstock.core.interfaces import (
    LearnerGoneError,
    RunOverError,
    UnknownPolicyError,
    Welcome,
)
from penstock.core.params import POLICY_ID, Stamp
from penstock.core.role import RoleContext
from penstock.core.specs import SlotSpec
from penstock.transport import wire
from penstock.transport.addresses import with_port_of
from penstock.transport.grants import BEAT_S
from penstock.transport.wire import Header, MessageKind, RelayOffer, WeightsAt
from penstock.transport.zmq.keys import load_actor
from penstock.transport.zmq.sockets import Socket, dealer, handle_messages, send_now

# The largest slot of a learner whose spec is accepted without one of this actor.
MAX_SLOT_NBYTES = 1 << 31
# An unanswered message is repeated after so long.
REPEAT_S = BEAT_S
# After so long a silence of this actor its grants may soon be given to others.
RENEW_S = 3.0
# The interval between two tries while no peer is connected.
RECONNECT_S = 0.05
# After so long a wait for a learner, the user is told what is waited for.
NOTE_AFTER_S = 3.0


class Weights(NamedTuple):
    """One version of the weights, as it was received."""

    stamp: Stamp
    values: npt.NDArray[Any]
    """The weights ``[layout.size]``: float32, or bfloat16 bits as uint16."""


class RelayAnswer(NamedTuple):
    """An answer to a relay's request, instead of weights."""

    parent: WeightsAt | None
    """The relay to ask; None where this relay is to listen, and to ask again."""


class Sighting(NamedTuple):
    """Where the learner runs, as its first WELCOME says."""

    boot_id: str
    """The boot of its host."""
    unix_path: str
    """Its socket for shared memory."""
    release: str
    """Its release of Penstock; empty from 0.1.0, which does not send it."""


@dataclass
class GrantedStream:
    """An actor's slots: what it has sent, and what it may send."""

    next: int = 0
    """The sequence to be sent next."""
    limit: int = 0
    """The lowest sequence that is not granted."""
    produced_steps: int = 0
    """Agent steps of this actor up to the last slot."""
    oldest: Stamp | None = None
    """The oldest weights that may fill the granted slots; None for any."""

    @property
    def granted(self) -> bool:
        """Whether `next` may be sent."""
        return self.next < self.limit

    def drop_grants(self) -> None:
        """Hold no grants until the connector gives some."""
        self.limit = self.next


class _Request(NamedTuple):
    """A request for weights: the version that this side has, and when it was sent."""

    have: Stamp | None
    sent_s: float


class _WeightsInbox:
    """The requests for weights that are not answered, and the answers; all by policy id."""

    def __init__(self) -> None:
        self.requests: dict[int, _Request] = {}
        self.weights: dict[int, Weights] = {}
        self.relay_answers: dict[int, RelayAnswer] = {}
        self.refused: set[int] = set()

    def forget_requests(self) -> None:
        """Forget all but the weights: the connector that joined now knows of no request."""
        self.requests.clear()
        self.relay_answers.clear()
        self.refused.clear()


class Client:
    """The connection of an actor or a relay to a connector.

    It holds up to ``want`` grants for slots of ``spec``; a relay wants none, and gets only the
    welcome and weights. Call `join` first, and `beat` about once a second while a slot is filled.
    """

    welcome: Welcome
    """The description of the learner; set by `join`."""
    sighting: Sighting
    """Where the learner runs; set by `join`."""

    def __init__(
        self,
        ctx: RoleContext,
        address: str,
        *,
        actor: int = 0,
        spec: SlotSpec | None = None,
        want: int = 0,
        patience_s: float = 60.0,
    ) -> None:
        """Make the client.

        Args:
            ctx: of this role.
            address: of the connector.
            actor: unique in the run.
            spec: of the slots; None takes the learner's.
            want: grants to hold at a time.
            patience_s: longest silence of the connector, in seconds.

        Raises:
            UserError: the keys cannot be read.
        """
        self.spec = spec
        self.want = want
        self.address = address
        self.stream = GrantedStream()
        self._inbox = _WeightsInbox()
        self._ctx = ctx
        self._actor = actor

        # The state of the connection.
        self._run_id = 0  # 0 before the first welcome
        self._joined = False  # whether the connector knows this actor
        self._redirected = False  # whether the first connector has named another one
        self._next_report_s = 0.0  # when to report the counters again
        self._last_report_s = 0.0  # when a message about grants was last sent
        self._unanswered_s: float | None = None  # the time of the first message without an answer
        self._patience_s = patience_s

        # The socket.
        curve = ctx.curve or (ctx.config.transport.curve if ctx.config else None)
        self.keys = load_actor(Path(curve)) if curve else None
        self.context: zmq.Context[Socket] = zmq.Context()
        """Of the socket; `close` waits until all of its sockets are closed."""
        try:
            self.socket = dealer(self.context, address, self.keys)
        except BaseException:
            self.context.term()
            raise

    def join(self) -> None:
        """Wait for a connector, without limit.

        Raises:
            UserError: the learner refuses this actor.
            LearnerGoneError: this role is asked to leave meanwhile.
        """
        started_s = time.monotonic()
        noted = False
        while not self._joined:
            if self._ctx.leaving():
                raise LearnerGoneError("left before a learner was found")
            if not noted and time.monotonic() - started_s > NOTE_AFTER_S:
                noted = self._ctx.report("note", text=f"waiting for the learner at {self.address}")

            # There is no limit to this wait, so the connector's silence does not count.
            self._unanswered_s = None
            self._report_counters()
            self.pump(0.1)

    # --------------------------------------------------------------------------------- slots

    def wait_turn(self, timeout_s: float) -> bool:
        """Wait for the grant of the next slot, up to ``timeout_s`` seconds; return whether it came.

        Raises LearnerGoneError.
        """
        deadline_s = time.monotonic() + timeout_s
        self.pump(0)

        while not self.stream.granted:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return False
            self._report_counters()
            self.pump(min(remaining_s, 0.1))
        return True

    def beat(self) -> None:
        """Report this actor's counters, at most once in `BEAT_S`. Raises LearnerGoneError."""
        self.pump(0)
        self._report_counters()

    def renew(self) -> None:
        """Request grants again if this actor was silent for so long that they may have been taken
        back.

        `wait_turn` then waits for the answer.
        """
        if time.monotonic() - self._last_report_s > RENEW_S:
            self.pump(0)  # messages from before the silence no longer hold
            self.stream.drop_grants()
            self._next_report_s = 0.0

    def send_slot(self, parts: wire.Parts, produced_steps: int) -> bool:
        """Send the next slot; return False where no peer is connected: wait and try again."""
        if not send_now(self.socket, parts):
            self.rejoin()
            return False
        self.stream.next += 1
        self.stream.produced_steps = produced_steps
        self._last_report_s = time.monotonic()
        return True

    # ------------------------------------------------------------------------------- weights

    def ask_weights(
        self, have: Stamp | None, policy_id: int = POLICY_ID, offer: RelayOffer | None = None
    ) -> None:
        """Request weights other than ``have``; an early repetition sends nothing.

        Args:
            have: the version that this side has.
            policy_id: whose weights.
            offer: of a relay, which may be answered by a `RelayAnswer` instead of weights.

        Raises:
            LearnerGoneError: the connector has been silent for too long.
        """
        now_s = time.monotonic()
        previous = self._inbox.requests.get(policy_id)
        if previous is not None and previous.have == have and now_s - previous.sent_s < REPEAT_S:
            return

        self._inbox.requests[policy_id] = _Request(have, now_s)
        self._await_answer(now_s)
        meta: dict[str, Any] = {"have": have} | wire.policy_meta(policy_id)
        if offer is not None:
            meta["relay"] = offer._asdict()
        self._send(MessageKind.WEIGHTS_GET, meta)

    def take_weights(self, policy_id: int = POLICY_ID) -> Weights | None:
        """Return the weights received since the last call, if any.

        Raises UnknownPolicyError where the learner refused the policy.
        """
        if policy_id in self._inbox.refused:
            raise UnknownPolicyError(policy_id)
        weights = self._inbox.weights.pop(policy_id, None)
        if weights is not None:
            self._inbox.requests.pop(policy_id, None)
        return weights

    def take_weights_at(self, policy_id: int = POLICY_ID) -> RelayAnswer | None:
        """Return the answer to a relay that was received since the last call, if any."""
        answer = self._inbox.relay_answers.pop(policy_id, None)
        if answer is not None:
            self._inbox.requests.pop(policy_id, None)
        return answer

    def received_stamp(self, policy_id: int = POLICY_ID) -> Stamp | None:
        """Return the version of the weights that `take_weights` would return."""
        weights = self._inbox.weights.get(policy_id)
        return None if weights is None else weights.stamp

    # ------------------------------------------------------------------------ the connection

    def pump(self, timeout_s: float) -> None:
        """Handle received messages; wait up to ``timeout_s`` seconds for one."""
        self._ctx.status.beat()
        if timeout_s > 0:
            self.socket.poll(max(1, round(timeout_s * 1000)))
        handle_messages(
            self.socket,
            self._on_message,
            server=f"the learner at {self.address}",
            client="this actor",
        )

    def rejoin(self) -> None:
        """Send HELLO again before anything else is sent."""
        self._joined = False
        self.stream.drop_grants()
        self._next_report_s = 0.0

    def close(self) -> None:
        """Send BYE, once; sent messages are still delivered, within the linger time."""
        if self.socket.closed:
            return
        if self._joined and self.want:
            self._send(MessageKind.BYE)
        self.socket.close()
        self.context.term()

    def _report_counters(self) -> None:
        """Report this actor's counters, once a second: by HELLO until it has joined."""
        now_s = time.monotonic()
        if now_s < self._next_report_s:
            return
        self._await_answer(now_s)

        if self._joined:
            sent = self._send(MessageKind.BEAT)
        else:
            spec = self.spec.to_dict() if self.spec else None
            meta = {"spec": spec, "want": self.want, "release": __version__}
            sent = self._send(MessageKind.HELLO, meta)
        self._next_report_s = now_s + (REPEAT_S if sent else RECONNECT_S)
        if sent:
            self._last_report_s = now_s

    def _await_answer(self, now_s: float) -> None:
        """Note that an answer is expected; raise LearnerGoneError after too long without any."""
        self._unanswered_s = self._unanswered_s or now_s
        if now_s - self._unanswered_s > self._patience_s:
            raise LearnerGoneError(
                f"the learner at {self.address} has been silent for {self._patience_s:g} s"
            )

    def _send(self, kind: MessageKind, meta: Any = None) -> bool:
        """Send a message with this actor's counters; return False where no peer takes it."""
        head = Header(
            kind,
            run_id=self._run_id,
            spec_hash=self.spec.hash if self.spec else 0,
            actor=self._actor,
            incarnation=self._ctx.incarnation,
            sequence=self.stream.next,
            produced_steps=self.stream.produced_steps,
        )
        return send_now(self.socket, wire.encode(head, meta))

    # ------------------------------------------------------------------------------ messages

    def _on_message(self, message: wire.Message) -> None:
        """Handle a message of the connector; any is a sign of its life.

        Raises WireError for a message that cannot be used, UserError where this actor is refused,
        LearnerGoneError where another run listens, and RunOverError where the run is over.
        """
        head = message.head
        if head.kind == MessageKind.WEIGHTS:
            self._on_weights(message)
            return
        if head.kind == MessageKind.WEIGHTS_AT:
            self._on_weights_at(message)
            return

        meta = wire.verify(message)
        self._unanswered_s = None
        if head.kind == MessageKind.WELCOME:
            self._on_welcome(head, meta)
        elif head.kind == MessageKind.REFUSE:
            self._on_refusal(meta)
        elif self._run_id and head.run_id != self._run_id:
            raise LearnerGoneError(f"another run listens at {self.address}")
        elif head.kind == MessageKind.GRANT and self._joined:
            self._on_grant(head)
        elif head.kind == MessageKind.WHO and self._joined:
            self.rejoin()
        elif head.kind == MessageKind.BYE and self._joined:
            raise RunOverError(f"the run of the learner at {self.address} is over")

    def _on_weights(self, message: wire.Message) -> None:
        """Keep weights that were requested until `take_weights`."""
        self._unanswered_s = None
        policy_id, values = wire.decode_weights(message, self.welcome.layout)
        if policy_id in self._inbox.requests:
            stamp = Stamp(message.head.generation, message.head.version)
            self._inbox.weights[policy_id] = Weights(stamp, values)

    def _on_weights_at(self, message: wire.Message) -> None:
        """Keep the answer to a relay until `take_weights_at`."""
        policy_id, parent = wire.decode_weights_at(message, self.welcome.layout)
        self._unanswered_s = None
        if policy_id in self._inbox.requests and message.head.run_id == self._run_id:
            self._inbox.relay_answers[policy_id] = RelayAnswer(parent)

    def _on_refusal(self, meta: dict[str, Any]) -> None:
        """Handle a REFUSE: of a policy, of this connector for another one, or of this actor."""
        if "policy_id" in meta:
            policy_id = wire.policy_of(meta)
            if policy_id in self._inbox.requests:
                self._inbox.refused.add(policy_id)
        elif "connector" in meta and not self._redirected:
            self._go_to(str(meta["connector"]))
        else:
            raise UserError(printable(str(meta["error"])))

    def _on_welcome(self, head: Header, meta: dict[str, Any]) -> None:
        """Join; the first welcome describes the learner."""
        if self._run_id and head.run_id != self._run_id:
            raise LearnerGoneError(f"another run listens at {self.address}")

        if not self._run_id:
            self.welcome = wire.read_welcome(head.run_id, head.generation, meta)
            self._check_spec(self.welcome.spec)
            self.sighting = Sighting(meta["boot_id"], meta["unix_path"], wire.release_of(meta))
            self.spec = self.spec or self.welcome.spec

        self._run_id = head.run_id
        self._joined = True
        self._inbox.forget_requests()
        self._on_grant(head)

    def _on_grant(self, head: Header) -> None:
        """Take over the limit of the grants, and the weights for which they are given."""
        self.stream.limit = max(self.stream.next, head.sequence)
        self.stream.oldest = Stamp(head.generation, head.version) if head.version else None

    def _go_to(self, address: str) -> None:
        """Join at another connector of the learner, whose ``address`` it sent.

        Only the port (or the name of the socket) is taken from it: the learner may know its host by
        another name, and cannot send an actor to other hosts or folders.

        Raises UserError for an address that cannot be one.
        """
        try:
            address = with_port_of(self.address, address)
            self.socket.disconnect(self.address)
            self.socket.connect(address)
        except (ValueError, zmq.ZMQError) as error:
            raise UserError(
                f"the learner at {self.address} sent this actor on to {printable(address)}, where "
                "none of its connectors can be; use the same release of Penstock in both"
            ) from error

        self._redirected = True
        self.rejoin()

    def _check_spec(self, spec: SlotSpec) -> None:
        """Check the spec of a welcome, before memory is allocated for its slots.

        Raises:
            UserError: the spec is not that of this actor. Where this actor takes any spec, its
                slots are too large.
        """
        if self.spec is not None and spec != self.spec:
            raise UserError(
                f"the learner at {self.address} disagrees on what a slot holds "
                f"({printable(spec.difference(self.spec))}); start both with the same config and "
                "the same version of the environment"
            )

        if self.spec is None and spec.payload_nbytes > MAX_SLOT_NBYTES:
            raise UserError(
                f"the learner at {self.address} asks for slots of {spec.payload_nbytes} bytes; "
                f"an actor makes at most {MAX_SLOT_NBYTES}, so use smaller actors.unroll or "
                "actors.envs"
            )
