"""Which processes make up a command: data, so that what starts them need not know what they are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.configs.schema import Config

REMOTE_NICE = 5  # actors of another host start before they hear the learner's config


class Stage(IntEnum):
    """The order in which roles are stopped: who produces first, who consumes last."""

    ACTORS = 0
    CARRIERS = 1
    LEARNER = 2


@dataclass(frozen=True)
class RoleSpec:
    """One process. ``main`` is ``module:function``, called with its `RoleContext`.

    A role of the last stage is the run itself: where it ends, the run ends, and nobody starts it
    again. ``informed`` roles hear of every actor that ends.
    """

    role: str
    index: int
    main: str
    stage: Stage
    nice: int = 0
    threads: int = 1
    address: str | None = None
    informed: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def essential(self) -> bool:
        return self.stage is Stage.LEARNER


def train(config: Config, runtime_dir: Path) -> tuple[RoleSpec, ...]:
    """Everything on this host. The learner comes first: it takes longest to start."""
    transport = config.transport
    if transport.kind == "inproc":
        main = "penstock.launch.lockstep:run"
        threads = config.learner.threads
        return (RoleSpec("lockstep", 0, main, Stage.LEARNER, config.learner.nice, threads),)
    bind = transport.bind or f"ipc://{runtime_dir}/wire"
    over_wire = transport.kind == "zmq"
    address = reachable(bind) if over_wire else None
    actors = _actors(config.actors.count, config.actors.nice, config.actors.threads, address)
    return (
        _learner(config),
        *actors,
        *([_connector(bind)] if over_wire or transport.bind else []),
        *([_relay(reachable(bind))] if over_wire else []),
    )


def learner(config: Config, bind: str) -> tuple[RoleSpec, ...]:
    """A learner that others join: no actors of its own."""
    return (_learner(config), _connector(bind))


def actors(count: int, address: str, *, relay: bool) -> tuple[RoleSpec, ...]:
    """Actors that join a learner elsewhere; its config comes in the handshake."""
    carriers = [_relay(address)] if relay else []
    return (*_actors(count, REMOTE_NICE, 1, address), *carriers)


def reachable(bind: str) -> str:
    """Where this host reaches what is bound to ``bind``."""
    return re.sub(r"^tcp://(\*|0\.0\.0\.0):", "tcp://127.0.0.1:", bind)


def names(specs: Iterable[RoleSpec]) -> str:
    """What is started, for a person: "learner, 2 actors, relay"."""
    counts: dict[str, int] = {}
    for spec in specs:
        counts[spec.role] = counts.get(spec.role, 0) + 1
    return ", ".join(role if n == 1 else f"{n} {role}s" for role, n in counts.items())


def _learner(config: Config) -> RoleSpec:
    return RoleSpec(
        "learner",
        0,
        "penstock.learner.main:run",
        Stage.LEARNER,
        config.learner.nice,
        config.learner.threads,
        informed=True,
    )


def _actors(count: int, nice: int, threads: int, address: str | None) -> tuple[RoleSpec, ...]:
    main = "penstock.actors.main:run"
    return tuple(
        RoleSpec("actor", i, main, Stage.ACTORS, nice, threads, address) for i in range(count)
    )


def _connector(bind: str) -> RoleSpec:
    main = "penstock.launch.connector:run"
    return RoleSpec("connector", 0, main, Stage.CARRIERS, address=bind)


def _relay(address: str) -> RoleSpec:
    main = "penstock.transport.relay:run"
    return RoleSpec("relay", 0, main, Stage.CARRIERS, address=address)
