from __future__ import annotations

from pathlib import Path

import pytest

from penstock.configs.load import resolve
from penstock.launch import topology
from penstock.launch.topology import RoleSpec, Stage, reachable

RUNTIME = Path("/tmp/penstock-x")


def train(*overrides: str) -> tuple[RoleSpec, ...]:
    return topology.train(resolve("CartPole-v1", overrides), RUNTIME)


def addresses(specs: tuple[RoleSpec, ...]) -> dict[str, str | None]:
    return {spec.name: spec.address for spec in specs}


@pytest.mark.parametrize("kind", ["auto", "shm"])
def test_on_one_host_a_run_is_a_learner_and_actors(kind: str) -> None:
    specs = train(f"transport.kind={kind}", "actors.count=2", "actors.nice=7", "learner.threads=3")
    assert addresses(specs) == {"learner-0": None, "actor-0": None, "actor-1": None}
    learner, actor, _ = specs
    assert (learner.stage, learner.threads, learner.informed) == (Stage.LEARNER, 3, True)
    assert (actor.stage, actor.nice, actor.essential) == (Stage.ACTORS, 7, False)


def test_over_the_wire_there_are_a_connector_and_a_relay_too() -> None:
    wire = f"ipc://{RUNTIME}/wire"
    assert addresses(train("transport.kind=zmq", "actors.count=1")) == {
        "learner-0": None,
        "actor-0": wire,
        "connector-0": wire,
        "relay-0": wire,
    }


def test_a_bound_run_lets_others_join_while_its_own_actors_share_memory() -> None:
    bind = "tcp://127.0.0.1:7700"
    assert addresses(train(f"transport.bind={bind}", "actors.count=1")) == {
        "learner-0": None,
        "actor-0": None,
        "connector-0": bind,
    }


def test_one_process_is_lockstep() -> None:
    [spec] = train("transport.kind=inproc")
    assert (spec.name, spec.essential) == ("lockstep-0", True)


def test_a_learner_by_hand_has_no_actors_and_actors_no_learner() -> None:
    config = resolve("CartPole-v1")
    specs = topology.learner(config, "tcp://10.0.0.1:7700")
    assert addresses(specs) == {"learner-0": None, "connector-0": "tcp://10.0.0.1:7700"}
    specs = topology.actors(2, "tcp://10.0.0.1:7700", relay=True)
    assert set(addresses(specs)) == {"actor-0", "actor-1", "relay-0"}
    assert not any(spec.informed for spec in specs)
    assert topology.names(specs) == "2 actors, relay"
    assert len(topology.actors(2, "tcp://10.0.0.1:7700", relay=False)) == 2


@pytest.mark.parametrize(
    ("bind", "connect"),
    [
        ("tcp://0.0.0.0:7700", "tcp://127.0.0.1:7700"),
        ("tcp://*:7700", "tcp://127.0.0.1:7700"),
        ("tcp://10.0.0.1:7700", "tcp://10.0.0.1:7700"),
        ("ipc:///tmp/x", "ipc:///tmp/x"),
    ],
)
def test_what_is_bound_everywhere_is_reached_on_this_host(bind: str, connect: str) -> None:
    assert reachable(bind) == connect
