"""The server's socket: a ROUTER that detects at once which of its peers has died.

When a connection ends, libzmq reports that, but not whose it was. So every peer is then sent a
small message, the probe: a peer that cannot be reached is gone. There are several rounds of probes,
as the socket updates its routes a moment after the report.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import zmq

from penstock.learner.extras.parameter_server.protocol import (
    FRAMES,
    Payload,
    ServerHeader,
    ServerMessageKind,
    encode,
)
from penstock.transport.zmq.keys import load_learners
from penstock.transport.zmq.server_socket import ServerSocket

PROBES = 10  # rounds of probes after a connection has ended
PROBE_S = 0.05  # seconds between two rounds


class Peers:
    """The ROUTER and its peers."""

    def __init__(self, bind: str, curve: Path | None, max_frame_nbytes: int) -> None:
        """Open the socket.

        Args:
            bind: its address.
            curve: folder of keys; only a peer with the learner's secret key is let in. None: all
                are let in.
            max_frame_nbytes: a peer that sends a larger frame is disconnected.

        Raises:
            UserError: if the socket cannot be opened.
        """
        self._probes_left = 0
        self._next_probe_s = 0.0

        keys = load_learners(curve)[0] if curve else None
        self._socket = ServerSocket(bind, keys, max_frame_nbytes, linger_ms=0)
        self.listener = self._socket.listener
        self._router = self._socket.router
        self._disconnections = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.watch(self._disconnections)

    def wait(self, timeout_s: float) -> None:
        """Return as soon as there is an event, or after ``timeout_s`` seconds."""
        self.listener.check_descriptors(time.monotonic())
        if self._probes_left:
            timeout_s = min(timeout_s, PROBE_S)
        if self._disconnections in self._socket.wait(timeout_s):
            self._disconnections.recv_multipart()
            self._probes_left = PROBES
            self._next_probe_s = 0.0

    def receive(self) -> tuple[bytes, list[Payload]] | None:
        """Receive a message, if there is one now.

        Returns:
            Name of a peer and the frames of its message; None when there is none. Of a message with
            more than `FRAMES` frames the first `FRAMES` + 1 are returned.
        """
        try:
            name = self._router.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

        frames: list[Payload] = []
        while self._router.getsockopt(zmq.RCVMORE):
            frame = self._router.recv(copy=False)
            if len(frames) <= FRAMES:
                frames.append(frame.buffer)
        return name, frames

    def send(self, name: bytes, frames: Sequence[Payload]) -> bool:
        """Send a message; returns False where the peer is gone, or accepts nothing any more."""
        try:
            self._router.send_multipart([name, *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def gone(self, names: Iterable[bytes]) -> list[bytes]:
        """Send probes to the peers, if a connection has ended recently and a round is due.

        Returns those of ``names`` that cannot be reached.
        """
        if not self._probes_left or time.monotonic() < self._next_probe_s:
            return []
        self._probes_left -= 1
        self._next_probe_s = time.monotonic() + PROBE_S
        return [name for name in names if not self.is_there(name)]

    def is_there(self, name: bytes) -> bool:
        """Whether a peer is connected, as far as the socket knows."""
        return self.send(name, encode(ServerHeader(ServerMessageKind.PING)))

    def close(self) -> None:
        """Close the socket and its monitor."""
        self._router.disable_monitor()
        self._socket.close()
