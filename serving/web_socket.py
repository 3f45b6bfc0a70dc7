"""Games over WebSocket: each binary message is a message of a game, without its length.

The handshake is checked by the `Guard` as a request of HTTP is, but for the token, which HELLO has.
"""

from __future__ import annotations

import asyncio
from typing import Any

from websockets.exceptions import InvalidState
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from penstock.core.web.guard import Guard, Refusal
from penstock.serving.messages import JSON_NBYTES, LENGTH
from penstock.serving.port import Games, Wire

PATH = "/play"
# A peer that does not answer a ping within this time is closed.
PING_S = 20
# After so many frames the others have their turn: a read may bring 40,000 of 6 bytes.
MOST_FRAMES = 64
# Bytes that are read before frames are counted again.
SLICE_NBYTES = 2048


class WebSocketProtocol(Wire):
    """One game over WebSocket, on the sans-I/O protocol of websockets."""

    def __init__(self, port: Games, guard: Guard, **uvicorn_arguments: Any) -> None:
        """Called by uvicorn for a request that asks for WebSocket, with what it knows."""
        super().__init__(port)
        self._guard = guard
        self._connection = ServerProtocol(max_size=JSON_NBYTES)
        self._unparsed = b""
        """What has arrived and is not read yet."""
        self._message = bytearray()
        """What has arrived of a message."""
        self._is_answered = True
        """Whether the last ping was answered."""

    def data_received(self, data: bytes) -> None:
        """Read the request, which comes first, and frames."""
        is_waiting = bool(self._unparsed)
        self._unparsed += data
        if not is_waiting:
            self._read()

    def resume_reading(self) -> None:
        """Read again, once all that has arrived is read."""
        if not self._unparsed:
            super().resume_reading()

    def _read(self) -> None:
        """Read what has arrived; of many frames some, and the others in the next turns."""
        if self._transport.is_closing():
            self._unparsed = b""
            return
        if self._game is not None:
            # HELLO has raised it to that of a STEP of all seats.
            self._connection.max_message_size = self._game.most_nbytes

        frames = 0
        position = 0
        while position < len(self._unparsed) and frames < MOST_FRAMES:
            end = position + SLICE_NBYTES
            self._connection.receive_data(self._unparsed[position:end])
            position = end
            for event in self._connection.events_received():
                frames += 1
                if isinstance(event, Request):
                    self._open(event)
                else:
                    assert isinstance(event, Frame)
                    self._read_frame(event)
        self._unparsed = self._unparsed[position:]
        self._write()

        if self._unparsed:
            self.pause_reading()
            asyncio.get_running_loop().call_soon(self._read)
        elif self._game is None or not self._game.is_paused:
            self.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free what has arrived, and tell the port."""
        self._unparsed = b""
        self._message.clear()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """End with the peer."""
        self._connection.receive_eof()

    def send(self, message: bytes) -> None:
        """Send a message that has its length in front."""
        try:
            self._connection.send_binary(message[LENGTH.size :])
        except InvalidState:  # the peer closes at this moment
            return
        self._write()

    def close(self) -> None:
        """Close the connection when all is sent."""
        if self._connection.state is State.OPEN:
            self._connection.send_close(CloseCode.NORMAL_CLOSURE)
            self._write()
        self._abort_later()

    def _open(self, request: Request) -> None:
        """Answer the handshake, and open a game."""
        path = request.path.partition("?")[0]
        headers = [
            (name.encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in request.headers.raw_items()
        ]
        try:
            self._guard.check_site({"path": path, "headers": headers})
            if path != PATH:
                raise Refusal(404, f"games connect to {PATH}")
        except Refusal as refusal:
            self._connection.send_response(
                self._connection.reject(refusal.status, f"penstock: {refusal.reason}\n")
            )
            return

        response = self._connection.accept(request)
        self._connection.send_response(response)
        self._write()
        if response.status_code == 101:
            self._game = self._port.open(self)
            asyncio.get_running_loop().call_later(PING_S, self._ping)

    def _read_frame(self, frame: Frame) -> None:
        """Hand a complete message to the port."""
        if frame.opcode is Opcode.PONG:
            self._is_answered = True
        elif frame.opcode is Opcode.TEXT:
            self._connection.fail(CloseCode.UNSUPPORTED_DATA, "messages of games are binary")
        if frame.opcode not in (Opcode.BINARY, Opcode.CONT):
            return
        if self._game is None or self._game.is_closed:
            self._message.clear()
            return

        self._message += frame.data
        if frame.fin:
            message = bytes(self._message)
            self._message.clear()
            self._port.receive(self._game, LENGTH.pack(len(message)) + message)

    def _ping(self) -> None:
        """Ask whether the peer is there, from time to time."""
        if self._connection.state is not State.OPEN:
            return
        if not self._is_answered:
            self._transport.abort()
            return
        self._is_answered = False
        self._connection.send_ping(b"")
        self._write()
        asyncio.get_running_loop().call_later(PING_S, self._ping)

    def _write(self) -> None:
        """Write what the protocol has to send."""
        for data in self._connection.data_to_send():
            if self._transport.is_closing():  # the peer has gone
                continue
            if data:
                self._transport.write(data)
            else:  # the mark of the end
                self._transport.close()
