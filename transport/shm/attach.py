"""The Unix socket where processes of this host attach to memory, and how their end is detected.

The socket lies in a directory of mode 0700. A client connects, sends one request and receives one
reply, with descriptors. The connection stays open: its end shows the client that the owner is gone.
The owner watches each client's pidfd. A client's memory is taken back only when the kernel reports
its end, or the client itself sends that it will not write any more: a closed connection proves
neither.

An owner that ends for good sends BYE to its clients before it closes their connections.

The folder's mode keeps other users away. An attached client maps the memory and may write to it, so
it is trusted, as the owner is; a request or an answer of another release is refused in a sentence.

Everything runs in the thread that calls `AttachServer.poll`.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from penstock import __version__
from penstock.configs.errors import UserError
from penstock.configs.value_types import MOST_CHAIRS
from penstock.core.runtime_folder import UNIX_PATH_NBYTES

ATTACH_VERSION = 1
# The longest wait for the answer to a request.
ATTACH_TIMEOUT_S = 10.0
# The rest after a connection that could not be accepted.
SHORT_OF_DESCRIPTORS_S = 0.01
MESSAGE_NBYTES = 1 << 17
# The most descriptors in an answer: three of a lane, and one of each policy's board.
MAX_FDS = 3 + 1 + MOST_CHAIRS
# A client that sends this does not write any more; an owner that sends it has ended for good.
BYE = b"bye"


class Attached(NamedTuple):
    """The answer to a client's request."""

    lane: int | None
    """The lane that the client holds from now on, if any."""
    fds: list[int]
    """The descriptors that are sent."""
    reply: dict[str, Any]
    """The message that is sent."""


class _Peer(NamedTuple):
    """A client that is attached."""

    connection: socket.socket
    lane: int | None


class AttachServer:
    """Accepts clients at a Unix socket; call `poll` repeatedly."""

    def __init__(
        self,
        path: Path,
        attach: Callable[[dict[str, Any]], Attached],
        on_leave: Callable[[int], None],
    ) -> None:
        """Open the socket.

        Args:
            path: where to listen.
            attach: answers a request, or raises UserError to refuse it.
            left: called with each lane whose holder has ended.

        Raises:
            UserError: another process listens at ``path``.
        """
        self._path = path
        self._attach = attach
        self._on_leave = on_leave
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, _Peer] = {}  # by pidfd
        self._listener = _listen(path)
        self._socket_file = os.lstat(path)
        self.watch(self._listener, self._accept)

    def watch(self, fileobj: Any, callback: Callable[[], None] | None = None) -> None:
        """Make `poll` return when ``fileobj`` is readable, and call ``callback`` if given."""
        self._selector.register(fileobj, selectors.EVENT_READ, callback)

    def unwatch(self, fileobj: Any) -> None:
        """Undo `watch`."""
        self._selector.unregister(fileobj)

    def poll(self, timeout_s: float | None) -> None:
        """Handle events, waiting up to ``timeout_s`` seconds (None: without limit) for one."""
        for key, _ in self._selector.select(timeout_s):
            # A callback before this one may have removed it, and its number may be another's now.
            if self._selector.get_map().get(key.fileobj) is key and key.data is not None:
                key.data()

    def close(self, *, over: bool = False) -> None:
        """Close all connections, and remove the socket's file.

        ``over``: no other owner will take this one's place, which the clients are told.
        """
        sockets = [key.fileobj for key in self._selector.get_map().values()]
        for pidfd, peer in self._peers.items():
            if over:
                with suppress(OSError):
                    peer.connection.send(BYE)
            sockets.append(peer.connection)
            os.close(pidfd)
        self._peers.clear()
        self._selector.close()
        for fileobj in sockets:
            if isinstance(fileobj, socket.socket):
                fileobj.close()

        # Another owner may have replaced the file by its own.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self._path), self._socket_file):
                self._path.unlink()

    def _accept(self) -> None:
        """Accept a connection, and wait for its request."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            # The client left, or descriptors are short: clients retry. The listener stays readable
            # meanwhile, so this rests.
            time.sleep(SHORT_OF_DESCRIPTORS_S)
            return
        connection.setblocking(False)
        self.watch(connection, lambda: self._serve(connection))

    def _serve(self, connection: socket.socket) -> None:
        """Answer the request of a client; from then on its pidfd reports its end."""
        self.unwatch(connection)
        try:
            request = _unpack(connection.recv(MESSAGE_NBYTES))
            if hung_up(connection):
                raise ValueError("it did not wait for an answer")
            pidfd = os.pidfd_open(pid_of(connection))
        except (OSError, ValueError):  # it left, or it is not a client of ours
            connection.close()
            return

        answer = self._answer(request)
        self._peers[pidfd] = _Peer(connection, answer.lane)
        self.watch(pidfd, lambda: self._end(pidfd))
        self.watch(connection, lambda: self._on_readable(pidfd))
        try:
            socket.send_fds(connection, [msgpack.packb(answer.reply)], answer.fds)
        except OSError:  # the descriptors were not delivered
            self._end(pidfd)

    def _answer(self, request: Any) -> Attached:
        """Answer a request; an invalid or refused one is answered by a sentence."""
        try:
            if request.get("attach") != ATTACH_VERSION:
                raise UserError(
                    f"this process asks for version {request.get('attach')!r:.20} of shared "
                    f"memory, and the learner's Penstock {__version__} has {ATTACH_VERSION}; use "
                    "the same release in both, or penstock actor --transport zmq"
                )
            return self._attach(request)
        except (UserError, OSError) as error:
            return Attached(None, [], {"error": str(error)})
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return Attached(None, [], {"error": "this is no request to attach"})

    def _on_readable(self, pidfd: int) -> None:
        """Handle a client that will not write any more, or has closed its connection.

        A closed connection alone proves nothing; its process may still write.
        """
        connection = self._peers[pidfd].connection
        message = b""
        with suppress(OSError):
            message = connection.recv(len(BYE))

        if message == BYE:
            self._end(pidfd)
        else:
            self.unwatch(connection)

    def _end(self, pidfd: int) -> None:
        """Forget a client that does not write any more, and report its lane as free."""
        peer = self._peers.pop(pidfd)
        self.unwatch(pidfd)
        with suppress(KeyError):  # not watched, if its connection was closed before
            self.unwatch(peer.connection)
        os.close(pidfd)
        peer.connection.close()
        if peer.lane is not None:
            self._on_leave(peer.lane)


class AttachClient:
    """A client's attachment: the owner's answer, its descriptors, and whether it still lives.

    The caller owns the descriptors.
    """

    def __init__(
        self, path: Path, request: dict[str, Any], timeout_s: float = ATTACH_TIMEOUT_S
    ) -> None:
        """Connect, send ``request``, and wait for the answer.

        Raises:
            OSError: no process listens.
            UserError: the owner refuses, or sends what is no answer.
            TimeoutError: there is no answer within ``timeout_s`` seconds.
            EOFError: the owner ended meanwhile.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(str(path))
            self.reply, self.fds = self._ask(request)
            self._socket.settimeout(None)
        except BaseException as error:
            self._socket.close()
            if isinstance(error, (TimeoutError, BlockingIOError)):
                raise TimeoutError(
                    f"the owner of {path} did not answer within {timeout_s:g} s; it may be stopped "
                    "or hang: look at its process"
                ) from error
            raise

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """Send a request; return the owner's reply and its descriptors. Raises as `__init__`."""
        self._socket.send(msgpack.packb({"attach": ATTACH_VERSION, **request}))
        data, fds, flags, _address = socket.recv_fds(
            self._socket, MESSAGE_NBYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC
        )

        # Whatever is wrong with the reply, its descriptors are closed.
        try:
            if not data:
                raise EOFError("the owner ended during the handshake")
            truncated = flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
            if truncated:
                raise ValueError("more than an answer can be")
            reply = _unpack(data)
            if not isinstance(reply, dict):
                raise ValueError("no map")
            if "error" in reply:
                raise UserError(str(reply["error"]))
        except ValueError as error:
            close_all(fds)
            raise UserError(
                f"the answer of the memory's owner cannot be used ({error}); use the same release "
                "of Penstock in both processes"
            ) from error
        except BaseException:
            close_all(fds)
            raise
        return reply, fds

    @property
    def owner_gone(self) -> bool:
        """Whether the owner closed the connection, which it does only by ending."""
        return self._last_word() is not None

    @property
    def owner_over(self) -> bool:
        """Whether the owner has ended for good."""
        return self._last_word() == BYE

    def _last_word(self) -> bytes | None:
        """Return BYE, or empty bytes, after the owner's end; None while it lives.

        The message stays in the socket, so that each call finds it.
        """
        try:
            return self._socket.recv(len(BYE), socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def leave(self) -> None:
        """Send that this side will not write any more."""
        with suppress(OSError):
            self._socket.send(BYE)
        self._socket.close()


def pid_of(peer: socket.socket) -> int:
    """Return the pid of the process at the other end of a Unix socket, as of its connecting."""
    layout = struct.Struct("3i")  # pid, uid, gid
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    pid: int
    pid, _uid, _gid = layout.unpack(credentials)
    return pid


def close_all(fds: list[int]) -> None:
    """Close descriptors; errors are ignored."""
    for fd in fds:
        with suppress(OSError):
            os.close(fd)


def _unpack(data: bytes) -> Any:
    """Decode a message. Raises ValueError for an invalid one."""
    try:
        return msgpack.unpackb(data, max_ext_len=0)
    except (ValueError, TypeError, RecursionError) as error:  # all that msgpack raises
        raise ValueError(f"no message: {error}") from error


def hung_up(peer: socket.socket) -> bool:
    """Whether the other end of a connection is closed."""
    try:
        return not peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _abandoned(path: Path) -> bool:
    """Whether a socket lies at ``path`` that no process listens to.

    A socket of another type, of another program, refuses to connect with another error.
    """
    if not path.is_socket() or path.is_symlink():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(ATTACH_TIMEOUT_S)
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def _listen(path: Path) -> socket.socket:
    """Open a socket that listens at ``path``. Raises UserError where that is not possible."""
    if len(os.fsencode(path)) > UNIX_PATH_NBYTES:
        raise UserError(
            f"the socket path {path} is longer than the {UNIX_PATH_NBYTES} bytes that the system "
            "allows; set XDG_RUNTIME_DIR or TMPDIR to a shorter folder"
        )
    if _abandoned(path):
        path.unlink()  # left by a process that was killed

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen at {path} ({error.strerror}); another process may be using it: "
            "stop that one first"
        ) from error
    # Where a user gave a path, its folder may be open to other users.
    path.chmod(0o600)
    listener.listen(128)
    listener.setblocking(False)
    return listener
