"""JSON messages between the supervisor and a role, over a Unix socket with message boundaries.

SOCK_SEQPACKET delivers whole messages in order or none, so there is no buffer to split, and a
process that dies leaves no half message. Neither side waits for the other: reading never blocks,
and sending blocks no longer than the sender's ``patience_s``.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from typing import Any

Message = dict[str, Any]

MESSAGE_NBYTES = 1 << 18  # above what the default socket buffer can hold


class Channel:
    """One end of the control socket. Sending is safe from several threads."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._writable = select.poll()
        self._writable.register(end, select.POLLOUT)
        self._lock = threading.Lock()
        self.closed = False

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Make the supervisor's end, and the socket that a child inherits."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, patience_s: float = 0.0) -> bool:
        """Send one message.

        False where the other end is gone or stays full for ``patience_s`` seconds.
        """
        data = json.dumps(message, separators=(",", ":")).encode()
        with self._lock:
            try:
                if patience_s:
                    self._writable.poll(patience_s * 1000)
                self._socket.send(data)
            except OSError:
                return False
        return True

    def receive(self, most: int | None = None) -> list[Message]:
        """Messages that have arrived, up to ``most``.

        ``closed`` is set once the other end is gone.
        """
        messages: list[Message] = []
        while not self.closed and len(messages) != most:
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
            if not data:
                self.closed = True
            elif (message := _message(data)) is not None:
                messages.append(message)
        return messages

    def close(self) -> None:
        self.closed = True
        self._socket.close()


def _message(data: bytes) -> Message | None:
    """Decode a message; None for anything but a JSON object, which must not end the reader."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
