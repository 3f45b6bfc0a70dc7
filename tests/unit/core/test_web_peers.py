"""The user at the other end of a connection, from the kernel's tables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from penstock.core.web.peers import user_of

CONNECT = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
connection = socket.socket()
connection.connect(("127.0.0.1", int(sys.argv[1])))
print(*connection.getsockname(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener() -> closing[socket.socket]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return closing(listener)


def test_connection_of_this_user_is_recognised(listener: closing[socket.socket]) -> None:
    with listener as server, closing(socket.create_connection(server.getsockname())) as client:
        assert user_of(client.getsockname(), server.getsockname()) == os.geteuid()
        nobody = (client.getsockname()[0], client.getsockname()[1] ^ 1)
        assert user_of(nobody, server.getsockname()) is None


def test_address_of_another_host_belongs_to_no_user(listener: closing[socket.socket]) -> None:
    with listener as server:
        assert user_of(("10.0.0.1", 50000), server.getsockname()) is None


def test_ipv6_and_mapped_ipv4_peers_are_recognised() -> None:
    with closing(socket.socket(socket.AF_INET6)) as server:
        try:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.bind(("::", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        server.listen()
        port = server.getsockname()[1]
        for family, host in ((socket.AF_INET6, "::1"), (socket.AF_INET6, "::ffff:127.0.0.1")):
            with closing(socket.socket(family)) as client:
                client.connect((host, port))
                own = client.getsockname()[:2]
                assert user_of(own, (host, port)) == os.geteuid(), host


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_connection_of_another_user_is_recognised(listener: closing[socket.socket]) -> None:
    with listener as server:
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", CONNECT, str(server.getsockname()[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        host, port = child.stdout.readline().split()
        assert user_of((host, int(port)), server.getsockname()) == 65534
        child.communicate("")
        assert child.returncode == 0
