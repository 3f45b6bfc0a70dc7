"""A small HTTP server for programs that poll a run, in one thread of its own.

It answers GET and HEAD, closes each connection after its answer, and never reads a body. Any host
that reaches the port can connect, so the number of clients, the size of a request and the time of a
connection are limited. A client that is slower than `CLIENT_S` is closed; so is the one that has
been silent for longest, beyond `CLIENTS` at a time, so that a probe is always answered.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple

CLIENTS = 16  # at a time
CLIENT_S = 5.0  # from the accepted connection to the last byte of the answer
REQUEST_NBYTES = 8192  # of the request line and all headers
CHUNK_NBYTES = 4096
JOIN_S = 1.0
RETRY_S = 0.1


class Page(NamedTuple):
    """An answer: its status, its media type and its content."""

    status: HTTPStatus
    content_type: str
    body: bytes


def plain(status: HTTPStatus, text: str) -> Page:
    """An answer of one line of text."""
    return Page(status, "text/plain; charset=utf-8", f"{text}\n".encode())


class ScrapeServer:
    """Serves ``page`` from its creation until `close`."""

    def __init__(self, host: str, port: int, page: Callable[[str], Page]) -> None:
        """Listen at ``host`` and ``port``; port 0 lets the system choose one.

        Args:
            page: called in the server's thread with the path of a request, such as "/metrics".

        Raises:
            OSError: the address cannot be used.
        """
        self._page = page
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._clients: dict[int, _Client] = {}  # by descriptor
        self._wakeup, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="scrapes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close all connections. A second call does nothing."""
        if self._wakeup.fileno() < 0:
            return
        self._wakeup.close()  # which the thread reads as its end
        self._thread.join(JOIN_S)

    def _serve(self) -> None:
        with self._woken, self._listener:
            while self._turn():
                pass
            for client in self._clients.values():
                client.connection.close()

    def _turn(self) -> bool:
        """Wait and serve; False once the server is closed."""
        poll = select.poll()  # not `select`: this process may have more than 1024 descriptors
        poll.register(self._woken, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        for fd, client in self._clients.items():
            poll.register(fd, select.POLLIN if client.answer is None else select.POLLOUT)
        ends_s = min((client.ends_s for client in self._clients.values()), default=None)
        wait_ms = None if ends_s is None else max(0.0, ends_s - time.monotonic()) * 1e3 + 1
        ready = {fd for fd, _ in poll.poll(wait_ms)}
        if self._woken.fileno() in ready:
            return False
        if self._listener.fileno() in ready:
            self._accept()
        now_s = time.monotonic()
        for fd, client in [*self._clients.items()]:
            if now_s >= client.ends_s or (fd in ready and not client.turn(self._page)):
                del self._clients[fd]
                client.connection.close()
        return True

    def _accept(self) -> None:
        """Take a new client in place of the one that has been silent for longest, if needed."""
        if len(self._clients) >= CLIENTS:
            silent = [fd for fd, client in self._clients.items() if client.answer is None]
            oldest = next(iter(silent or self._clients))
            self._clients.pop(oldest).connection.close()
        try:
            client = _Client(self._listener.accept()[0])
        except OSError:  # no descriptor is left; the connection waits and stays readable
            time.sleep(RETRY_S)
        else:
            self._clients[client.connection.fileno()] = client


class _Client:
    """A connection: its request as far as it was received, then the rest of its answer."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.ends_s = time.monotonic() + CLIENT_S
        self.answer: memoryview | None = None
        self._request = b""

    def turn(self, page: Callable[[str], Page]) -> bool:
        """Receive or send a part; returns whether the connection is still needed."""
        try:
            if self.answer is None:
                received = self.connection.recv(CHUNK_NBYTES)
                self._request += received
                if b"\r\n\r\n" in self._request or len(self._request) > REQUEST_NBYTES:
                    self.answer = memoryview(_answer(self._request, page))
                return bool(received)
            self.answer = self.answer[self.connection.send(self.answer) :]
            return bool(self.answer)
        except BlockingIOError:
            return True
        except OSError:
            return False


def _answer(request: bytes, page: Callable[[str], Page]) -> bytes:
    """The response to a request whose body, if any, is ignored."""
    head, ended, _ = request.partition(b"\r\n\r\n")
    words = head.decode("latin-1").partition("\r\n")[0].split(" ")
    method = words[0]
    if not ended or len(head) > REQUEST_NBYTES:
        found = plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too long")
    elif len(words) != 3 or not words[2].startswith("HTTP/1."):
        found = plain(HTTPStatus.BAD_REQUEST, "this is not a request of HTTP/1.1")
    elif method not in ("GET", "HEAD"):
        found = plain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are served")
    else:
        found = _page_of(page, words[1].partition("?")[0])
    head_lines = (
        f"HTTP/1.1 {found.status.value} {found.status.phrase}",
        f"Content-Type: {found.content_type}",
        f"Content-Length: {len(found.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    )
    response = "\r\n".join((*head_lines, "", "")).encode("latin-1")
    return response if method == "HEAD" else response + found.body


def _page_of(page: Callable[[str], Page], path: str) -> Page:
    try:
        return page(path)
    except Exception as error:  # whatever fails here ends neither the thread nor the run
        return plain(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
