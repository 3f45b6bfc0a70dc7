"""Learners on several machines: their ranks, their rendezvous store, and checks of both.

Learners that are started by hand get --rank, --world and --store. torchrun sets environment
variables instead; it restarts all learners when one has ended, and serves the store itself.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.configs.errors import UserError
from penstock.core.role import Store
from penstock.core.run_dir import Resume

if TYPE_CHECKING:
    from penstock.configs.schema import Config

TORCHRUN = "TORCHELASTIC_RUN_ID"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
EXAMPLE = "--rank 0 --world 2 --store 10.0.0.1:29500"


@dataclass(frozen=True)
class LearnerPlace:
    """This learner among ``world`` of them."""

    rank: int
    world: int
    store: Store
    torchrun: bool = False


def find_place(
    rank: int | None, world: int | None, store: str | None, environ: Mapping[str, str]
) -> LearnerPlace | None:
    """The place of this learner by its options or torchrun; None if this command starts all
    learners.

    Raises UserError for missing options, and for an impossible rank or port.
    """
    options = {"--rank": rank, "--world": world, "--store": store}
    given = [name for name, value in options.items() if value is not None]
    if TORCHRUN in environ:
        if given:
            raise UserError(f"torchrun sets the rank; leave out {', '.join(given)}")
        return _from_torchrun(environ)
    if not given:
        return None
    if rank is None or world is None or store is None:
        missing = ", ".join(name for name, value in options.items() if value is None)
        raise UserError(
            "a learner on one of several machines needs --rank, --world and --store, and "
            f"{missing} is missing; give all three, such as {EXAMPLE}"
        )
    if world < 1:
        raise UserError(f"--world is {world}; it must be a whole number of at least 1")
    if not 0 <= rank < world:
        wrong = "negative" if rank < 0 else f"not below --world {world}"
        raise UserError(
            f"--rank {rank} is {wrong}: ranks count from 0; give --rank 0 to {world - 1}"
        )
    return LearnerPlace(rank, world, _parse(store))


def check_place(place: LearnerPlace, config: Config, environ: Mapping[str, str]) -> None:
    """Raise UserError for options that do not work over several machines."""
    if place.world > 1:
        from penstock.autotune import connectors, envs  # which most runs do not need

        envs.check_not_auto(config, f"{place.world} learners")
        connectors.check_not_auto(config, f"{place.world} learners need the same number")
    if place.torchrun and config.run.dir is None:
        raise UserError(
            "torchrun restarts a learner with the same command, which must find its checkpoint; "
            "set run.dir"
        )
    interface = config.learner.reduce.interface
    known = [name for _, name in socket.if_nameindex()]
    _check_interfaces(interface, known, environ)
    _check_named(place)
    chosen = interface is not None or any(name in environ for name in INTERFACE_VARIABLES)
    if place.world > 1 and not chosen:
        _check_reachable(place.store.host, known)


def check_store(place: LearnerPlace, *, trusted: bool) -> None:
    """Raise UserError for a store of this learner's own that other hosts reach, unless the network
    is ``trusted``: the store has no keys. The store of torchrun is torchrun's."""
    host = place.store.host
    address = _resolve(host)
    if place.store.served or trusted or address is None:
        return
    if not is_loopback(address):
        raise UserError(
            f"--store {host}:{place.store.port} can be reached from other hosts, and connections "
            "between learners are not authenticated; give --trusted-network if all machines on the "
            "network are trusted, or use 127.0.0.1 on one machine"
        )


def where_to_write(place: LearnerPlace, path: Path, resume: Resume) -> tuple[Path, Resume]:
    """Each rank has a run folder of its own; the checkpoint is in that of rank 0."""
    if place.torchrun and resume == "no":
        resume = "auto"
    if not place.rank:
        return path, resume
    return path / f"rank-{place.rank}", "auto" if resume == "must" else resume


def _check_interfaces(interface: str | None, known: list[str], environ: Mapping[str, str]) -> None:
    """Raise UserError for an interface that this machine does not have. The variable of gloo may
    name several; that of NCCL has patterns, which are not checked."""
    gloo = INTERFACE_VARIABLES[0]
    option, given = "learner.reduce.interface", [] if interface is None else [interface]
    if interface is None and environ.get(gloo):
        option, given = gloo, environ[gloo].split(",")
    for name in given:
        if name not in known:
            raise UserError(f"{option} {name} does not exist; this machine has {', '.join(known)}")


def _check_named(place: LearnerPlace) -> None:
    """Raise UserError where rank 0 would serve the store at a loopback address by mistake: as on
    many a Debian, where the machine's own name is 127.0.1.1."""
    store = place.store
    if place.rank or store.served or _is_address(store.host) or store.host == "localhost":
        return
    address = _resolve(store.host)
    if address is not None and is_loopback(address):
        raise UserError(
            f"--store {store.host}:{store.port} resolves to {address} on this machine, which other "
            f"machines cannot reach; give an address of this machine, such as 10.0.0.1:{store.port}"
        )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_reachable(store: str, known: list[str]) -> None:
    """Whether the others could reach this machine, where the ``store`` is another's."""
    address = _resolve(store)
    if address is None:
        raise UserError(
            f"the host {store} of --store cannot be resolved; give its address, such as 10.0.0.1"
        )
    name = socket.gethostname()
    own = _resolve(name)
    if is_loopback(address) or not (own is None or is_loopback(own)):
        return
    what = "cannot be resolved" if own is None else f"resolves to {own}"
    raise UserError(
        f"this machine's name {name} {what}, so learners on other machines cannot reach it; set "
        "learner.reduce.interface to the interface of the shared network, one of "
        f"{', '.join(known)}"
    )


def is_loopback(address: str) -> bool:
    """Whether only this host reaches an address."""
    return ipaddress.ip_address(address).is_loopback


def own_address(other: str) -> str:
    """The address of this machine that it has towards the host ``other``, which is not contacted.

    Raises UserError where there is no way to that host.
    """
    try:
        found = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"this machine has no way to {other}, the host of --store ({error.strerror}); give an "
            "address of rank 0 that all machines reach"
        ) from None


def _from_torchrun(environ: Mapping[str, str]) -> LearnerPlace:
    try:
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if not 0 <= rank < world:
            raise ValueError(f"RANK={rank} with WORLD_SIZE={world}")
        if not 0 < port < 1 << 16:
            raise ValueError(f"MASTER_PORT={port}")
        if attempt < 0:
            raise ValueError(f"TORCHELASTIC_RESTART_COUNT={attempt}")
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{TORCHRUN} is set as by torchrun, but {error} is not valid in the environment of "
            f"torchrun; unset {TORCHRUN}, or start the learner with torchrun"
        ) from error
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return LearnerPlace(rank, world, Store(host, port, served, attempt), torchrun=True)


def _parse(text: str) -> Store:
    match = re.fullmatch(r"\[?([^\s/\]]+)\]?:(\d{1,5})", text)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise UserError(
            f"--store {text} is not a host and port; give the address of rank 0, such as "
            "10.0.0.1:29500"
        )
    return Store(match[1], int(match[2]))


def _resolve(host: str) -> str | None:
    """The first address of a name or address, IPv4 or IPv6."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    return str(found[0][4][0]).partition("%")[0]
