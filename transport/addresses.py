"""Addresses ``tcp://HOST:PORT`` and ``ipc://PATH``: which hosts reach them, and which are safe."""

from __future__ import annotations

import ipaddress
import os
import stat
from pathlib import Path

from penstock.configs.errors import UserError


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


def is_own_ipc(address: str) -> bool:
    """Whether an ``ipc://`` path lies in a folder of this user that no other user may write to.

    Only then is its listener the user's own. Raises FileNotFoundError while there is no folder.
    """
    if not address.startswith("ipc://") or address.startswith("ipc://@"):
        return False  # @ begins a name that any user of the host may take
    found = Path(address.removeprefix("ipc://")).parent.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_local(address: str) -> bool:
    """Whether only this host reaches a ``tcp://`` or ``ipc://`` address."""
    if address.startswith("ipc://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface or a wildcard
        return False
