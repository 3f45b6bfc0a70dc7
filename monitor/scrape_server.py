"""The HTTP server for programs that poll a run: that of the standard library, with limits.

It answers GET and HEAD, closes each connection after its answer, and never reads a body. Any host
that reaches the port can connect, and each connection has a thread. So a client that does not send
or read for `CLIENT_S` is closed; so is the oldest one beyond `CLIENTS` at a time, so that a probe
is always answered.

Starlette under uvicorn, which serves the page of `penstock watch`, was measured in its place: it
needs that extra, costs a supervisor 45 ms of processor time and 6.4 MB instead of 2 ms and 0.4 MB,
and a request costs the same. prometheus_client's own server has no limits and serves no probes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, NamedTuple

CLIENTS = 16  # connections at a time
CLIENT_S = 5.0
# The accepting thread looks up after this time; `close` wakes it.
POLL_S = 3600.0
# Without a free descriptor, the next attempt to accept is after this time.
RETRY_S = 0.1


class Page(NamedTuple):
    """An answer: its status, its media type and its content."""

    status: HTTPStatus
    content_type: str
    body: bytes


def plain(status: HTTPStatus, text: str) -> Page:
    """Returns an answer of one line of text."""
    return Page(status, "text/plain; charset=utf-8", f"{text}\n".encode())


class ScrapeServer(ThreadingMixIn, TCPServer):
    """Serves pages from its creation until `close`."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, page: Callable[[str], Page]) -> None:
        """Listen at ``host`` and ``port``, and serve in a thread.

        Args:
            host: name or address.
            port: 0 lets the system choose one.
            page: returns the answer to a request. It is called in a thread with the path, such as
                "/metrics".

        Raises:
            OSError: the address cannot be used.
        """
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = addresses[0]
        super().__init__(address, _Handler)  # type: ignore[arg-type]
        self.page = page
        self.port: int = self.socket.getsockname()[1]

        self._open: dict[Any, None] = {}  # connections, the oldest first
        self._lock = threading.Lock()  # held while `_open` is read or changed
        self._closes = threading.Event()
        self._thread = threading.Thread(
            target=self.serve_forever, args=(POLL_S,), name="scrapes", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and close all connections. A second call does nothing."""
        if self._closes.is_set():
            return

        self._closes.set()
        self.socket.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self.shutdown()
        self.server_close()
        with self._lock:
            for connection in self._open:
                _hang_up(connection)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Without a free descriptor it waits, and stays readable."""
        try:
            return super().get_request()
        except OSError:
            self._closes.wait(RETRY_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, in place of the oldest one if there are too many."""
        with self._lock:
            self._open[request] = None
            if len(self._open) > CLIENTS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _hang_up(oldest)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves before its answer is no event of the run."""


def _hang_up(connection: Any) -> None:
    """End a connection that another thread serves, which then closes it."""
    with suppress(OSError):  # the client has left
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers the request of a connection."""

    server: ScrapeServer
    protocol_version = "HTTP/1.1"
    server_version = "penstock"
    sys_version = ""
    error_message_format = "%(code)d: %(message)s\n"
    error_content_type = "text/plain; charset=utf-8"
    timeout = CLIENT_S

    def do_GET(self) -> None:
        """Send the page of the path; for HEAD, its header only."""
        try:
            page = self.server.page(self.path.partition("?")[0])
        except Exception as error:  # whatever fails here does not end the run
            page = plain(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")

        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page.body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Write nothing: requests are not events of the run."""
