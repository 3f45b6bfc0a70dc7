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
from penstock.core.role import StoreAddress
from penstock.core.run_dir import Resume
from penstock.transport.addresses import address_towards

if TYPE_CHECKING:
    from penstock.configs.schema import Config

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun sets, by which it is recognised."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables with the network interfaces of gloo and NCCL."""
EXAMPLE = "--rank 0 --world 2 --store 10.0.0.1:29500"


@dataclass(frozen=True)
class LearnerPlace:
    """The place of this learner among several that were started one by one.

    ``store`` is where all of them meet, and ``torchrun`` whether torchrun has started them.
    """

    rank: int
    world: int
    store: StoreAddress
    torchrun: bool = False


def find_place(
    rank: int | None, world: int | None, store: str | None, environ: Mapping[str, str]
) -> LearnerPlace | None:
    """Find the place of this learner, from its options or torchrun's variables.

    Args:
        rank: value of --rank; None if it is not given.
        world: value of --world.
        store: value of --store.
        environ: variables of the environment.

    Returns: the place; None if this command starts all learners.

    Raises:
        UserError: options are missing, or a rank or port is impossible.
    """
    options = {"--rank": rank, "--world": world, "--store": store}
    present = [name for name, value in options.items() if value is not None]
    missing = [name for name, value in options.items() if value is None]
    if TORCHRUN in environ:
        if present:
            raise UserError(f"torchrun sets the rank; leave out {', '.join(present)}")
        return _from_torchrun(environ)

    if not present:
        return None

    if rank is None or world is None or store is None:
        raise UserError(
            "a learner on one of several machines needs --rank, --world and --store, and "
            f"{', '.join(missing)} is missing; give all three, such as {EXAMPLE}"
        )
    if world < 1:
        raise UserError(f"--world is {world}; it must be a whole number of at least 1")
    if not 0 <= rank < world:
        problem = "negative" if rank < 0 else f"not below --world {world}"
        raise UserError(
            f"--rank {rank} is {problem}: ranks count from 0; give --rank 0 to {world - 1}"
        )
    return LearnerPlace(rank, world, _parse_store(store))


def check_place(place: LearnerPlace, config: Config, environ: Mapping[str, str]) -> None:
    """Raise UserError for options and networks that do not work over several machines.

    Args:
        place: the place of this learner.
        config: its config.
        environ: variables of the environment.
    """
    if place.world > 1:
        from penstock.autotune import connectors, envs  # needed here only

        envs.check_not_auto(config, f"{place.world} learners")
        connectors.check_not_auto(config, f"{place.world} learners need the same number")
    if place.torchrun and config.run.dir is None:
        raise UserError(
            "torchrun restarts a learner with the same command, which must find its checkpoint; "
            "set run.dir"
        )

    # Other learners reach this one at the interface that it has chosen, or by its name.
    interface = config.learner.reduce.interface
    interfaces = [name for _, name in socket.if_nameindex()]
    _check_interfaces(interface, interfaces, environ)
    _check_served_store(place)
    is_chosen = interface is not None or any(name in environ for name in INTERFACE_VARIABLES)
    if place.world > 1 and not is_chosen:
        _check_reachable(place.store.host, interfaces)


def check_store(place: LearnerPlace, *, trusted: bool) -> None:
    """Raise UserError for a store of the learners that untrusted hosts may reach: it has no keys.

    Args:
        place: the place of this learner. A store that torchrun serves is not checked.
        trusted: whether the user trusts all hosts of the network.
    """
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


def choose_run_dir(place: LearnerPlace, path: Path, resume: Resume) -> tuple[Path, Resume]:
    """Choose the run's folder of this learner, and how it resumes.

    Each rank has a folder of its own; only that of rank 0 has the checkpoint. torchrun restarts a
    learner with the same command, so that it resumes if there is a checkpoint.

    Args:
        place: the place of this learner.
        path: folder of the run.
        resume: what the user has asked for.
    """
    if place.torchrun and resume == "no":
        resume = "auto"
    if place.rank == 0:
        return path, resume

    # The state comes from the learner that has the checkpoint.
    if resume == "must":
        resume = "auto"
    return path / f"rank-{place.rank}", resume


def _check_interfaces(
    interface: str | None, interfaces: list[str], environ: Mapping[str, str]
) -> None:
    """Raise UserError for an interface that this machine does not have.

    It is that of the option or, without that, of gloo's variable, which may name several. The
    variable of NCCL has patterns, which are not checked.
    """
    gloo = INTERFACE_VARIABLES[0]
    if interface is not None:
        option = "learner.reduce.interface"
        names = [interface]
    elif environ.get(gloo):
        option = gloo
        names = environ[gloo].split(",")
    else:
        return

    for name in names:
        if name not in interfaces:
            raise UserError(
                f"{option} {name} does not exist; this machine has {', '.join(interfaces)}"
            )


def _check_served_store(place: LearnerPlace) -> None:
    """Raise UserError if rank 0 would serve the store at a loopback address by mistake.

    On many a Debian the machine's own name is 127.0.1.1.
    """
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
    """Returns whether a host is given by its address instead of its name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_reachable(store_host: str, interfaces: list[str]) -> None:
    """Raise UserError if other learners cannot reach this machine by its name.

    Args:
        store_host: host of the store, which all learners reach. A loopback address means that all
            learners are on this machine.
        interfaces: names of this machine's interfaces.
    """
    store_address = _resolve(store_host)
    if store_address is None:
        raise UserError(
            f"the host {store_host} of --store cannot be resolved; give its address, such as "
            "10.0.0.1"
        )

    name = socket.gethostname()
    address = _resolve(name)
    others_reach_it = address is not None and not is_loopback(address)
    if is_loopback(store_address) or others_reach_it:
        return

    problem = "cannot be resolved" if address is None else f"resolves to {address}"
    raise UserError(
        f"this machine's name {name} {problem}, so learners on other machines cannot reach it; set "
        "learner.reduce.interface to the interface of the shared network, one of "
        f"{', '.join(interfaces)}"
    )


def is_loopback(address: str) -> bool:
    """Returns whether only this host reaches an address."""
    return ipaddress.ip_address(address).is_loopback


def own_address(other: str) -> str:
    """Returns the address that this machine has towards the host ``other``.

    Raises:
        UserError: there is no way to that host.
    """
    try:
        return address_towards(other)
    except OSError as error:
        raise UserError(
            f"this machine has no way to {other}, the host of --store ({error.strerror}); give an "
            "address of rank 0 that all machines reach"
        ) from None


def _from_torchrun(environ: Mapping[str, str]) -> LearnerPlace:
    """Returns the place that torchrun's variables describe; raises UserError if one is wrong."""
    try:
        rank = int(environ["RANK"])
        world = int(environ["WORLD_SIZE"])
        host = environ["MASTER_ADDR"]
        port = int(environ["MASTER_PORT"])
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
    return LearnerPlace(rank, world, StoreAddress(host, port, served, attempt), torchrun=True)


def _parse_store(text: str) -> StoreAddress:
    """Returns the store at ``HOST:PORT`` or ``[HOST]:PORT``; raises UserError for other texts."""
    match = re.fullmatch(r"\[?([^\s/\]]+)\]?:(\d{1,5})", text)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise UserError(
            f"--store {text} is not a host and port; give the address of rank 0, such as "
            "10.0.0.1:29500"
        )
    return StoreAddress(match[1], int(match[2]))


def _resolve(host: str) -> str | None:
    """Returns the first address of a host, IPv4 or IPv6; None if its name is not known."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None

    *_, socket_address = addresses[0]
    return str(socket_address[0]).partition("%")[0]  # without the scope of IPv6
