"""ZeroMQ sockets with the options that the protocol relies on.

High-water marks are a backstop behind the grants; like all options that shape a connection they are
set before connecting. IMMEDIATE keeps messages out of pipes to absent peers. Heartbeats detect
hosts that vanished; the protocol's own silence detects processes that hang. libzmq bounds the size
of a frame (MAXMSGSIZE), but not the number of frames in a message that has not ended: that is in
docs/security.md.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from penstock.configs.errors import UserError
from penstock.core.runtime_folder import UNIX_PATH_NBYTES
from penstock.transport.addresses import check_port
from penstock.transport.wire import (
    MAX_FRAMES,
    STRANGE,
    Buffer,
    Message,
    Parts,
    WireError,
    decode,
    describe_other_version,
)
from penstock.transport.zmq.keys import ZAP_ADDRESS, ZAP_DOMAIN, ActorKeys, LearnerKeys

# The first parts of a message, up to the meta, are small, and cheaper copied.
COPIED_PARTS = 3
# The most connections that wait to be accepted; `transport.zmq.listener` clears so many.
BACKLOG = 16
# The most messages per peer that wait; a peer has fewer grants.
HIGH_WATER = 64
MAX_WEIGHTS_NBYTES = 1 << 31
# A connection that has not spoken ZeroMQ's protocol by then is closed.
HANDSHAKE_MS = 5000
COMMON_OPTIONS = (
    (zmq.SNDHWM, HIGH_WATER),
    (zmq.RCVHWM, HIGH_WATER),
    (zmq.LINGER, 3000),
    (zmq.HEARTBEAT_IVL, 2000),
    (zmq.HEARTBEAT_TIMEOUT, 5000),
    (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.IPV6, 1),
)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Socket = zmq.Socket[bytes]

# The outcome of sending a message.
SENT = 0  # on its way
FULL = 1  # no room for it now
GONE = 2  # no such peer

IsReleased = Callable[[], bool]
"""Returns whether the socket has released a message that was sent."""
Send = Callable[[bytes, Parts], tuple[int, IsReleased]]
"""Sends a message to a peer, as `send_to`."""


class Sender(NamedTuple):
    """The connection from which a message came."""

    peer: bytes
    """Its routing id."""
    key: bytes = b""
    """The peer's public CURVE key, Z85 text, as set by `keys.answer_zap`; empty without CURVE."""
    host: str = ""
    """The peer's IP address; over ``ipc://`` another text, or empty."""


def dealer(
    context: zmq.Context[Socket],
    address: str,
    keys: ActorKeys | None,
    *,
    max_frame_nbytes: int = MAX_WEIGHTS_NBYTES,
    received: int = HIGH_WATER,
    queued: bool = False,
) -> Socket:
    """Make a DEALER that keeps connecting to a connector, or to a relay, until there is one.

    Args:
        context: of the socket.
        address: of the peer.
        keys: this side's, and the peer's public one; None without CURVE.
        max_frame_nbytes: largest frame that is received.
        received: messages that may wait to be read.
        queued: whether messages sent before there is a connection wait for it, instead of raising
            `zmq.Again`.

    Raises:
        UserError: the address is no address.
    """
    check_port(address)
    with _new_socket(context, zmq.DEALER) as client:
        client.setsockopt(zmq.IMMEDIATE, not queued)
        client.setsockopt(zmq.RCVHWM, received)
        client.setsockopt(zmq.MAXMSGSIZE, max_frame_nbytes)
        client.setsockopt(zmq.CONNECT_TIMEOUT, 3000)  # the system's own retries become rarer
        client.setsockopt(zmq.RECONNECT_IVL, 50)
        client.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if keys is not None:
            client.curve_publickey = keys.own.public
            client.curve_secretkey = keys.own.secret
            client.curve_serverkey = keys.learner

        try:
            client.connect(address)
        except zmq.ZMQError as error:
            raise UserError(
                f"cannot connect to {address} ({error.strerror}); an address looks like "
                "tcp://learner-host:7700"
            ) from error
        return client


def router(
    context: zmq.Context[Socket],
    address: str,
    keys: LearnerKeys | None,
    max_frame_nbytes: int,
    *,
    received: int = HIGH_WATER,
    sent: int = HIGH_WATER,
) -> Socket:
    """Make a ROUTER that listens at an address.

    Args:
        context: of the socket.
        address: where it listens.
        keys: the server's own, and those of the peers that are let in; None without CURVE.
        max_frame_nbytes: largest frame that is received.
        received: messages from a peer that may wait to be read.
        sent: messages to a peer that may wait.

    Raises:
        UserError: the address is taken or not ours.
    """
    check_port(address)
    with _new_socket(context, zmq.ROUTER) as server:
        server.setsockopt(zmq.MAXMSGSIZE, max_frame_nbytes)
        server.setsockopt(zmq.RCVHWM, received)
        server.setsockopt(zmq.SNDHWM, sent)
        server.setsockopt(zmq.BACKLOG, BACKLOG)
        # A message that does not fit, or whose peer has left, is reported and not dropped.
        server.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            server.curve_publickey = keys.own.public
            server.curve_secretkey = keys.own.secret
            server.curve_server = True
            server.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)

        try:
            _check_ipc(address)
            server.bind(address)
        except zmq.ZMQError as error:
            raise UserError(
                f"cannot listen at {address} ({error.strerror}); another process may be using it: "
                "stop that one, or choose another address"
            ) from error
        return server


def zap(context: zmq.Context[Socket]) -> Socket:
    """Make the socket at which libzmq authenticates peers; do so before the router is bound."""
    authenticator = context.socket(zmq.REP)
    authenticator.bind(ZAP_ADDRESS)
    return authenticator


def port_of(bound: Socket) -> int:
    """Return the TCP port at which a socket listens."""
    return int(bound.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def boot_id() -> str:
    """Return the id of this boot: two processes have the same one only under the same kernel."""
    return BOOT_ID.read_text().strip()


def receive(source: Socket) -> list[Buffer] | None:
    """Return the parts of the next message without copying big ones; None when there is none now.

    Of a message with too many parts the first are returned, and the rest is dropped.
    """
    try:
        parts: list[Buffer] = [source.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    return _with_remaining(source, parts)


def handle_messages(
    source: Socket,
    handle: Callable[[Message], None],
    *,
    server: str,
    client: str,
    error: type[UserError] = UserError,
) -> None:
    """Handle the messages that wait at a DEALER; one that cannot be used is dropped.

    Args:
        source: the socket.
        handle: called with each message.
        server: the peer, for an error.
        client: this side, for an error.
        error: the type of the error for a server that speaks another version of the protocol.

    Raises:
        UserError: of the type ``error``, and any that ``handle`` raises.
    """
    while (parts := receive(source)) is not None:
        try:
            handle(decode(parts))
        except WireError as fault:
            if fault.reason == "version":
                raise error(describe_other_version(server, fault.text, client)) from fault
        except UserError:  # raised by `handle`; some are a ValueError too
            raise
        except STRANGE:  # unexpected content is of no more use than a torn message
            continue


def receive_from(source: Socket, *, keys: bool) -> tuple[Sender, list[Buffer]] | None:
    """Return the sender of the next message at a ROUTER, and the parts after its routing id.

    Returns None when there is no message now. ``keys``: whether peers have CURVE keys.
    """
    try:
        routing_frame = source.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None
    key = str(routing_frame.get("User-Id")).encode() if keys else b""
    peer, *parts = _with_remaining(source, [routing_frame.bytes])
    try:
        host = str(routing_frame.get("Peer-Address"))
    except zmq.ZMQError:
        host = ""
    # An IPv4 peer of a socket that takes IPv6 too is shown with a prefix.
    host = host.removeprefix("::ffff:")
    return Sender(bytes(peer), key, host), parts


def send_now(target: Socket, parts: Parts) -> bool:
    """Send a message by a DEALER, without waiting; return False where no peer takes it now."""
    try:
        target.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def send_to(
    target: Socket, peer: bytes, parts: Parts, *, tracked: bool = False
) -> tuple[int, IsReleased]:
    """Send a message by a ROUTER, without waiting.

    Returns:
        SENT, FULL or GONE, and a function that returns whether the socket has released the message,
        if that has frames or is ``tracked``: a small one is copied. A peer that does not read can
        report anything, so what waits for it counts until then.
    """
    copy = len(parts) < COPIED_PARTS and not tracked
    is_released: IsReleased = _was_copied
    message: list[Any] = [peer, *parts]
    # The last part is tracked, because libzmq sends and releases it last.
    if not copy:
        last = zmq.Frame(parts[-1], track=True, copy=False, copy_threshold=0)
        message[-1] = last
        is_released = partial(getattr, last.tracker, "done")

    try:
        target.send_multipart(message, zmq.NOBLOCK, copy=copy)
    except zmq.Again:
        return FULL, is_released
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return GONE, is_released
    return SENT, is_released


class WasWritten:
    """Returns whether a message was written to its connection with CURVE.

    libzmq releases a message when it is encrypted, and turns to the next one when all of the
    encrypted one is written. So a small message is sent after it, whose release shows that.
    """

    def __init__(
        self, is_released: IsReleased, send_next: Callable[[], tuple[int, IsReleased]]
    ) -> None:
        """Make the test of a message.

        Args:
            is_released: returns whether the socket has released the message.
            send_next: sends a small tracked message to the same peer.
        """
        self._is_released = is_released
        self._send_next: Callable[[], tuple[int, IsReleased]] | None = send_next

    def __call__(self) -> bool:
        if not self._is_released() or self._send_next is None:
            return self._is_released()
        outcome, is_released = self._send_next()
        if outcome == SENT:
            self._is_released = is_released
            self._send_next = None
        return outcome == GONE


def _was_copied() -> bool:
    """Whether libzmq has released a message without frames: it has only a copy, which is small."""
    return True


def _with_remaining(source: Socket, parts: list[Buffer]) -> list[Buffer]:
    """Read the rest of a message whose first parts are given, and return all of its parts."""
    while source.getsockopt(zmq.RCVMORE):
        if len(parts) < COPIED_PARTS:  # routing id, header, meta: small, and cheaper copied
            parts.append(source.recv())
            continue
        frame = source.recv(copy=False)
        if len(parts) <= 3 + MAX_FRAMES:
            parts.append(frame.buffer)
    return parts


@contextmanager
def _new_socket(context: zmq.Context[Socket], kind: int) -> Iterator[Socket]:
    """Make a socket with the common options; it is closed if an error leaves the block."""
    new_socket = context.socket(kind)
    try:
        for option, value in COMMON_OPTIONS:
            new_socket.setsockopt(option, value)
        yield new_socket
    except BaseException:
        new_socket.close(0)
        raise


def _check_ipc(address: str) -> None:
    """Check that a socket may be bound at the path of an ``ipc://`` address.

    libzmq would silently take over the path of a live listener.

    Raises:
        UserError: the path is too long.
        ZMQError: another process listens there.
    """
    if not address.startswith("ipc://"):
        return

    path = Path(address.removeprefix("ipc://"))
    if len(os.fsencode(path)) > UNIX_PATH_NBYTES:
        raise UserError(
            f"the socket path {path} is longer than the {UNIX_PATH_NBYTES} bytes that the system "
            "allows; choose a shorter one"
        )

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise zmq.ZMQError(zmq.EADDRINUSE)
