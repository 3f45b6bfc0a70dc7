"""The user at the other end of a connection from this host, as the kernel knows it.

A port on loopback can be reached by every user of a host. Linux lists in `/proc/net/tcp` the user
of each socket, so that a server can refuse the others without a password.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

ESTABLISHED = "01"  # the state of a connection
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
# The columns of the tables.
LOCAL = 1
REMOTE = 2
STATE = 3
UID = 7

Address = tuple[str, int]
"""An IP address and a port."""


def user_of(client: Address, server: Address) -> int | None:
    """Returns the uid of the process that has connected from ``client`` to ``server``.

    None if it is not on this host, or in another network namespace.
    """
    # A connection over IPv4 can be in either table.
    ends = {(_coded(client, ipv6=ipv6), _coded(server, ipv6=ipv6)) for ipv6 in (False, True)}
    for table in TABLES:
        with suppress(OSError), table.open() as lines:
            for line in lines:
                fields = line.split()
                if len(fields) <= UID or fields[STATE] != ESTABLISHED:
                    continue
                if (fields[LOCAL], fields[REMOTE]) in ends:
                    return int(fields[UID])
    return None


def _coded(address: Address, *, ipv6: bool) -> str:
    """Returns an address as these tables write it: 32-bit words in the machine's byte order."""
    host, port = address
    data = ip_address(host).packed
    if ipv6 and len(data) == 4:
        data = b"\0" * 10 + b"\xff\xff" + data  # an IPv4-mapped address

    words = [data[i : i + 4] for i in range(0, len(data), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return f"{b''.join(words).hex().upper()}:{port:04X}"
