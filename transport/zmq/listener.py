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
LOOK_EVERY_S = 0.05
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # linux/socket.h; Python has no names for them
# One instruction of BPF: return 0 bytes of the packet.
DROP = struct.pack("HBBI", 0x06, 0, 0, 0)


class Listener:
    """The gate of one bound socket. Does nothing for ``ipc://``, where a folder is the gate."""

    def __init__(self, source: Socket) -> None:
        """Make the gate of ``source``, a bound socket."""
        self.turned_away = 0
        """How often the gate was shut, and how many connections were closed then."""
        self.shut = False
        self._look_at_s = 0.0
        self._spares: list[int] = []
        self._socket = _listening(source.getsockopt_string(zmq.LAST_ENDPOINT))
        if self._socket is not None:
            self._keep_spares()

    def look(self, now_s: float) -> None:
        """Shut or open the gate. Call it in every turn; it checks every `LOOK_EVERY_S` seconds."""
        if self._socket is None or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        if nearly_used_up(RESERVE + MARGIN * self.shut):
            if not self.shut:
                self._shut(self._socket)
            self._clear(self._socket)
        elif self.shut:
            self.shut = False
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        self._keep_spares()

    def close(self) -> None:
        """Release the socket, and with it the address."""
        self._drop_spares(len(self._spares))
        if self._socket is not None:
            self._socket.close()

    def _shut(self, listening: socket.socket) -> None:
        self.shut = True
        self.turned_away += 1
        code = ctypes.create_string_buffer(DROP, len(DROP))
        program = struct.pack("HP", 1, ctypes.addressof(code))
        with suppress(OSError):  # a sandbox may forbid it: then only `_clear` helps
            listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)

    def _clear(self, listening: socket.socket) -> None:
        """Accept and close waiting connections.

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

    def _keep_spares(self) -> None:
        with suppress(OSError):  # none is left: at the next check
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
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # it was closed meanwhile
            continue

        with suppress(OSError):
            inet = found.family in (socket.AF_INET, socket.AF_INET6)
            listens = inet and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and found.getsockname()[1] == port:
                found.setblocking(False)
                return found
        found.close()
    return None
