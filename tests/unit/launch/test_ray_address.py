"""Which Ray cluster `--engine ray` joins, and which addresses are refused at once."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.launch.engines import ray_connection

services = pytest.importorskip("ray._private.services")


@pytest.fixture
def closed() -> Iterator[str]:
    """An address of this host at which nothing listens, and nothing will."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(autouse=True)
def host_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users of the host may run one: its processes and records are not looked at."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(services, "find_gcs_addresses", frozenset)


def refusal(address: str) -> str:
    begun_s = time.monotonic()
    with pytest.raises(UserError) as refused:
        ray_connection.connect(address)
    assert time.monotonic() < begun_s + 2 * ray_connection.CONNECT_S
    found = re.fullmatch(
        rf"--address {re.escape(address)} is not a Ray cluster that can be reached \((.*)\); start "
        "one by `ray start --head`, or leave out --address to start one on this host",
        str(refused.value),
    )
    assert found, refused.value
    return found[1]


def is_of(closed: str, text: str) -> bool:
    """Ray names this host by another of its addresses."""
    port = closed.rpartition(":")[2]
    return re.fullmatch(rf"nothing answers at [\d.]+:{port}: \[Errno 111\] .*", text) is not None


def test_address_without_a_listener_is_refused(closed: str) -> None:
    assert is_of(closed, refusal(closed))


def test_auto_without_a_cluster_is_refused() -> None:
    assert refusal("auto") == "RAY_ADDRESS is not set, and none runs on this host"


def test_auto_with_the_record_of_an_ended_cluster_is_refused(closed: str, tmp_path: Path) -> None:
    record = tmp_path / "ray" / "ray_current_cluster"
    record.parent.mkdir(exist_ok=True)
    record.write_text(closed)
    assert is_of(closed, refusal("auto"))


def test_auto_with_a_wrong_environment_variable_is_refused(
    closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", closed)
    assert is_of(closed, refusal("auto"))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert refusal("auto") == "RAY_ADDRESS is local"


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", "head:port", ":6379"])
def test_malformed_address_is_refused(address: str) -> None:
    assert refusal(address) == f"{address} is not auto, or host:port of the head node"


def test_nonexistent_port_is_refused() -> None:
    assert re.match(r"nothing answers at [\d.]+:99999: ", refusal("127.0.0.1:99999"))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"SSH-2.0-server\r\n"])
def test_port_of_another_service_is_refused(answer: bytes) -> None:
    with socket.create_server(("", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.recv(64)
                connection.sendall(answer)

        with ThreadPoolExecutor() as threads:
            threads.submit(serve)
            said = refusal(f"127.0.0.1:{server.getsockname()[1]}")
    assert said.endswith("does not answer as a head node does, by gRPC")
