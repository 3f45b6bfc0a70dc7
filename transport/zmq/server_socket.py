"""A server's socket: a bound ROUTER, the authentication of its peers, and its gate.

With keys libzmq asks this process about each new peer (`keys.answer_zap`). While file descriptors
are nearly used up, `Listener` turns new connections away.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import zmq

from penstock.configs.errors import UserError
from penstock.transport.wire import Buffer, Parts
from penstock.transport.zmq.keys import LearnerKeys, answer_zap
from penstock.transport.zmq.listener import Listener
from penstock.transport.zmq.sockets import (
    HIGH_WATER,
    IsReleased,
    Sender,
    Socket,
    receive_from,
    router,
    send_to,
    zap,
)

# The interval between two tries to bind an address that libzmq has not freed yet.
REBIND_S = 0.005


class ServerSocket:
    """A ROUTER at an address, in a context of its own; used by one thread."""

    router: Socket
    listener: Listener
    """The gate of the socket; call `Listener.check_descriptors` in every turn."""

    def __init__(
        self,
        address: str,
        keys: LearnerKeys | None,
        max_frame_nbytes: int,
        *,
        received: int = HIGH_WATER,
        linger_ms: int = 500,
    ) -> None:
        """Bind the socket.

        Args:
            address: to listen at.
            keys: the server's own, and those of the peers that are let in; None without CURVE.
            max_frame_nbytes: largest frame that is received.
            received: messages from a peer that may wait.
            linger_ms: time for messages on their way when the socket is closed.

        Raises:
            UserError: the address is taken or not ours.
        """
        self._keys = keys
        self._max_frame_nbytes = max_frame_nbytes
        self._received = received
        self._poller = zmq.Poller()

        # What was opened is closed where a later step fails, and otherwise by `close`.
        with ExitStack() as opening:
            self._context: zmq.Context[Socket] = zmq.Context()
            opening.callback(self._context.destroy, linger_ms)  # closes its sockets too
            self._zap = zap(self._context) if keys else None
            if self._zap is not None:
                self.watch(self._zap)
            self._bind(address)
            opening.callback(lambda: self.listener.close())
            self._stack = opening.pop_all()

    def _bind(self, address: str) -> None:
        """Bind a new ROUTER, with its gate. Raises UserError where the address is taken."""
        self.router = router(
            self._context,
            address,
            self._keys,
            max_frame_nbytes=self._max_frame_nbytes,
            received=self._received,
        )
        self.listener = Listener(self.router)
        self.watch(self.router)

    @property
    def has_keys(self) -> bool:
        """Whether connections are encrypted, and peers authenticated."""
        return self._keys is not None

    def watch(self, source: Any) -> None:
        """Make `wait` return when ``source``, a socket or descriptor, is readable too."""
        self._poller.register(source, zmq.POLLIN)

    def wait(self, timeout_s: float) -> dict[Any, int]:
        """Wait for a message, a peer to authenticate, or what is watched besides.

        Returns:
            The sockets and descriptors that are readable, with the event that they are readable by.
        """
        ready = dict(self._poller.poll(round(timeout_s * 1000)))
        if self._zap is not None and self._keys is not None and self._zap in ready:
            answer_zap(self._zap, self._keys.allowed)
        return ready

    def receive(self) -> tuple[Sender, list[Buffer]] | None:
        """Return the sender and the parts of the next message; None when there is none now."""
        return receive_from(self.router, keys=self.has_keys)

    def send(self, peer: bytes, parts: Parts, *, tracked: bool = False) -> tuple[int, IsReleased]:
        """Send a message as `sockets.send_to`."""
        return send_to(self.router, peer, parts, tracked=tracked)

    def reopen(self, address: str, patience_s: float) -> None:
        """Close every connection, and bind again at ``address``, within ``patience_s`` seconds.

        Raises UserError where the address is not free by then.
        """
        self._poller.unregister(self.router)
        self.listener.close()  # it holds the address too
        self.router.close(0)

        # libzmq frees the address a little later.
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                self._bind(address)
                return
            except UserError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(REBIND_S)

    def close(self) -> None:
        """Close the socket, and with it the address."""
        self._stack.close()
