"""Decides which connections to a server stay open, so that its owner is always served.

A peer that the `Guard` does not admit is refused before it takes a place. Each other connection is
closed if it completes no request within a while, and the oldest one if too many have no request in
progress. uvicorn itself waits for the headers of a request without limit, and answers no request
while all places are taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.core.web.guard import NOT_OWN, Scope

# A connection that completes no request for so long is closed.
IDLE_S = 15
# So many connections may have no request in progress; a browser has at most six.
SILENT = 32
REFUSAL = (
    "HTTP/1.1 403 Forbidden\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\r\n"
    f"penstock: {NOT_OWN}\n"
).encode()


def limited(admits: Callable[[Scope], bool]) -> Callable[..., asyncio.Protocol]:
    """Returns what uvicorn calls for each new connection.

    ``admits`` decides on a connection by its two addresses.
    """
    return partial(LimitedProtocol, admits)


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol for one connection; all connections of a server have this class."""

    idle_s: float = IDLE_S
    most_silent: int = SILENT

    def __init__(self, admits: Callable[[Scope], bool], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._admits = admits
        self.silent_s = self.loop.time()
        """Since when no request was in progress."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override, unused-ignore]
        """Refuse a connection that is not admitted; if there are too many, close the oldest one."""
        super().connection_made(transport)
        if not self._admits({"client": self.client, "server": self.server}):
            self.connections.discard(self)
            transport.write(REFUSAL)
            transport.close()
            return

        connections: set[Any] = self.connections
        silent = [connection for connection in connections if connection.is_silent]
        if len(silent) > self.most_silent:
            oldest = min(silent, key=lambda connection: connection.silent_s)
            oldest.end()
        self._timer = self.loop.call_later(self.idle_s, self._check)

    @property
    def is_silent(self) -> bool:
        """Whether no request is in progress."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def end(self) -> None:
        """Close the connection, whose place is free at once."""
        self.connections.discard(self)
        self.transport.close()

    def hand_over(self, protocol: asyncio.Protocol) -> None:
        """Have another protocol serve the connection from now on; its place here is free."""
        self.connections.discard(self)
        self._timer.cancel()
        self._unset_keepalive_if_required()
        self.transport.set_protocol(protocol)
        protocol.connection_made(self.transport)

    def on_response_complete(self) -> None:
        """Note that the connection is silent from now on."""
        self.silent_s = self.loop.time()
        super().on_response_complete()

    def _check(self) -> None:
        """Close the connection if it was silent for too long, or check it later again."""
        if self.transport.is_closing():
            return
        if self.is_silent and self.loop.time() >= self.silent_s + self.idle_s:
            self.end()
        else:
            self._timer = self.loop.call_later(self.idle_s, self._check)
