"""Nodes of a Ray cluster on which host agents do not start."""

from __future__ import annotations

from penstock.launch.engines.ray_engine import MOST_FAILURES, NODE_LABEL, RefusedNodes

ALIVE = ("a", "b", "c")


def refuse(nodes: RefusedNodes, node: str) -> list[bool]:
    return [nodes.count_failure(node, ALIVE) for _ in range(MOST_FAILURES)]


def test_a_node_is_given_up_once_after_some_failed_starts() -> None:
    nodes = RefusedNodes()
    assert nodes.selector() is None
    assert refuse(nodes, "b") == [False] * (MOST_FAILURES - 1) + [True]
    assert nodes.selector() == [{NODE_LABEL: "!in(b)"}]
    assert not nodes.count_failure("b", ALIVE), "its bundle was asked for before"
    refuse(nodes, "a")
    assert nodes.selector() == [{NODE_LABEL: "!in(a,b)"}]


def test_departed_nodes_are_forgotten_and_unknown_nodes_not_counted() -> None:
    nodes = RefusedNodes()
    refuse(nodes, "b")
    assert not nodes.count_failure("", ALIVE)
    assert not nodes.count_failure("c", ("a", "c"))
    assert nodes.selector() is None
