"""Bytes that a process gives to the network, as the kernel counts them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from network_bytes import Interface, interface, tcp_nbytes

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    with here, there:
        yield here, there


def read(end: socket.socket, nbytes: int) -> None:
    while nbytes:
        nbytes -= len(end.recv(nbytes))


def test_every_byte_that_is_sent_counts_once(pair: Pair) -> None:
    here, there = pair
    before = tcp_nbytes()
    here.sendall(bytes(123_457))
    read(there, 123_457)
    assert tcp_nbytes() - before == 123_457
    there.sendall(b"abc")  # both ends are this process's
    assert tcp_nbytes() - before == 123_460


def test_unread_bytes_count(pair: Pair) -> None:
    here, _ = pair
    here.setblocking(False)
    before, handed = tcp_nbytes(), 0
    while True:  # until both sockets' buffers are full
        try:
            handed += here.send(bytes(1 << 16))
        except BlockingIOError:
            break
    assert handed > 1 << 16
    assert tcp_nbytes() - before == handed


def test_only_tcp_counts() -> None:
    before = tcp_nbytes()
    left, right = socket.socketpair()
    with left, right, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        left.send(b"x" * 100)
        datagrams.sendto(b"x" * 100, ("127.0.0.1", 9))
        with socket.create_server(("127.0.0.1", 0)), open(os.devnull):
            assert tcp_nbytes() == before


def test_counting_does_not_affect_connections_or_descriptors(pair: Pair) -> None:
    here, there = pair
    descriptors = os.listdir("/proc/self/fd")
    tcp_nbytes()
    assert os.listdir("/proc/self/fd") == descriptors
    here.sendall(b"still open")
    assert there.recv(100) == b"still open"


def test_an_interface_counts_whole_frames(pair: Pair) -> None:
    here, there = pair
    before = interface("lo")
    here.sendall(bytes(50_000))
    read(there, 50_000)
    sent = interface("lo")
    assert sent.nbytes - before.nbytes >= 50_000
    assert sent.packets > before.packets


def test_payload_excludes_headers() -> None:
    # 3 packets of 1448, 1448 and 1000 bytes behind 14 (Ethernet) + 20 (IP) + 32 (TCP) each.
    before, after = Interface(5000, 10), Interface(5000 + 1514 + 1514 + 1066, 13)
    assert after.payload_since(before) == 1448 + 1448 + 1000


def test_missing_interface_is_an_oserror() -> None:
    with pytest.raises(OSError, match="no network interface nowhere0"):
        interface("nowhere0")
