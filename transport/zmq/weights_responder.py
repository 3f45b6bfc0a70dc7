"""Where a connector hands out weights: each asker gets the newest, once, and nothing is queued.

An asker names the version that it has and is answered when there is another: at once, or as soon as
the learner publishes. A slow asker so skips versions, and a late one starts with the newest. Those
who wait are looked at again when there is another version, and not in every turn.
"""

from __future__ import annotations

import numpy as np

from penstock.core.interfaces import Welcome
from penstock.core.params import Stamp, WireDtype
from penstock.transport import wire
from penstock.transport.shm.weights_board import WeightsBoard

MAX_WAITING = 1 << 14  # peers that wait for another version; most of them may have left


class WeightsResponder:
    """Reads the board of one policy and encodes each version at most once."""

    def __init__(self, board: WeightsBoard, welcome: Welcome, dtype: WireDtype) -> None:
        self._board = board
        self._welcome = welcome
        self._dtype = dtype
        self._asks: dict[bytes, Stamp | None] = {}  # not looked at yet
        self._content: set[bytes] = set()  # who had the newest at the last look
        self._newest: Stamp | None = None  # at the last look
        self._stamp: Stamp | None = None
        self._parts: wire.Parts = []

    def ask(self, peer: bytes, have: Stamp | None) -> bool:
        """Note what a peer has; whether it was waiting for an answer already."""
        waiting = peer in self._asks or peer in self._content
        if len(self._content) >= MAX_WAITING:
            self._content.pop()  # it asks again
        self._content.discard(peer)
        self._asks[peer] = have
        return waiting

    def due(self) -> list[tuple[bytes, wire.Parts]]:
        """The answers that can be given now, as peer and message."""
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
        # Fresh memory each time: messages of the version before may still be on their way out.
        layout = self._welcome.layout
        values = np.empty(layout.size, np.float32)
        stamp = self._board.read(values, policy_id=self._board.policy_id)
        assert stamp is not None
        run_id = self._welcome.run_id
        policy_id = self._board.policy_id
        self._parts = wire.encode_weights(values, stamp, self._dtype, layout, run_id, policy_id)
        self._stamp = stamp
