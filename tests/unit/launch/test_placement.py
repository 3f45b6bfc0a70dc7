"""Which roles of a run are on which host, given the cores of each."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.role_spec import RoleSpec
from penstock.launch import placement, topology
from penstock.transport.zmq.keys import read_keys, write_keys

NETWORK = ("transport.kind=zmq", "transport.bind=tcp://*:7700", "transport.insecure=true")


def config(*overrides: str) -> Config:
    return resolve("cartpole", ["eval.every_steps=null", "actors.count=4", *overrides])


def names(specs: tuple[RoleSpec, ...], role: str) -> list[str]:
    return [spec.name for spec in specs if spec.role == role]


def test_a_run_that_fits_on_the_largest_host_stays_in_shared_memory(tmp_path: Path) -> None:
    made = placement.adapt_to_hosts(config(), [2, 5, 4], tmp_path)
    assert made.transport == config().transport
    assert not list(tmp_path.iterdir())


def test_run_on_a_single_host_stays_there_even_if_too_small(tmp_path: Path) -> None:
    assert placement.adapt_to_hosts(config("actors.count=40"), [2], tmp_path).transport.bind is None


def test_a_larger_run_is_given_an_address_and_keys(tmp_path: Path) -> None:
    made = placement.adapt_to_hosts(config(), [2, 4], tmp_path).transport
    assert made.kind == "zmq"
    assert made.bind is not None
    host, _, port = made.bind.rpartition(":")
    assert (host, int(port) in placement.PORTS) == ("tcp://*", True)
    assert made.curve == str(tmp_path / "keys")
    again = placement.adapt_to_hosts(config(), [2, 4], tmp_path).transport
    assert again.curve == made.curve, "a resumed run has the same keys"


def test_address_and_keys_of_the_user_are_kept(tmp_path: Path) -> None:
    made = placement.adapt_to_hosts(config(*NETWORK), [2, 4], tmp_path).transport
    assert (made.bind, made.curve, made.insecure) == ("tcp://*:7700", None, True)


def test_explicit_shared_memory_is_refused_if_the_run_needs_several_hosts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"transport\.kind shm keeps all .* the 5 cores of 4 act"):
        placement.adapt_to_hosts(config("transport.kind=shm"), [4, 4], tmp_path)


@pytest.mark.parametrize(
    ("hosts", "overrides", "count"),
    [
        ([4, 8], (), "3..9"),  # three groups
        ([4, 8], ("learner.threads=2", "actors.threads=3"), "1..3"),
        ([16, 16, 16], (), "15..45"),
        ([16, 16], ("learner.count=3",), "13..24"),
        ([2, 2, 2], (), "2..4"),
        ([4, 8], ("transport.max_policy_lag=0",), 9),  # all take turns
        ([8], (), 7),
        ([8], ("learner.count=3",), 3),
        ([1], (), 1),
    ],
)
def test_auto_uses_the_cores_that_learners_leave(
    hosts: list[int], overrides: tuple[str, ...], count: int | str, tmp_path: Path
) -> None:
    given = config("actors.count=auto", *overrides)
    assert placement.adapt_to_hosts(given, hosts, tmp_path).actors.count == count


def test_auto_fills_the_batches_of_all_learners_on_too_few_cores(tmp_path: Path) -> None:
    given = resolve("pong", ["actors.count=auto", "learner.count=4"])
    made = placement.adapt_to_hosts(given, [2, 2], tmp_path)
    assert (
        made.actors.count == 8
    )  # more than the cores: each learner trains on two slots, and an actor has one
    Config.model_validate(made.model_dump(mode="json"))  # as a role does


@pytest.mark.parametrize(("nodes", "gpus"), [(2, 0), (8, 0), (2, 1), (8, 1), (2, 4)])
def test_auto_fills_hosts_of_one_size(nodes: int, gpus: int, tmp_path: Path) -> None:
    """Each bundle on the emptiest host, as Ray places them; none is left over."""
    gpu_options = [f"learner.count={nodes * gpus}", "learner.device=cuda"] if gpus else []
    given = resolve("pong", ["actors.count=auto", *gpu_options])
    hosts = [16] * nodes
    made = placement.adapt_to_hosts(given, hosts, tmp_path)
    _, bundles = placement.make_bundles(topology.train_roles(made, tmp_path), hosts)
    free = [[16, gpus] for _ in hosts]
    for bundle in sorted(bundles, key=lambda bundle: not bundle.required):
        fitting = [h for h in free if h[0] >= bundle.cpus and h[1] >= bundle.gpus]
        assert fitting, bundle
        host = max(fitting, key=lambda h: h[0])
        host[0] -= bundle.cpus
        host[1] -= bundle.gpus
    assert sum(cores for cores, _ in free) < nodes, "a core of each host for relays"


def test_actors_are_divided_among_hosts_with_a_relay_for_each_learner(tmp_path: Path) -> None:
    given = config(*NETWORK, "actors.count=6", "learner.count=2")
    specs, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), [4])
    assert [bundle.name for bundle in bundles] == ["learners", "actors-0", "actors-1"]
    assert names(specs, "relay") == [f"relay-{i}" for i in range(4)]
    assert [s.learner for s in specs if s.role == "relay"] == [0, 1, 0, 1]
    assert bundles[1].roles == (*(f"actor-{i}" for i in range(4)), "relay-0", "relay-1")
    assert bundles[2].roles == ("actor-4", "actor-5", "relay-2", "relay-3")
    placed = [role for bundle in bundles for role in bundle.roles]
    assert sorted(placed) == sorted(spec.name for spec in specs)


def test_learners_that_do_not_fit_on_one_host_are_spread_and_meet_at_the_first(
    tmp_path: Path,
) -> None:
    given = config(*NETWORK, "learner.count=3", "actors.count=3", "eval.every_steps=1000")
    specs, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), [2, 2, 2])
    found = {bundle.name: bundle.roles for bundle in bundles}
    assert found["learner-0"] == ("learner-0", "connector-0", "evaluator-0")
    assert found["learner-2"] == ("learner-2", "connector-2")
    hosts = {
        role: f"10.0.0.{number}" for number, bundle in enumerate(bundles) for role in bundle.roles
    }
    placed = {spec.name: spec for spec in placement.with_addresses(specs, hosts, bundles, 20_000)}
    meetings = [placed[f"learner-{rank}"].meets_at or "" for rank in range(3)]
    assert [meeting.rpartition(":")[0] for meeting in meetings] == [f"10.0.0.{r}" for r in range(3)]
    assert len({meeting.rpartition(":")[2] for meeting in meetings}) == 3, "nodes may share a host"
    assert placed["connector-1"].meets_at is None
    assert placed["actor-1"].address == "tcp://10.0.0.1:7701"


def test_learners_placed_on_one_host_meet_on_it(tmp_path: Path) -> None:
    given = config(*NETWORK, "learner.count=2", "actors.count=2")
    specs, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), [2, 2, 2])
    hosts = dict.fromkeys((spec.name for spec in specs), "10.0.0.1")
    assert [bundle.name for bundle in bundles] == ["learners", "actors"]
    assert {spec.meets_at for spec in placement.with_addresses(specs, hosts, bundles, 20_000)} == {
        None
    }


def test_learners_with_one_gpu_each_are_spread_on_a_cluster(tmp_path: Path) -> None:
    options = ("learner.count=4", "actors.count=8", "learner.device=cuda")
    given = placement.adapt_to_hosts(config(*options), [8, 8], tmp_path)  # whose GPUs are not known
    _, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), [8, 8])
    assert [(b.name, b.gpus) for b in bundles][:4] == [(f"learner-{r}", 1) for r in range(4)]
    assert all(bundle.gpus == 0 for bundle in bundles[4:])
    _, bundles = placement.make_bundles(topology.train_roles(given, tmp_path))  # on a single host
    assert (bundles[0].name, bundles[0].gpus) == ("learners", 4)
    served = placement.adapt_to_hosts(config(*options, "learner.pace=ssp"), [8, 8], tmp_path)
    _, bundles = placement.make_bundles(topology.train_roles(served, tmp_path), [8, 8])
    assert (bundles[0].name, bundles[0].gpus) == ("learners", 4)


def test_gpu_learners_are_spread_even_with_few_actors(tmp_path: Path) -> None:
    options = ("learner.count=2", "actors.count=2", "learner.device=cuda")
    given = placement.adapt_to_hosts(config(*options), [8, 8], tmp_path)
    assert given.transport.kind == "zmq"
    _, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), [8, 8])
    assert [b.name for b in bundles] == ["learner-0", "learner-1", "actors"]
    alone = placement.adapt_to_hosts(config(*options), [8], tmp_path)
    assert alone.transport.bind is None
    by_name = placement.adapt_to_hosts(config(*options, "transport.kind=shm"), [8, 8], tmp_path)
    _, bundles = placement.make_bundles(topology.train_roles(by_name, tmp_path), [8, 8])
    assert [b.name for b in bundles] == ["learners"], "memory is shared on one host only"


def test_a_parameter_server_needs_its_learners_on_one_host(tmp_path: Path) -> None:
    given = config("learner.count=3", "actors.count=3", "learner.pace=ssp")
    with pytest.raises(UserError, match=r"^learner\.pace ssp is for learners of one host, and no"):
        placement.adapt_to_hosts(given, [2, 2, 2], tmp_path)


SPREAD = (
    "learner.count=2",
    "learner.pace=ssp",
    "learner.server_shards=2",
    "learner.server_spread=true",
    "actors.count=2",
)


def test_spread_shards_have_their_own_bundles(tmp_path: Path) -> None:
    given = placement.adapt_to_hosts(config(*SPREAD), [8, 8, 8], tmp_path)
    assert given.transport.curve == str(tmp_path / "keys")
    port = int((given.transport.bind or "").rpartition(":")[2])
    specs, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), [8, 8, 8])
    found = {bundle.name: (bundle.roles, bundle.cpus, bundle.spread) for bundle in bundles}
    assert found.keys() == {"learners", "server-0", "server-1", "actors"}
    assert found["server-1"] == (("server-1",), 1, True)
    assert found["learners"][1:] == (2, False)
    hosts = {role: f"10.0.0.{n}" for n, bundle in enumerate(bundles) for role in bundle.roles}
    placed = {spec.name: spec for spec in placement.with_addresses(specs, hosts, bundles, 20_000)}
    wanted = tuple(f"tcp://{hosts[f'server-{n}']}:{port + 2 + n}" for n in range(2))
    assert placed["learner-0"].servers == placed["learner-1"].servers == wanted
    assert placed["server-1"].address == f"tcp://*:{port + 3}"
    assert placed["actor-1"].address == f"tcp://{hosts['connector-1']}:{port + 1}"


def test_learners_may_be_spread_if_their_server_is_on_the_network(tmp_path: Path) -> None:
    given = placement.adapt_to_hosts(config(*SPREAD, "learner.device=cuda"), [8, 8, 8], tmp_path)
    _, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), [8, 8, 8])
    assert [bundle.name for bundle in bundles if bundle.gpus] == ["learner-0", "learner-1"]
    given = placement.adapt_to_hosts(
        config(*SPREAD, "learner.count=3", "actors.count=3"), [2] * 6, tmp_path
    )
    _, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), [2] * 6)
    names = [bundle.name for bundle in bundles]
    assert names[:5] == ["learner-0", "learner-1", "learner-2", "server-0", "server-1"]


def test_auto_leaves_cores_for_spread_shards(tmp_path: Path) -> None:
    given = config(*SPREAD, "actors.count=auto")
    assert placement.adapt_to_hosts(given, [4, 4, 4], tmp_path).actors.count == "3..6", (
        "4..8 without"
    )


@pytest.mark.parametrize("hosts", [[8], []], ids=["a cluster of one host", "no cluster"])
@pytest.mark.parametrize("bind", [(), ("transport.bind=tcp://*:7700", "transport.insecure=true")])
@pytest.mark.parametrize("actors", ["2", "2..20"])
def test_shards_on_one_host_stay_in_the_runtime_folder(
    hosts: list[int], bind: tuple[str, ...], actors: str, tmp_path: Path
) -> None:
    wanted = config(*SPREAD, *bind, f"actors.count={actors}")
    given = (
        placement.adapt_to_hosts(wanted, hosts, tmp_path)
        if hosts
        else placement.adapt_to_this_host(wanted)
    )
    servers = tuple(f"ipc://{tmp_path}/server-{n}" for n in range(2))
    by_hand = topology.learner_roles(given, "tcp://*:7700", tmp_path)
    for specs in (topology.train_roles(given, tmp_path), by_hand):
        assert {spec.servers for spec in specs if spec.role == "learner"} == {servers}
    _, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), hosts)
    assert bundles[0].name == "learners"
    assert {"server-0", "server-1"} <= set(bundles[0].roles)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("transport.kind=shm",), r"keeps the run on one host, and learner\.server_spread"),
        (
            ("transport.bind=tcp://10.0.0.1:7700", "transport.insecure=true"),
            r"10\.0\.0\.1:7700 is an address of one host, and .* set transport\.bind=tcp://\*:PORT",
        ),
    ],
)
def test_spreading_shards_is_refused_without_network_access(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        placement.adapt_to_hosts(config(*SPREAD, *options), [8, 8], tmp_path)


def test_spread_shards_need_an_explicit_port(tmp_path: Path) -> None:
    given = config(*SPREAD, "transport.bind=tcp://*:0", "transport.insecure=true")
    with pytest.raises(UserError, match=r"at ports after tcp://\*:0, which leaves the port to"):
        topology.train_roles(given, tmp_path)


def test_keys_are_copied_completely_and_never_replaced(tmp_path: Path) -> None:
    placement.adapt_to_hosts(config(), [2, 4], tmp_path)
    keys = read_keys(tmp_path / "keys")
    assert set(keys) == {
        "learner.key",
        "learner.key_secret",
        "actor.key_secret",
        "allowed/actor.key",
    }
    for _ in range(2):
        write_keys(tmp_path / "there" / "keys", keys)
    assert read_keys(tmp_path / "there" / "keys") == keys
    secret = tmp_path / "there" / "keys" / "learner.key_secret"
    assert secret.stat().st_mode & 0o077 == 0
    with pytest.raises(OSError, match=r"is of another run; choose another run\.dir"):
        write_keys(tmp_path / "there" / "keys", {"learner.key": "other"})


def test_elastic_actors_have_their_own_bundles(tmp_path: Path) -> None:
    given = placement.adapt_to_hosts(config("actors.count=2..5"), [2], tmp_path)
    assert given.transport.kind == "zmq", "more hosts may come"
    specs, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), [2, 2, 2])
    found = {bundle.name: (bundle.required, bundle.cpus) for bundle in bundles}
    assert found["actors-0"] == (True, 2)
    assert found["actors-1"] == (False, 2)
    assert found["actors-2"] == (False, 1)
    later = {spec.name for spec in specs if spec.spare}
    assert later == {"actor-2", "actor-3", "actor-4", "relay-1", "relay-2"}


def test_actor_range_that_fits_on_one_host_starts_with_its_maximum(tmp_path: Path) -> None:
    given = placement.adapt_to_hosts(config("actors.count=2..4"), [2, 8], tmp_path)
    assert (given.actors.count, given.transport.bind) == (4, None)


def test_elastic_learners_have_their_own_bundles(tmp_path: Path) -> None:
    given = placement.adapt_to_hosts(config("learner.count=1..3"), [16], tmp_path)
    assert given.transport.kind == "zmq", "more hosts may come"
    specs, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), [16])
    found = {bundle.name: (bundle.required, bundle.cpus, bundle.roles) for bundle in bundles}
    assert found["learner-0"] == (True, 1, ("learner-0", "connector-0", "evaluator-0"))
    assert found["learner-1"] == (False, 1, ("learner-1", "connector-1"))
    assert found["learner-2"] == (False, 1, ("learner-2", "connector-2"))
    assert found["actors"][:2] == (True, 4)
    assert [s.name for s in specs if s.role == "relay" and s.spare] == ["relay-1", "relay-2"]
    hosts = {spec.name: "10.0.0.1" for spec in specs}
    hosts |= dict.fromkeys(found["learner-2"][2], "")  # Ray has not found one yet
    placed = {spec.name: spec for spec in placement.with_addresses(specs, hosts, bundles, 20_000)}
    assert placed["learner-1"].meets_at == "10.0.0.1:20001"
    address = placed["relay-1"].address or ""
    assert address.startswith("tcp://10.0.0.1:")
    assert (placed["relay-2"].address or "").startswith("tcp://127.0.0.1:"), "not without a host"
    again = placement.with_addresses(specs, dict.fromkeys(hosts, "10.0.0.1"), bundles, 20_000)
    assert {spec.name: spec for spec in again}["relay-1"].address == address


def test_elastic_learners_need_a_transport_between_hosts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"learner\.count 1\.\.2 has learners on hosts of their"):
        placement.adapt_to_hosts(
            config("learner.count=1..2", "transport.kind=shm"), [8, 8], tmp_path
        )


def test_elastic_learners_need_a_cluster() -> None:
    with pytest.raises(
        UserError, match=r"learner\.count 1\.\.2 starts .* add --engine ray, or set"
    ):
        placement.adapt_to_this_host(config("learner.count=1..2"))


@pytest.mark.parametrize("bind", ["tcp://10.0.0.1:7700", "ipc:///tmp/wire"])
@pytest.mark.parametrize("hosts", [[8], [8, 8]])
def test_elastic_learners_listen_on_every_host(tmp_path: Path, hosts: list[int], bind: str) -> None:
    options = ("learner.count=1..2", "transport.insecure=true")
    message = (
        r" is an address of one host, and learner\.count 1\.\.2 needs .* transport\.bind=tcp://\*"
    )
    with pytest.raises(UserError, match=message):
        placement.adapt_to_hosts(config(*options, f"transport.bind={bind}"), hosts, tmp_path)
    given = placement.adapt_to_hosts(
        config(*options, "transport.bind=tcp://*:7700"), hosts, tmp_path
    )
    assert given.transport.bind == "tcp://*:7700"


@pytest.mark.parametrize(
    ("hosts", "overrides", "count"),
    [
        ([4], ("learner.count=1..4",), "3..12"),
        ([4], ("learner.count=2..4",), "2..8"),
        ([16], ("learner.count=1..3",), "15..45"),
        ([16, 16], ("learner.count=1..3",), "15..45"),
        ([16, 16, 16, 16], ("learner.count=1..3",), "15..60"),
    ],
)
def test_auto_leaves_room_for_elastic_learners_and_their_actors(
    hosts: list[int], overrides: tuple[str, ...], count: str, tmp_path: Path
) -> None:
    given = placement.adapt_to_hosts(config("actors.count=auto", *overrides), hosts, tmp_path)
    assert given.actors.count == count
    Config.model_validate(given.model_dump(mode="json"))  # as a role does
    _, bundles = placement.make_bundles(topology.train_roles(given, tmp_path), hosts)
    free = list(hosts)
    for bundle in (bundle for bundle in bundles if bundle.required):
        host = max(range(len(free)), key=free.__getitem__)
        free[host] -= bundle.cpus
        assert free[host] >= 0, bundle
    later = [b for b in bundles if not b.required and b.name.startswith("actors")]
    assert all(0 < bundle.cpus < max(hosts) for bundle in later), "a learner is on their host"
    assert later


def test_keys_written_incompletely_are_removed(tmp_path: Path) -> None:
    """As on a full disk: the next attempt must not find a part of them."""
    keys = {"learner.key": "text"}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_keys(tmp_path, keys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
    write_keys(tmp_path, keys)
    assert read_keys(tmp_path) == keys
