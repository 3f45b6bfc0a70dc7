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
from penstock.core.role import StoreAddress
from penstock.learner.group.process_group import INTERFACE_VARIABLES

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Longest try to connect, in seconds.
TRY_S = 1.0
# Seconds between two looks at the store.
POLL_S = 0.05
# Seconds in which all living members notice that the group is lost.
ROLL_S = 5.0
# Connections that may wait to be accepted.
BACKLOG = 1024
# The learner that serves the store ends so many seconds after the others.
LINGER_S = 1.0
# Seconds in which the others read why they do not fit together, from a store that then ends.
REREAD_S = 0.5
AGAIN = "start all of them again with --resume auto, to go on from the last checkpoint"


def interface_of(address: StoreAddress, environ: Mapping[str, str]) -> str | None:
    """Returns the loopback interface if learners that meet at an address are all on this host.

    So they listen nowhere else. None if they are not, or ``environ`` names an interface.
    """
    is_named = any(name in environ for name in INTERFACE_VARIABLES)
    on_this_host = is_local(f"tcp://{address.host}:{address.port}")
    return "lo" if on_this_host and not is_named else None


def interface_with(meets_at: str) -> str | None:
    """Returns the network interface of this host that has the address of ``host:port``, if any."""
    import psutil

    host = meets_at.rpartition(":")[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            return str(name)
    return None


def open_store(
    address: StoreAddress, rank: int, timeout_s: float, waiting: Callable[[], bool]
) -> Store | None:
    """Open the store; rank 0 serves it unless it is ``served``.

    Args:
        address: of the store.
        rank: of this learner.
        timeout_s: longest wait for its server, in seconds.
        waiting: called repeatedly; returns whether to continue.

    Returns:
        The store, under the prefix of this attempt; None if ``waiting`` has returned False.

    Raises:
        UserError: the store cannot be served, or not be reached within ``timeout_s``.
    """
    serves = rank == 0 and not address.served
    if not serves and not _answers(address, timeout_s, waiting):
        return None

    timeout = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address.host,
            address.port,
            is_master=serves,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=_listen(address) if serves else None,
        )
    except (OSError, RuntimeError) as error:
        done = "served" if serves else "reached"
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(
            f"the store at {address.host}:{address.port} cannot be {done} ({why}); rank 0 serves "
            "it, at an address of its machine and on a port that is free"
        ) from None
    return dist.PrefixStore(f"attempt-{address.attempt}", store)  # type: ignore[attr-defined]


def _listen(address: StoreAddress) -> int:
    """Make a listening socket at only that address, for the store. Returns its descriptor.

    By default the store would listen at all addresses of the machine. Raises OSError.
    """
    candidates = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, socket_address = candidates[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(socket_address)
        listener.listen(BACKLOG)
        return listener.detach()


def _answers(address: StoreAddress, timeout_s: float, waiting: Callable[[], bool]) -> bool:
    """Wait until a server listens there. torch's own wait cannot be interrupted.

    Returns False if ``waiting`` has returned False. Raises UserError after ``timeout_s`` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    while waiting():
        try:
            socket.create_connection((address.host, address.port), TRY_S).close()
            return True
        except OSError as error:
            why = error.strerror or str(error)

        if time.monotonic() > deadline_s:
            server = "torchrun" if address.served else "rank 0"
            raise UserError(
                f"no answer from {address.host}:{address.port}, where {server} serves the store, "
                f"within run.start_timeout_s = {timeout_s:g} s ({why}); start {server} with the "
                "same address, and see that no firewall is between"
            )
        time.sleep(POLL_S)
    return False


def could_not_meet(address: StoreAddress, failure: str) -> UserError:
    """Returns the error of learners that found each other's store and formed no group."""
    return UserError(
        f"the learners could not form a group: {failure}; start every rank with the same "
        f"--world and --store, check that no firewall separates it from {address.host}:"
        f"{address.port}, and look at the messages of the other ranks"
    )


def who_has_gone(
    store: Store,
    address: StoreAddress,
    members: Sequence[int],
    me: int,
    waiting: Callable[[], bool],
) -> str:
    """Find the members of a lost group that do not answer; all living members call it.

    It takes `ROLL_S` seconds if a member is gone.

    Args:
        store: in which each living member leaves a sign.
        address: of the store.
        members: ranks of the group.
        me: this learner's rank.
        waiting: called repeatedly; returns whether to continue.

    Returns:
        The beginning of a sentence that names them.
    """
    absent = {member for member in members if member != me}
    store_answered = threading.Event()

    def call_the_roll() -> None:
        """Leave this learner's sign, and look for those of the others."""
        try:
            store.set(f"lives-{me}", "")
            deadline_s = time.monotonic() + ROLL_S
            while absent and time.monotonic() < deadline_s:
                absent.difference_update(m for m in list(absent) if store.check([f"lives-{m}"]))
                time.sleep(POLL_S)
        except RuntimeError:
            if 0 in absent or address.served:
                return  # else rank 0 was alive then, and has ended meanwhile like all
        store_answered.set()

    # The roll is called in a thread: a store whose host has gone does not answer at all. The
    # learner that serves the store waits until all others have read it.
    caller = threading.Thread(target=call_the_roll, name="roll", daemon=True)
    caller.start()
    deadline_s = time.monotonic() + ROLL_S + LINGER_S
    serves = me == 0 and not address.served
    while (caller.is_alive() or serves) and time.monotonic() < deadline_s and waiting():
        time.sleep(POLL_S)

    if not store_answered.is_set():
        server = "torchrun's agent" if address.served else "rank 0"
        return f"{server}, which serves the store, has ended or cannot be reached"
    if not absent:
        return "the connections among learners have broken, though all of them live"
    ranks = ", ".join(map(str, sorted(absent)))
    return f"rank {ranks} {'has' if len(absent) == 1 else 'have'} ended or cannot be reached"
