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
from typing import Any

Message = dict[str, Any]

MOST_FDS = 16  # with the first message
MESSAGE_NBYTES = 1 << 18  # that a reader takes; a longer one would be cut
SKB_NBYTES = 32  # of a socket's buffer, which no message can use


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
        """The longest message that can be sent, by the buffer of the socket and the reader."""
        buffer = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        return min(MESSAGE_NBYTES, buffer - SKB_NBYTES)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, patience_s: float = 0.0, fds: Sequence[int] = ()) -> bool:
        """Send one message, with duplicates of descriptors for `receive_first`.

        False where the other end is gone or stays full for ``patience_s`` seconds, and where the
        message is longer than `most_nbytes`.
        """
        data = encoded(message)
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
        """Wait for the first message, and the descriptors that were sent with it.

        None where the other end is gone.
        """
        self._readable.poll()
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_NBYTES, MOST_FDS)
        except OSError:
            data, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
        self.closed = not data
        return json.loads(data) if data else None, fds

    def receive(self, most: int | None = None) -> list[Message]:
        """Messages that have arrived, up to ``most``.

        ``closed`` is set once the other end is gone.
        """
        messages: list[Message] = []
        # Messages are few, and `recv` allocates room for the longest before it looks for one.
        while not self.closed and len(messages) != most and self._readable.poll(0):
            try:
                data = self._socket.recv(MESSAGE_NBYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                # The other end closed without reading everything; this error is raised once, before
                # its own messages can be read.
                continue
            except OSError:
                data = b""
            if data:
                messages.append(json.loads(data))
            else:
                self.closed = True
        return messages

    def close(self) -> None:
        self.closed = True
        self._socket.close()


def encoded(message: Message) -> bytes:
    """The message as it is sent."""
    return json.dumps(message, separators=(",", ":")).encode()
