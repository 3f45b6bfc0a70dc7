"""Weights over ZeroMQ: the relay on each actor host pulls them, the connector answers.

The relay is one process per actor host. It requests weights, one version at a time, and publishes
them on a board in shared memory. So the hundred actors of a host cost the learner's link one copy,
and reading weights costs an actor no message.

Nothing is queued. A request names the version that the relay has; the connector's
`WeightsResponder` replies when another version exists: at once, or as soon as the learner publishes
(long poll). A slow relay skips versions, and a late one starts with the newest. Waiting requests
are examined again when there is another version, not in every turn.
"""

from __future__ import annotations

import time

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

TICK_S = 0.05
# most bytes of weights per second of one host: limits the load of the learner
MAX_NBYTES_PER_S = 32e6
MAX_WAITING = 1 << 14  # peers that wait for another version; most of them may have left


class WeightsResponder:
    """Answers requests for weights; encodes each version of the board's policy at most once."""

    def __init__(self, board: WeightsBoard, welcome: Welcome, dtype: WireDtype) -> None:
        self._board = board
        self._welcome = welcome
        self._dtype = dtype
        self._asks: dict[bytes, Stamp | None] = {}  # not examined yet
        self._content: set[bytes] = set()  # peers that had the newest version at the last check
        self._newest: Stamp | None = None  # at the last check
        self._stamp: Stamp | None = None
        self._parts: wire.Parts = []

    def ask(self, peer: bytes, have: Stamp | None) -> bool:
        """Note a request of a peer that has the version ``have``.

        Returns whether one was waiting already.
        """
        waiting = peer in self._asks or peer in self._content
        if len(self._content) >= MAX_WAITING:
            self._content.pop()  # the peer asks again
        self._content.discard(peer)
        self._asks[peer] = have
        return waiting

    def due(self) -> list[tuple[bytes, wire.Parts]]:
        """The answers that are possible now, as peer and message."""
        newest = self._board.stamp
        if newest is None:
            return []
        if newest != self._newest:
            self._asks |= dict.fromkeys(self._content, self._newest)
            self._content.clear()
            self._newest = newest
        if not self._asks:
            return []
        asks, self._asks = self._asks, {}
        self._content.update(peer for peer, have in asks.items() if have == newest)
        peers = [peer for peer, have in asks.items() if have != newest]
        if peers and newest != self._stamp:
            self._encode()
        return [(peer, self._parts) for peer in peers]

    def _encode(self) -> None:
        # New memory each time: messages of the previous version may still be on their way.
        layout = self._welcome.layout
        values = np.empty(layout.size, np.float32)
        stamp = self._board.read(values, policy_id=self._board.policy_id)
        assert stamp is not None
        run_id = self._welcome.run_id
        policy_id = self._board.policy_id
        self._parts = wire.encode_weights(values, stamp, self._dtype, layout, run_id, policy_id)
        self._stamp = stamp


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
    host.watch(client.socket.FD, lambda: None)
    ctx.report("ready")
    ctx.status.phase = Phase.RECEIVING
    ledger = ctx.ledger
    have: Stamp | None = None
    ask_at = 0.0
    try:
        while not ctx.stopping():
            ledger.switch(Part.RECEIVE)
            if time.monotonic() >= ask_at:
                client.ask_weights(have)
            client.pump(0)  # before waiting: the descriptor signals only new events
            fresh = client.take_weights()
            if fresh is not None:
                have, values = fresh
                ledger.switch(Part.PUBLISH)
                board.publish(values, have)
                ledger.switch(Part.RECEIVE)
                ask_at = time.monotonic() + values.nbytes / MAX_NBYTES_PER_S
                continue
            ledger.switch(Part.WAIT)
            host.poll(max(0.001, min(TICK_S, ask_at - time.monotonic())) if have else TICK_S)
    finally:
        ctx.status.phase = Phase.STOPPING
        host.close()
        board.close()
