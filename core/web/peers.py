"""The user at the other end of a connection from this host, as the kernel knows it.

A port on loopback can be reached by every user of a host. Linux tells the user of each socket, so
that a server can refuse the others without a password: by netlink (sock_diag(7)) in 10
microseconds, and where a sandbox has no such netlink in `/proc/net/tcp`, which takes milliseconds.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from contextlib import closing, suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

ESTABLISHED = 1  # the state of a connection
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
# The columns of the tables.
LOCAL = 1
REMOTE = 2
STATE = 3
UID = 7

# Of linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h.
NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, pid
ASKED = struct.Struct("=BBBBI")  # struct inet_diag_req_v2: family, protocol, extensions, -, states
PORTS = struct.Struct("!HH")
REST = struct.Struct("=III")  # interface, and a cookie that matches any socket
ANSWER = struct.Struct("=BB2x48s3I")  # struct inet_diag_msg: family, state, socket, numbers
ANSWER_UID = struct.Struct("=I")
ADDRESS_NBYTES = 16
REPLY_NBYTES = 1 << 12
ANY_COOKIE = 0xFFFFFFFF

Address = tuple[str, int]
"""An IP address and a port."""


def user_of(client: Address, server: Address) -> int | None:
    """Returns the uid of the process that has connected from ``client`` to ``server``.

    None if it is not on this host, or in another network namespace.
    """
    try:
        return _user_by_netlink(client, server)
    except OSError:
        return _user_by_table(client, server)


def _user_by_netlink(client: Address, server: Address) -> int | None:
    """Ask the kernel for one connection. Raises OSError if it does not answer such questions."""
    ends = [_without_mapping(host) for host, _ in (client, server)]
    family = socket.AF_INET if len(ends[0]) == 4 else socket.AF_INET6
    question = (
        ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, 1 << ESTABLISHED)
        + PORTS.pack(client[1], server[1])
        + b"".join(end.ljust(ADDRESS_NBYTES, b"\0") for end in ends)
        + REST.pack(0, ANY_COOKIE, ANY_COOKIE)
    )
    header = HEADER.pack(HEADER.size + len(question), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0)
    with closing(socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG)) as netlink:
        netlink.send(header + question)
        reply = netlink.recv(REPLY_NBYTES)

    _, kind, _, _, _ = HEADER.unpack_from(reply)
    if kind != SOCK_DIAG_BY_FAMILY:
        (error,) = struct.unpack_from("=i", reply, HEADER.size)
        if -error == errno.ENOENT:
            return None
        raise OSError(-error, "the kernel does not tell the user of a socket")
    # Without such a connection, the kernel answers with the socket that listens at the port.
    _, state, *_ = ANSWER.unpack_from(reply, HEADER.size)
    if state != ESTABLISHED:
        return None
    (uid,) = ANSWER_UID.unpack_from(reply, HEADER.size + ANSWER.size)
    return int(uid)


def _without_mapping(host: str) -> bytes:
    """Returns an address as bytes, of four if it is one of IPv4 that is mapped into IPv6."""
    address = ip_address(host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.packed
    return address.packed


def _user_by_table(client: Address, server: Address) -> int | None:
    """Search the tables of all connections."""
    # A connection over IPv4 can be in either table.
    ends = {(_coded(client, ipv6=ipv6), _coded(server, ipv6=ipv6)) for ipv6 in (False, True)}
    for table in TABLES:
        with suppress(OSError), table.open() as lines:
            for line in lines:
                fields = line.split()
                if len(fields) <= UID or fields[STATE] != f"{ESTABLISHED:02X}":
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
