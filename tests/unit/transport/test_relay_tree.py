"""Which relay is referred to which other, without sockets."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock.transport.zmq.relay_tree import (
    ALIVE_S,
    FANOUT,
    FORGET_S,
    MAX_RELAYS,
    MIN_RELAYS,
    REST_S,
    RelayTree,
)

NBYTES = 3_400_000  # 1.7 million parameters in bf16
CONNECTOR = ""


def name(number: int) -> bytes:
    return f"relay-{number:04}".encode()


def address(relay: bytes) -> str:
    return f"tcp://{relay.decode()}:1"


def joined(count: int, now_s: float = 0.0, **limits: int) -> tuple[RelayTree, list[bytes]]:
    tree = RelayTree(NBYTES, **limits)
    relays = [name(number) for number in range(count)]
    for relay in relays:
        tree.on_request(relay, address(relay), "", "", now_s)
    tree.on_new_version(now_s)
    return tree, relays


def parents(tree: RelayTree, relays: list[bytes], now_s: float = 0.0) -> dict[bytes, str]:
    """The parent of each relay, in the order of the tree."""
    found = {}
    for relay in tree.ordered(relays):
        parent = tree.place(relay, now_s)
        found[relay] = parent.address if parent else CONNECTOR
    return found


@pytest.mark.parametrize("count", [1, FANOUT, MIN_RELAYS - 1])
def test_few_relays_all_get_copies_from_the_connector(count: int) -> None:
    tree, relays = joined(count)
    assert set(parents(tree, relays).values()) == {CONNECTOR}


def test_small_weights_are_sent_to_all_relays_directly() -> None:
    tree = RelayTree(20_000)
    relays = [name(number) for number in range(100)]
    for relay in relays:
        tree.on_request(relay, address(relay), "", "", 0.0)
    assert set(parents(tree, relays).values()) == {CONNECTOR}


@pytest.mark.parametrize("count", [MIN_RELAYS, 100, 1000])
def test_no_sender_exceeds_the_fan_out(count: int) -> None:
    tree, relays = joined(count)
    sends = Counter(parents(tree, relays).values())
    assert sends[CONNECTOR] == FANOUT
    assert max(sends.values()) == FANOUT
    assert sends.total() == count


def test_last_level_is_spread_evenly_over_the_level_above() -> None:
    tree, relays = joined(100)
    sends = Counter(parents(tree, relays).values())
    last = [sends[address(relay)] for relay in relays[FANOUT : FANOUT + FANOUT**2]]
    assert sum(last) == 70
    assert max(last) == 3


def test_hundred_relays_form_three_levels() -> None:
    tree, relays = joined(100)
    depths = Counter(
        parent.depth if (parent := tree.place(relay, 0.0)) else 0 for relay in tree.ordered(relays)
    )
    assert depths == {0: 5, 1: 25, 2: 70}


def test_parents_are_placed_before_their_children() -> None:
    tree, relays = joined(300)
    before = {CONNECTOR}
    for relay, parent in parents(tree, list(reversed(relays))).items():
        assert parent in before
        before.add(address(relay))


def test_parents_stay_the_same_from_version_to_version() -> None:
    tree, relays = joined(50)
    first = parents(tree, relays)
    tree.on_new_version(1.0)
    assert parents(tree, list(reversed(relays)), 1.0) == first


def test_repeated_request_gets_the_same_parent_and_one_place() -> None:
    tree, relays = joined(30)
    first = parents(tree, relays)
    assert [parents(tree, relays) for _ in range(3)] == [first] * 3


def test_late_relay_is_referred_to_one_that_has_the_version() -> None:
    tree, relays = joined(20)
    parents(tree, relays)
    tree.on_request(b"late", "tcp://late:1", "", "", 0.5)
    parent = tree.place(b"late", 0.5)
    assert parent is not None
    assert parent.address in {address(relay) for relay in relays}


def test_peers_that_are_no_relays_get_copies_and_have_no_children() -> None:
    tree, relays = joined(20)
    assert tree.place(b"actor", 0.0) is None
    assert tree.ordered([b"actor", *relays])[-1] == b"actor"
    assert set(parents(tree, relays).values()) <= {CONNECTOR, *map(address, relays)}


def test_relays_that_cannot_listen_are_leaves() -> None:
    tree, relays = joined(20)
    deaf = relays[:3]
    for relay in deaf:
        tree.on_request(relay, "", "", "", 0.0)
    found = parents(tree, relays)
    assert not {address(relay) for relay in deaf} & set(found.values())
    for relay in relays:
        tree.on_request(relay, "", "", "", 0.0)
    tree.on_new_version(0.0)
    assert set(parents(tree, relays).values()) == {CONNECTOR}, "none can serve"


def test_relays_listen_only_if_there_is_a_tree() -> None:
    tree = RelayTree(NBYTES)
    for number in range(MIN_RELAYS):
        assert not tree.must_listen(name(number))
        tree.on_request(name(number), None, "", "", 0.0)
    assert tree.must_listen(name(0))
    tree.on_request(name(0), "", "", "", 0.0)
    assert not tree.must_listen(name(0)), "it cannot"


def next_version(tree: RelayTree, relays: list[bytes], now_s: float) -> dict[bytes, str]:
    """The parents of a version for which all relays ask."""
    for relay in relays:
        tree.on_request(relay, address(relay), "", "", now_s)
    tree.on_new_version(now_s)
    return parents(tree, relays, now_s)


def test_child_of_a_failed_parent_gets_a_copy_from_the_connector() -> None:
    tree, relays = joined(20)
    parents(tree, relays)
    child = relays[-1]
    tree.on_request(child, address(child), "", "late", 1.0)
    assert tree.place(child, 1.0) is None


def is_named(tree: RelayTree, relays: list[bytes], bad: bytes, where: str, now_s: float) -> bool:
    """Whether a relay at ``where`` becomes a parent when all ``relays`` but it have left, and
    others have joined after it."""
    for relay in relays:
        if relay != bad:
            tree.on_disconnect(relay)
    tree.on_request(bad, where, "", "", now_s)
    newcomers = [name(100 + number) for number in range(MIN_RELAYS)]
    for relay in newcomers:
        tree.on_request(relay, address(relay), "", "", now_s)
    tree.on_new_version(now_s)
    return where in parents(tree, [bad, *newcomers], now_s).values()


def test_failed_parent_is_suspended_and_returns_as_a_leaf() -> None:
    tree, relays = joined(20)
    child = relays[-1]
    parent = parents(tree, relays)[child]
    tree.on_request(child, address(child), "", "wrong", 0.0)
    assert parent not in next_version(tree, relays, REST_S - 1).values()
    last = list(next_version(tree, relays, REST_S + 1))[-1]
    assert address(last) == parent


@pytest.mark.parametrize("leaves", ["after the report", "before the report", "its port first"])
def test_suspended_parent_is_not_named_under_another_connection_or_port(leaves: str) -> None:
    tree, relays = joined(20)
    child = relays[-1]
    parent = parents(tree, relays)[child]
    bad = next(relay for relay in relays if address(relay) == parent)
    if leaves == "its port first":
        tree.on_request(bad, "", "", "", 1.0)
    if leaves == "before the report":
        tree.on_disconnect(bad)
    tree.on_request(child, address(child), "", "late", 1.0)
    other_port = parent.replace(":1", ":2")
    assert not is_named(tree, relays, b"again", other_port, REST_S)
    assert is_named(tree, relays, b"again", other_port, REST_S + 1)


def test_only_children_can_report_a_parent_and_once() -> None:
    tree, relays = joined(20)
    child = relays[-1]
    parent = parents(tree, relays)[child]
    bad = next(relay for relay in relays if address(relay) == parent)
    tree.on_request(relays[0], address(relays[0]), "", "late", 0.0)  # it has no parent
    assert parent in next_version(tree, relays, 1.0).values()
    for now_s in (1.0, 50.0):
        tree.on_request(child, address(child), "", "late", now_s)
    assert is_named(tree, relays, bad, parent, REST_S + 1)


def test_parent_with_a_newer_version_is_not_suspended() -> None:
    tree, relays = joined(20)
    first = parents(tree, relays)
    child = relays[-1]
    tree.on_request(child, address(child), "", "passed", 1.0)
    assert tree.place(child, 1.0) is None
    assert next_version(tree, relays, 1.0) == first


def test_departed_or_silent_relay_is_no_parent() -> None:
    tree, relays = joined(20)
    tree.on_disconnect(relays[0])
    for relay in relays[2:]:
        tree.on_request(relay, address(relay), "", "", ALIVE_S + 1)
    found = parents(tree, relays[1:], ALIVE_S + 1)
    assert not {address(relays[0]), address(relays[1])} & set(found.values())
    assert found[relays[-1]]


def test_parent_that_leaves_within_a_version_is_not_named_again() -> None:
    tree, relays = joined(20)
    first = parents(tree, relays)
    tree.on_disconnect(relays[0])
    again = parents(tree, relays[1:])
    assert address(relays[0]) in first.values()
    assert address(relays[0]) not in again.values()


def test_silent_relays_are_forgotten_and_their_number_is_bounded() -> None:
    tree, _ = joined(MIN_RELAYS)
    assert tree.in_use
    tree.on_new_version(FORGET_S + 1)
    assert not tree.in_use
    for number in range(MAX_RELAYS + 5):
        tree.on_request(name(number), "", "", "", FORGET_S + 1)
    assert len(tree._relays) == MAX_RELAYS
    assert tree.place(name(MAX_RELAYS + 1), FORGET_S + 1) is None
