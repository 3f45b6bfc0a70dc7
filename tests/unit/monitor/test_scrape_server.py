"""The server of /metrics against good and hostile clients, over real sockets."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http import HTTPStatus
from http.client import HTTPConnection

import pytest

from penstock.monitor import scrape_server
from penstock.monitor.scrape_server import CLIENTS, Page, ScrapeServer, plain
from waiting import wait_until

LARGE = b"x" * (4 << 20)


def page(path: str) -> Page:
    if path == "/fault":
        raise KeyError("a fault")
    if path == "/large":
        return Page(HTTPStatus.OK, "text/plain", LARGE)
    return plain(HTTPStatus.OK, path)


@pytest.fixture
def server() -> Iterator[ScrapeServer]:
    made = ScrapeServer("127.0.0.1", 0, page)
    yield made
    made.close()


def get(server: ScrapeServer, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def connection_threads() -> list[str]:
    """The names of the threads that serve a connection."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if "process_request_thread" in name]


def raw(server: ScrapeServer, request: bytes) -> bytes:
    """All that is received after ``request``, until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(request)
        received = b""
        while part := client.recv(65536):
            received += part
        return received


def test_a_path_is_served_without_its_query(server: ScrapeServer) -> None:
    assert get(server, "/metrics?x=1") == (200, b"/metrics\n")
    assert get(server, "/metrics", "HEAD") == (200, b"")


def test_a_large_answer_arrives_whole(server: ScrapeServer) -> None:
    assert get(server, "/large") == (200, LARGE)


def test_exhausted_descriptors_cause_no_busy_loop(server: ScrapeServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client, ExitStack() as taken:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with suppress(OSError):
            while True:
                taken.callback(os.close, os.dup(0))
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET /a HTTP/1.1\r\n\r\n")
        before_s = time.process_time()
        time.sleep(0.5)
        spent_s = time.process_time() - before_s
        taken.close()
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")
    assert spent_s < 0.1


def test_a_request_may_arrive_in_pieces(server: ScrapeServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        for part in (b"GET /a HT", b"TP/1.1\r\nHost: x\r", b"\n\r\n"):
            client.sendall(part)
            time.sleep(0.02)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", 501),
        (b"GET\r\n\r\n", 400),
        (b"\xff\xfe\x00 \x00 HTTP/1.1\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 16), 431),
        (b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * 101, 431),
        (b"GET /" + b"x" * (1 << 16), 414),
    ],
)
def test_malformed_request_is_refused(server: ScrapeServer, request_: bytes, status: int) -> None:
    assert str(status).encode() in raw(server, request_)[:20]
    assert get(server, "/still") == (200, b"/still\n")


def test_page_error_returns_500_and_the_server_continues(server: ScrapeServer) -> None:
    assert get(server, "/fault")[0] == 500
    assert get(server, "/still") == (200, b"/still\n")


def test_silent_client_is_closed_while_others_are_served(
    server: ScrapeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape_server._Handler, "timeout", 0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:
        silent.sendall(b"GET /")
        assert get(server, "/other") == (200, b"/other\n")
        assert silent.recv(1) == b""


def test_sixty_silent_connections_do_not_block_others(server: ScrapeServer) -> None:
    with ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        before_s = time.monotonic()
        assert get(server, "/healthz") == (200, b"/healthz\n")
        assert time.monotonic() - before_s < scrape_server.CLIENT_S / 2

        # The thread of a connection that was closed ends a little later.
        wait_until(lambda: len(connection_threads()) <= CLIENTS)


def test_closing_ends_the_thread_and_frees_the_port() -> None:
    earlier_threads = set(threading.enumerate())  # some may belong to a server of another test
    server = ScrapeServer("127.0.0.1", 0, page)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        assert get(server, "/a") == (200, b"/a\n")
        server.close()
        server.close()
        assert client.recv(1) == b""
    wait_until(lambda: set(threading.enumerate()) <= earlier_threads)
    ScrapeServer("127.0.0.1", server.port, page).close()


def test_a_port_that_is_taken_is_an_oserror(server: ScrapeServer) -> None:
    with pytest.raises(OSError, match="in use"):
        ScrapeServer("127.0.0.1", server.port, page)
