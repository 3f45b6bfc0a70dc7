"""Addresses: which hosts reach them, which need keys, and the socket in a run's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import zmq

from penstock.configs.errors import UserError
from penstock.transport import addresses
from penstock.transport.zmq import sockets

LOCAL = (
    "ipc:///run/penstock/wire",
    "tcp://127.0.0.1:7700",
    "tcp://127.5.0.1:*",
    "tcp://localhost:7700",
    "tcp://[::1]:7700",
)
EXPOSED = ("tcp://0.0.0.0:7700", "tcp://*:7700", "tcp://[::]:7700", "tcp://10.0.0.1:1", "tcp://h:1")


@pytest.mark.parametrize("address", LOCAL)
def test_loopback_address_needs_no_keys(address: str) -> None:
    addresses.check_bind(address, keys=False, insecure=False)


@pytest.mark.parametrize("address", EXPOSED)
def test_address_open_to_other_hosts_needs_keys_or_explicit_consent(address: str) -> None:
    with pytest.raises(UserError, match="can be reached from other hosts"):
        addresses.check_bind(address, keys=False, insecure=False)
    addresses.check_bind(address, keys=True, insecure=False)
    addresses.check_bind(address, keys=False, insecure=True)


@pytest.mark.parametrize(
    ("address", "other", "found"),
    [
        ("tcp://learner:7700", "tcp://*:7702", "tcp://learner:7702"),
        ("tcp://[::1]:7700", "tcp://[::]:7702", "tcp://[::1]:7702"),
        ("ipc://run/sockets/wire", "ipc:///home/me/run/sockets/wire-2", "ipc://run/sockets/wire-2"),
        ("ipc:///a/wire", "ipc:///b/../c", "ipc:///a/c"),
    ],
)
def test_address_of_another_connector_has_the_same_host_or_folder(
    address: str, other: str, found: str
) -> None:
    assert addresses.with_port_of(address, other) == found


@pytest.mark.parametrize(
    "other",
    ["", "7702", "tcp://x", "tcp://x:0", "tcp://x:65536", "tcp://x:٣", "tcp://x:1e3", "ipc:///a/b"],
)
def test_connector_port_must_be_a_number(other: str) -> None:
    with pytest.raises(ValueError, match="cannot be beside"):
        addresses.with_port_of("tcp://learner:7700", other)


@pytest.mark.parametrize("other", ["", "ipc:///a/", f"ipc:///{'x' * 200}", "tcp://x:7700"])
def test_connector_socket_must_have_a_name(other: str) -> None:
    with pytest.raises(ValueError, match="cannot be beside"):
        addresses.with_port_of("ipc:///a/wire", other)


def test_a_long_socket_path_is_refused_with_the_limit(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/{'x' * 120}"
    with zmq.Context() as context, pytest.raises(UserError, match="longer than the 107 bytes"):
        sockets.router(context, address, None, 1000)


def test_bind_to_a_foreign_address_is_refused_in_one_sentence() -> None:
    with zmq.Context() as context, pytest.raises(UserError, match="cannot listen at tcp://192"):
        sockets.router(context, "tcp://192.0.2.1:7700", None, 1000)


def test_malformed_address_is_refused_in_one_sentence() -> None:
    with zmq.Context() as context, pytest.raises(UserError, match="cannot connect to learner:7700"):
        sockets.dealer(context, "learner:7700", None)


def test_leftover_socket_file_does_not_prevent_listening(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/wire"
    (tmp_path / "wire").touch()
    with zmq.Context() as context:
        sockets.router(context, address, None, 1000).close(0)


@pytest.mark.parametrize("address", LOCAL)
def test_learner_on_this_host_is_joined_without_keys(address: str) -> None:
    addresses.check_connect(address, keys=False, insecure=False)


@pytest.mark.parametrize("address", EXPOSED)
def test_learner_on_another_host_needs_keys_or_explicit_consent(address: str) -> None:
    with pytest.raises(UserError, match="is on another host, and its learner decides"):
        addresses.check_connect(address, keys=False, insecure=False)
    addresses.check_connect(address, keys=True, insecure=False)
    addresses.check_connect(address, keys=False, insecure=True)


@pytest.mark.parametrize(("mode", "own"), [(0o700, True), (0o755, True), (0o770, False)])
def test_ipc_address_in_a_folder_writable_by_others_is_not_trusted(
    tmp_path: Path, mode: int, own: bool
) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    folder.chmod(mode)
    assert addresses.is_own_ipc(f"ipc://{folder}/wire") is own


def test_tcp_and_abstract_addresses_are_not_trusted() -> None:
    assert not addresses.is_own_ipc("tcp://127.0.0.1:7700")
    assert not addresses.is_own_ipc("ipc://@wire")


def test_ipc_address_in_a_folder_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 65534, 65534)
    assert not addresses.is_own_ipc(f"ipc://{tmp_path}/wire")


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:7700", "ipc:///run/wire"])
def test_explicit_address_is_used_unchanged(address: str) -> None:
    assert addresses.address_of(address) == address


def test_run_folder_is_resolved_to_its_socket(tmp_path: Path) -> None:
    run = tmp_path / "run"  # which need not be there yet
    assert addresses.address_of(str(run)) == f"ipc://{run}/sockets/wire"


@pytest.mark.parametrize("rank", [0, 2])
def test_actors_join_a_rank_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.chdir(tmp_path)  # its whole path may be too long for a socket
    folder = Path(f"rank-{rank}")
    folder.mkdir()
    for _ in range(2):  # a learner that is started, and started again
        with zmq.Context() as context:  # at its end all sockets are closed
            joins = sockets.dealer(context, addresses.address_of(str(folder)), None)
            addresses.make_socket_folder(folder, rank)
            bind = addresses.address_of_rank(addresses.address_in_run(folder), rank)
            listens = sockets.router(context, bind, None, 1000)
            joins.send(b"hello")
            arrived = listens.poll(20_000)
            joins.close(0)
            listens.close(0)
        assert arrived


def test_long_socket_path_is_made_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.chdir(deep)
    assert addresses.address_in_run(deep / "run") == "ipc://run/sockets/wire"
    with pytest.raises(UserError, match="longer than the 102 bytes"):
        addresses.address_in_run(deep / ("y" * 100))


def test_socket_folder_is_private(tmp_path: Path) -> None:
    for _ in range(2):
        addresses.make_socket_folder(tmp_path)
        assert (tmp_path / "sockets").stat().st_mode & 0o777 == 0o700


def test_uncreatable_socket_folder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "sockets").touch()
    with pytest.raises(UserError, match="cannot be created"):
        addresses.make_socket_folder(tmp_path)


def test_open_or_linked_socket_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a/sockets").mkdir(parents=True)
    (tmp_path / "a/sockets").chmod(0o755)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/sockets").symlink_to(tmp_path / "a/sockets")
    for run in ("a", "b"):
        with pytest.raises(UserError, match="must belong to this user and have mode 0700"):
            addresses.make_socket_folder(tmp_path / run)
    assert (tmp_path / "a/sockets").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("make", [sockets.dealer, sockets.router])
def test_nonexistent_port_is_refused(make: Any) -> None:
    """libzmq would take 34463, the remainder, and name it nowhere."""
    with zmq.Context() as context, pytest.raises(UserError, match="the last one is 65535"):
        make(context, "tcp://127.0.0.1:99999", None, max_frame_nbytes=1)
