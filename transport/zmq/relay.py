"""Weights over ZeroMQ: the relay on each actor host pulls them, the connector answers.

The relay is one process per actor host. It requests weights, one version at a time, and publishes
them on a board in shared memory. So the hundred actors of a host cost the learner's link one copy,
and reading weights costs an actor no message.

Nothing is queued. A request names the version that the relay has; the connector's
`WeightsResponder` replies when another version exists: at once, or as soon as the learner publishes
(long poll). A slow relay skips versions, and a late one starts with the newest. Waiting requests
are examined again when there is another version, not in every turn. A peer repeats its request
every second, also while a copy is on its way: on a slow link more copies would queue up behind it,
each older on arrival than the one before.

A peer may claim to have read a copy that it did not. So it is sent no further one while the socket
holds it, and the copies that the socket holds for all connections of a host are limited: each
takes memory, of a version that is needed for nothing else. Both hold for the copies of all policies
together, and the run's own weights have the first turn. So another member on a chair, which is
rare, delays them by one copy at most.

With many relays the connector sends a part of them to other relays for a version of the run's
weights (`transport.zmq.relay_tree`), which they fetch as `transport.zmq.relay_peers` describes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple

import numpy as np

from penstock.core.interfaces import LearnerGoneError, UnknownPolicyError, Welcome
from penstock.core.params import POLICY_ID, Stamp, WireDtype
from penstock.core.role import EXIT_REJOIN, RoleContext, relay_socket
from penstock.profiling.ledger import Part
from penstock.profiling.status import Phase
from penstock.transport import wire
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.zmq.client import Client
from penstock.transport.zmq.relay_peers import SentCopy, WeightsPuller
from penstock.transport.zmq.relay_tree import RelayTree
from penstock.transport.zmq.sockets import GONE, SENT, Send

# The longest wait of the relay for an event.
TICK_S = 0.05
# The longest silence of the connector, for a relay without a config.
DEFAULT_PATIENCE_S = 60.0
# The most peers that wait for another version; most of them may have left.
MAX_WAITING = 1 << 14
# After so long a copy that was sent is no longer expected to arrive.
ARRIVAL_S = 30.0
# The most that the socket holds of copies to a host, beyond the first.
HOST_NBYTES = 32 << 20


class WeightsRequest(NamedTuple):
    """A request of a peer."""

    have: Stamp | None
    """The version that the peer has."""
    host: str
    """The peer's host; empty where it is not known."""


class EncodedVersion:
    """One version of the weights as a message."""

    def __init__(self, stamp: Stamp, parts: wire.Parts) -> None:
        self.stamp = stamp
        self.parts = parts
        self.nbytes = memoryview(parts[2]).nbytes
        """The size of the weights."""
        self._sha256 = ""

    @property
    def sha256(self) -> str:
        """The checksum of the weights, in hexadecimal digits; computed once a relay needs it."""
        if not self._sha256:
            self._sha256 = hashlib.sha256(memoryview(self.parts[2])).hexdigest()
        return self._sha256

    @property
    def max_host_copies(self) -> int:
        """The most copies to one host that the socket may hold."""
        return 1 + HOST_NBYTES // self.nbytes


class HeldCopies:
    """The copies of any policy that the connector's socket has not released yet: one a peer."""

    def __init__(self) -> None:
        self._by_peer: dict[bytes, SentCopy] = {}

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._by_peer

    def add(self, peer: bytes, copy: SentCopy) -> None:
        """Note a copy that was sent."""
        self._by_peer[peer] = copy

    def drop_released(self) -> None:
        """Forget the copies that the socket has released."""
        by_peer = self._by_peer
        self._by_peer = {peer: copy for peer, copy in by_peer.items() if not copy.is_released()}

    def count_by_host(self) -> Counter[str]:
        """Return the number of copies for each host."""
        return Counter(copy.host for copy in self._by_peer.values())


class WeightsResponder:
    """Answers requests for weights; encodes each version of the board's policy at most once.

    Where many relays ask, `tree` decides which of them are sent a copy, and which are sent the
    address of a relay that has one.
    """

    def __init__(
        self,
        board: WeightsBoard,
        welcome: Welcome,
        dtype: WireDtype,
        tree: RelayTree | None = None,
        held: HeldCopies | None = None,
    ) -> None:
        """Make the responder.

        Args:
            board: the weights of one policy.
            welcome: the description of the learner.
            dtype: the type in which weights are sent.
            tree: the tree of relays; None for one with the usual limits.
            held: the copies that the socket holds, also those of other policies; None: of this one.
        """
        nbytes = welcome.layout.size * (2 if dtype == "bf16" else 4)
        self.tree = tree or RelayTree(nbytes)
        """The relays; call `RelayTree.on_request` before `on_request`."""
        self._board = board
        self._welcome = welcome
        self._dtype = dtype

        self._newest: Stamp | None = None  # the newest version at the last check
        self._encoded: EncodedVersion | None = None  # the last version that was sent
        # By peer: requests that are not examined or not answered yet, and the hosts of those peers
        # that had the newest version.
        self._requests: dict[bytes, WeightsRequest] = {}
        self._up_to_date: dict[bytes, str] = {}
        # By peer: the last copy until it has arrived.
        self._sent: dict[bytes, SentCopy] = {}
        self._held = HeldCopies() if held is None else held

    def on_request(self, peer: bytes, have: Stamp | None, host: str = "") -> bool:
        """Note a request of a peer that has the version ``have``.

        Returns:
            Whether a request of the peer was waiting already.
        """
        waiting = peer in self._requests or peer in self._up_to_date
        if len(self._up_to_date) >= MAX_WAITING:
            self._up_to_date.popitem()  # the peer asks again
        self._up_to_date.pop(peer, None)
        self._requests[peer] = WeightsRequest(have, host)
        return waiting

    def serve(self, now_s: float, send: Send) -> None:
        """Send the answers that are possible at ``now_s``."""
        newest = self._board.stamp
        if newest is None:
            return
        if newest != self._newest:
            self._on_new_version(newest, now_s)
        if not self._requests:
            return

        self._held.drop_released()
        requests = self._take_answerable(newest, now_s)
        if not requests:
            return
        if self._encoded is None or self._encoded.stamp != newest:
            self._encoded = self._encode()
        encoded = self._encoded

        # A peer or a host for which the socket holds enough copies has its turn later.
        copies_of_host = self._held.count_by_host()
        for peer in self.tree.ordered(requests):
            host = requests[peer].host
            if peer in self._held or copies_of_host[host] >= encoded.max_host_copies:
                self._requests[peer] = requests[peer]
            elif self._answer(peer, host, encoded, now_s=now_s, send=send):
                copies_of_host[host] += 1

    def _on_new_version(self, newest: Stamp, now_s: float) -> None:
        """Examine all waiting requests again, since there is another version."""
        for peer, host in self._up_to_date.items():
            self._requests[peer] = WeightsRequest(self._newest, host)
        self._up_to_date.clear()
        self._newest = newest
        self.tree.on_new_version(now_s)

    def _take_answerable(self, newest: Stamp, now_s: float) -> dict[bytes, WeightsRequest]:
        """Take the requests of peers that do not have the version ``newest``.

        A peer that has it waits for the next one. A request is dropped while a copy is on its way
        to the peer, which repeats it.
        """
        requests, self._requests = self._requests, {}
        answerable: dict[bytes, WeightsRequest] = {}
        for peer, request in requests.items():
            copy = self._sent.get(peer)
            if copy is not None and copy.stamp == request.have and peer not in self._held:
                del self._sent[peer]  # it has arrived
                copy = None

            if request.have == newest:
                self._up_to_date[peer] = request.host
            elif peer in self._held or copy is None or now_s >= copy.sent_s + ARRIVAL_S:
                answerable[peer] = request
        return answerable

    def _answer(
        self, peer: bytes, host: str, encoded: EncodedVersion, *, now_s: float, send: Send
    ) -> bool:
        """Answer a peer by a copy or by the address of a relay; return whether by a copy."""
        parts = self._answer_to(peer, encoded, now_s)
        outcome, is_released = send(peer, parts)
        if outcome == GONE:
            self.tree.on_disconnect(peer)  # before it is named to others
        if outcome != SENT or parts is not encoded.parts:
            return False

        if len(self._sent) >= MAX_WAITING:
            del self._sent[next(iter(self._sent))]
        copy = SentCopy(encoded.stamp, is_released, sent_s=now_s, host=host)
        self._sent[peer] = copy
        self._held.add(peer, copy)
        return True

    def _answer_to(self, peer: bytes, encoded: EncodedVersion, now_s: float) -> wire.Parts:
        """Return the newest copy for a peer, or the message that names the relay to ask."""
        run_id = self._welcome.run_id
        policy_id = self._board.policy_id
        if self.tree.must_listen(peer):
            return wire.encode_weights_at(None, run_id, policy_id)
        parent = self.tree.place(peer, now_s)
        if parent is None:
            return encoded.parts

        weights_at = wire.WeightsAt(
            stamp=encoded.stamp,
            nbytes=encoded.nbytes,
            address=parent.address,
            key=parent.key,
            sha256=encoded.sha256,
            depth=min(parent.depth, wire.MAX_DEPTH),
        )
        return wire.encode_weights_at(weights_at, run_id, policy_id)

    def _encode(self) -> EncodedVersion:
        """Encode the newest version of the board."""
        # New memory each time: messages of the previous version may still be on their way.
        layout = self._welcome.layout
        policy_id = self._board.policy_id
        values = np.empty(layout.size, np.float32)
        stamp = self._board.read(values, policy_id=policy_id)
        assert stamp is not None
        parts = wire.encode_weights(
            values, stamp, self._dtype, layout, run_id=self._welcome.run_id, policy_id=policy_id
        )
        return EncodedVersion(stamp, parts)


def run(ctx: RoleContext) -> None:
    """Serve weights at `relay_socket` until asked to stop: the main function of a relay.

    Exits with EXIT_REJOIN when the learner is gone or was replaced.
    """
    assert ctx.address is not None
    patience_s = ctx.config.run.hang_timeout_s if ctx.config else DEFAULT_PATIENCE_S
    client = Client(ctx, ctx.address, patience_s=patience_s)

    try:
        client.join()
        _serve(ctx, client)
    except (LearnerGoneError, UnknownPolicyError):  # the latter: it has fewer chairs than before
        if not ctx.stopping():
            raise SystemExit(EXIT_REJOIN) from None
    finally:
        client.close()


def _serve(ctx: RoleContext, client: Client) -> None:
    """Publish version after version on this host's boards, until asked to stop."""
    welcome = client.welcome
    boards = [
        WeightsBoard.create(welcome.layout.size, policy_id=policy_id)
        for policy_id in range(POLICY_ID, 1 + welcome.chairs)
    ]
    host = ShmHost(relay_socket(ctx.runtime_dir, ctx.learner), welcome, boards)
    host.watch(client.socket.FD)
    puller = WeightsPuller(
        client,
        watch=host.watch,
        unwatch=host.unwatch,
        report=lambda text: ctx.event("relay", text),
    )
    ctx.report("ready")
    ctx.status.phase = Phase.RECEIVING

    ledger = ctx.ledger
    try:
        while not ctx.stopping():
            ledger.switch(Part.RECEIVE)
            # This comes before the puller's turn, which reads what has arrived.
            for board in boards[1:]:
                _follow_chair(client, board)
            turn = puller.turn()
            if turn.weights is not None:
                ledger.switch(Part.PUBLISH)
                boards[POLICY_ID].publish(turn.weights.values, turn.weights.stamp)
                ledger.switch(Part.RECEIVE)
            ledger.switch(Part.WAIT)
            host.poll(0 if turn.busy else puller.wait_s(TICK_S))
    finally:
        ctx.status.phase = Phase.STOPPING
        puller.close()
        host.close()
        for board in boards:
            board.close()


def _follow_chair(client: Client, board: WeightsBoard) -> None:
    """Publish the weights of a chair that have arrived, and request the next ones.

    Relays fetch them from the connector alone: they are rare. Raises LearnerGoneError, and
    UnknownPolicyError where the learner has no such chair.
    """
    policy_id = board.policy_id
    weights = client.take_weights(policy_id)
    if weights is not None:
        board.publish(weights.values, weights.stamp, policy_id)
    client.ask_weights(board.stamp, policy_id)
