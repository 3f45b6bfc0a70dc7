"""The processes of each command, as data: specs of roles that a supervisor starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.configs.learner import PACES
from penstock.configs.transports import AUTO, TRANSPORTS, TransportSpec
from penstock.core.cores import most_actors
from penstock.core.role import Store
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.machines import own_address
from penstock.launch.placement import free_port
from penstock.transport.addresses import (
    bind_of,
    connector_addresses,
    own_server_addresses,
    reachable,
    run_bind,
    server_addresses,
)

if TYPE_CHECKING:
    from penstock.configs.schema import Config

# Niceness of actors that join, which start before they receive the learner's config.
REMOTE_NICE = 5
# How much nicer the evaluator is than actors; at 5, 15 actors on two cores left it 2 % of them.
EVALUATOR_NICER = 1


def train(config: Config, runtime_dir: Path) -> tuple[RoleSpec, ...]:
    """Returns all roles of a run on this host.

    Learners precede actors, as they take longest to start.
    """
    transport, count = config.transport, config.learner.most_count
    joined_by = TRANSPORTS.here(transport.kind)

    # In lockstep mode one process is actors and learner.
    if joined_by.one_process:
        main = "penstock.launch.lockstep:run"
        threads = config.learner.first_threads
        nice, gpus = config.learner.nice, _gpus(config)
        lockstep = RoleSpec("lockstep", 0, main, Stage.LEARNER, nice, threads, gpus=gpus)
        return (lockstep, *_beside(config))

    # Actors on other hosts reach each learner at an address of its connectors, and get its weights
    # from relays.
    bind = transport.bind
    wire = run_bind(config.transport, runtime_dir)
    sends = joined_by.reaches_other_hosts
    addresses = [reachable(bind_of(wire, rank)) if sends else None for rank in range(count)]
    learners = (_learner(config, rank, address) for rank, address in enumerate(addresses))

    return (
        *_server(config, runtime_dir),
        *_served(config, runtime_dir, _with_spare(config, learners)),
        *_own_actors(config, addresses),
        *(_with_spare(config, _connectors(config, wire, range(count))) if sends or bind else ()),
        *(_with_spare(config, _relays(joined_by, addresses)) if sends else ()),
        *_beside(config),
    )


def learner(config: Config, bind: str, runtime_dir: Path) -> tuple[RoleSpec, ...]:
    """Returns the roles of learners without actors of their own; actors join them.

    Args:
        config: the config of the run.
        bind: address at which the first connector of the first learner listens.
        runtime_dir: folder for Unix sockets.
    """
    ranks = range(config.learner.most_count)
    return (
        *_server(config, runtime_dir),
        *_served(config, runtime_dir, (_learner(config, rank, None) for rank in ranks)),
        *_connectors(config, bind, ranks),
        *_beside(config),
    )


def one_of_several(config: Config, bind: str, rank: int, store: Store) -> tuple[RoleSpec, ...]:
    """Returns the roles of one learner among several that are started one by one.

    Args:
        config: the config of the run.
        bind: address at which the first connector of the first learner listens.
        rank: rank of the learner. If the pace has a parameter server, the learner has the shards
            whose number, modulo the number of learners, is its rank.
        store: where all learners meet.
    """
    beside = _beside(config) if rank == 0 else ()
    shards: dict[int, str] = {}
    if config.learner.served:
        host = own_address(store.host)
        offsets = range(rank, config.learner.server_shards, config.learner.most_count)
        port = free_port(host, offsets)
        shards = own_server_addresses(config, bind, rank, host, port)

    learner = replace(_learner(config, rank, None, store), servers=tuple(shards.values()))
    return (
        *(
            replace(_shard(config, shard, address), store=store)
            for shard, address in shards.items()
        ),
        learner,
        *_connectors(config, bind, [rank]),
        *beside,
    )


def actors(count: int, address: str, transport: str) -> tuple[RoleSpec, ...]:
    """Returns actors that join a learner and receive its config in the handshake.

    Args:
        count: number of actors.
        address: address of the learner.
        transport: value of --transport.
    """
    joined_by = TRANSPORTS.elsewhere(transport)
    sends = transport == AUTO or TRANSPORTS.here(transport).reaches_other_hosts
    relays = _relays(joined_by, [address]) if sends else ()
    return (*_actors(count, REMOTE_NICE, 1, [address]), *relays)


def names(specs: Iterable[RoleSpec]) -> str:
    """Returns the roles as text, without spare ones: "learner, 2 actors, relay"."""
    counts: dict[str, int] = {}
    for spec in specs:
        counts[spec.role] = counts.get(spec.role, 0) + (not spec.spare)
    return ", ".join(role if n == 1 else f"{n} {role}s" for role, n in counts.items())


def _server(config: Config, runtime_dir: Path) -> tuple[RoleSpec, ...]:
    """Returns the parameter server of the paces that have one: a role for each shard."""
    if not config.learner.served:
        return ()
    addresses = server_addresses(config, runtime_dir)
    return tuple(_shard(config, shard, address) for shard, address in enumerate(addresses))


def _shard(config: Config, shard: int, address: str) -> RoleSpec:
    """Returns one shard of the parameter server, which listens at ``address``."""
    main = PACES.specs[config.learner.pace].server
    return RoleSpec("server", shard, main, Stage.SERVER, address=address)


def _served(config: Config, runtime_dir: Path, learners: Iterable[RoleSpec]) -> Iterator[RoleSpec]:
    """Yields the learners, with the addresses of their parameter server if they have one."""
    served = config.learner.served
    servers = tuple(map(reachable, server_addresses(config, runtime_dir))) if served else ()
    for spec in learners:
        yield replace(spec, servers=servers)


def _learner(
    config: Config, rank: int, address: str | None, store: Store | None = None
) -> RoleSpec:
    """Returns one learner.

    Args:
        config: the config of the run.
        rank: rank of the learner.
        address: where actors of this run reach it; None: in shared memory only.
        store: where several learners that are started one by one meet.
    """
    return RoleSpec(
        "learner",
        rank,
        "penstock.learner.role:run",
        Stage.LEARNER,
        config.learner.nice,
        config.learner.first_threads,
        address=address,
        informed=True,
        learner=rank,
        store=store,
        gpus=_gpus(config),
    )


def _gpus(config: Config) -> int:
    """Returns the number of GPUs that a learner needs."""
    return int(config.learner.device.startswith("cuda"))


def _actors(
    count: int, nice: int, threads: int, addresses: list[str | None] | list[str]
) -> tuple[RoleSpec, ...]:
    """Returns actors, assigned to the learners in turn.

    Args:
        count: number of actors.
        nice: niceness of their processes.
        threads: number of threads of each.
        addresses: address of each learner, by rank; None: they share its memory.
    """
    main = "penstock.actors.role:run"
    ranks = [i % len(addresses) for i in range(count)]
    return tuple(
        RoleSpec("actor", i, main, Stage.ACTORS, nice, threads, addresses[rank], learner=rank)
        for i, rank in enumerate(ranks)
    )


def _own_actors(config: Config, addresses: list[str | None]) -> Iterator[RoleSpec]:
    """Yields the actors of a run; those that it may need later are spare."""
    actors, first = config.actors, config.first_actors
    for spec in _actors(most_actors(config), actors.nice, actors.threads, addresses):
        yield replace(spec, spare=spec.index >= first)


def _with_spare(config: Config, specs: Iterable[RoleSpec]) -> Iterator[RoleSpec]:
    """Yields roles of learners; those of learners with which the run does not begin are spare."""
    for spec in specs:
        yield replace(spec, spare=spec.learner >= config.learner.first_count)


def _beside(config: Config) -> tuple[RoleSpec, ...]:
    """Returns the roles that a run has once, whatever its learners are."""
    return tuple(spec for make in BESIDE for spec in make(config))


def _evaluator(config: Config) -> tuple[RoleSpec, ...]:
    """Returns the evaluator, if the run has one. It has a low priority, and stops last."""
    if not config.has_evaluator:
        return ()
    main, nice = "penstock.evaluation.evaluator:run", min(19, config.actors.nice + EVALUATOR_NICER)
    return (RoleSpec("evaluator", 0, main, Stage.EVALUATOR, nice, expendable=True),)


BESIDE: list[Callable[[Config], tuple[RoleSpec, ...]]] = [_evaluator]
"""Each makes the specs of one role that a run has once; none where the config does not want it."""


def _connectors(config: Config, bind: str, ranks: Iterable[int]) -> tuple[RoleSpec, ...]:
    """Returns the connectors of the learners of ``ranks``.

    Those of a learner have successive indices. ``bind`` is where the first connector of the first
    learner listens.
    """
    main = "penstock.launch.connector:run"
    return tuple(
        RoleSpec("connector", index, main, Stage.CARRIERS, address=address, learner=rank)
        for rank in ranks
        for index, address in enumerate(
            connector_addresses(config, bind, rank), rank * config.transport.first_connectors
        )
    )


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
