"""A relay's side of the tree of relays: fetching weights from a parent, and serving children.

The connector decides (`transport.zmq.relay_tree`). It answers a request by the weights, or by the
address of a relay that has them (`wire.WeightsAt`), or asks the relay to listen.

                  WEIGHTS_GET ──►             ◄── WEIGHTS_GET
    connector  ◄────────────────►  relay  ◄────────────────────►  its children
                                     │  WEIGHTS_GET ──►
                                     └◄────────────────► its parent

A relay trusts the connector alone. It accepts from a parent only the bytes whose SHA-256 the
connector has named, of one version, within a time and a size; anything else makes it ask the
connector for a copy. With CURVE, a relay's socket has a key pair of its own, made when it opens.
Its public key reaches the children through the connector and is known to no other program, so only
peers that the connector admits can connect.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy.typing as npt
import zmq

from penstock.configs.errors import UserError
from penstock.core.params import POLICY_ID, Stamp
from penstock.transport import wire
from penstock.transport.wire import Buffer, Header, MessageKind, RelayOffer, WeightsAt, WireError
from penstock.transport.zmq.client import REPEAT_S, Client
from penstock.transport.zmq.keys import ActorKeys, KeyPair, LearnerKeys
from penstock.transport.zmq.listener import Listener
from penstock.transport.zmq.relay_tree import FANOUT
from penstock.transport.zmq.sockets import (
    IsReleased,
    Socket,
    dealer,
    port_of,
    receive,
    receive_from,
    router,
    send_now,
    send_to,
)

# most bytes of weights per second of one host: limits the load of the learner
MAX_NBYTES_PER_S = 32e6
PATIENCE_S = 1.0  # for a parent, besides the time of its copies
MAX_CHILDREN = 4 * FANOUT  # that are sent a version, or wait for one
BATCH = 64  # requests handled between two checks of everything else
QUEUED = 2  # messages from or to another relay that may wait: each can be large
REQUEST_NBYTES = 4096  # largest frame of a request
REPORT_S = 60.0  # between two reports of a parent that failed

Weights = tuple[Stamp, npt.NDArray[Any]]
"""A version, and the weights ``[layout.size]``: float32, or bfloat16 bits as uint16."""


class WeightsPuller:
    """Fetches version after version for a relay; call `turn` repeatedly."""

    def __init__(
        self,
        client: Client,
        watch: Callable[[int], None],
        unwatch: Callable[[int], None],
        report: Callable[[str], object],
    ) -> None:
        """Make the puller.

        Args:
            client: joined to the connector; stays open until `close`.
            watch: called with a descriptor that becomes readable when `turn` has work.
            unwatch: called with such a descriptor before it is closed.
            report: called with a sentence about a parent that failed, at most once a minute.
        """
        self._client = client
        self._report = report
        self._report_at = 0.0
        self._ask_at = 0.0
        self._failed = ""  # why only the connector may answer
        self._port: int | None = None
        self._server: RelayServer | None = None
        self._newest: Weights | None = None
        self._parent = ParentRelay(client, watch, unwatch)
        self._watch, self._unwatch = watch, unwatch
        self.from_relays = 0
        """Number of versions that came from another relay."""

    def turn(self) -> tuple[Weights | None, bool]:
        """Take one step without waiting: new weights, if any, and whether to call again at once."""
        client, now_s = self._client, time.monotonic()
        if not self._parent.busy and now_s >= self._ask_at:
            key = self._server.key if self._server is not None else ""
            have = self._newest[0] if self._newest is not None else None
            client.ask_weights(have, offer=RelayOffer(self._port, key, self._failed))
        client.pump(0)  # before waiting: the descriptor signals only new events
        fresh, busy = client.take_weights(), False
        if fresh is not None:
            self._parent.cancel()
        else:
            busy = self._follow(now_s)
            fresh = self._parent.poll(now_s)
            self.from_relays += fresh is not None
        if self._parent.failed:
            self._note_failure(now_s)
            busy = True
        if fresh is not None:
            self._take(fresh)
            busy = True
        if self._server is not None:
            busy = self._server.turn() > 0 or busy
        return fresh, busy

    def wait_s(self, longest_s: float) -> float:
        """How long to wait for an event before the next turn."""
        pause_s = self._ask_at - time.monotonic()
        return min(longest_s, pause_s) if pause_s > 0 else longest_s

    def _follow(self, now_s: float) -> bool:
        """Do what the connector has sent instead of weights; returns whether it has."""
        answer = self._client.take_weights_at()
        if answer is None or self._parent.busy:
            return False
        if answer[0] is not None:
            self._parent.ask(answer[0], now_s)
        elif self._port is None:
            self._listen()
        else:  # it knows the port already, so it asks in vain
            self._ask_at = now_s + REPEAT_S
        return True

    def _listen(self) -> None:
        try:
            self._server = RelayServer(self._client)
        except (UserError, OSError):
            self._port = 0  # this relay only receives
            return
        self._port = self._server.port
        self._watch(self._server.fd)
        if self._newest is not None:
            self._server.publish(self._newest)

    def _take(self, fresh: Weights) -> None:
        self._newest, self._failed = fresh, ""
        self._ask_at = time.monotonic() + fresh[1].nbytes / MAX_NBYTES_PER_S
        if self._server is not None:
            self._server.publish(fresh)

    def _note_failure(self, now_s: float) -> None:
        self._failed, self._ask_at = self._parent.failed, now_s
        if self._failed != "passed" and now_s >= self._report_at:
            self._report_at = now_s + REPORT_S
            self._report(
                f"the relay at {self._parent.address} {_FAULTS[self._failed]}; the weights come "
                "from the learner instead"
            )
        self._parent.failed = ""

    def close(self) -> None:
        """Close the sockets to other relays."""
        self._parent.close()
        if self._server is not None:
            self._unwatch(self._server.fd)
            self._server.close()
            self._server = None


class ParentRelay:
    """The connection to the relay that the connector named last."""

    def __init__(
        self, client: Client, watch: Callable[[int], None], unwatch: Callable[[int], None]
    ) -> None:
        """Make it without a connection; arguments as of `WeightsPuller`."""
        self.failed = ""
        """Why the parent was of no use, one of `wire.FAILURES`; set by `ask` and `poll`."""
        self.address = ""
        self._client = client
        self._watch, self._unwatch = watch, unwatch
        self._key = ""
        self._socket: Socket | None = None
        self._wanted: WeightsAt | None = None
        self._ends_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether weights are expected."""
        return self._wanted is not None

    def ask(self, at: WeightsAt, now_s: float) -> None:
        """Request the version ``at`` from the relay there."""
        try:
            self._connect(at.address, at.key)
        except (UserError, zmq.ZMQError):  # no address or key that ZeroMQ can use
            self.address = at.address
            self._fail("wrong")
            return
        assert self._socket is not None
        head = Header(MessageKind.WEIGHTS_GET, run_id=self._client.welcome.run_id)
        if not send_now(self._socket, wire.encode(head, {"want": at.stamp})):  # it does not read
            self._fail("late")
            return
        self._wanted = at
        copies_s = FANOUT * at.nbytes / MAX_NBYTES_PER_S
        self._ends_s = now_s + at.depth * (PATIENCE_S + copies_s)  # its parent may fail first

    def poll(self, now_s: float) -> Weights | None:
        """The weights requested, once they are here; does not wait."""
        if self._wanted is None or self._socket is None:
            return None
        parts = receive(self._socket)
        if parts is not None:
            try:
                return self._accept(wire.decode(parts), self._wanted)
            except (WireError, *wire.STRANGE):
                self._fail("wrong")
        elif now_s >= self._ends_s:
            self._fail("late")
        return None

    def _accept(self, message: wire.Message, at: WeightsAt) -> Weights | None:
        """The weights of a message of the parent. Raises WireError for any that were not named."""
        if message.head.kind == MessageKind.REFUSE:  # its sentence may be long, and is not read
            self._fail("passed")
            return None
        head, welcome = message.head, self._client.welcome
        if head.kind != MessageKind.WEIGHTS or head.run_id != welcome.run_id:
            raise WireError("kind")
        policy_id, values = wire.decode_weights(message, welcome.layout)
        if policy_id != POLICY_ID or Stamp(head.generation, head.version) != at.stamp:
            raise WireError("policy")
        if hashlib.sha256(message.frames[0]).hexdigest() != at.sha256:
            raise WireError("checksum")
        self._wanted = None
        return at.stamp, values

    def _connect(self, address: str, key: str) -> None:
        """Connect, unless it is the same relay as before."""
        if self._socket is not None and (self.address, self._key) == (address, key):
            return
        self.close()
        own = self._client.keys
        if bool(key) != (own is not None):
            raise UserError("the connector and this relay disagree on keys")
        self._socket = dealer(
            self._client.context,
            address,
            ActorKeys(own.own, key.encode()) if own is not None else None,
            max_frame_nbytes=max(REQUEST_NBYTES, self._client.welcome.layout.size * 4),
            received=QUEUED,
            queued=True,
        )
        self.address, self._key = address, key
        self._watch(self._socket.FD)

    def _fail(self, why: str) -> None:
        self.failed = why
        self.close()  # with all that it may still send

    def cancel(self) -> None:
        """Drop a request that is not answered yet, and with it the connection."""
        if self._wanted is not None:
            self.close()

    def close(self) -> None:
        """Close the connection; the next `ask` opens one."""
        self._wanted = None
        if self._socket is not None:
            self._unwatch(self._socket.FD)
            self._socket.close(0)
            self._socket = None


class SentCopy(NamedTuple):
    """A copy of the weights that was sent to a peer."""

    stamp: Stamp
    is_released: IsReleased
    sent_s: float = 0.0
    host: str = ""


class RelayServer:
    """Sends the newest weights of a relay to other relays: one version at a time, to each once."""

    def __init__(self, client: Client) -> None:
        """Listen on the address by which this host reaches the connector, at a port of the system.

        Raises UserError or OSError where that is not possible.
        """
        own = client.keys and KeyPair(*zmq.curve_keypair())
        self.key = own.public.decode() if own else ""
        """The public CURVE key, Z85 text; empty without CURVE."""
        self._run_id, self._layout = client.welcome.run_id, client.welcome.layout
        self._newest: Stamp | None = None
        self._parts: wire.Parts = []
        # The last copy to each child: all of the newest version, and older ones that are held.
        self._copies: dict[bytes, SentCopy] = {}
        self._waiting: dict[bytes, Stamp] = {}
        with ExitStack() as opening:
            bind = f"tcp://{_own_host(client.address)}:*"
            keys = LearnerKeys(own, frozenset()) if own else None
            self._router = router(
                client.context, bind, keys, REQUEST_NBYTES, received=QUEUED, sent=QUEUED
            )
            opening.callback(self._router.close, 0)
            self._listener = Listener(self._router)
            opening.callback(self._listener.close)
            self._stack = opening.pop_all()
        self.port = port_of(self._router)

    @property
    def fd(self) -> int:
        """The descriptor that becomes readable when `turn` has work."""
        return int(self._router.FD)

    def publish(self, weights: Weights) -> None:
        """Send newer weights to the relays that wait for them."""
        self._newest, values = weights
        self._parts = wire.encode_payload(values, self._newest, self._layout, self._run_id)
        # A child that does not read keeps its place, so that few versions are held in all.
        copies = self._copies.items()
        self._copies = {peer: copy for peer, copy in copies if not copy.is_released()}
        self._answer_waiting()

    def turn(self) -> int:
        """Handle the requests that have arrived, without waiting; returns their number."""
        count = 0
        while count < BATCH and (received := receive_from(self._router, keys=False)) is not None:
            count += 1
            self.handle(received[0].peer, received[1])
        self._answer_waiting()
        self._listener.look(time.monotonic())
        return count

    def handle(self, peer: bytes, parts: Sequence[Buffer]) -> None:
        """Handle one message of a peer; one that is no request of this run is dropped."""
        try:
            message = wire.decode(parts)
            if message.head.kind != MessageKind.WEIGHTS_GET or message.head.run_id != self._run_id:
                return
            meta: Any = wire.verify(message)
            if wire.policy_of(meta) == POLICY_ID:
                self._answer(peer, Stamp(*map(int, meta["want"])))
        except (WireError, *wire.STRANGE):
            return

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for peer, want in waiting.items():
            self._answer(peer, want)

    def _answer(self, peer: bytes, want: Stamp) -> None:
        copy = self._copies.get(peer)
        if self._newest is None or want > self._newest:
            self._wait(peer, want)
        elif want < self._newest:
            head = Header(MessageKind.REFUSE, run_id=self._run_id)
            text = "this relay has a newer version"
            send_to(self._router, peer, wire.encode(head, {"error": text}))
        elif copy is None and len(self._copies) < MAX_CHILDREN:
            self._send_copy(peer, self._newest)
        elif copy is not None and copy.stamp != self._newest:
            if copy.is_released():
                self._send_copy(peer, self._newest)
            else:
                self._wait(peer, want)

    def _wait(self, peer: bytes, want: Stamp) -> None:
        if peer not in self._waiting and len(self._waiting) >= MAX_CHILDREN:
            # The oldest may wait for a version that never comes.
            del self._waiting[next(iter(self._waiting))]
        self._waiting[peer] = want

    def _send_copy(self, peer: bytes, stamp: Stamp) -> None:
        # A peer that has left, or does not read, loses it.
        _, is_released = send_to(self._router, peer, self._parts)
        self._copies[peer] = SentCopy(stamp, is_released)

    def close(self) -> None:
        self._stack.close()


def _own_host(address: str) -> str:
    """This host's address towards a ``tcp://`` address. Raises OSError if that has none."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://"):
        raise OSError(f"{address} is not reached by TCP")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, where = found[0]
    with socket.socket(family, kind, protocol) as probe:  # sends nothing
        probe.connect(where)
        own = str(probe.getsockname()[0])
    return f"[{own}]" if ":" in own else own


_FAULTS = {
    "late": "did not send its weights in time",
    "wrong": "sent something else than the learner's weights",
}
