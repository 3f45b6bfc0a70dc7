"""Rejects new TCP connections to a ZeroMQ socket while file descriptors are nearly used up.

libzmq, which then cannot accept them, retries without a pause: that takes a core, accepts no peer
and reports nothing. Existing connections are not affected.

The gate is a filter on the listening socket, under which the kernel ignores packets that would open
a connection; a correct client retries automatically. Connections from before the filter are
accepted and closed, with descriptors reserved for this.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from contextlib import suppress

import zmq

from penstock.core.descriptors import limit, nearly_used_up
from penstock.transport.zmq.sockets import BACKLOG, Socket

# The number of descriptors that new connections must leave free.
RESERVE = 16
# As many more must be free before new connections are let in again.
MARGIN = 4
# The interval between two checks.
CHECK_S = 0.05
# Options of linux/socket.h for which Python has no names.
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
# One instruction of BPF: return 0 bytes of the packet.
DROP = struct.pack("HBBI", 0x06, 0, 0, 0)


class Listener:
    """The gate of one bound socket. Does nothing for ``ipc://``, where a folder is the gate."""

    def __init__(self, source: Socket) -> None:
        """Make the gate of ``source``, a bound socket."""
        self.turned_away = 0
        """How often the gate was shut, and how many connections were closed then."""
        self.is_shut = False
        """Whether new connections are turned away now."""
        self._next_check_s = 0.0
        self._spares: list[int] = []  # descriptors that are freed to accept and close connections
        self._socket = _listening(source.getsockopt_string(zmq.LAST_ENDPOINT))
        if self._socket is not None:
            self._fill_spares()

    def check_descriptors(self, now_s: float) -> None:
        """Shut or open the gate. Call it in every turn; it checks every `CHECK_S` seconds."""
        if self._socket is None or now_s < self._next_check_s:
            return
        self._next_check_s = now_s + CHECK_S

        needed = RESERVE + MARGIN if self.is_shut else RESERVE
        if nearly_used_up(needed):
            if not self.is_shut:
                self._shut_gate(self._socket)
            self._close_waiting(self._socket)
        elif self.is_shut:
            self._open_gate(self._socket)
        self._fill_spares()

    def close(self) -> None:
        """Release the socket, and with it the address."""
        self._drop_spares(len(self._spares))
        if self._socket is not None:
            self._socket.close()

    def _shut_gate(self, listening: socket.socket) -> None:
        """Let the kernel ignore packets that would open a connection."""
        self.is_shut = True
        self.turned_away += 1
        code = ctypes.create_string_buffer(DROP, len(DROP))
        program = struct.pack("HP", 1, ctypes.addressof(code))
        # A sandbox may forbid it: then only `_close_waiting` helps.
        with suppress(OSError):
            listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)

    def _open_gate(self, listening: socket.socket) -> None:
        """Let new connections in again."""
        self.is_shut = False
        with suppress(OSError):
            listening.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

    def _close_waiting(self, listening: socket.socket) -> None:
        """Accept and close the connections that wait, with the help of spare descriptors.

        libzmq may take a descriptor that was freed here; then its connection does not wait any more
        either.
        """
        while True:
            try:
                listening.accept()[0].close()
                self.turned_away += 1
            except BlockingIOError:
                return
            except OSError:  # no descriptor is free
                if not self._spares:
                    return
                self._drop_spares(1)

    def _fill_spares(self) -> None:
        """Reserve descriptors; where none is free, the next check tries again."""
        with suppress(OSError):
            while len(self._spares) < BACKLOG:
                self._spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _drop_spares(self, count: int) -> None:
        """Free ``count`` of the reserved descriptors."""
        for _ in range(count):
            os.close(self._spares.pop())


def turned_away_note(role: str) -> str:
    """Return the sentence about connections that a role's listeners have turned away."""
    return (
        f"{role} turned new connections away, since nearly all of its {limit()} file descriptors "
        "are in use: raise the hard limit (ulimit -Hn), or find out what connects"
    )


def _listening(endpoint: str) -> socket.socket | None:
    """Return a duplicate of the socket with which libzmq listens at a TCP endpoint.

    libzmq does not tell its descriptor, so all sockets of this process are examined. Returns None
    for another kind of endpoint, or if there is no such socket.
    """
    if not endpoint.startswith("tcp://"):
        return None
    port = int(endpoint.rpartition(":")[2])

    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            candidate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # it was closed meanwhile
            continue

        with suppress(OSError):
            is_inet = candidate.family in (socket.AF_INET, socket.AF_INET6)
            listens = is_inet and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and candidate.getsockname()[1] == port:
                candidate.setblocking(False)
                return candidate
        candidate.close()
    return None
