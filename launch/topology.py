"""The processes of each command, as data: specs of roles that a supervisor starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.configs.errors import UserError
from penstock.configs.learner import PACES
from penstock.configs.transports import AUTO, TRANSPORTS, TransportSpec
from penstock.core.cores import most_actors
from penstock.core.role import StoreAddress
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.machines import own_address
from penstock.launch.placement import free_port
from penstock.transport.addresses import (
    address_of_rank,
    connector_addresses,
    own_server_addresses,
    reachable,
    run_bind,
    server_addresses,
)

if TYPE_CHECKING:
    from penstock.configs.schema import Config

REMOTE_NICE = 5
"""Niceness of actors that join, which start before they receive the learner's config."""
EVALUATOR_NICER = 1
"""How much nicer the evaluator is than actors; at 5, 15 actors on two cores left it 2 % of them."""


def train_roles(config: Config, runtime_dir: Path) -> tuple[RoleSpec, ...]:
    """Returns all roles of a run on this host.

    Learners precede actors, as they take longest to start. Raises UserError for a run that games
    play.
    """
    _refuse_games(config)
    count = config.learner.most_count
    transport = TRANSPORTS.same_host_spec(config.transport.kind)

    # In lockstep mode one process is actors and learner.
    if transport.one_process:
        lockstep = RoleSpec(
            role="lockstep",
            index=0,
            main="penstock.launch.lockstep:run",
            stage=Stage.LEARNER,
            nice=config.learner.nice,
            threads=config.learner.first_threads,
            gpus=_gpus(config),
        )
        return (lockstep, *_single_roles(config))

    # Actors on other hosts reach each learner at an address of its connectors, and get its weights
    # from relays. With `transport.bind`, further actors may join those of shared memory.
    bind = run_bind(config.transport, runtime_dir)
    by_network = transport.reaches_other_hosts
    addresses: list[str | None] = [None] * count
    connectors: tuple[RoleSpec, ...] = ()
    relays: tuple[RoleSpec, ...] = ()
    if by_network:
        addresses = [reachable(address_of_rank(bind, rank)) for rank in range(count)]
        relays = _relays(transport, addresses)
    if by_network or config.transport.bind:
        connectors = _connectors(config, bind, range(count))

    learners = [_learner(config, rank, address) for rank, address in enumerate(addresses)]
    return (
        *_server(config, runtime_dir),
        *_with_servers(config, runtime_dir, _with_spare(config, learners)),
        *_own_actors(config, addresses),
        *_with_spare(config, connectors),
        *_with_spare(config, relays),
        *_single_roles(config),
    )


def learner_roles(config: Config, bind: str, runtime_dir: Path) -> tuple[RoleSpec, ...]:
    """Returns the roles of learners without actors of their own; actors join them.

    Args:
        config: the config of the run.
        bind: address at which the first connector of the first learner listens.
        runtime_dir: folder for Unix sockets.

    Raises UserError for a run that games play.
    """
    _refuse_games(config)
    ranks = range(config.learner.most_count)
    learners = [_learner(config, rank, None) for rank in ranks]
    return (
        *_server(config, runtime_dir),
        *_with_servers(config, runtime_dir, learners),
        *_connectors(config, bind, ranks),
        *_single_roles(config),
    )


def serve_env_roles(
    config: Config, bind: str, listen: Mapping[str, Any], runtime_dir: Path
) -> tuple[RoleSpec, ...]:
    """Returns the roles of a run that games play: learners, and a connector of games for each.

    Args:
        config: the config of the run.
        bind: address at which the games of the first learner connect; the ports of the others
            follow.
        listen: which games are served, as in `RoleSpec`.
        runtime_dir: folder for Unix sockets.
    """
    ranks = range(config.learner.most_count)
    learners = [_learner(config, rank, None) for rank in ranks]
    connectors = [
        RoleSpec(
            role="connector",
            index=rank,
            main="penstock.serving.games_role:run",
            stage=Stage.CARRIERS,
            threads=config.actors.threads,
            address=address_of_rank(bind, rank),
            learner=rank,
            listen=listen,
        )
        for rank in ranks
    ]
    return (
        *_server(config, runtime_dir),
        *_with_servers(config, runtime_dir, learners),
        *connectors,
        *_single_roles(config),
    )


def one_of_several(
    config: Config, bind: str, rank: int, store: StoreAddress
) -> tuple[RoleSpec, ...]:
    """Returns the roles of one learner among several that are started one by one.

    Args:
        config: the config of the run.
        bind: address at which the first connector of the first learner listens.
        rank: rank of the learner. If the pace has a parameter server, the learner has the shards
            whose number, modulo the number of learners, is its rank.
        store: where all learners meet.

    Raises UserError for a run that games play.
    """
    _refuse_games(config)
    shard_addresses: dict[int, str] = {}
    if config.learner.served:
        host = own_address(store.host)
        offsets = range(rank, config.learner.server_shards, config.learner.most_count)
        port = free_port(host, offsets)
        shard_addresses = own_server_addresses(config, bind, rank, host, port)

    shards = [_shard(config, number, address) for number, address in shard_addresses.items()]
    learner = _learner(config, rank, None, store)
    return (
        *(replace(shard, store=store) for shard in shards),
        replace(learner, servers=tuple(shard_addresses.values())),
        *_connectors(config, bind, [rank]),
        *(_single_roles(config) if rank == 0 else ()),
    )


def actor_roles(count: int, address: str, transport: str) -> tuple[RoleSpec, ...]:
    """Returns actors that join a learner and receive its config in the handshake.

    Args:
        count: number of actors.
        address: address of the learner.
        transport: value of --transport.
    """
    by_network = transport == AUTO or TRANSPORTS.same_host_spec(transport).reaches_other_hosts
    relays = _relays(TRANSPORTS.other_hosts_spec(transport), [address]) if by_network else ()
    return (*_actors(count, nice=REMOTE_NICE, threads=1, addresses=[address]), *relays)


def describe_roles(specs: Iterable[RoleSpec]) -> str:
    """Returns the roles as text, without spare ones: "learner, 2 actors, relay"."""
    counts: dict[str, int] = {}
    for spec in specs:
        counts.setdefault(spec.role, 0)
        if not spec.spare:
            counts[spec.role] += 1
    return ", ".join(role if count == 1 else f"{count} {role}s" for role, count in counts.items())


def _refuse_games(config: Config) -> None:
    """Raise UserError for a run that games play, by a command that starts no port for them."""
    if config.actors.games:
        raise UserError(
            "actors.games true is of a run that games play, and this command starts no port for "
            "them; use penstock serve-env, or set actors.games=false with actors.count and "
            "actors.envs of your own"
        )


def _server(config: Config, runtime_dir: Path) -> tuple[RoleSpec, ...]:
    """Returns the parameter server of the paces that have one: a role for each shard."""
    if not config.learner.served:
        return ()
    addresses = server_addresses(config, runtime_dir)
    return tuple(_shard(config, number, address) for number, address in enumerate(addresses))


def _shard(config: Config, number: int, address: str) -> RoleSpec:
    """Returns one shard of the parameter server, which listens at ``address``."""
    main = PACES.specs[config.learner.pace].server
    return RoleSpec("server", number, main, Stage.SERVER, address=address)


def _with_servers(
    config: Config, runtime_dir: Path, learners: Iterable[RoleSpec]
) -> Iterator[RoleSpec]:
    """Yields the learners, with the addresses of their parameter server if they have one."""
    servers: tuple[str, ...] = ()
    if config.learner.served:
        servers = tuple(map(reachable, server_addresses(config, runtime_dir)))
    for spec in learners:
        yield replace(spec, servers=servers)


def _learner(
    config: Config, rank: int, address: str | None, store: StoreAddress | None = None
) -> RoleSpec:
    """Returns one learner.

    Args:
        config: the config of the run.
        rank: rank of the learner.
        address: where actors of this run reach it; None: in shared memory only.
        store: where several learners that are started one by one meet.
    """
    return RoleSpec(
        role="learner",
        index=rank,
        main="penstock.learner.role:run",
        stage=Stage.LEARNER,
        nice=config.learner.nice,
        threads=config.learner.first_threads,
        address=address,
        informed=True,
        learner=rank,
        store=store,
        gpus=_gpus(config),
    )


def _gpus(config: Config) -> int:
    """Returns the number of GPUs that a learner needs."""
    return 1 if config.learner.device.startswith("cuda") else 0


def _actors(
    count: int, *, nice: int, threads: int, addresses: list[str | None] | list[str]
) -> tuple[RoleSpec, ...]:
    """Returns actors, assigned to the learners in turn.

    Args:
        count: number of actors.
        nice: niceness of their processes.
        threads: number of threads of each.
        addresses: address of each learner, by rank; None: they share its memory.
    """
    specs = []
    for index in range(count):
        rank = index % len(addresses)
        spec = RoleSpec(
            role="actor",
            index=index,
            main="penstock.actors.role:run",
            stage=Stage.ACTORS,
            nice=nice,
            threads=threads,
            address=addresses[rank],
            learner=rank,
        )
        specs.append(spec)
    return tuple(specs)


def _own_actors(config: Config, addresses: list[str | None]) -> Iterator[RoleSpec]:
    """Yields the actors of a run; those that it may need later are spare."""
    specs = _actors(
        most_actors(config),
        nice=config.actors.nice,
        threads=config.actors.threads,
        addresses=addresses,
    )
    for spec in specs:
        yield replace(spec, spare=spec.index >= config.first_actors)


def _with_spare(config: Config, specs: Iterable[RoleSpec]) -> Iterator[RoleSpec]:
    """Yields roles of learners; those of learners with which the run does not begin are spare."""
    for spec in specs:
        yield replace(spec, spare=spec.learner >= config.learner.first_count)


def _single_roles(config: Config) -> tuple[RoleSpec, ...]:
    """Returns the roles that a run has once, whatever its learners are."""
    return tuple(spec for make in SINGLE_ROLES for spec in make(config))


def _evaluator(config: Config) -> tuple[RoleSpec, ...]:
    """Returns the evaluator, if the run has one. It has a low priority, and stops last."""
    if not config.has_evaluator:
        return ()

    evaluator = RoleSpec(
        role="evaluator",
        index=0,
        main="penstock.evaluation.evaluator:run",
        stage=Stage.EVALUATOR,
        nice=min(19, config.actors.nice + EVALUATOR_NICER),
        expendable=True,
    )
    return (evaluator,)


SINGLE_ROLES: list[Callable[[Config], tuple[RoleSpec, ...]]] = [_evaluator]
"""Each makes the specs of one role that a run has once; none where the config does not want it."""


def _connectors(config: Config, bind: str, ranks: Iterable[int]) -> tuple[RoleSpec, ...]:
    """Returns the connectors of the learners of ``ranks``.

    Those of a learner have successive indices. ``bind`` is where the first connector of the first
    learner listens.
    """
    main = "penstock.launch.connector:run"
    specs = []
    for rank in ranks:
        first_index = rank * config.transport.first_connectors
        for index, address in enumerate(connector_addresses(config, bind, rank), first_index):
            specs.append(
                RoleSpec("connector", index, main, Stage.CARRIERS, address=address, learner=rank)
            )
    return tuple(specs)


def _relays(transport: TransportSpec, addresses: Sequence[str | None]) -> tuple[RoleSpec, ...]:
    """Returns the relays that bring the weights of each learner to this host."""
    main = transport.relay
    if main is None:
        return ()
    return tuple(
        RoleSpec("relay", rank, main, Stage.CARRIERS, address=address, learner=rank, relays=True)
        for rank, address in enumerate(addresses)
    )


def role_arguments(run_dir: Path, runtime_dir: Path) -> dict[str, Any]:
    """Returns the arguments of every role, with defaults for those that only some commands set."""
    return {
        "run_dir": str(run_dir.absolute()),
        "runtime_dir": str(runtime_dir),
        "config": None,
        "resume": "no",
        "transport": "auto",
        "curve": None,
        "insecure": False,
        "allow": [],
        "group_begun": False,
        "wait_s": None,
    }
