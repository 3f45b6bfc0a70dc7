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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

# The most copies of a version that the connector, or a relay, sends.
FANOUT = 5
# With fewer relays a tree saves nothing.
MIN_RELAYS = 2 * FANOUT
# With fewer bytes in the copies of a version there is no tree: a quarter of a second of 1 Gbit/s.
MIN_NBYTES = 32_000_000
# The most relays that are remembered; further ones are sent copies.
MAX_RELAYS = 4096
# A relay asks every second while it waits; after this silence it is no parent.
ALIVE_S = 10.0
# After this silence a relay is forgotten.
FORGET_S = 60.0
# After a relay has failed, none of its host is named for so long.
REST_S = 60.0


class Parent(NamedTuple):
    """The relay that another one is to ask; ``depth`` relays are between the two ends."""

    address: str
    key: str
    depth: int


@dataclass
class _Relay:
    """What is known of a relay, whatever the version."""

    order: int
    """Its place: the longer one works, the nearer it is to the connector. So parents change
    rarely."""
    address: str | None
    """Where it serves others: None while it does not listen, empty if it cannot."""
    key: str
    """The public CURVE key of its socket; empty without CURVE."""
    last_request_s: float
    """When it last requested weights."""
    host: str = ""
    """Host of its last address; stays when it serves no more, or is gone."""
    parent: _Relay | None = None
    """The last relay that it was sent to."""
    needs_copy: bool = False
    """Whether only a copy from the connector helps, because its parent was of no use."""


@dataclass
class _Node:
    """A relay that can serve ``free`` more relays with a version."""

    relay: bytes
    free: int


class _VersionTree:
    """The tree of one version of the weights."""

    def __init__(self, fanout: int) -> None:
        self.parents: dict[bytes, bytes | None] = {}
        """The parent of each relay that was placed; None for the connector."""
        self.depths: dict[bytes, int] = {}
        """The number of relays between each relay that was placed and the connector."""
        self._fanout = fanout
        self._connector_copies = fanout  # copies that the connector still sends
        self._level: deque[_Node] = deque()  # where the next children go, one by one in turns
        self._next_level: deque[_Node] = deque()

    def add(self, relay: bytes, parent: bytes | None, *, serves: bool) -> None:
        """Place a relay below its parent, or the connector (None).

        ``serves``: whether the relay can have children.
        """
        self.parents[relay] = parent
        self.depths[relay] = 0 if parent is None else self.depths[parent] + 1
        if serves:
            self._next_level.append(_Node(relay, self._fanout))

    def take_place(self, can_serve: Callable[[bytes], bool]) -> bytes | None:
        """Return the parent for the next relay: None for the connector.

        A relay that ``can_serve`` denies gets no more children.
        """
        if self._connector_copies:
            self._connector_copies -= 1
            return None

        while self._level or self._next_level:
            if not self._level:
                self._level, self._next_level = self._next_level, self._level
            node = self._level.popleft()
            if can_serve(node.relay):
                node.free -= 1
                if node.free:
                    self._level.append(node)
                return node.relay
        return None  # no relay has room, so the connector sends one copy more


class RelayTree:
    """The relays of one policy's weights, and the tree of their newest version.

    Call `on_new_version` when there is one, and `on_request` for each request of a relay. Then
    `place` decides from whom the relay gets the version.
    """

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
        self._nbytes = nbytes
        self._fanout = fanout
        self._min_relays = min_relays
        self._min_nbytes = min_nbytes
        self._relays: dict[bytes, _Relay] = {}  # by the routing id of the connection
        self._rests: dict[str, float] = {}  # end of the rest by host of a parent that failed
        self._last_order = 0
        self._version = _VersionTree(fanout)

    @property
    def in_use(self) -> bool:
        """Whether there are enough relays for a tree."""
        count = len(self._relays)
        return count >= self._min_relays and count * self._nbytes >= self._min_nbytes

    def on_request(
        self, peer: bytes, address: str | None, key: str, failure: str, now_s: float
    ) -> None:
        """Note that a relay requests weights, and what it says about its last parent.

        Args:
            peer: the routing id of its connection.
            address: where it serves others: None for not yet, empty for never.
            key: the public CURVE key of its socket.
            failure: why its last parent was of no use, one of `wire.FAILURES`; empty if it was.
            now_s: the time.
        """
        relay = self._relays.get(peer)
        if relay is None:
            if len(self._relays) >= MAX_RELAYS:
                return
            relay = _Relay(self._next_order(), address, key, last_request_s=now_s)
            self._relays[peer] = relay
        relay.address = address
        relay.key = key
        relay.last_request_s = now_s
        relay.host = (address or "").rpartition(":")[0] or relay.host
        relay.needs_copy = bool(failure)

        # A parent is blamed once. That it has a newer version is no fault.
        parent, relay.parent = relay.parent, None
        if parent is not None and failure in ("late", "wrong"):
            self._rests[parent.host] = now_s + REST_S
            parent.order = self._next_order()

    def on_disconnect(self, peer: bytes) -> None:
        """Note that the connection of a relay is closed."""
        self._relays.pop(peer, None)

    def on_new_version(self, now_s: float) -> None:
        """Begin the tree of a newer version, of which no relay has a copy."""
        self._version = _VersionTree(self._fanout)
        self._rests = {host: end_s for host, end_s in self._rests.items() if now_s < end_s}
        self._relays = {
            peer: relay
            for peer, relay in self._relays.items()
            if now_s - relay.last_request_s <= FORGET_S
        }

    def ordered(self, peers: Iterable[bytes]) -> list[bytes]:
        """Return the ``peers`` that request this version in the order in which to place them.

        Relays come first, the longest-serving before the others.
        """
        last = self._last_order + 1

        def order_of(peer: bytes) -> int:
            relay = self._relays.get(peer)
            return last if relay is None else relay.order

        return sorted(peers, key=order_of)

    def must_listen(self, peer: bytes) -> bool:
        """Whether a relay is to open its socket, and to ask again, before it is placed."""
        relay = self._relays.get(peer)
        if relay is None or relay.needs_copy:
            return False
        return self.in_use and relay.address is None

    def place(self, peer: bytes, now_s: float) -> Parent | None:
        """Return the parent of a peer for this version; None if the connector sends it a copy.

        A peer that was placed keeps its parent, as long as that can serve it.
        """
        relay = self._relays.get(peer)
        if relay is None or not self.in_use:
            return None

        version = self._version
        if peer not in version.parents:
            parent_peer = None
            if not relay.needs_copy:
                parent_peer = version.take_place(lambda node: self._can_serve(node, now_s))
            version.add(peer, parent_peer, serves=bool(relay.address))

        parent_peer = version.parents[peer]
        if parent_peer is None or relay.needs_copy or not self._can_serve(parent_peer, now_s):
            return None
        parent = self._relays[parent_peer]
        relay.parent = parent
        assert parent.address
        return Parent(parent.address, parent.key, version.depths[peer])

    def _next_order(self) -> int:
        """Return the place at the end of the tree."""
        self._last_order += 1
        return self._last_order

    def _can_serve(self, peer: bytes, now_s: float) -> bool:
        """Whether a relay listens, is alive, and no parent on its host has failed lately."""
        relay = self._relays.get(peer)
        if relay is None or not relay.address:
            return False
        alive = now_s - relay.last_request_s <= ALIVE_S
        return alive and now_s >= self._rests.get(relay.host, 0.0)
