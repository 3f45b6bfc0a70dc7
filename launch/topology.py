"""Which processes make up a command: data, so that what starts them need not know what they are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.configs.errors import UserError
from penstock.configs.group import SERVED
from penstock.core.role import Store
from penstock.core.role_spec import RoleSpec, Stage

if TYPE_CHECKING:
    from penstock.configs.schema import Config

REMOTE_NICE = 5  # actors of another host start before they hear the learner's config
EVALUATOR_NICER = 5  # than actors
MAX_PORT = 65535


def train(config: Config, runtime_dir: Path) -> tuple[RoleSpec, ...]:
    """Everything on this host. The learners come first: they take longest to start."""
    transport, count = config.transport, config.learner.count
    if transport.kind == "inproc":
        main = "penstock.launch.lockstep:run"
        threads = config.learner.threads
        lockstep = RoleSpec("lockstep", 0, main, Stage.LEARNER, config.learner.nice, threads)
        return (lockstep, *_evaluator(config))
    bind = transport.bind
    wires = (f"ipc://{runtime_dir}/wire-{rank}" for rank in range(count))
    binds = [bind_of(bind, rank) for rank in range(count)] if bind else list(wires)
    over_wire = transport.kind == "zmq"
    addresses = [reachable(bind) if over_wire else None for bind in binds]
    return (
        *_server(config, runtime_dir),
        *(_learner(config, rank, address) for rank, address in enumerate(addresses)),
        *_actors(config.actors.count, config.actors.nice, config.actors.threads, addresses),
        *(_connectors(binds) if over_wire or transport.bind else ()),
        *(_relay(address, rank) for rank, address in enumerate(addresses) if address),
        *_evaluator(config),
    )


def learner(config: Config, bind: str, runtime_dir: Path) -> tuple[RoleSpec, ...]:
    """Learners that others join: no actors of their own."""
    ranks = range(config.learner.count)
    return (
        *_server(config, runtime_dir),
        *(_learner(config, rank, None) for rank in ranks),
        *_connectors([bind_of(bind, rank) for rank in ranks]),
        *_evaluator(config),
    )


def one_of_several(config: Config, bind: str, rank: int, store: Store) -> tuple[RoleSpec, ...]:
    """The learner of one rank; it meets the others at ``store``."""
    evaluator = _evaluator(config) if rank == 0 else ()
    return (_learner(config, rank, None, store), _connector(bind_of(bind, rank), rank), *evaluator)


def actors(count: int, address: str, *, relay: bool) -> tuple[RoleSpec, ...]:
    """Actors that join a learner elsewhere; its config comes in the handshake."""
    carriers = [_relay(address, 0)] if relay else []
    return (*_actors(count, REMOTE_NICE, 1, [address]), *carriers)


def bind_of(bind: str, rank: int) -> str:
    """Where the learner of a rank is joined, given where that of rank 0 is: as many ports higher.

    Raises UserError where there is no such port.
    """
    if bind.startswith("ipc://"):
        return f"{bind}-{rank}" if rank else bind
    host, _, port = bind.rpartition(":")
    if rank == 0 or port in ("*", "0"):
        return bind
    if int(port) + rank > MAX_PORT:
        raise UserError(
            f"the learner of rank {rank} would listen at port {port} + {rank}, and the last port "
            f"is {MAX_PORT}; set transport.bind to a lower port"
        )
    return f"{host}:{int(port) + rank}"


def reachable(bind: str) -> str:
    """Where this host reaches what is bound to ``bind``."""
    return re.sub(r"^tcp://(\*|0\.0\.0\.0):", "tcp://127.0.0.1:", bind)


def names(specs: Iterable[RoleSpec]) -> str:
    """What is started, for a person: "learner, 2 actors, relay"."""
    counts: dict[str, int] = {}
    for spec in specs:
        counts[spec.role] = counts.get(spec.role, 0) + 1
    return ", ".join(role if n == 1 else f"{n} {role}s" for role, n in counts.items())


def _server(config: Config, runtime_dir: Path) -> tuple[RoleSpec, ...]:
    """The parameter server of the paces that have one."""
    if config.learner.pace not in SERVED:
        return ()
    main, address = "penstock.learner.parameter_server.server:run", f"ipc://{runtime_dir}/server"
    threads = config.learner.threads
    return (RoleSpec("server", 0, main, Stage.SERVER, threads=threads, address=address),)


def _learner(
    config: Config, rank: int, address: str | None, store: Store | None = None
) -> RoleSpec:
    return RoleSpec(
        "learner",
        rank,
        "penstock.learner.role:run",
        Stage.LEARNER,
        config.learner.nice,
        config.learner.threads,
        address=address,
        informed=True,
        learner=rank,
        store=store,
    )


def _actors(
    count: int, nice: int, threads: int, addresses: list[str | None] | list[str]
) -> tuple[RoleSpec, ...]:
    """Dealt out to the learners in turn."""
    main = "penstock.actors.role:run"
    ranks = [i % len(addresses) for i in range(count)]
    return tuple(
        RoleSpec("actor", i, main, Stage.ACTORS, nice, threads, addresses[rank], learner=rank)
        for i, rank in enumerate(ranks)
    )


def _evaluator(config: Config) -> tuple[RoleSpec, ...]:
    """It is in nobody's way, and stops while the learners still run."""
    if config.eval.every_s is None:
        return ()
    main, nice = "penstock.evaluation.evaluator:run", min(19, config.actors.nice + EVALUATOR_NICER)
    return (RoleSpec("evaluator", 0, main, Stage.CARRIERS, nice, expendable=True),)


def _connectors(binds: list[str]) -> tuple[RoleSpec, ...]:
    return tuple(_connector(bind, rank) for rank, bind in enumerate(binds))


def _connector(bind: str, rank: int) -> RoleSpec:
    main = "penstock.launch.connector:run"
    return RoleSpec("connector", rank, main, Stage.CARRIERS, address=bind, learner=rank)


def _relay(address: str, rank: int) -> RoleSpec:
    main = "penstock.transport.zmq.relay:run"
    return RoleSpec("relay", rank, main, Stage.CARRIERS, address=address, learner=rank)
