"""What a process gives to the network: bytes counted by the kernel, at its sockets or interface.

Both are of Linux. A socket counts payload, an interface whole frames, headers included.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import termios
from typing import NamedTuple

import psutil

# Offsets in struct tcp_info of linux/tcp.h, which only ever grows at its end.
STATE, ACKED = 0, 120  # u8; u64 bytes_acked
TCP_INFO_NBYTES = 128
TCP_LISTEN = 10
IP = (socket.AF_INET, socket.AF_INET6)
HEADERS_NBYTES = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps


class Interface(NamedTuple):
    """Sent by a network interface since it was made."""

    nbytes: int
    packets: int

    def payload_since(self, before: Interface) -> int:
        """Bytes sent since ``before`` without the headers of their packets.

        Exact for TCP over IPv4 but for a few packets that open connections or repeat losses. A
        packet here is what the interface was given: where segmentation is left to it, tens of
        kilobytes under one header.
        """
        return self.nbytes - before.nbytes - HEADERS_NBYTES * (self.packets - before.packets)


def tcp_nbytes() -> int:
    """Bytes that this process has handed to the TCP sockets it has open, repeats not counted.

    What waits in a socket's buffer counts. Opening a connection may count one, and a socket that is
    closed takes its count along, so take differences while the same connections stand.
    """
    return sum(map(_handed, os.listdir("/proc/self/fd")))


def interface(name: str) -> Interface:
    """Counters of an interface in this process's network namespace.

    Raises OSError where there is no such interface.
    """
    found = psutil.net_io_counters(pernic=True, nowrap=False).get(name)
    if found is None:
        raise OSError(f"there is no network interface {name}")
    return Interface(found.bytes_sent, found.packets_sent)


def _handed(fd: str) -> int:
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
            return 0
        # A duplicate: closing it leaves the socket to its owner.
        with socket.socket(fileno=os.dup(int(fd))) as tcp:
            if tcp.family not in IP or tcp.proto != socket.IPPROTO_TCP:
                return 0
            return _written(tcp)
    except OSError:  # closed meanwhile
        return 0


def _written(tcp: socket.socket) -> int:
    """Bytes that were acknowledged, and those that still wait for it.

    The kernel's own count of bytes sent would not do: it counts twice what a full queue below the
    socket gave back.
    """
    acked = _acked(tcp)
    while True:
        waiting = fcntl.ioctl(tcp, termios.TIOCOUTQ, bytes(4))
        before, acked = acked, _acked(tcp)
        if acked == before:  # nothing went from the one to the other meanwhile
            return acked + int.from_bytes(waiting, sys.byteorder)


def _acked(tcp: socket.socket) -> int:
    info = tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_NBYTES)
    if len(info) < TCP_INFO_NBYTES or info[STATE] == TCP_LISTEN:
        raise OSError(errno.EOPNOTSUPP, "this socket sends nothing")
    return int.from_bytes(info[ACKED:], sys.byteorder)
