"""The roles of a run, their addresses, and how they are bundled for hosts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.interfaces import Bundle
from penstock.core.role import StoreAddress
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch import placement, topology
from penstock.transport.addresses import address_of_rank, reachable

RUNTIME = Path("/tmp/penstock-x")


UNEVALUATED = ("eval.every_steps=null", "stop.confirm_episodes=0")


def train(*overrides: str) -> tuple[RoleSpec, ...]:
    return topology.train_roles(resolve("CartPole-v1", [*UNEVALUATED, *overrides]), RUNTIME)


def addresses(specs: tuple[RoleSpec, ...]) -> dict[str, str | None]:
    return {spec.name: spec.address for spec in specs}


@pytest.mark.parametrize("kind", ["auto", "shm"])
def test_run_on_one_host_has_only_a_learner_and_actors(kind: str) -> None:
    specs = train(f"transport.kind={kind}", "actors.count=2", "actors.nice=7", "learner.threads=3")
    assert addresses(specs) == {"learner-0": None, "actor-0": None, "actor-1": None}
    learner, actor, _ = specs
    assert (learner.stage, learner.threads, learner.informed) == (Stage.LEARNER, 3, True)
    assert (actor.stage, actor.nice, actor.essential) == (Stage.ACTORS, 7, False)


def test_run_over_the_wire_adds_a_connector_and_a_relay() -> None:
    wire = f"ipc://{RUNTIME}/wire"
    assert addresses(train("transport.kind=zmq", "actors.count=1")) == {
        "learner-0": wire,
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


def test_inproc_transport_is_one_lockstep_role() -> None:
    [spec] = train("transport.kind=inproc")
    assert (spec.name, spec.essential) == ("lockstep-0", True)


def test_roles_started_by_hand_are_only_those_of_the_command() -> None:
    config = resolve("CartPole-v1", UNEVALUATED)
    specs = topology.learner_roles(config, "tcp://10.0.0.1:7700", RUNTIME)
    assert addresses(specs) == {"learner-0": None, "connector-0": "tcp://10.0.0.1:7700"}
    specs = topology.actor_roles(2, "tcp://10.0.0.1:7700", "auto")
    assert set(addresses(specs)) == {"actor-0", "actor-1", "relay-0"}
    assert not any(spec.informed for spec in specs)
    assert topology.describe_roles(specs) == "2 actors, relay"
    assert len(topology.actor_roles(2, "tcp://10.0.0.1:7700", "shm")) == 2


@pytest.mark.parametrize(
    ("bind", "connect"),
    [
        ("tcp://0.0.0.0:7700", "tcp://127.0.0.1:7700"),
        ("tcp://*:7700", "tcp://127.0.0.1:7700"),
        ("tcp://[::]:7700", "tcp://127.0.0.1:7700"),
        ("tcp://10.0.0.1:7700", "tcp://10.0.0.1:7700"),
        ("ipc:///tmp/x", "ipc:///tmp/x"),
    ],
)
def test_wildcard_bind_address_is_reached_by_loopback(bind: str, connect: str) -> None:
    assert reachable(bind) == connect


def test_the_address_of_a_host_may_be_of_ipv6() -> None:
    assert reachable("tcp://*:7700", "fd00::7") == "tcp://[fd00::7]:7700"


def test_each_learner_has_a_share_of_the_actors() -> None:
    specs = train("learner.count=2", "actors.count=5")
    assert [s.name for s in specs if s.informed] == ["learner-0", "learner-1"]
    learner_of = {spec.name: spec.learner for spec in specs}
    assert learner_of == {
        "learner-0": 0,
        "learner-1": 1,
        "actor-0": 0,
        "actor-1": 1,
        "actor-2": 0,
        "actor-3": 1,
        "actor-4": 0,
    }
    assert topology.describe_roles(specs) == "2 learners, 5 actors"


def test_each_learner_has_its_own_wire_address() -> None:
    specs = train("learner.count=2", "actors.count=3", "transport.kind=zmq")
    for spec in specs:
        assert spec.address == f"ipc://{RUNTIME}/wire" + ("-1" if spec.learner else "")
    roles = [spec.name for spec in specs if spec.stage is Stage.CARRIERS]
    assert roles == ["connector-0", "connector-1", "relay-0", "relay-1"]


def test_a_learner_may_have_several_connectors_behind_one_address() -> None:
    options = ("learner.count=2", "actors.count=4", "transport.connectors=2")
    found = addresses(train(*options, "transport.bind=tcp://*:7700", "transport.insecure=true"))
    assert {name: at for name, at in found.items() if name.startswith("connector")} == {
        "connector-0": "tcp://*:7700",
        "connector-1": "tcp://*:7702",
        "connector-2": "tcp://*:7701",
        "connector-3": "tcp://*:7703",
    }
    specs = train(*options, "transport.kind=zmq")
    assert {spec.address for spec in specs if spec.role == "actor"} == {
        f"ipc://{RUNTIME}/wire",
        f"ipc://{RUNTIME}/wire-1",
    }
    assert [spec.learner for spec in specs if spec.role == "connector"] == [0, 0, 1, 1]


@pytest.mark.parametrize("port", ["0", "*"])
def test_several_connectors_need_an_explicit_port(port: str) -> None:
    with pytest.raises(UserError, match=r"transport.connectors is 2, and .* leaves the port"):
        train("transport.connectors=2", f"transport.bind=tcp://127.0.0.1:{port}")


def test_learners_of_one_host_listen_at_ports_side_by_side() -> None:
    config = resolve("CartPole-v1", ["learner.count=3", "actors.count=3"])
    specs = topology.learner_roles(config, "tcp://127.0.0.1:7700", RUNTIME)
    connectors = [spec.address for spec in specs if spec.role == "connector"]
    assert connectors == [f"tcp://127.0.0.1:{port}" for port in (7700, 7701, 7702)]


def test_parameter_server_runs_beside_learners_and_ends_after_them() -> None:
    server, *others = train("learner.count=2", "actors.count=2", "learner.pace=ssp")
    assert (server.name, server.address) == ("server-0", f"ipc://{RUNTIME}/server-0")
    assert server.stage > max(spec.stage for spec in others)
    assert server.essential


def test_each_shard_of_a_parameter_server_is_a_process() -> None:
    specs = train("learner.count=2", "learner.pace=ssp", "learner.server_shards=3")
    servers = [spec for spec in specs if spec.role == "server"]
    assert [spec.name for spec in servers] == ["server-0", "server-1", "server-2"]
    assert len({spec.address for spec in servers}) == 3


@pytest.mark.parametrize("kind", ["shm", "inproc", "zmq"])
def test_evaluator_is_nicer_than_actors_and_expendable(kind: str) -> None:
    options = ("eval.every_s=60", "actors.nice=6", "checkpoint.every_steps=9")
    *others, evaluator = train(*options, f"transport.kind={kind}")
    assert (evaluator.name, evaluator.nice, evaluator.expendable) == ("evaluator-0", 7, True)
    assert not evaluator.essential
    assert not any(spec.expendable for spec in others)
    [*_, nicest] = train("eval.every_s=60", "actors.nice=19")
    assert nicest.nice == 19


@pytest.mark.parametrize(
    ("options", "evaluated"),
    [
        ((), True),
        (("stop.return=null",), True),
        (("eval.every_steps=null",), True),  # `stop.return` must be confirmed
        (("eval.every_steps=null", "stop.return=null"), False),
        (("eval.every_steps=null", "stop.confirm_episodes=0"), False),
        (("transport.kind=inproc",), False),
        (("transport.kind=inproc", "eval.every_s=60", "checkpoint.every_steps=9"), True),
    ],
)
def test_run_has_an_evaluator_only_if_evaluations_are_due(
    options: tuple[str, ...], evaluated: bool
) -> None:
    specs = topology.train_roles(resolve("CartPole-v1", options), RUNTIME)
    assert ("evaluator-0" in addresses(specs)) is evaluated


def test_only_the_first_of_several_machines_has_an_evaluator() -> None:
    options = ["learner.count=2", "actors.count=2", "eval.every_s=60"]
    config, store = resolve("CartPole-v1", options), StoreAddress("10.0.0.1", 29500)
    roles = [
        [spec.role for spec in topology.one_of_several(config, "tcp://0.0.0.0:7700", rank, store)]
        for rank in (0, 1)
    ]
    assert roles == [["learner", "connector", "evaluator"], ["learner", "connector"]]


def test_learner_of_several_machines_has_its_connector_in_its_command() -> None:
    config = resolve("CartPole-v1", [*UNEVALUATED, "learner.count=3", "actors.count=3"])
    store = StoreAddress("10.0.0.1", 29500)
    learner, connector = topology.one_of_several(config, "tcp://0.0.0.0:7700", 2, store)
    assert (learner.name, learner.learner, learner.store) == ("learner-2", 2, store)
    assert (connector.address, connector.learner) == ("tcp://0.0.0.0:7702", 2)


def one_of(rank: int, bind: str, *options: str) -> dict[str, RoleSpec]:
    """The roles of one of three learners that are started by hand, by name."""
    found = ["learner.count=3", "actors.count=3", "learner.pace=ssp", *UNEVALUATED, *options]
    store = StoreAddress("127.0.0.1", 29500)
    specs = topology.one_of_several(resolve("CartPole-v1", found), bind, rank, store)
    return {spec.name: spec for spec in specs}


def test_each_of_several_machines_has_its_share_of_the_parameter_server() -> None:
    bind, shards = "tcp://0.0.0.0:7700", "learner.server_shards=5"
    found = [one_of(rank, bind, shards, "transport.connectors=2") for rank in range(3)]
    servers = [[name for name in specs if name.startswith("server")] for specs in found]
    assert servers == [["server-0", "server-3"], ["server-1", "server-4"], ["server-2"]]
    first = found[0]
    # six connectors listen before them, and the store is reached from this address
    assert first["learner-0"].servers == ("tcp://127.0.0.1:7706", "tcp://127.0.0.1:7709")
    assert first["server-3"].address == "tcp://127.0.0.1:7709"
    assert first["server-3"].store == first["learner-0"].store


def test_single_shard_runs_on_the_first_machine() -> None:
    found = [one_of(rank, "tcp://0.0.0.0:7700") for rank in range(3)]
    assert [specs[f"learner-{rank}"].servers for rank, specs in enumerate(found)] == [
        ("tcp://127.0.0.1:7703",),
        (),
        (),
    ]


@pytest.mark.parametrize("bind", ["ipc:///tmp/x", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0"])
def test_shards_get_a_port_when_actors_have_none(bind: str) -> None:
    [address] = one_of(0, bind)["learner-0"].servers
    assert int(address.rpartition(":")[2]) in placement.PORTS


def test_shards_get_ports_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        monkeypatch.setattr(placement, "PORTS", range(port - 8, port + 9))
        for _ in range(20):
            servers = one_of(0, "ipc:///tmp/x", "learner.server_shards=7")["learner-0"].servers
            ports = [int(address.rpartition(":")[2]) for address in servers]
            assert len(ports) == 3
            assert port not in ports


def test_ports_of_shards_end_with_those_of_the_machine() -> None:
    with pytest.raises(UserError, match="would listen up to port 65536, and the last port is"):
        one_of(1, "tcp://127.0.0.1:65532", "learner.server_shards=2")


@pytest.mark.parametrize(
    ("bind", "third"),
    [
        ("tcp://0.0.0.0:7700", "tcp://0.0.0.0:7702"),
        ("tcp://[::1]:7700", "tcp://[::1]:7702"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("ipc:///tmp/x", "ipc:///tmp/x-2"),
    ],
)
def test_bind_address_of_the_third_learner_is_two_ports_higher(bind: str, third: str) -> None:
    assert address_of_rank(bind, 0) == bind
    assert address_of_rank(bind, 2) == third


def test_port_beyond_65535_is_refused() -> None:
    with pytest.raises(UserError, match=r"port 65534 \+ 2, and the last port is 65535; give"):
        address_of_rank("tcp://127.0.0.1:65534", 2)


def test_roles_that_share_memory_or_unix_sockets_are_one_bundle() -> None:
    for kind in ("shm", "zmq"):
        specs = train(f"transport.kind={kind}", "learner.count=2", "actors.count=4")
        _, [bundle] = placement.make_bundles(specs)
        assert bundle.roles == tuple(spec.name for spec in specs)


def test_network_actors_are_bundled_with_their_relay() -> None:
    bind = ("transport.kind=zmq", "transport.bind=tcp://*:7700", "transport.insecure=true")
    specs = train(*bind, "actors.count=3", "learner.threads=2", "learner.device=cuda")
    _, (learners, actors) = placement.make_bundles(specs)
    assert learners == Bundle("learners", ("learner-0", "connector-0"), 2, 1)
    assert actors == Bundle("actors", ("actor-0", "actor-1", "actor-2", "relay-0"), 3, 0)


def test_roles_reach_the_connector_of_another_host() -> None:
    bind = ("transport.kind=zmq", "transport.bind=tcp://*:7700", "transport.insecure=true")
    specs = train(*bind, "actors.count=1", "learner.count=1")
    hosts = dict.fromkeys(("learner-0", "connector-0"), "10.0.0.1")
    hosts |= dict.fromkeys(("actor-0", "relay-0"), "10.0.0.2")
    assert addresses(placement.with_addresses(specs, hosts, (), 20_000)) == {
        "learner-0": "tcp://10.0.0.1:7700",
        "actor-0": "tcp://10.0.0.1:7700",
        "connector-0": "tcp://*:7700",
        "relay-0": "tcp://10.0.0.1:7700",
    }
    assert placement.with_addresses(specs, dict.fromkeys(hosts, "10.0.0.1"), (), 20_000) == specs
