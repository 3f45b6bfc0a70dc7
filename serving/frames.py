"""The protocol of games over TCP, and how it shares the port with HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.core.web.connections import LimitedProtocol
from penstock.core.web.guard import Scope
from penstock.serving.port import HELLO_S, Games, Wire

# How a request of HTTP begins: as the length of a message these bytes would be beyond every limit.
METHODS = (b"GET ", b"POST", b"HEAD", b"OPTI", b"PUT ", b"DELE", b"PATC")
SNIFFED_NBYTES = 4


class FrameProtocol(Wire):
    """One game over TCP: messages with their length in front."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open a game."""
        super().connection_made(transport)
        self.send = self._transport.write
        self._game = self._port.open(self)

    def data_received(self, data: bytes) -> None:
        """Hand bytes to the port."""
        if self._game is not None:
            self._port.receive(self._game, data)


def sniffing(
    port: Games, admits: Callable[[Scope], bool], most_silent: int
) -> Callable[..., asyncio.Protocol]:
    """Returns what uvicorn calls for each new connection, as `connections.limited` does.

    So many connections may have sent nothing yet, or have no request in progress.
    """
    return partial(SniffingProtocol, port, admits, most_silent)


class SniffingProtocol(LimitedProtocol):
    """A connection whose first bytes decide whether it is HTTP, or a game over TCP."""

    idle_s = HELLO_S

    def __init__(
        self, port: Games, admits: Callable[[Scope], bool], most_silent: int, **arguments: Any
    ) -> None:
        super().__init__(admits, **arguments)
        self.most_silent = most_silent
        self._port = port
        self._is_http = False
        self._first_bytes = b""

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Hand the connection over to the protocol of WebSocket."""
        self._timer.cancel()
        super().handle_websocket_upgrade(event)

    def data_received(self, data: bytes) -> None:
        """Read a request, or hand the connection over to the games."""
        if self._is_http:
            super().data_received(data)
            return

        self._first_bytes += data
        if len(self._first_bytes) < SNIFFED_NBYTES:
            return
        first_bytes, self._first_bytes = self._first_bytes, b""
        if first_bytes.startswith(METHODS):
            self._is_http = True
            super().data_received(first_bytes)
        else:
            protocol = FrameProtocol(self._port)
            self.hand_over(protocol)
            protocol.data_received(first_bytes)
