"""The connector's work: one ROUTER on one side, one lane of the learner's store on the other.

    ROUTER ── wire.decode ── Grants.admit ── SlotDecoder into a lent slot ── process ── publish

It takes no decisions itself: `Grants` decides which actor may send, `wire` whether a message is
valid, and the learner, by lending slots, how much is received. A message that cannot be used is
counted by reason and dropped; no received message raises. A slot is checked against its header,
then the algorithm's ``process`` runs here, outside the learner.
"""

from __future__ import annotations

import ipaddress
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from penstock import __version__
from penstock.configs.errors import UserError
from penstock.configs.value_types import is_local
from penstock.core.interfaces import SlotProcessor, UnknownPolicyError
from penstock.core.params import POLICY_ID, Stamp, WireDtype
from penstock.core.role import ACTOR_INDEX_BITS
from penstock.profiling.ledger import Part, TimeLedger
from penstock.transport import wire
from penstock.transport.grants import ActorStream, EpisodeEnds, Grants, TakenError
from penstock.transport.shm.host import check_spec
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import drain_event
from penstock.transport.wire import Buffer, Header, MessageKind, WireError
from penstock.transport.zmq.keys import load_learner
from penstock.transport.zmq.relay import HeldCopies, WeightsResponder
from penstock.transport.zmq.relay_tree import RelayTree
from penstock.transport.zmq.server_socket import ServerSocket
from penstock.transport.zmq.sockets import GONE, IsReleased, Sender, WasWritten, boot_id

# The longest wait for an event; new weights are sent as late as that.
TICK_S = 0.01
# After so long without a message, all sent messages have arrived.
QUIET_S = 0.2
# A BYE is lost with the connection if it was not read, and an actor that plays reads once a second.
FAREWELL_S = 3.0
# The most messages that are handled between two checks of everything else.
BATCH = 64
# The longest sentence in a REFUSE.
REFUSE_CHARACTERS = 2000
# A HELLO may describe a slot by so many bytes more than the learner's: reading a column of it takes
# 3 µs, and the sentence about a difference names each.
EXTRA_SPEC_NBYTES = 2048
# The most releases of Penstock other than this one that are reported.
MAX_RELEASES = 8


class ActorShare(NamedTuple):
    """The actors that each connector of a learner receives from.

    An actor's id decides, so that connectors share no state, and two connections that claim the
    same id reach the same connector. Ids of a run's own actors are their indices, which its
    ``learners`` take in turn; those of actors started by hand have a random number above their
    lowest 16 bits.
    """

    addresses: tuple[str, ...]
    """The addresses of the learner's connectors."""
    own_index: int
    """The index of this connector among them."""
    learners: int = 1
    """The number of learners of the run."""

    def connector(self, actor: int) -> int:
        """Return the index of the connector that receives from ``actor``."""
        random_number, actor_index = divmod(actor, 1 << ACTOR_INDEX_BITS)
        place = random_number + actor_index if random_number else actor_index // self.learners
        return place % len(self.addresses)


class SlotIntake:
    """Writes the slots of messages into the learner's store: decoded, checked and processed."""

    def __init__(self, link: ShmLink, process: SlotProcessor | None, ledger: TimeLedger) -> None:
        """Make the intake.

        Args:
            link: attached to the learner with a lane, whose slots are filled.
            process: checks and changes a slot's columns before it is published.
            ledger: the time ledger of the calling thread.
        """
        assert link.writer is not None
        self.received = dict.fromkeys(("slots", "steps", "raw_nbytes", "coded_nbytes"), 0)
        """What was stored since the start: slots, agent steps, bytes decoded and on the wire."""
        self.writer = link.writer
        self._board = link.boards[POLICY_ID]
        self._decoder = wire.SlotDecoder(link.spec)
        self._process = process
        self._process_failed = False  # whether ``process`` has raised before
        self._ledger = ledger
        self._newest = Stamp(0, 0)  # the newest weights, as far as they were looked up

    def check_policy(self, head: Header) -> None:
        """Raise WireError for weights that the learner has not published.

        Versions are compared within a generation: a learner that resumed from a checkpoint counts
        from a lower one than it had reached before.
        """
        acting = Stamp(head.generation, head.version)
        if acting <= self._newest:
            return

        newest = self._board.stamp
        if newest is None:  # a learner publishes before it listens
            return
        self._newest = newest
        if acting > newest:
            text = (
                f"{head.generation}.{head.version}, "
                f"the newest is {newest.generation}.{newest.version}"
            )
            raise WireError("policy", text)

    def store(self, message: wire.Message, stream: ActorStream, now_s: float) -> None:
        """Write the slot of an admitted message into a lent slot, and publish it.

        Raises:
            WireError: the message cannot be decoded, its rows do not match its header, or the
                algorithm does not accept them. Nothing is published then.
        """
        head = message.head
        with self.writer.slot(0) as slot:
            assert slot is not None
            self._ledger.switch(Part.DECOMPRESS)
            self._decoder.decode(message, slot.payload)
            wire.fill_header(slot.header, head, now_s)

            self._ledger.switch(Part.PROCESS)
            episode_ends = check_rows(slot.columns, head, stream.episode_ends)
            if self._process is not None:
                self._apply(self._process, slot.columns)
            self._ledger.switch(Part.PUBLISH)
        self._ledger.switch(Part.RECEIVE)

        stream.episode_ends = episode_ends
        received = self.received
        received["slots"] += 1
        received["steps"] += head.steps
        received["raw_nbytes"] += head.raw_nbytes
        received["coded_nbytes"] += head.coded_nbytes

    def return_unwanted(self, wanted: int) -> None:
        """Return lent slots beyond ``wanted``: of a bounded number others would lack them."""
        while self.writer.available > wanted:
            slot = self.writer.acquire(0)
            assert slot is not None
            self.writer.return_unfilled(slot)

    def _apply(self, process: SlotProcessor, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Process the columns; raise WireError for any error, the first of which is printed."""
        try:
            process(columns)
        except Exception as error:
            if not self._process_failed:
                self._process_failed = True
                traceback.print_exc(file=sys.stderr)
            raise WireError("process", str(error)) from error


class Receiver:
    """Receives the messages of actors and relays, and answers them; call `turn` repeatedly."""

    def __init__(
        self,
        link: ShmLink,
        address: str,
        unix_path: Path,
        *,
        curve: Path | None = None,
        dtype: WireDtype = "bf16",
        silence_s: float = 60.0,
        process: SlotProcessor | None = None,
        ledger: TimeLedger | None = None,
        by_batch: bool = False,
        share: ActorShare | None = None,
        tree: RelayTree | None = None,
    ) -> None:
        """Open the socket.

        Args:
            link: attached to the learner with a lane, whose slots are filled.
            address: where to listen.
            unix_path: the learner's socket for shared memory, of which actors are told.
            curve: the folder of the learner's keys; None without CURVE.
            dtype: the type in which weights are sent.
            silence_s: seconds of silence after which an actor's stream is over.
            process: checks and changes a slot's columns before it is published.
            ledger: the time ledger of the calling thread.
            by_batch: whether slots are lent for one batch at a time. A grant is then for the newest
                weights.
            share: the actors whose slots are received here; None for all.
            tree: the tree of relays; None for one with the usual limits.

        Raises:
            UserError: the address is taken, or the keys cannot be read.
        """
        spec = link.spec
        keys = load_learner(curve) if curve else None

        # What actors and peers have sent.
        self.grants = Grants(
            silence_s=silence_s,
            slot_steps=spec.unroll * spec.envs,
            connected=self._connected,
            keys=len(keys.allowed) if keys else 0,
        )
        self.rejected: Counter[str] = Counter()  # unusable messages by reason
        self.last_rejected: dict[str, str] = {}  # the latest message of each reason
        self.other_releases: set[str] = set()  # other releases of Penstock that actors have

        # The learner, and what it gives to actors.
        self._link = link
        self._ledger = ledger or TimeLedger()
        self._intake = SlotIntake(link, process, self._ledger)
        self._lending = True  # whether grants are given, until `drain`
        self._by_batch = by_batch
        self._learner_gone = False  # whether the learner was gone at the last turn
        # The run's weights come first, in each turn. Only they are passed on by relays.
        held = HeldCopies()
        self._responders = {
            board.policy_id: WeightsResponder(
                board,
                link.welcome,
                dtype,
                tree=tree if board.policy_id == POLICY_ID else None,
                held=held,
            )
            for board in link.boards
        }

        # Answers to a HELLO.
        self._share = share or ActorShare((address,), 0)
        self._welcome_meta = wire.welcome_meta(link.welcome) | {
            "boot_id": boot_id(),
            "unix_path": str(unix_path),
        }
        self._max_hello_nbytes = len(msgpack.packb(spec.to_dict())) + EXTRA_SPEC_NBYTES

        # The socket.
        self._handlers: dict[int, Callable[[wire.Message, Sender], None]] = {
            MessageKind.HELLO: self._on_hello,
            MessageKind.SLOT: self._on_slot,
            MessageKind.BEAT: self._on_beat,
            MessageKind.BYE: self._on_bye,
            MessageKind.WEIGHTS_GET: self._on_weights_get,
        }
        self._address_is_local = is_local(address)
        self._socket = ServerSocket(address, keys, wire.max_frame_nbytes(spec))
        self._socket.watch(self._intake.writer.event)

    @property
    def received(self) -> dict[str, int]:
        """What was stored since the start, in slots, agent steps and bytes."""
        return self._intake.received

    @property
    def turned_away(self) -> int:
        """The connections that the socket's `Listener` has turned away."""
        return self._socket.listener.turned_away

    def turn(self, timeout_s: float) -> int:
        """Handle received messages, waiting up to ``timeout_s`` seconds; return their number."""
        self._ledger.switch(Part.RECEIVE)
        self._learner_gone = self._link.learner_gone()

        # With keys, peers are authenticated while waiting, so that is done in every turn.
        count = self._handle_waiting()
        if not count or self._socket.has_keys:
            self._wait(0 if count else timeout_s)
            count += self._handle_waiting()

        self._work_between_messages(time.monotonic())
        self._ledger.switch(Part.OTHER)
        return count

    def handle(
        self, peer: bytes, parts: Sequence[Buffer], key: bytes = b"", host: str = ""
    ) -> None:
        """Handle one message of a peer; a bad one is counted.

        Args:
            peer: the routing id of the connection.
            parts: the message, without the routing id.
            key: the peer's public key, Z85 text; empty without CURVE.
            host: the peer's IP address; empty or another text over ``ipc://``.
        """
        message = None
        try:
            message = wire.decode(parts)
            handler = self._handler_of(message.head)
            handler(message, Sender(peer, key, host))
        except WireError as error:
            self._reject(error)
            head = None if message is None else message.head
            self._answer_fault(error, peer, parts=parts, head=head)

    def learner_gone(self) -> bool:
        """Whether the learner has ended or was replaced."""
        return self._link.learner_gone()

    def drain(self, timeout_s: float, beat: Callable[[], None], *, over: bool = False) -> None:
        """Receive the messages on their way, until none arrives or all actors have left.

        No more grants are given.

        Args:
            timeout_s: the longest time for that, in seconds.
            beat: called in every turn.
            over: whether the run is over, which the actors are told; they answer by leaving.
        """
        self._lending = False
        if over:
            for stream in list(self.grants.streams.values()):
                self._send_message(stream.peer, MessageKind.BYE, stream=stream)

        max_quiet_s = FAREWELL_S if over else QUIET_S
        deadline_s = time.monotonic() + timeout_s
        quiet_until_s = time.monotonic() + max_quiet_s
        while self.grants.streams and time.monotonic() < min(quiet_until_s, deadline_s):
            beat()
            if self.turn(TICK_S):
                quiet_until_s = time.monotonic() + max_quiet_s

    def figures(self) -> dict[str, Any]:
        """Return counters since the start, in slots, agent steps and bytes."""
        return {
            "actors": len(self.grants.streams),
            **self.received,
            "rejected": dict(self.rejected),
        }

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    # ------------------------------------------------------------------------------ one turn

    def _handle_waiting(self) -> int:
        """Handle the messages that wait, up to `BATCH`; return their number."""
        count = 0
        while count < BATCH and (received := self._socket.receive()) is not None:
            sender, parts = received
            self.handle(sender.peer, parts, key=sender.key, host=sender.host)
            count += 1
        return count

    def _wait(self, timeout_s: float) -> None:
        """Wait for an event: a message, a lent slot, or a peer to authenticate."""
        self._ledger.switch(Part.WAIT)
        ready = self._socket.wait(timeout_s)
        self._ledger.switch(Part.RECEIVE)
        if self._intake.writer.event in ready:
            drain_event(self._intake.writer.event)

    def _work_between_messages(self, now_s: float) -> None:
        """Give grants, send weights, and take grants back from silent actors."""
        grants = self.grants
        writer = self._intake.writer
        if self._lending:
            for stream in grants.lend(writer.available):
                self._send_grant(stream.peer, stream)
        for responder in self._responders.values():
            responder.serve(now_s, self._send_weights)
        grants.expire(now_s)
        self._socket.listener.check_descriptors(now_s)

        # The lane asks for as many slots as the actors want to hold.
        if writer.want != grants.want:
            writer.want = grants.want
        if self._lending:
            self._intake.return_unwanted(max(grants.want, grants.outstanding))

    # ------------------------------------------------------------------------------ messages

    def _handler_of(self, head: Header) -> Callable[[wire.Message, Sender], None]:
        """Return what handles messages with this header.

        Raises WireError for a kind that no actor or relay sends, and for another run; a newcomer
        does not know the run yet.
        """
        handler = self._handlers.get(head.kind)
        if handler is None:
            raise WireError("kind")
        is_newcomer = head.kind == MessageKind.HELLO and not head.run_id
        if not is_newcomer and head.run_id != self._link.welcome.run_id:
            raise WireError("run")
        return handler

    def _answer_fault(
        self, error: WireError, peer: bytes, *, parts: Sequence[Buffer], head: Header | None
    ) -> None:
        """Answer a message that cannot be used, if its sender, or the user, can mend that.

        Args:
            error: what is wrong.
            peer: the sender.
            parts: the message.
            head: its header; None where that is not valid.
        """
        if error.reason in ("run", "unknown"):
            self._send_message(peer, MessageKind.WHO)
        elif error.reason == "ungranted" and head is not None:
            self._send_grant(peer, self.grants.stream_of(head, peer))
        elif error.reason == "version" and wire.is_hello(parts):
            self._refuse(peer, wire.describe_other_version("this actor", error.text, "the learner"))
        elif isinstance(error, TakenError) and error.lives and wire.is_hello(parts):
            self._refuse(peer, error.text)

    def _on_hello(self, message: wire.Message, sender: Sender) -> None:
        """Welcome an actor or a relay, refuse it, or send it to another connector."""
        try:
            self._check_hello_size(message)
            meta = wire.verify(message)
            want = int(meta["want"])
            check_spec(self._link.spec, meta["spec"])
        except UserError as error:
            self.rejected["refused"] += 1
            self._refuse(sender.peer, str(error))
            return
        except wire.STRANGE as error:
            raise WireError("meta", str(error)) from error

        release = wire.release_of(meta)
        if release not in ("", __version__) and len(self.other_releases) < MAX_RELEASES:
            self.other_releases.add(release)

        # A relay wants no grants, so it has no stream.
        stream = None
        if want:
            connector = self._share.connector(message.head.actor)
            if connector != self._share.own_index:
                self._redirect(sender.peer, self._share.addresses[connector])
                return
            stream = self.grants.on_hello(
                message.head, sender.peer, want=want, now_s=time.monotonic(), key=sender.key
            )
        self._send_message(sender.peer, MessageKind.WELCOME, meta=self._welcome_meta, stream=stream)

    def _check_hello_size(self, message: wire.Message) -> None:
        """Raise UserError for a HELLO that is too long to be read."""
        nbytes = memoryview(message.parts[1]).nbytes
        if nbytes > self._max_hello_nbytes:
            own_nbytes = self._max_hello_nbytes - EXTRA_SPEC_NBYTES
            raise UserError(
                f"the actor describes its slots in {nbytes} bytes, and the learner reads at most "
                f"{self._max_hello_nbytes}, as its own take {own_nbytes}; "
                "start both with the same config and the same version of the environment"
            )

    def _on_slot(self, message: wire.Message, sender: Sender) -> None:
        """Store a slot, if its grant and its content are valid."""
        head = message.head
        if head.spec_hash != self._link.spec.hash:
            raise WireError("spec")
        now_s = time.monotonic()
        available = 0 if self._learner_gone else self._intake.writer.available
        stream = self.grants.admit(
            head, sender.peer, now_s=now_s, available=available, key=sender.key
        )
        self._intake.check_policy(head)

        if available:
            self._intake.store(message, stream, now_s)
        else:  # the next slot of the stream, or its end, counts this one as lost
            wire.verify(message)
        self.grants.count_slot(stream, head, sender.peer, now_s)

    def _on_beat(self, message: wire.Message, sender: Sender) -> None:
        """Take the counters of an actor, and repeat its grant."""
        wire.verify(message)
        stream = self.grants.on_beat(
            message.head, sender.peer, now_s=time.monotonic(), key=sender.key
        )
        self._send_grant(sender.peer, stream)

    def _on_bye(self, message: wire.Message, sender: Sender) -> None:
        """End the stream of an actor that leaves."""
        wire.verify(message)
        self.grants.on_bye(message.head, sender.peer, now_s=time.monotonic(), key=sender.key)

    def _on_weights_get(self, message: wire.Message, sender: Sender) -> None:
        """Note a request for weights, which is answered between messages."""
        meta = wire.verify(message)
        try:
            have = None if meta["have"] is None else Stamp(*map(int, meta["have"]))
        except wire.STRANGE as error:
            raise WireError("meta", str(error)) from error
        policy_id = wire.policy_of(meta)
        offer = wire.relay_offer(meta)

        peer = sender.peer
        responder = self._responders.get(policy_id)
        if responder is None:
            text = str(UnknownPolicyError(policy_id))
            self._reject(WireError("policy", text))
            self._refuse(peer, text, policy_id=policy_id)
            return

        if offer is not None and policy_id == POLICY_ID:
            address = None if offer.port is None else self._relay_address(offer, sender.host)
            responder.tree.on_request(
                peer, address=address, key=offer.key, failure=offer.failed, now_s=time.monotonic()
            )
        already_waiting = responder.on_request(peer, have, sender.host)
        # There is nothing newer yet; a grant shows the peer that the connector lives.
        if already_waiting:
            self._send_grant(peer, self.grants.stream_of(message.head, peer))

    def _relay_address(self, offer: wire.RelayOffer, host: str) -> str:
        """Return where other relays reach one that connects from ``host``; empty if they do not.

        Only the port is the relay's word: it cannot send others to another host. Its key must be
        one exactly if this learner uses keys.
        """
        try:
            host_address = ipaddress.ip_address(host)
        except ValueError:  # over ipc://
            return ""
        # At a loopback address, relays of other hosts would reach themselves.
        only_here = host_address.is_loopback and not self._address_is_local
        if not offer.port or only_here or bool(offer.key) != self._socket.has_keys:
            return ""
        return f"tcp://[{host}]:{offer.port}" if ":" in host else f"tcp://{host}:{offer.port}"

    # ------------------------------------------------------------------------------- answers

    def _reject(self, error: WireError) -> None:
        """Count a message that cannot be used."""
        self.rejected[error.reason] += 1
        self.last_rejected[error.reason] = error.text

    def _redirect(self, peer: bytes, address: str) -> None:
        """Send an actor to the connector that receives from it; no state of it is kept here."""
        text = f"the learner receives from this actor at {address}; join there"
        self._send_message(peer, MessageKind.REFUSE, meta={"error": text, "connector": address})

    def _refuse(self, peer: bytes, text: str, **more: int) -> None:
        """Send a sentence that says why a request is refused, with further fields."""
        meta = {"error": text[:REFUSE_CHARACTERS], **more}
        self._send_message(peer, MessageKind.REFUSE, meta=meta)

    def _connected(self, stream: ActorStream) -> bool:
        """Whether the connection of a stream is open; repeats its grant to test that."""
        return self._send_grant(stream.peer, stream)

    def _send_grant(self, peer: bytes, stream: ActorStream | None) -> bool:
        """Send the limit of a stream to a peer, or an empty grant; False where it has left."""
        return self._send_message(peer, MessageKind.GRANT, stream=stream)

    def _send_message(
        self,
        peer: bytes,
        kind: MessageKind,
        *,
        meta: Any = None,
        stream: ActorStream | None = None,
    ) -> bool:
        """Send a message without frames; return False where the peer has left.

        A peer that does not read loses the message, and asks again.
        """
        outcome, _ = self._send(peer, self._encode(kind, meta=meta, stream=stream))
        return outcome != GONE

    def _encode(
        self, kind: MessageKind, *, meta: Any = None, stream: ActorStream | None = None
    ) -> wire.Parts:
        """Encode a message without frames, with the identity and the limit of ``stream``."""
        welcome = self._link.welcome
        newest = self._link.boards[POLICY_ID].stamp if self._by_batch else None
        head = Header(
            kind,
            spec_hash=self._link.spec.hash,
            run_id=welcome.run_id,
            generation=welcome.generation,
            version=newest.version if newest else 0,
            actor=stream.actor if stream else 0,
            incarnation=stream.incarnation if stream else 0,
            sequence=stream.limit if stream else 0,
        )
        return wire.encode(head, meta)

    def _send_weights(self, peer: bytes, parts: wire.Parts) -> tuple[int, IsReleased]:
        """Send weights as `_send`; with CURVE they are released when they were written."""
        outcome, is_released = self._send(peer, parts)
        if self._socket.has_keys:
            is_released = WasWritten(is_released, partial(self._send_tracked_grant, peer))
        return outcome, is_released

    def _send_tracked_grant(self, peer: bytes) -> tuple[int, IsReleased]:
        """Repeat the grant of a peer, if it has one, in a tracked message."""
        streams = self.grants.streams.values()
        stream = next((stream for stream in streams if stream.peer == peer), None)
        return self._send(peer, self._encode(MessageKind.GRANT, stream=stream), tracked=True)

    def _send(
        self, peer: bytes, parts: wire.Parts, *, tracked: bool = False
    ) -> tuple[int, IsReleased]:
        """Send a message as `sockets.send_to`."""
        return self._socket.send(peer, parts, tracked=tracked)


def check_rows(
    columns: dict[str, npt.NDArray[Any]], head: Header, previous_ends: EpisodeEnds | None
) -> EpisodeEnds | None:
    """Check that ``head`` counts the rows that are alive, and that no row that only resets is.

    Args:
        columns: of a decoded slot, each ``[T, envs]`` or larger; without ``alive`` nothing is
            checked.
        head: the header of its message.
        previous_ends: the result for the last stored slot of the stream.

    Returns:
        The ends of episodes in the last row; None where the columns do not show them.

    Raises:
        WireError: the rows do not match.
    """
    if "alive" not in columns:
        return None
    alive = columns["alive"]
    alive_steps = np.count_nonzero(alive)
    if alive_steps != head.steps:
        raise WireError("steps", f"{alive_steps} rows are alive, not {head.steps}")

    # The row after an episode's end only resets, also if it is the first one of the next slot.
    # Counting is the fastest test whether any value is set.
    if "terminated" not in columns:
        return None
    over = columns["terminated"] | columns["truncated"]
    resets_alive = np.count_nonzero(over) > 0 and np.count_nonzero(over[:-1] & alive[1:]) > 0
    if previous_ends is not None and previous_ends.next_sequence == head.sequence:
        resets_alive = resets_alive or np.count_nonzero(previous_ends.over & alive[0]) > 0
    if resets_alive:
        raise WireError("alive", "a row after an episode's end, which only resets, is alive")
    return EpisodeEnds(head.sequence + 1, over[-1].copy())
