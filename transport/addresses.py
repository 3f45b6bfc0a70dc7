"""Addresses ``tcp://HOST:PORT`` and ``ipc://PATH``: which hosts reach them, which are safe, where a
learner's connectors listen, and which socket the actors of this host join by default.

That socket is in the folder of the run, because a port of 127.0.0.1 is open to every user of the
host:

    RUN/sockets/          mode 0700: only processes of this user have access
    RUN/sockets/wire      the first connector of rank 0; `connector_addresses` has the others
    RUN/rank-1/sockets/wire   of a learner with a folder of its own: a link to its own wire-1

An actor finds the socket by the run's folder, before and after a restart of the learner. The file
of a socket remains after its connector has ended, and the next connector replaces it.
"""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.configs.errors import UserError
from penstock.configs.value_types import is_local
from penstock.core.runtime_folder import UNIX_PATH_NBYTES

if TYPE_CHECKING:
    from penstock.configs.schema import Config
    from penstock.configs.transports import TransportConfig

# An address of no host (RFC 5737), which the default route would reach.
ELSEWHERE = "192.0.2.1"
FOLDER = "sockets"
SOCKET = "wire"
MAX_PORT = 65535
# The longest path of rank 0, to which `address_of_rank` appends other ranks.
PATH_NBYTES = UNIX_PATH_NBYTES - len("-9999")


def check_bind(address: str, *, keys: bool, insecure: bool) -> None:
    """Raise UserError for an address that other hosts reach without keys."""
    if not keys and not insecure and not is_local(address):
        raise UserError(
            f"{address} can be reached from other hosts, where anyone could send samples; make "
            "keys with `penstock keys new` and set transport.curve, or set transport.insecure=true"
        )


def check_connect(address: str, *, keys: bool, insecure: bool) -> None:
    """Raise UserError for a learner on another host that is not authenticated by keys."""
    if not keys and not insecure and not is_local(address):
        raise UserError(
            f"{address} is on another host, and its learner decides what code the actors run; "
            "give the keys of its run with --curve KEYS, or pass --insecure on a network that you "
            "trust"
        )


def check_port(address: str) -> None:
    """Raise UserError for a port that does not exist, of which libzmq would take the remainder."""
    match = re.fullmatch(r"tcp://.*:(\d+)", address)
    if match is not None and int(match[1]) > MAX_PORT:
        raise UserError(
            f"the port of {address} does not exist, as the last one is {MAX_PORT}; give another"
        )


def is_own_ipc(address: str) -> bool:
    """Whether an ``ipc://`` path lies in a folder of this user that no other user may write to.

    Only then is its listener the user's own. Raises FileNotFoundError while there is no folder.
    """
    if not address.startswith("ipc://") or address.startswith("ipc://@"):
        return False  # @ begins a name that any user of the host may take
    folder = Path(address.removeprefix("ipc://")).parent.stat()
    others_may_write = bool(folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    return folder.st_uid == os.geteuid() and not others_may_write


def address_in_run(run_dir: Path) -> str:
    """Return the ``ipc://`` address of rank 0 in a run's folder, which need not exist yet.

    The path is absolute where it is short enough for a Unix socket, and relative otherwise. Raises
    UserError where both are too long.
    """
    path = run_dir.absolute() / FOLDER / SOCKET

    for candidate in (path, Path(os.path.relpath(path))):
        if len(os.fsencode(candidate)) <= PATH_NBYTES:
            return f"ipc://{candidate}"
    raise UserError(
        f"the path {path} of the socket for actors is longer than the {PATH_NBYTES} bytes that the "
        "system allows; set run.dir to a shorter path, or give --bind ipc://PATH"
    )


def address_of(connect: str) -> str:
    """Return the address that an actor connects to, of the option ``--connect``.

    That is ``connect`` itself, or the socket in the folder of a run. Raises UserError if
    ``connect`` is neither an address nor a folder.
    """
    if connect.startswith(("tcp://", "ipc://")):
        return connect

    if "://" not in connect and (os.sep in connect or Path(connect).is_dir()):
        return address_in_run(Path(connect))
    raise UserError(
        f"--connect {connect} is neither an address nor a folder; give the folder of a run on this "
        "host, or an address such as tcp://10.0.0.1:7700"
    )


def make_socket_folder(run_dir: Path, rank: int = 0) -> None:
    """Make the folder of the sockets, in the folder of a run or of a learner.

    In the folder of a learner's own, a link with the name of rank 0's socket leads to the socket of
    its ``rank``, so that actors find it.

    Raises:
        UserError: the folder cannot be made, or others have access to it.
    """
    path = run_dir / FOLDER
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise UserError(
            f"the folder {path} for the sockets of actors cannot be created ({error.strerror}); "
            "choose another place with --bind ipc://PATH"
        ) from error
    if status.st_mode != stat.S_IFDIR | 0o700 or status.st_uid != os.geteuid():
        raise UserError(
            f"{path}, the folder for the sockets of actors, must belong to this user and have mode "
            "0700; remove it, or choose another place with --bind ipc://PATH"
        )

    if rank:
        link = path / SOCKET
        link.unlink(missing_ok=True)
        link.symlink_to(address_of_rank(f"ipc://{SOCKET}", rank).removeprefix("ipc://"))


def run_bind(transport: TransportConfig, runtime_dir: Path) -> str:
    """Return the address of the first connector of rank 0.

    Without `transport.bind` it is one that only this run's processes know.
    """
    return transport.bind or f"ipc://{runtime_dir}/wire"


def address_of_rank(bind: str, rank: int) -> str:
    """Return the address that is ``rank`` after ``bind``, the one of rank 0.

    The port is so much higher, or the rank is appended to the path. An address whose port the
    system chooses stays as it is. Raises UserError if the port does not exist.
    """
    if rank == 0:
        return bind
    if bind.startswith("ipc://"):
        return f"{bind}-{rank}"

    host, _, port = bind.rpartition(":")
    if port in ("*", "0"):
        return bind

    if int(port) + rank > MAX_PORT:
        raise UserError(
            f"the learners' connectors would listen up to port {port} + {rank}, and the last port "
            f"is {MAX_PORT}; give a lower port"
        )
    return f"{host}:{int(port) + rank}"


def connector_addresses(config: Config, bind: str, rank: int) -> tuple[str, ...]:
    """Return where the connectors of the learner of a rank listen.

    The first is the one at which actors join; it sends some of them on to the others, whose ports
    follow those of all learners' first ones.

    Args:
        config: of the run.
        bind: the address of the first connector of rank 0.
        rank: of the learner.

    Raises:
        UserError: one of the ports does not exist, or is chosen by the system, so that the first
            connector could not name it.
    """
    count = config.transport.first_connectors
    if count > 1 and re.search(r":(\*|0+)$", bind):
        raise UserError(
            f"transport.connectors is {count}, and {bind} leaves the port to the system; set "
            "transport.bind to an address with a port, such as tcp://127.0.0.1:7700"
        )

    learners = config.learner.most_count
    return tuple(address_of_rank(bind, rank + index * learners) for index in range(count))


def server_addresses(config: Config, runtime_dir: Path) -> tuple[str, ...]:
    """Return where the shards of a run's parameter server listen.

    On hosts of their own (`learner.server_spread`) their ports follow those of all connectors,
    otherwise they are in the runtime folder. Raises UserError as `connector_addresses`.
    """
    shards = range(config.learner.server_shards)
    bind = config.transport.bind
    if not config.learner.server_spread or bind is None or not bind.startswith("tcp://"):
        return tuple(f"ipc://{runtime_dir}/server-{shard}" for shard in shards)
    if re.search(r":(\*|0+)$", bind):
        raise UserError(
            f"learner.server_spread puts the parameter server at ports after {bind}, which leaves "
            "the port to the system; set transport.bind to an address with a port, such as "
            "tcp://*:7700"
        )

    connectors = config.learner.most_count * config.transport.first_connectors
    return tuple(address_of_rank(bind, connectors + shard) for shard in shards)


def own_server_addresses(
    config: Config, bind: str, rank: int, host: str, port: int
) -> dict[int, str]:
    """Return where the shards of the parameter server listen that run beside a learner.

    Learners of several machines share the shards: shard i is with the learner of rank i mod the
    number of learners. Its port follows those of all connectors, so that a firewall can know it.

    Args:
        config: of the run.
        bind: the address of the first connector of rank 0.
        rank: of the learner.
        host: the address of the learner's host.
        port: of shard 0, where ``bind`` has no port.

    Returns:
        The address of each of the learner's shards, by its number.

    Raises:
        UserError: a port does not exist.
    """
    learners = config.learner.most_count
    shards = range(rank, config.learner.server_shards, learners)
    match = re.fullmatch(r"tcp://.*:(\d+)", bind)
    if match is not None and int(match[1]):
        port = int(match[1]) + learners * config.transport.first_connectors

    last_port = port + max(shards, default=0)
    if last_port > MAX_PORT:
        raise UserError(
            f"the shards of the parameter server would listen up to port {last_port}, and the last "
            f"port is {MAX_PORT}; set transport.bind to a lower port"
        )
    url_host = _url_host(host)
    return {shard: f"tcp://{url_host}:{port + shard}" for shard in shards}


def with_port_of(address: str, other: str) -> str:
    """Return the address with the host or folder of ``address``, and the port or name of ``other``.

    Raises ValueError if ``other`` is not of the same kind, or has no such port or name.
    """
    if address.startswith("tcp://"):
        scheme = "tcp://"
        separator = ":"
        end = other.rpartition(separator)[2]
        valid = re.fullmatch("[0-9]{1,5}", end) is not None and 0 < int(end) <= MAX_PORT
    else:
        scheme = "ipc://"
        separator = "/"
        end = other.rpartition(separator)[2]
        valid = 0 < len(end) <= PATH_NBYTES

    if not (valid and other.startswith(scheme)):
        raise ValueError(f"{other} cannot be beside {address}")
    return address.rpartition(separator)[0] + separator + end


def reachable(bind: str, host: str = "127.0.0.1") -> str:
    """Return the address at which clients reach ``bind`` of ``host``.

    By default that is the address for clients on the same host.
    """
    any_interface = r"^tcp://(\*|0\.0\.0\.0|\[::\]):"
    return re.sub(any_interface, f"tcp://{_url_host(host)}:", bind)


def address_towards(other: str) -> str:
    """Return the address that this machine has towards the host ``other``.

    The host is not contacted: connecting a socket for datagrams only looks up the route. Raises
    OSError if there is no way to it.
    """
    addresses = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def own_host() -> str:
    """Return how other hosts may reach this one: by its address towards them, or by its name."""
    try:
        return address_towards(ELSEWHERE)
    except OSError:
        return socket.gethostname()


def _url_host(host: str) -> str:
    """The host as it stands in an address: with brackets if it is an IPv6 address."""
    return f"[{host}]" if ":" in host else host
