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
from penstock.core.params import Stamp, WireDtype
from penstock.core.role import ACTOR_INDEX_BITS
from penstock.profiling.ledger import Part, TimeLedger
from penstock.transport import wire
from penstock.transport.grants import ActorStream, Grants, TakenError
from penstock.transport.shm.host import check_spec
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import drain_event
from penstock.transport.wire import Buffer, Header, MessageKind, WireError
from penstock.transport.zmq.keys import load_learner
from penstock.transport.zmq.relay import WeightsResponder
from penstock.transport.zmq.relay_tree import RelayTree
from penstock.transport.zmq.server_socket import ServerSocket
from penstock.transport.zmq.sockets import GONE, IsReleased, Sender, WasWritten, boot_id

TICK_S = 0.01  # longest wait of new weights
QUIET_S = 0.2  # after so long without a message, all sent messages have arrived
# A BYE is lost with the connection if it was not read, and an actor that plays reads once a second.
FAREWELL_S = 3.0
BATCH = 64  # messages handled between two checks of everything else
REFUSE_CHARACTERS = 2000
# A HELLO may describe a slot by so many bytes more than the learner's: reading a column of it takes
# 3 µs, and the sentence about a difference names each.
EXTRA_SPEC_NBYTES = 2048
MAX_RELEASES = 8  # that are reported


class ActorShare(NamedTuple):
    """The actors that each connector of a learner receives from.

    An actor's id decides, so that connectors share no state, and two connections that claim the
    same id reach the same connector. ``addresses`` are those of the connectors, ``own`` the index
    of this one. Ids of a run's own actors are their indices, which its ``learners`` take in turn;
    those of actors started by hand have a random number above their lowest 16 bits.
    """

    addresses: tuple[str, ...]
    own: int
    learners: int = 1

    def connector(self, actor: int) -> int:
        """The index of the connector that receives from ``actor``."""
        group, index = divmod(actor, 1 << ACTOR_INDEX_BITS)
        place = group + index if group else index // self.learners
        return place % len(self.addresses)


class Receiver:
    """Receives slots; call `turn` repeatedly.

    ``process`` changes a slot's columns before it is published.
    """

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
        """Attach the socket. Raises UserError for an address that is taken, or unreadable keys.

        ``tree``: of the relays; None for one with the usual limits.
        ``share``: the actors whose slots are received here; None for all.
        ``by_batch``: slots are lent for one batch at a time. A grant is then for the newest
        weights.
        """
        assert link.writer is not None
        spec = link.spec
        keys = load_learner(curve) if curve else None
        slot_steps = spec.unroll * spec.envs
        self.grants = Grants(
            silence_s, slot_steps, self._connected, len(keys.allowed) if keys else 0
        )
        self.rejected: Counter[str] = Counter()
        self.last_rejected: dict[str, str] = {}  # the latest message of each reason
        self.other_releases: set[str] = set()  # of Penstock, that actors have
        self.received = dict.fromkeys(("slots", "steps", "raw_nbytes", "coded_nbytes"), 0)
        self._link = link
        self._writer = link.writer
        self._decoder = wire.SlotDecoder(link.spec)
        self._responders = {
            board.policy_id: WeightsResponder(board, link.welcome, dtype, tree)
            for board in (link.board,)
        }
        self._local = is_local(address)
        self._process = process
        self._ledger = ledger or TimeLedger()
        self._by_batch = by_batch
        self._share = share or ActorShare((address,), 0)
        self._lending = True
        self._gone = False  # whether the learner is gone, at the last check
        self._newest = (0, 0)  # generation and version of weights, at the last check
        self._welcome = wire.welcome_meta(link.welcome) | {
            "boot_id": boot_id(),
            "unix_path": str(unix_path),
        }
        self._hello_nbytes = len(msgpack.packb(spec.to_dict())) + EXTRA_SPEC_NBYTES
        self._handlers: dict[int, Callable[[wire.Message, Sender], None]] = {
            MessageKind.HELLO: self._hello,
            MessageKind.SLOT: self._slot,
            MessageKind.BEAT: self._beat,
            MessageKind.BYE: self._bye,
            MessageKind.WEIGHTS_GET: self._weights_get,
        }
        self._socket = ServerSocket(address, keys, wire.max_frame_nbytes(spec))
        self._socket.watch(self._writer.event)

    @property
    def turned_away(self) -> int:
        """`Listener.turned_away` of the socket."""
        return self._socket.listener.turned_away

    def turn(self, timeout_s: float) -> int:
        """Handle received messages, waiting up to ``timeout_s`` seconds; returns their number."""
        self._ledger.switch(Part.RECEIVE)
        self._gone = self._link.learner_gone()
        count = self._take_in()
        if not count or self._socket.has_keys:
            self._wait(0 if count else timeout_s)
            count += self._take_in()
        self._tend(time.monotonic())
        self._ledger.switch(Part.OTHER)
        return count

    def _take_in(self) -> int:
        """Handle the waiting messages; returns their number."""
        count = 0
        while count < BATCH and (received := self._socket.receive()) is not None:
            sender, parts = received
            self.handle(sender.peer, parts, sender.key, sender.host)
            count += 1
        return count

    def _wait(self, timeout_s: float) -> None:
        """Wait for an event: a message, a lent slot, a peer to authenticate."""
        self._ledger.switch(Part.WAIT)
        ready = self._socket.wait(timeout_s)
        self._ledger.switch(Part.RECEIVE)
        if self._writer.event in ready:
            drain_event(self._writer.event)

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
        try:
            message = wire.decode(parts)
            head = message.head
            handler = self._handlers.get(head.kind)
            if handler is None:
                raise WireError("kind")
            newcomer = head.kind == MessageKind.HELLO and not head.run_id
            if not newcomer and head.run_id != self._link.welcome.run_id:
                raise WireError("run")
            handler(message, Sender(peer, key, host))
        except WireError as error:
            self._reject(error)
            if error.reason in ("run", "unknown"):
                self._say(peer, MessageKind.WHO)
            elif error.reason == "ungranted":
                self._say(peer, MessageKind.GRANT, None, self.grants.of(message.head, peer))
            elif error.reason == "version" and wire.is_hello(parts):
                self._refuse(peer, wire.other_version("this actor", error.text, "the learner"))
            elif isinstance(error, TakenError) and error.lives and wire.is_hello(parts):
                self._refuse(peer, error.text)

    def _reject(self, error: WireError) -> None:
        self.rejected[error.reason] += 1
        self.last_rejected[error.reason] = error.text

    def learner_gone(self) -> bool:
        return self._link.learner_gone()

    def drain(self, timeout_s: float, beat: Callable[[], None], *, over: bool = False) -> None:
        """Receive the messages on their way until none arrives or all actors have left.

        No grants. ``over``: the run is over, which the actors are told; they answer by leaving.
        """
        self._lending = False
        for stream in [*self.grants.streams.values()] if over else ():
            self._say(stream.peer, MessageKind.BYE, None, stream)
        most_quiet_s = FAREWELL_S if over else QUIET_S
        deadline_s = time.monotonic() + timeout_s
        quiet_s = time.monotonic() + most_quiet_s
        while self.grants.streams and time.monotonic() < min(quiet_s, deadline_s):
            beat()
            if self.turn(TICK_S):
                quiet_s = time.monotonic() + most_quiet_s

    def figures(self) -> dict[str, Any]:
        """Counters since the start, in slots, agent steps and bytes."""
        return {
            "actors": len(self.grants.streams),
            **self.received,
            "rejected": dict(self.rejected),
        }

    def close(self) -> None:
        self._socket.close()

    def _hello(self, message: wire.Message, sender: Sender) -> None:
        try:
            self._check_size(message)
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
        stream = None
        if want:
            receives = self._share.connector(message.head.actor)
            if receives != self._share.own:
                self._send_on(sender.peer, self._share.addresses[receives])
                return
            stream = self.grants.hello(
                message.head, sender.peer, want, time.monotonic(), sender.key
            )
        self._say(sender.peer, MessageKind.WELCOME, self._welcome, stream)

    def _check_size(self, message: wire.Message) -> None:
        """Raise UserError for a HELLO that is too long to be read."""
        nbytes = memoryview(message.parts[1]).nbytes
        if nbytes > self._hello_nbytes:
            raise UserError(
                f"the actor describes its slots in {nbytes} bytes, and the learner reads at most "
                f"{self._hello_nbytes}, as its own take {self._hello_nbytes - EXTRA_SPEC_NBYTES}; "
                "start both with the same config and the same version of the environment"
            )

    def _slot(self, message: wire.Message, sender: Sender) -> None:
        head = message.head
        if head.spec_hash != self._link.spec.hash:
            raise WireError("spec")
        now_s = time.monotonic()
        available = 0 if self._gone else self._writer.available
        stream = self.grants.admit(head, sender.peer, now_s, available, sender.key)
        self._check_policy(head)
        if available:
            self._store(message, stream, now_s)
        else:  # the next slot of the stream, or its end, counts this one as lost
            wire.verify(message)
        self.grants.received(stream, head, sender.peer, now_s)

    def _check_policy(self, head: Header) -> None:
        """Raise WireError for weights that the learner has not published.

        Versions are compared within a generation: a learner that resumed from a checkpoint counts
        from a lower one than it had reached before.
        """
        used = Stamp(head.generation, head.version)
        if used > self._newest:
            stamp = self._link.board.stamp
            if stamp is None:  # a learner publishes before it listens
                return
            self._newest = stamp
            if used > stamp:
                text = f"{head.generation}.{head.version}, the newest is {stamp[0]}.{stamp[1]}"
                raise WireError("policy", text)

    def _store(self, message: wire.Message, stream: ActorStream, now_s: float) -> None:
        head = message.head
        with self._writer.slot(0) as slot:
            assert slot is not None
            self._ledger.switch(Part.DECOMPRESS)
            self._decoder.decode(message, slot.payload)
            wire.fill_header(slot.header, head, now_s)
            self._ledger.switch(Part.PROCESS)
            over = check_rows(slot.columns, head, stream.over)
            if self._process is not None:
                self._apply(self._process, slot.columns)
            self._ledger.switch(Part.PUBLISH)
        self._ledger.switch(Part.RECEIVE)
        stream.over = over
        received = self.received
        received["slots"] += 1
        received["steps"] += head.steps
        received["raw_nbytes"] += head.raw_nbytes
        received["coded_nbytes"] += head.coded_nbytes

    def _apply(self, process: SlotProcessor, columns: dict[str, npt.NDArray[Any]]) -> None:
        try:
            process(columns)
        except Exception as error:
            if not self.rejected["process"]:
                traceback.print_exc(file=sys.stderr)
            raise WireError("process", str(error)) from error

    def _beat(self, message: wire.Message, sender: Sender) -> None:
        wire.verify(message)
        stream = self.grants.beat(message.head, sender.peer, time.monotonic(), sender.key)
        self._say(sender.peer, MessageKind.GRANT, None, stream)

    def _bye(self, message: wire.Message, sender: Sender) -> None:
        wire.verify(message)
        self.grants.bye(message.head, sender.peer, time.monotonic(), sender.key)

    def _weights_get(self, message: wire.Message, sender: Sender) -> None:
        meta = wire.verify(message)
        try:
            have = None if meta["have"] is None else Stamp(*map(int, meta["have"]))
        except wire.STRANGE as error:
            raise WireError("meta", str(error)) from error
        policy_id = wire.policy_of(meta)
        offer = wire.relay_offer(meta)
        responder = self._responders.get(policy_id)
        peer = sender.peer
        if responder is None:
            text = str(UnknownPolicyError(policy_id))
            self._reject(WireError("policy", text))
            self._refuse(peer, text, policy_id=policy_id)
            return
        if offer is not None:
            address = None if offer.port is None else self._relay_address(offer, sender.host)
            responder.tree.asked(peer, address, offer.key, offer.failed, time.monotonic())
        if responder.ask(peer, have, sender.host):  # nothing newer yet, but the connector lives
            self._say(peer, MessageKind.GRANT, None, self.grants.of(message.head, peer))

    def _relay_address(self, offer: wire.RelayOffer, host: str) -> str:
        """Where other relays reach one that connects from ``host``; empty if they do not.

        Only the port is the relay's word: it cannot send others to another host. Its key must be
        one exactly if this learner uses keys.
        """
        try:
            found = ipaddress.ip_address(host)
        except ValueError:  # over ipc://
            return ""
        alone = found.is_loopback and not self._local  # others would reach themselves
        if not offer.port or alone or bool(offer.key) != self._socket.has_keys:
            return ""
        return f"tcp://[{host}]:{offer.port}" if ":" in host else f"tcp://{host}:{offer.port}"

    def _tend(self, now_s: float) -> None:
        """Work besides messages: grants, weights, silent actors."""
        if self._lending:
            for stream in self.grants.lend(self._writer.available):
                self._say(stream.peer, MessageKind.GRANT, None, stream)
        for responder in self._responders.values():
            responder.serve(now_s, self._send_weights)
        self.grants.expire(now_s)
        self._socket.listener.look(now_s)
        if self._writer.want != self.grants.want:
            self._writer.want = self.grants.want
        if self._lending:
            self._return_unwanted()

    def _return_unwanted(self) -> None:
        """Return slots beyond those that present actors want to hold: of a bounded number others
        would lack them.
        """
        while self._writer.available > max(self.grants.want, self.grants.outstanding):
            slot = self._writer.acquire(0)
            assert slot is not None
            self._writer.return_unfilled(slot)

    def _send_on(self, peer: bytes, address: str) -> None:
        """Send an actor to the connector that receives from it; no state of it is kept here."""
        text = f"the learner receives from this actor at {address}; join there"
        self._say(peer, MessageKind.REFUSE, {"error": text, "connector": address})

    def _refuse(self, peer: bytes, text: str, **more: int) -> None:
        self._say(peer, MessageKind.REFUSE, {"error": text[:REFUSE_CHARACTERS], **more})

    def _say(
        self, peer: bytes, kind: MessageKind, meta: Any = None, stream: ActorStream | None = None
    ) -> bool:
        """Send a message without frames; False where the peer has left.

        A peer that does not read loses the message, and asks again.
        """
        return self._send(peer, self._message(kind, meta, stream))[0] != GONE

    def _message(
        self, kind: MessageKind, meta: Any = None, stream: ActorStream | None = None
    ) -> wire.Parts:
        welcome = self._link.welcome
        newest = self._link.board.stamp if self._by_batch else None
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

    def _connected(self, stream: ActorStream) -> bool:
        """Whether the connection of a stream is open; repeats its grant to test that."""
        return self._say(stream.peer, MessageKind.GRANT, None, stream)

    def _send_weights(self, peer: bytes, parts: wire.Parts) -> tuple[int, IsReleased]:
        outcome, is_released = self._send(peer, parts)
        if self._socket.has_keys:
            is_released = WasWritten(is_released, partial(self._send_grant, peer))
        return outcome, is_released

    def _send_grant(self, peer: bytes) -> tuple[int, IsReleased]:
        """Repeat the grant of a peer, if it has one, in a tracked message."""
        streams = self.grants.streams.values()
        stream = next((stream for stream in streams if stream.peer == peer), None)
        return self._send(peer, self._message(MessageKind.GRANT, None, stream), tracked=True)

    def _send(
        self, peer: bytes, parts: wire.Parts, *, tracked: bool = False
    ) -> tuple[int, IsReleased]:
        return self._socket.send(peer, parts, tracked=tracked)


def check_rows(
    columns: dict[str, npt.NDArray[Any]], head: Header, before: tuple[int, npt.NDArray[Any]] | None
) -> tuple[int, npt.NDArray[Any]] | None:
    """Check the rows that count against the header, and that none only resets.

    Args:
        columns: of a decoded slot; without ``alive`` nothing is checked.
        head: the header of its message.
        before: the result for the last stored slot of the stream.

    Returns:
        The sequence of the slot that follows, and the environments whose episode ended with the
            last row, bool ``[envs]``.

    Raises:
        WireError: the rows do not match.
    """
    if "alive" not in columns:
        return None
    alive = columns["alive"]
    counted = np.count_nonzero(alive)
    if counted != head.steps:
        raise WireError("steps", f"{counted} rows are alive, not {head.steps}")
    if "terminated" not in columns:
        return None
    over = columns["terminated"] | columns["truncated"]
    # Counting is the fastest test whether any is set.
    at_fault = np.count_nonzero(over) and np.count_nonzero(over[:-1] & alive[1:])
    if before is not None and before[0] == head.sequence:
        at_fault = at_fault or np.count_nonzero(before[1] & alive[0])
    if at_fault:
        raise WireError("alive", "a row after an episode's end, which only resets, is alive")
    return head.sequence + 1, over[-1].copy()
