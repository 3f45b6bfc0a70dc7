"""The store where learners of several machines meet, and the addresses at which it listens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from penstock.configs.errors import UserError
from penstock.core.role import StoreAddress
from penstock.learner.extras.parameter_server.pace import all_servers, publish_servers
from penstock.learner.group.remote_store import (
    interface_of,
    open_store,
)
from waiting import free_port

LISTEN = "0A"


def listeners(port: int) -> list[str]:
    """Addresses at which this machine listens at a port, in the kernel's hexadecimal."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in _table(name)]
    return [
        fields[1].partition(":")[0]
        for fields in lines
        if fields[3] == LISTEN and int(fields[1].partition(":")[2], 16) == port
    ]


def _table(name: str) -> list[str]:
    path = Path("/proc/net") / name
    return path.read_text().splitlines()[1:] if path.exists() else []


@pytest.mark.parametrize(
    ("host", "listens"), [("127.0.0.1", "0100007F"), ("127.0.0.2", "0200007F")]
)
def test_store_listens_at_the_given_address(host: str, listens: str) -> None:
    port = free_port(host)
    store = open_store(StoreAddress(host, port), 0, 5.0, lambda: True)
    assert store is not None
    assert listeners(port) == [listens]
    store.set("key", "value")
    other = open_store(StoreAddress(host, port), 1, 5.0, lambda: True)
    assert other is not None
    assert other.get("key") == b"value"


def test_an_address_of_another_machine_cannot_be_served() -> None:
    with pytest.raises(UserError) as caught:
        open_store(StoreAddress("192.0.2.1", 29500), 0, 5.0, lambda: True)
    assert str(caught.value) == (
        "the store at 192.0.2.1:29500 cannot be served (Cannot assign requested address); rank 0 "
        "serves it, at an address of its machine and on a port that is free"
    )


@pytest.mark.parametrize(
    ("host", "environ", "interface"),
    [
        ("127.0.0.1", {}, "lo"),
        ("::1", {}, "lo"),
        ("localhost", {}, "lo"),
        ("10.0.0.1", {}, None),
        ("box", {}, None),
        ("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth0"}, None),
    ],
)
def test_learners_of_one_host_listen_only_on_loopback(
    host: str, environ: dict[str, str], interface: str | None
) -> None:
    assert interface_of(StoreAddress(host, 29500), environ) == interface


def test_shards_are_ordered_by_number_across_learners() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    own = [["tcp://a:1", "tcp://a:4"], ["tcp://b:2", "tcp://[::1]:5"], ["tcp://c:3"]]
    for rank, addresses in enumerate(own):
        publish_servers(store, rank, addresses)
    assert all_servers(store, 3, 5) == (
        *("tcp://a:1", "tcp://b:2", "tcp://c:3"),
        *("tcp://a:4", "tcp://[::1]:5"),
    )


def test_learner_without_a_shard_is_not_queried() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    publish_servers(store, 0, ["tcp://a:1"])
    assert all_servers(store, 4, 1) == ("tcp://a:1",)


@pytest.mark.parametrize(
    "foreign",
    [
        *("", "{", "7", "[7]", "[]", '["tcp://b:2", "tcp://b:3"]', '["ipc:///tmp/x"]'),
        *('["tcp://b"]', '["tcp://b:2 tcp://c:3"]', "[" * 100_000),
    ],
)
def test_addresses_that_no_learner_has_written_are_refused(foreign: str) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    publish_servers(store, 0, ["tcp://a:1"])
    store.set("servers-1", foreign)
    with pytest.raises(UserError, match="what the store holds for rank 1 is not what a learner"):
        all_servers(store, 2, 2)
