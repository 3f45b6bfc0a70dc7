"""The store of learners on several machines: how to reach it, and which members have gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from penstock.configs.errors import UserError
from penstock.configs.value_types import is_local
from penstock.core.role import Store as Where
from penstock.learner.group.process_group import INTERFACE_VARIABLES

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Longest try to connect, in seconds.
TRY_S = 1.0
# Seconds between two looks at the store.
LOOK_S = 0.05
# Seconds in which all living members notice that the group is lost.
ROLL_S = 5.0
# Connections that may wait to be accepted.
BACKLOG = 1024
# The learner that serves the store ends so many seconds after the others.
LINGER_S = 1.0
# Seconds in which the others read why they do not fit together, from a store that then ends.
REREAD_S = 0.5
AGAIN = "start all of them again with --resume auto, to go on from the last checkpoint"


def interface_of(where: Where, environ: Mapping[str, str]) -> str | None:
    """The loopback interface where learners that meet at ``where`` are all on this host.

    So they listen nowhere else. None where they are not, or ``environ`` names an interface.
    """
    named = any(name in environ for name in INTERFACE_VARIABLES)
    local = is_local(f"tcp://{where.host}:{where.port}")
    return "lo" if local and not named else None


def interface_with(meets_at: str) -> str | None:
    """Returns the network interface of this host that has the address of ``host:port``, if any."""
    import psutil

    host = meets_at.rpartition(":")[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return str(name)
    return None


def open_store(
    where: Where, rank: int, timeout_s: float, waiting: Callable[[], bool]
) -> Store | None:
    """Open the store; rank 0 serves it unless it is ``served``.

    ``waiting`` is called repeatedly; None once it returns False. Raises UserError where the store
    cannot be served, or reached within ``timeout_s`` seconds.
    """
    serves = rank == 0 and not where.served
    if not (serves or _answers(where, timeout_s, waiting)):
        return None
    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            where.host,
            where.port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=_listen(where) if serves else None,
        )
    except (OSError, RuntimeError) as error:
        done = "served" if serves else "reached"
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            f"the store at {where.host}:{where.port} cannot be {done} ({why}); rank 0 serves it, "
            "at an address of its machine and on a port that is free"
        ) from None
    return dist.PrefixStore(f"attempt-{where.attempt}", store)  # type: ignore[attr-defined]


def _listen(where: Where) -> int:
    """Make a listening socket at only that address, for the store.

    By default the store would listen at all addresses of the machine. Raises OSError.
    """
    found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        return listener.detach()


def _answers(where: Where, timeout_s: float, waiting: Callable[[], bool]) -> bool:
    """Wait until a server listens there. torch's own wait cannot be interrupted."""
    deadline_s = time.monotonic() + timeout_s
    while waiting():
        try:
            socket.create_connection((where.host, where.port), TRY_S).close()
            return True
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > deadline_s:
            who = "torchrun" if where.served else "rank 0"
            raise UserError(
                f"no answer from {where.host}:{where.port}, where {who} serves the store, "
                f"within run.start_timeout_s = {timeout_s:g} s ({why}); start {who} with the same "
                "address, and see that no firewall is between"
            )
        time.sleep(LOOK_S)
    return False


def could_not_meet(where: Where, failure: str) -> UserError:
    """The error of learners that found each other's store and formed no group."""
    return UserError(
        f"the learners could not form a group: {failure}; start every rank with the same "
        f"--world and --store, check that no firewall separates it from {where.host}:"
        f"{where.port}, and look at the messages of the other ranks"
    )


def who_has_gone(
    store: Store, where: Where, members: Sequence[int], me: int, waiting: Callable[[], bool]
) -> str:
    """Find the members of a lost group that do not answer; all living members call it.

    Returns the beginning of a sentence. Takes `ROLL_S` where a member is gone.
    """
    absent = {member for member in members if member != me}
    done = threading.Event()

    def call() -> None:
        try:
            store.set(f"lives-{me}", "")
            deadline_s = time.monotonic() + ROLL_S
            while absent and time.monotonic() < deadline_s:
                absent.difference_update(m for m in list(absent) if store.check([f"lives-{m}"]))
                time.sleep(LOOK_S)
        except RuntimeError:
            if 0 in absent or where.served:
                return  # else rank 0 was alive then, and has ended meanwhile like all
        done.set()

    # In a separate thread: a store whose host has gone does not answer at all.
    caller = threading.Thread(target=call, name="roll", daemon=True)
    caller.start()
    ends_s = time.monotonic() + ROLL_S + LINGER_S
    serves = me == 0 and not where.served
    while (caller.is_alive() or serves) and time.monotonic() < ends_s and waiting():
        time.sleep(LOOK_S)
    if not done.is_set():
        server = "torchrun's agent" if where.served else "rank 0"
        return f"{server}, which serves the store, has ended or cannot be reached"
    if not absent:
        return "the connections among learners have broken, though all of them live"
    ranks = ", ".join(map(str, sorted(absent)))
    return f"rank {ranks} {'has' if len(absent) == 1 else 'have'} ended or cannot be reached"
