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

import zmq

from penstock.configs.errors import UserError
from penstock.core.params import POLICY_ID, Stamp
from penstock.transport import wire
from penstock.transport.wire import Buffer, Header, MessageKind, RelayOffer, WeightsAt, WireError
from penstock.transport.zmq.client import REPEAT_S, Client, Weights
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

# The most bytes of weights per second of one host: this limits the load of the learner.
MAX_NBYTES_PER_S = 32e6
# The patience with a parent, besides the time of its copies.
PATIENCE_S = 1.0
# The most relays that are sent a version, and that wait for one.
MAX_CHILDREN = 4 * FANOUT
# The most requests that are handled between two checks of everything else.
BATCH = 64
# The most messages from or to another relay that may wait: each can be large.
QUEUED = 2
# The largest frame of a request.
REQUEST_NBYTES = 4096
# The shortest time between two reports of a parent that failed.
REPORT_S = 60.0


class PullerTurn(NamedTuple):
    """What one turn of a `WeightsPuller` has brought."""

    weights: Weights | None
    """New weights, if any."""
    busy: bool
    """Whether to call again at once."""


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
        self.from_relays = 0
        """Number of versions that came from another relay."""
        self._client = client
        self._watch = watch
        self._unwatch = unwatch
        self._report = report
        self._next_report_s = 0.0
        self._next_request_s = 0.0
        self._newest: Weights | None = None
        self._parent = ParentRelay(client, watch, unwatch)
        self._failure = ""  # why only the connector may answer, one of `wire.FAILURES`
        self._server: RelayServer | None = None
        self._port: int | None = None  # where the server listens; 0 if it cannot

    def turn(self) -> PullerTurn:
        """Request weights, and handle what has arrived, without waiting."""
        client = self._client
        now_s = time.monotonic()
        if not self._parent.busy and now_s >= self._next_request_s:
            self._request()

        # This comes before any waiting: the descriptor signals only new events.
        client.pump(0)
        busy = False
        weights = client.take_weights()
        if weights is not None:
            self._parent.cancel()
        else:
            busy = self._follow(now_s)
            weights = self._parent.poll(now_s)
            if weights is not None:
                self.from_relays += 1

        if self._parent.failure:
            self._on_failure(now_s)
            busy = True
        if weights is not None:
            self._on_weights(weights)
            busy = True
        if self._server is not None:
            busy = self._server.turn() > 0 or busy
        return PullerTurn(weights, busy)

    def wait_s(self, longest_s: float) -> float:
        """Return how long to wait for an event before the next turn, in seconds."""
        pause_s = self._next_request_s - time.monotonic()
        return min(longest_s, pause_s) if pause_s > 0 else longest_s

    def _request(self) -> None:
        """Ask the connector for a newer version, and offer to serve others."""
        key = self._server.key if self._server is not None else ""
        have = self._newest.stamp if self._newest is not None else None
        self._client.ask_weights(have, offer=RelayOffer(self._port, key, self._failure))

    def _follow(self, now_s: float) -> bool:
        """Do what the connector has sent instead of weights; return whether it has."""
        answer = self._client.take_weights_at()
        if answer is None or self._parent.busy:
            return False

        if answer.parent is not None:
            self._parent.request(answer.parent, now_s)
        elif self._port is None:
            self._listen()
        else:  # it knows the port already, so it asks in vain
            self._next_request_s = now_s + REPEAT_S
        return True

    def _listen(self) -> None:
        """Open the socket for children; where that fails, this relay only receives."""
        try:
            self._server = RelayServer(self._client)
        except (UserError, OSError):
            self._port = 0
            return
        self._port = self._server.port
        self._watch(self._server.fd)
        if self._newest is not None:
            self._server.publish(self._newest)

    def _on_weights(self, weights: Weights) -> None:
        """Offer new weights to the children, and rest before the next request."""
        self._newest = weights
        self._failure = ""
        self._next_request_s = time.monotonic() + weights.values.nbytes / MAX_NBYTES_PER_S
        if self._server is not None:
            self._server.publish(weights)

    def _on_failure(self, now_s: float) -> None:
        """Turn to the connector at once, and report the parent that failed."""
        self._failure = self._parent.failure
        self._next_request_s = now_s
        self._parent.failure = ""
        if self._failure == "passed" or now_s < self._next_report_s:
            return

        self._next_report_s = now_s + REPORT_S
        self._report(
            f"the relay at {self._parent.address} {_FAULTS[self._failure]}; the weights come "
            "from the learner instead"
        )

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
        self.failure = ""
        """Why the parent was of no use, one of `wire.FAILURES`; set by `request` and `poll`."""
        self.address = ""
        self._client = client
        self._watch = watch
        self._unwatch = unwatch
        self._key = ""
        self._socket: Socket | None = None
        self._expected: WeightsAt | None = None  # the version that was requested
        self._deadline_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether weights are expected."""
        return self._expected is not None

    def request(self, weights_at: WeightsAt, now_s: float) -> None:
        """Request a version from the relay that has it."""
        try:
            self._connect(weights_at.address, weights_at.key)
        except (UserError, zmq.ZMQError):  # no address or key that ZeroMQ can use
            self.address = weights_at.address
            self._fail("wrong")
            return

        assert self._socket is not None
        head = Header(MessageKind.WEIGHTS_GET, run_id=self._client.welcome.run_id)
        if not send_now(self._socket, wire.encode(head, {"want": weights_at.stamp})):
            self._fail("late")  # it does not read
            return

        # Each relay above may fail first, and be replaced by the connector.
        self._expected = weights_at
        copies_s = FANOUT * weights_at.nbytes / MAX_NBYTES_PER_S
        self._deadline_s = now_s + weights_at.depth * (PATIENCE_S + copies_s)

    def poll(self, now_s: float) -> Weights | None:
        """Return the requested weights, once they are here; this does not wait."""
        if self._expected is None or self._socket is None:
            return None

        parts = receive(self._socket)
        if parts is not None:
            try:
                return self._accept(wire.decode(parts), self._expected)
            except (WireError, *wire.STRANGE):
                self._fail("wrong")
        elif now_s >= self._deadline_s:
            self._fail("late")
        return None

    def _accept(self, message: wire.Message, expected: WeightsAt) -> Weights | None:
        """Return the weights of a message; None where the parent has a newer version.

        Raises WireError for any bytes that the connector has not named.
        """
        head = message.head
        welcome = self._client.welcome
        if head.kind == MessageKind.REFUSE:  # its sentence may be long, and is not read
            self._fail("passed")
            return None
        if head.kind != MessageKind.WEIGHTS or head.run_id != welcome.run_id:
            raise WireError("kind")

        policy_id, values = wire.decode_weights(message, welcome.layout)
        if policy_id != POLICY_ID or Stamp(head.generation, head.version) != expected.stamp:
            raise WireError("policy")
        if hashlib.sha256(message.frames[0]).hexdigest() != expected.sha256:
            raise WireError("checksum")
        self._expected = None
        return Weights(expected.stamp, values)

    def _connect(self, address: str, key: str) -> None:
        """Connect, unless it is the same relay as before.

        Raises UserError or ZMQError for an address or key that cannot be used.
        """
        if self._socket is not None and (self.address, self._key) == (address, key):
            return
        self.close()

        client_keys = self._client.keys
        if bool(key) != (client_keys is not None):
            raise UserError("the connector and this relay disagree on keys")
        keys = None
        if client_keys is not None:
            keys = ActorKeys(client_keys.own, learner=key.encode())
        self._socket = dealer(
            self._client.context,
            address,
            keys,
            max_frame_nbytes=max(REQUEST_NBYTES, self._client.welcome.layout.size * 4),
            received=QUEUED,
            queued=True,
        )
        self.address = address
        self._key = key
        self._watch(self._socket.FD)

    def _fail(self, failure: str) -> None:
        """Note a failure, and close the connection with all that may still come by it."""
        self.failure = failure
        self.close()

    def cancel(self) -> None:
        """Drop a request that is not answered yet, and with it the connection."""
        if self._expected is not None:
            self.close()

    def close(self) -> None:
        """Close the connection; the next `request` opens one."""
        self._expected = None
        if self._socket is not None:
            self._unwatch(self._socket.FD)
            self._socket.close(0)
            self._socket = None


class SentCopy(NamedTuple):
    """A copy of the weights that was sent to a peer."""

    stamp: Stamp
    is_released: IsReleased
    """Returns whether the socket has released the copy."""
    sent_s: float = 0.0
    host: str = ""


class RelayServer:
    """Sends the newest weights of a relay to other relays: one version at a time, to each once."""

    def __init__(self, client: Client) -> None:
        """Listen on the address by which this host reaches the connector, at a port of the system.

        Raises UserError or OSError where that is not possible.
        """
        key_pair = KeyPair(*zmq.curve_keypair()) if client.keys else None
        self.key = key_pair.public.decode() if key_pair else ""
        """The public CURVE key, Z85 text; empty without CURVE."""
        self._run_id = client.welcome.run_id
        self._layout = client.welcome.layout
        self._newest: Stamp | None = None
        self._parts: wire.Parts = []  # the message with the newest version
        # The last copy to each child: all of the newest version, and older ones that are held.
        self._copies: dict[bytes, SentCopy] = {}
        self._waiting: dict[bytes, Stamp] = {}  # the version that each child waits for

        with ExitStack() as opening:
            bind = f"tcp://{_own_host(client.address)}:*"
            keys = LearnerKeys(key_pair, frozenset()) if key_pair else None
            self._router = router(
                client.context,
                bind,
                keys,
                max_frame_nbytes=REQUEST_NBYTES,
                received=QUEUED,
                sent=QUEUED,
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
        self._newest = weights.stamp
        self._parts = wire.encode_payload(
            weights.values, weights.stamp, self._layout, run_id=self._run_id
        )
        # A child that does not read keeps its place, so that few versions are held in all.
        copies = self._copies.items()
        self._copies = {peer: copy for peer, copy in copies if not copy.is_released()}
        self._answer_waiting()

    def turn(self) -> int:
        """Handle the requests that have arrived, without waiting; return their number."""
        count = 0
        while count < BATCH and (received := receive_from(self._router, keys=False)) is not None:
            sender, parts = received
            self.handle(sender.peer, parts)
            count += 1
        self._answer_waiting()
        self._listener.check_descriptors(time.monotonic())
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
        """Answer the children that wait, where that is possible now."""
        waiting, self._waiting = self._waiting, {}
        for peer, want in waiting.items():
            self._answer(peer, want)

    def _answer(self, peer: bytes, want: Stamp) -> None:
        """Answer a request for the version ``want``, or let the child wait.

        A child that has got the newest version already is not answered again.
        """
        copy = self._copies.get(peer)
        if self._newest is None or want > self._newest:
            self._wait(peer, want)
        elif want < self._newest:
            head = Header(MessageKind.REFUSE, run_id=self._run_id)
            text = "this relay has a newer version"
            send_to(self._router, peer, wire.encode(head, {"error": text}))
        elif copy is None:
            if len(self._copies) < MAX_CHILDREN:
                self._send_copy(peer, self._newest)
        elif copy.stamp != self._newest:
            if copy.is_released():
                self._send_copy(peer, self._newest)
            else:
                self._wait(peer, want)

    def _wait(self, peer: bytes, want: Stamp) -> None:
        """Let a child wait for the version ``want``."""
        if peer not in self._waiting and len(self._waiting) >= MAX_CHILDREN:
            # The oldest may wait for a version that never comes.
            del self._waiting[next(iter(self._waiting))]
        self._waiting[peer] = want

    def _send_copy(self, peer: bytes, stamp: Stamp) -> None:
        """Send the newest version; a peer that has left, or does not read, loses it."""
        _, is_released = send_to(self._router, peer, self._parts)
        self._copies[peer] = SentCopy(stamp, is_released)

    def close(self) -> None:
        """Close the socket."""
        self._stack.close()


def _own_host(address: str) -> str:
    """Return this host's address towards a ``tcp://`` address, with brackets if it is IPv6.

    Raises OSError if there is none.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://"):
        raise OSError(f"{address} is not reached by TCP")

    # Connecting a datagram socket sends nothing, and shows by which address it would send.
    candidates = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    family, kind, protocol, _, socket_address = candidates[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(socket_address)
        own_host = str(probe.getsockname()[0])
    return f"[{own_host}]" if ":" in own_host else own_host


_FAULTS = {
    "late": "did not send its weights in time",
    "wrong": "sent something else than the learner's weights",
}
