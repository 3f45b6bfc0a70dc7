"""Which relay gets a version of the weights from which other: a connector's decisions, as a rule.

With a few relays the connector sends each a copy. With many, its link would be busy for seconds
with a version, so it sends copies to `FANOUT` relays, and each other one the address of a relay
that has the version or is about to receive it:

    connector ─┬─ relay ─┬─ relay ─── ...
               ├─ relay  ├─ relay
               └─ ...    └─ ...

Each level costs the time of `FANOUT` copies on a link, and the last one that of fewer: with 5, a
version is on 30 hosts after ten copies, on 100 after thirteen. With 3 to 6 the sums differ little
for 30 to 1,000 hosts, and the larger ones have fewer levels, each of which can fail.

Nothing of the tree outlives a version. A relay's parent was placed in the tree of the same version
before it, so there is no loop. A relay whose parent fails asks the connector for a copy. The
connector then names no relay of that parent's host for a minute, whatever connections it opens, and
the parent loses its seniority: it comes back at the end of the tree, where relays have no children.
So dead, slow, unreachable and hostile parents are one case, and cost their children one delay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

FANOUT = 5  # copies that the connector, or a relay, sends of a version
MIN_RELAYS = 2 * FANOUT  # with fewer a tree saves nothing
MIN_NBYTES = 32_000_000  # of the copies of a version: a quarter of a second of 1 Gbit/s
MAX_RELAYS = 4096  # that are remembered; further ones are sent copies
ALIVE_S = 10.0  # a relay asks every second while it waits; after this silence it is no parent
FORGET_S = 60.0
REST_S = 60.0  # time after a relay has failed in which none of its host is named


class Parent(NamedTuple):
    """The relay that another one is to ask; ``depth`` relays are between the two ends."""

    address: str
    key: str
    depth: int


@dataclass
class _Relay:
    order: int  # the longer one works, the nearer it is to the connector: parents change rarely
    address: str | None  # None while it does not listen, empty if it cannot
    key: str
    seen_s: float
    host: str = ""  # host of its last address; stays when it serves no more, or is gone
    parent: _Relay | None = None  # last relay that it was sent to
    direct: bool = False  # whether only a copy from the connector helps


@dataclass
class _Node:
    """A relay that can serve ``free`` more relays with a version."""

    relay: bytes
    free: int


class RelayTree:
    """The relays of one policy's weights, and the tree of their newest version."""

    def __init__(
        self,
        nbytes: int,
        *,
        fanout: int = FANOUT,
        min_relays: int = MIN_RELAYS,
        min_nbytes: int = MIN_NBYTES,
    ) -> None:
        """Make the tree.

        Args:
            nbytes: size of a version.
            fanout: copies that the connector, or a relay, sends of a version.
            min_relays: number of relays from which on there is a tree.
            min_nbytes: size of the copies for all relays from which on there is a tree.
        """
        self._nbytes, self._fanout = nbytes, fanout
        self._min_relays, self._min_nbytes = min_relays, min_nbytes
        self._relays: dict[bytes, _Relay] = {}
        self._rests: dict[str, float] = {}  # end of the rest by host of a parent that failed
        self._joined = 0
        self._copies = fanout  # that the connector has left for this version
        self._level: deque[_Node] = deque()  # where the next child goes, one by one in turns
        self._next_level: deque[_Node] = deque()
        self._placed: dict[bytes, bytes | None] = {}  # parents in this version; None: connector
        self._depths: dict[bytes, int] = {}  # relays between them and the connector

    @property
    def in_use(self) -> bool:
        """Whether there are enough relays for a tree."""
        count = len(self._relays)
        return count >= self._min_relays and count * self._nbytes >= self._min_nbytes

    def asked(self, relay: bytes, address: str | None, key: str, failed: str, now_s: float) -> None:
        """A relay requests weights.

        Args:
            relay: the routing id of its connection.
            address: where it serves others: None for not yet, empty for never.
            key: of its socket.
            failed: why its last parent was of no use; empty if it was.
            now_s: the time.
        """
        asking = self._relays.get(relay)
        if asking is None:
            if len(self._relays) >= MAX_RELAYS:
                return
            asking = self._relays[relay] = _Relay(self._next_order(), address, key, now_s)
        asking.address, asking.key, asking.seen_s = address, key, now_s
        asking.host = (address or "").rpartition(":")[0] or asking.host
        asking.direct = bool(failed)

        parent, asking.parent = asking.parent, None  # blamed once
        if parent is not None and failed in ("late", "wrong"):  # a newer version is no fault
            self._rests[parent.host] = now_s + REST_S
            parent.order = self._next_order()

    def _next_order(self) -> int:
        self._joined += 1
        return self._joined

    def gone(self, relay: bytes) -> None:
        """The connection of a relay is closed."""
        self._relays.pop(relay, None)

    def begin(self, now_s: float) -> None:
        """There is a newer version, of which no relay has a copy."""
        self._copies = self._fanout
        self._level.clear()
        self._next_level.clear()
        self._placed.clear()
        self._depths.clear()
        self._rests = {host: ends_s for host, ends_s in self._rests.items() if now_s < ends_s}
        silent = [r for r, known in self._relays.items() if now_s - known.seen_s > FORGET_S]
        for relay in silent:
            del self._relays[relay]

    def ordered(self, peers: Iterable[bytes]) -> list[bytes]:
        """``peers``, which request this version, in the order in which to place them."""
        last = self._joined + 1
        return sorted(peers, key=lambda p: known.order if (known := self._relays.get(p)) else last)

    def must_listen(self, peer: bytes) -> bool:
        """Whether a relay is to open its socket, and to ask again, before it is placed."""
        known = self._relays.get(peer)
        return self.in_use and known is not None and known.address is None and not known.direct

    def place(self, peer: bytes, now_s: float) -> Parent | None:
        """The parent of a peer for this version; None if the connector sends it a copy."""
        known = self._relays.get(peer)
        if known is None or not self.in_use:
            return None
        if peer not in self._placed:
            above = None if known.direct else self._free_place(now_s)
            self._placed[peer] = above
            self._depths[peer] = 0 if above is None else self._depths[above] + 1
            if known.address:
                self._next_level.append(_Node(peer, self._fanout))
        above = self._placed[peer]
        if above is None or known.direct or not self._can_serve(above, now_s):
            return None
        parent = known.parent = self._relays[above]
        assert parent.address
        return Parent(parent.address, parent.key, self._depths[peer])

    def _free_place(self, now_s: float) -> bytes | None:
        if self._copies:
            self._copies -= 1
            return None
        while self._level or self._next_level:
            if not self._level:
                self._level, self._next_level = self._next_level, self._level
            node = self._level.popleft()
            if self._can_serve(node.relay, now_s):
                node.free -= 1
                if node.free:
                    self._level.append(node)
                return node.relay
        return None  # no relay has room: one copy more

    def _can_serve(self, relay: bytes, now_s: float) -> bool:
        known = self._relays.get(relay)
        if known is None or not known.address:
            return False
        return now_s - known.seen_s <= ALIVE_S and now_s >= self._rests.get(known.host, 0.0)
