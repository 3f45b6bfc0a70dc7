"""JSON messages between the supervisor and a role, over a Unix socket with message boundaries.

SOCK_SEQPACKET delivers whole messages in order or none, so there is no buffer to split, and a
process that dies leaves no half message. Neither side waits for the other: reading never blocks,
and sending blocks no longer than the sender's ``patience_s``.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

Message = dict[str, Any]

# The most descriptors that can come with the first message.
MOST_FDS = 16
# The longest message that a reader takes; a longer one would be cut.
MESSAGE_NBYTES = 1 << 18
# The kernel needs so much of a socket's buffer for itself.
SKB_NBYTES = 32


class Channel:
    """One end of the control socket. Sending is safe from several threads."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._writable = select.poll()
        self._writable.register(end, select.POLLOUT)
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self._lock = threading.Lock()
        self.closed = False

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Make the supervisor's end, and the socket that a child inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @property
    def most_nbytes(self) -> int:
        """Bytes of the longest message that can be sent, by the socket's buffer and the reader."""
        buffer = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        return min(MESSAGE_NBYTES, buffer - SKB_NBYTES)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, patience_s: float = 0.0, fds: Sequence[int] = ()) -> bool:
        """Send one message.

        Args:
            message: JSON values by name.
            patience_s: how long to wait for room in the socket's buffer, in seconds.
            fds: descriptors, of which `receive_first` gets duplicates.

        Returns:
            Whether it was sent. It is not if the other end is gone, if there was no room, or if the
            message is longer than `most_nbytes`.
        """
        data = encode_message(message)
        if len(data) > MESSAGE_NBYTES:
            return False

        with self._lock:
            try:
                if patience_s:
                    self._writable.poll(patience_s * 1000)
                if fds:
                    socket.send_fds(self._socket, [data], fds)
                else:
                    self._socket.send(data)
            except OSError:
                return False
        return True

    def receive_first(self) -> tuple[Message | None, list[int]]:
        """Wait for the first message; returns it with the descriptors that were sent with it.

        The message is None if the other end is gone; then `closed` is set.
        """
        data = b""
        fds: list[int] = []
        self._readable.poll()
        with suppress(OSError):
            data, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_NBYTES, MOST_FDS)

        # Descriptors are inheritable when they arrive; programs that this process starts must not
        # get them.
        for fd in fds:
            os.set_inheritable(fd, False)

        self.closed = not data
        return json.loads(data) if data else None, fds

    def receive(self, most: int | None = None) -> list[Message]:
        """Returns the messages that have arrived, at most ``most``; never waits.

        `closed` is set once the other end is gone.
        """
        messages: list[Message] = []
        # Ask `poll` first: messages are few, and `recv` allocates room for the longest one before
        # it looks for one.
        while not self.closed and len(messages) != most and self._readable.poll(0):
            try:
                data = self._socket.recv(MESSAGE_NBYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                # The other end closed without reading everything. The error is raised once; then
                # the messages that it had sent can be read.
                continue
            except OSError:
                data = b""

            # Empty data is the end: no message is empty.
            if data:
                messages.append(json.loads(data))
            else:
                self.closed = True
        return messages

    def close(self) -> None:
        self.closed = True
        self._socket.close()


def encode_message(message: Message) -> bytes:
    """Returns the message as it is sent: JSON without spaces."""
    return json.dumps(message, separators=(",", ":")).encode()
