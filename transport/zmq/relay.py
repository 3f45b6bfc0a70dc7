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
takes memory, of a version that is needed for nothing else.

With many relays the connector sends a part of them to other relays for a version
(`transport.zmq.relay_tree`), which they fetch as `transport.zmq.relay_peers` describes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple

import numpy as np

from penstock.core.interfaces import LearnerGoneError, Welcome
from penstock.core.params import Stamp, WireDtype
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

TICK_S = 0.05
MAX_WAITING = 1 << 14  # peers that wait for another version; most of them may have left
ARRIVAL_S = 30.0  # after which a copy that was sent is no longer expected to arrive
HOST_NBYTES = 32 << 20  # most that the socket holds of copies to a host, beyond the first


class _Ask(NamedTuple):
    """A request of a peer: the version that it has, and its host."""

    have: Stamp | None
    host: str


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
    ) -> None:
        nbytes = welcome.layout.size * (2 if dtype == "bf16" else 4)
        self.tree = tree or RelayTree(nbytes)
        """The relays; `RelayTree.asked` before `ask`."""
        self._board = board
        self._welcome = welcome
        self._dtype = dtype
        self._asks: dict[bytes, _Ask] = {}  # by peer, not examined or not answered yet
        self._content: dict[bytes, str] = {}  # host by peer that had the newest version
        self._sent: dict[bytes, SentCopy] = {}  # last copy by peer, until it has arrived
        self._held: dict[bytes, SentCopy] = {}  # copies by peer that the socket had not released
        self._newest: Stamp | None = None  # at the last check
        self._stamp: Stamp | None = None
        self._parts: wire.Parts = []
        self._sha256 = ""  # of the encoded weights, once a relay needs it
        self._host_copies = 1  # most copies to a host that the socket may hold

    def ask(self, peer: bytes, have: Stamp | None, host: str = "") -> bool:
        """Note a request of a peer that has the version ``have``.

        Returns whether one was waiting already.
        """
        waiting = peer in self._asks or peer in self._content
        if len(self._content) >= MAX_WAITING:
            self._content.popitem()  # the peer asks again
        self._content.pop(peer, None)
        self._asks[peer] = _Ask(have, host)
        return waiting

    def serve(self, now_s: float, send: Send) -> None:
        """Send the answers that are possible at ``now_s``."""
        newest = self._board.stamp
        if newest is None:
            return
        if newest != self._newest:
            self._asks |= {peer: _Ask(self._newest, host) for peer, host in self._content.items()}
            self._content.clear()
            self._newest = newest
            self.tree.begin(now_s)
        if not self._asks:
            return

        self._held = {peer: copy for peer, copy in self._held.items() if not copy.is_released()}
        asks, self._asks = self._asks, {}
        wanting: dict[bytes, _Ask] = {}
        for peer, ask in asks.items():
            sent = self._sent.get(peer)
            if sent is not None and sent.stamp == ask.have and peer not in self._held:
                del self._sent[peer]  # it has arrived
                sent = None
            if ask.have == newest:
                self._content[peer] = ask.host
            elif peer in self._held or sent is None or now_s >= sent.sent_s + ARRIVAL_S:
                wanting[peer] = ask

        if wanting and newest != self._stamp:
            self._encode()
        hosts = Counter(copy.host for copy in self._held.values())
        for peer in self.tree.ordered(wanting):
            host = wanting[peer].host
            if peer in self._held or hosts[host] >= self._host_copies:
                self._asks[peer] = wanting[peer]  # again in the next turn
            elif self._answer(peer, host, now_s, send):
                hosts[host] += 1

    def _answer(self, peer: bytes, host: str, now_s: float, send: Send) -> bool:
        """Answer a peer; returns whether by a copy."""
        parts = self._answer_to(peer, now_s)
        outcome, is_released = send(peer, parts)
        if outcome == GONE:
            self.tree.gone(peer)  # before it is named to others
        if outcome != SENT or parts is not self._parts:
            return False
        assert self._stamp is not None
        if len(self._sent) >= MAX_WAITING:
            del self._sent[next(iter(self._sent))]
        self._sent[peer] = self._held[peer] = SentCopy(self._stamp, is_released, now_s, host)
        return True

    def _answer_to(self, peer: bytes, now_s: float) -> wire.Parts:
        """The newest copy for a peer, or the relay that it is to ask."""
        run_id, policy_id = self._welcome.run_id, self._board.policy_id
        if self.tree.must_listen(peer):
            return wire.encode_weights_at(None, run_id, policy_id)
        parent = self.tree.place(peer, now_s)
        if parent is None:
            return self._parts

        weights = memoryview(self._parts[2])
        self._sha256 = self._sha256 or hashlib.sha256(weights).hexdigest()
        depth = min(parent.depth, wire.MAX_DEPTH)
        assert self._stamp is not None
        at = wire.WeightsAt(
            self._stamp, weights.nbytes, parent.address, parent.key, self._sha256, depth
        )
        return wire.encode_weights_at(at, run_id, policy_id)

    def _encode(self) -> None:
        # New memory each time: messages of the previous version may still be on their way.
        layout = self._welcome.layout
        values = np.empty(layout.size, np.float32)
        stamp = self._board.read(values, policy_id=self._board.policy_id)
        assert stamp is not None
        run_id = self._welcome.run_id
        policy_id = self._board.policy_id
        self._parts = wire.encode_weights(values, stamp, self._dtype, layout, run_id, policy_id)
        self._stamp, self._sha256 = stamp, ""
        self._host_copies = 1 + HOST_NBYTES // memoryview(self._parts[2]).nbytes


def run(ctx: RoleContext) -> None:
    """Serve weights at `relay_socket` until asked to stop.

    Exits with EXIT_REJOIN when the learner is gone or was replaced.
    """
    assert ctx.address is not None
    patience_s = ctx.config.run.hang_timeout_s if ctx.config else 60.0
    client = Client(ctx, ctx.address, patience_s=patience_s)
    try:
        client.join()
        _serve(ctx, client)
    except LearnerGoneError:
        if not ctx.stopping():
            raise SystemExit(EXIT_REJOIN) from None
    finally:
        client.close()


def _serve(ctx: RoleContext, client: Client) -> None:
    board = WeightsBoard.create(client.welcome.layout.size)
    host = ShmHost(relay_socket(ctx.runtime_dir, ctx.learner), client.welcome, board)
    host.watch(client.socket.FD)
    puller = WeightsPuller(client, host.watch, host.unwatch, lambda text: ctx.event("relay", text))
    ctx.report("ready")
    ctx.status.phase = Phase.RECEIVING
    ledger = ctx.ledger
    try:
        while not ctx.stopping():
            ledger.switch(Part.RECEIVE)
            fresh, busy = puller.turn()
            if fresh is not None:
                ledger.switch(Part.PUBLISH)
                board.publish(fresh[1], fresh[0])
                ledger.switch(Part.RECEIVE)
            ledger.switch(Part.WAIT)
            host.poll(0 if busy else puller.wait_s(TICK_S))
    finally:
        ctx.status.phase = Phase.STOPPING
        puller.close()
        host.close()
        board.close()
