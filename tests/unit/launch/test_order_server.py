"""Orders to a live run: who may send which, and what is answered."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.launch import order_server
from penstock.launch.order_server import CLIENTS, OrderServer


@pytest.fixture
def server() -> Iterator[OrderServer]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, OrderServer(Path(folder)) as made:
        yield made


CONNECTED: list[socket.socket] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while CONNECTED:
        CONNECTED.pop().close()


def connected(server: OrderServer) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    CONNECTED.append(client)
    client.settimeout(5)
    client.connect(str(server.path))
    return client


def ordered(server: OrderServer, message: object) -> socket.socket:
    client = connected(server)
    client.send(json.dumps(message).encode())
    return client


def reply(client: socket.socket) -> Any:
    return json.loads(client.recv(1 << 16))


def test_all_who_ordered_a_checkpoint_get_the_same_answer(server: OrderServer) -> None:
    clients = [ordered(server, {"order": "save"}) for _ in range(2)]
    assert server.orders() == [{"order": "save"}, {"order": "save"}]
    assert server.orders() == []
    server.saved({"folder": "last"})
    assert [reply(client) for client in clients] == [{"folder": "last"}] * 2


def test_an_order_for_a_timeline_is_answered_once_it_is_written(server: OrderServer) -> None:
    client = ordered(server, {"order": "timeline"})
    assert server.orders() == [{"order": "timeline"}]
    assert server.orders() == []
    server.recorded({})
    assert reply(client) == {}


def test_an_order_for_stacks_is_answered_at_once(server: OrderServer) -> None:
    client = ordered(server, {"order": "stacks", "roles": ["actor-1"]})
    assert server.orders() == [{"order": "stacks", "roles": ["actor-1"]}]
    assert reply(client) == {}


@pytest.mark.parametrize(
    "message",
    [
        {"order": "erase"},
        {"order": ["save"]},
        {"order": None},
        {},
        {"order": "stacks"},
        {"order": "stacks", "roles": "actor-1"},
        {"order": "stacks", "roles": [1]},
    ],
)
def test_an_unknown_order_is_refused(server: OrderServer, message: object) -> None:
    client = ordered(server, message)
    assert server.orders() == []
    assert "is unknown to this run's release" in reply(client)["error"]


def test_the_end_of_a_run_is_an_answer(server: OrderServer) -> None:
    client = ordered(server, {"order": "save"})
    server.orders()
    server.__exit__()
    assert "the run has ended" in reply(client)["error"]
    server.path.touch()  # for the second end, by the fixture


def test_silent_clients_make_room_for_others(
    server: OrderServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_server, "ORDER_S", 0.0)
    silent = [connected(server) for _ in range(CLIENTS)]
    assert server.orders() == []
    ordered(server, {"order": "save"})
    assert server.orders() == [{"order": "save"}]
    assert all(client.recv(1) == b"" for client in silent)


@pytest.mark.parametrize("data", [b"save", b"[1]", b"\xff" * 100, b"9" * 100_000])
def test_noise_is_ignored(server: OrderServer, data: bytes) -> None:
    client = connected(server)
    client.send(data)
    assert server.orders() == []
    ordered(server, {"order": "save"})
    assert server.orders() == [{"order": "save"}]


def test_a_client_that_has_left_is_forgotten(server: OrderServer) -> None:
    for _ in range(3 * CLIENTS):
        ordered(server, {"order": "save"}).close()
        server.orders()
    client = ordered(server, {"order": "save"})
    server.orders()
    server.saved({"folder": "last"})
    assert reply(client) == {"folder": "last"}
