"""An actor's or relay's connection to a connector: one DEALER and the state of the protocol.

No call waits without a bound or beats the status page less than once a second. A connector may be
replaced at any time: unanswered messages are repeated every second, and an actor that the connector
does not know sends HELLO again, with the sequence that it will send next.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

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
from penstock.transport.addresses import beside
from penstock.transport.grants import BEAT_S
from penstock.transport.wire import Header, MessageKind, RelayOffer, WeightsAt
from penstock.transport.zmq.keys import load_actor
from penstock.transport.zmq.sockets import Socket, dealer, handle_messages, send_now

MAX_SLOT_NBYTES = 1 << 31  # of a learner whose spec is accepted unseen
REPEAT_S = BEAT_S
RENEW_S = 3.0  # of silence, after which grants may soon be given to others
RECONNECT_S = 0.05  # between two tries while no peer is connected
NOTE_AFTER_S = 3.0


class Client:
    """Holds up to ``want`` grants for slots of ``spec``; with ``want=0`` gets only weights and
    welcome.

    Call `join` first, and `beat` about once a second while a slot is filled. ``next`` is the
    sequence to be sent next, ``limit`` the first not granted.
    """

    welcome: Welcome

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
        self.next = 0
        self.limit = 0
        self.oldest: Stamp | None = None
        """The oldest weights that may fill the granted slots; None for any."""
        self.produced_steps = 0
        self.boot_id = ""
        self.unix_path = ""
        self.release = ""
        self.spec = spec
        self.want = want
        self.address = address
        self._ctx = ctx
        self._actor = actor
        self._patience_s = patience_s
        self._run_id = 0
        self._joined = False
        self._repeat_at = 0.0
        self._said_s = 0.0  # when a message about grants was last sent
        self._unanswered_s: float | None = None
        self._asked: dict[int, tuple[Stamp | None, float]] = {}  # by policy
        self._weights: dict[int, tuple[Stamp, npt.NDArray[Any]]] = {}
        self._weights_at: dict[int, WeightsAt | None] = {}
        self._unknown: set[int] = set()  # policies that were refused
        self._sent_on = False  # from the first connector to another one
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

        Raises UserError when refused, LearnerGoneError when this role is asked to leave meanwhile.
        """
        started_s = time.monotonic()
        noted = False
        while not self._joined:
            if self._ctx.leaving():
                raise LearnerGoneError("left before a learner was found")
            if not noted and time.monotonic() - started_s > NOTE_AFTER_S:
                noted = self._ctx.report("note", text=f"waiting for the learner at {self.address}")
            self._unanswered_s = None
            self._repeat()
            self.pump(0.1)

    def wait_turn(self, timeout_s: float) -> bool:
        """Whether `next` may be sent; waits for the grant up to ``timeout_s`` seconds."""
        deadline_s = time.monotonic() + timeout_s
        self.pump(0)
        while self.next >= self.limit:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._repeat()
            self.pump(min(left_s, 0.1))
        return True

    def beat(self) -> None:
        """Report this actor's counters, at most once in `BEAT_S`. Raises LearnerGoneError."""
        self.pump(0)
        self._repeat()

    def renew(self) -> None:
        """Request grants again if this actor was silent for so long that they may have been taken
        back.

        `wait_turn` then waits for the answer.
        """
        if time.monotonic() - self._said_s > RENEW_S:
            self.pump(0)  # messages from before the silence no longer hold
            self.limit = self.next
            self._repeat_at = 0.0

    def send_slot(self, parts: wire.Parts, produced_steps: int) -> bool:
        """Send the slot numbered `next`; False where no peer is connected: wait and try again."""
        if not send_now(self.socket, parts):
            self.rejoin()
            return False
        self.next += 1
        self.produced_steps = produced_steps
        self._said_s = time.monotonic()
        return True

    def ask_weights(
        self, have: Stamp | None, policy_id: int = POLICY_ID, offer: RelayOffer | None = None
    ) -> None:
        """Request weights other than ``have``; an early repetition sends nothing.

        ``offer``: of a relay, which may be answered by a `WeightsAt` instead of weights.
        """
        now_s = time.monotonic()
        if policy_id in self._asked:
            asked, at_s = self._asked[policy_id]
            if asked == have and now_s - at_s < REPEAT_S:
                return
        self._asked[policy_id] = (have, now_s)
        self._await_answer(now_s)
        meta: dict[str, Any] = {"have": have} | wire.policy_meta(policy_id)
        if offer is not None:
            meta["relay"] = offer._asdict()
        self._say(MessageKind.WEIGHTS_GET, meta)

    def take_weights(self, policy_id: int = POLICY_ID) -> tuple[Stamp, npt.NDArray[Any]] | None:
        """Weights received since the last call: float32, or bfloat16 bits as uint16.

        Raises UnknownPolicyError where the learner refused the policy.
        """
        if policy_id in self._unknown:
            raise UnknownPolicyError(policy_id)
        fresh = self._weights.pop(policy_id, None)
        if fresh is not None:
            self._asked.pop(policy_id, None)
        return fresh

    def take_weights_at(self, policy_id: int = POLICY_ID) -> tuple[WeightsAt | None] | None:
        """The relay to ask, as received since the last call; its inside is None where this relay is
        to listen and to ask again."""
        if policy_id not in self._weights_at:
            return None
        self._asked.pop(policy_id, None)
        return (self._weights_at.pop(policy_id),)

    def arrived(self, policy_id: int = POLICY_ID) -> Stamp | None:
        """The version of the weights that `take_weights` would return."""
        fresh = self._weights.get(policy_id)
        return None if fresh is None else fresh[0]

    def pump(self, timeout_s: float) -> None:
        """Handle received messages; wait up to ``timeout_s`` seconds for one."""
        self._ctx.status.beat()
        if timeout_s > 0:
            self.socket.poll(max(1, round(timeout_s * 1000)))
        learner = f"the learner at {self.address}"
        handle_messages(self.socket, self._handle, server=learner, client="this actor")

    def close(self) -> None:
        """Send BYE, once; sent messages are still delivered, within the linger time."""
        if self.socket.closed:
            return
        if self._joined and self.want:
            self._say(MessageKind.BYE)
        self.socket.close()
        self.context.term()

    def _repeat(self) -> None:
        """Report this actor's counters, once a second."""
        now_s = time.monotonic()
        if now_s < self._repeat_at:
            return
        self._await_answer(now_s)
        if self._joined:
            said = self._say(MessageKind.BEAT)
        else:
            spec = self.spec.to_dict() if self.spec else None
            meta = {"spec": spec, "want": self.want, "release": __version__}
            said = self._say(MessageKind.HELLO, meta)
        self._repeat_at = now_s + (REPEAT_S if said else RECONNECT_S)
        if said:
            self._said_s = now_s

    def _await_answer(self, now_s: float) -> None:
        """Note a request; raises LearnerGoneError after too long without any answer."""
        self._unanswered_s = self._unanswered_s or now_s
        if now_s - self._unanswered_s > self._patience_s:
            raise LearnerGoneError(
                f"the learner at {self.address} has been silent for {self._patience_s:g} s"
            )

    def _say(self, kind: MessageKind, meta: Any = None) -> bool:
        head = Header(
            kind,
            run_id=self._run_id,
            spec_hash=self.spec.hash if self.spec else 0,
            actor=self._actor,
            incarnation=self._ctx.incarnation,
            sequence=self.next,
            produced_steps=self.produced_steps,
        )
        return send_now(self.socket, wire.encode(head, meta))

    def rejoin(self) -> None:
        """Send HELLO again before anything else is sent."""
        self._joined = False
        self.limit = self.next
        self._repeat_at = 0.0

    def _handle(self, message: wire.Message) -> None:
        head = message.head
        if head.kind == MessageKind.WEIGHTS:
            self._unanswered_s = None
            policy_id, values = wire.decode_weights(message, self.welcome.layout)
            if policy_id in self._asked:
                self._weights[policy_id] = Stamp(head.generation, head.version), values
            return
        if head.kind == MessageKind.WEIGHTS_AT:
            policy_id, weights_at = wire.decode_weights_at(message, self.welcome.layout)
            self._unanswered_s = None
            if policy_id in self._asked and head.run_id == self._run_id:
                self._weights_at[policy_id] = weights_at
            return
        meta = wire.verify(message)
        self._unanswered_s = None
        if head.kind == MessageKind.WELCOME:
            self._welcomed(head, meta)
        elif head.kind == MessageKind.REFUSE and "policy_id" in meta:
            self._unknown |= {wire.policy_of(meta)} & self._asked.keys()
        elif head.kind == MessageKind.REFUSE and "connector" in meta and not self._sent_on:
            self._go_to(str(meta["connector"]))
        elif head.kind == MessageKind.REFUSE:
            raise UserError(printable(str(meta["error"])))
        elif self._run_id and head.run_id != self._run_id:
            raise LearnerGoneError(f"another run listens at {self.address}")
        elif head.kind == MessageKind.GRANT and self._joined:
            self._granted(head)
        elif head.kind == MessageKind.WHO and self._joined:
            self.rejoin()
        elif head.kind == MessageKind.BYE and self._joined:
            raise RunOverError(f"the run of the learner at {self.address} is over")

    def _go_to(self, address: str) -> None:
        """Join at another connector of the learner, whose ``address`` it sent.

        Only the port (or the name of the socket) is taken from it: the learner may know its host by
        another name, and cannot send an actor to other hosts or folders.
        """
        try:
            address = beside(self.address, address)
            self.socket.disconnect(self.address)
            self.socket.connect(address)
        except (ValueError, zmq.ZMQError) as error:
            raise UserError(
                f"the learner at {self.address} sent this actor on to {printable(address)}, where "
                "none of its connectors can be; use the same release of Penstock in both"
            ) from error
        self._sent_on = True
        self.rejoin()

    def _welcomed(self, head: Header, meta: dict[str, Any]) -> None:
        if self._run_id and head.run_id != self._run_id:
            raise LearnerGoneError(f"another run listens at {self.address}")
        if not self._run_id:
            self.welcome = wire.read_welcome(head.run_id, head.generation, meta)
            self._check_spec(self.welcome.spec)
            self.boot_id, self.unix_path = meta["boot_id"], meta["unix_path"]
            self.release = wire.release_of(meta)
            self.spec = self.spec or self.welcome.spec
        self._run_id = head.run_id
        self._joined = True
        self._asked.clear()
        self._weights_at.clear()
        self._unknown.clear()
        self._granted(head)

    def _granted(self, head: Header) -> None:
        self.limit = max(self.next, head.sequence)
        self.oldest = Stamp(head.generation, head.version) if head.version else None

    def _check_spec(self, spec: SlotSpec) -> None:
        """Check the spec of a welcome, for which memory is allocated.

        Raises UserError for a spec other than this actor's, or one that is too large.
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
