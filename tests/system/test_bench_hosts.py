"""Hosts in network namespaces of their own. Needs root; skips elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hosts import Hosts, NoHostsError, hosts
from penstock.core.machine import CHECKOUT

pytestmark = pytest.mark.system

SERVER = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    end, _ = server.accept()
    started, got = time.perf_counter(), 0
    while data := end.recv(1 << 16):
        got += len(data)
print(got, time.perf_counter() - started)
"""
CLIENT = f"""
import socket, sys, time
sys.path.append({str(CHECKOUT / "benchmarks")!r})
from network_bytes import interface, tcp_nbytes
with socket.create_connection((sys.argv[1], 5000)) as end:
    before, opened = interface("eth0"), tcp_nbytes()
    end.sendall(bytes(int(sys.argv[2])))
    handed = tcp_nbytes() - opened
    end.shutdown(socket.SHUT_WR)
    end.recv(1)
    after = interface("eth0")
    print(handed, after.payload_since(before), after.nbytes - before.nbytes)
"""
HOLD = f"""
import sys
sys.path.append({str(CHECKOUT / "benchmarks")!r})
from hosts import hosts
with hosts(2) as made:
    print(*made.command(0, []), *made.command(1, []), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def two() -> Iterator[Hosts]:
    try:
        with hosts(2) as made:
            yield made
    except NoHostsError as error:
        pytest.skip(f"no network namespaces here: {error}")


def run(made: Hosts, host: int, *command: str) -> str:
    return subprocess.run(
        made.command(host, command), capture_output=True, text=True, check=True, timeout=20
    ).stdout


def transfer(made: Hosts, nbytes: int) -> tuple[float, list[int]]:
    """Seconds, and bytes at the socket, at the interface without headers, and there with them."""
    command = made.command(1, [sys.executable, "-c", SERVER, made.addresses[1]])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        assert server.stdout.readline() == "ready\n"
        counted = run(made, 0, sys.executable, "-c", CLIENT, made.addresses[1], str(nbytes))
        got, seconds = server.stdout.read().split()
    assert int(got) == nbytes
    return float(seconds), [int(text) for text in counted.split()]


def holders(text: str) -> set[Path]:
    """Namespaces in a command that enters them."""
    return {Path(word.partition("=")[2]) for word in text.split() if word.startswith("--net=")}


def test_hosts_reach_each_other_and_nothing_else(two: Hosts) -> None:
    for host in range(2):
        names = [line.split(":")[1].strip().split("@")[0]
                 for line in run(two, host, "ip", "-o", "link").splitlines()]  # fmt: skip
        assert sorted(names) == ["eth0", "lo"]
        routes = run(two, host, "ip", "route").splitlines()
        assert [route.split()[0] for route in routes] == ["10.77.0.0/24"]
    assert len(holders(" ".join([*two.command(0, []), *two.command(1, [])]))) == 2


def test_bytes_at_the_socket_and_at_the_interface_are_counted(two: Hosts) -> None:
    _, (handed, payload, frames) = transfer(two, 3_000_000)
    assert handed == 3_000_000
    assert payload == pytest.approx(3_000_000, rel=0.001)
    assert frames > payload


@pytest.mark.parametrize(("link", "mbit_s"), [("100mbit", 100), ("1gbit", 1000)])
def test_a_limited_link_keeps_its_rate(two: Hosts, link: str, mbit_s: int) -> None:
    two.limit("unlimited")
    two.limit(link)
    nbytes = mbit_s * 1_000_000 // 8 // 2  # half a second of payload
    seconds, _ = transfer(two, nbytes)
    assert 0.5 <= seconds < 1.5


def test_an_unlimited_link_is_faster(two: Hosts) -> None:
    two.limit("100mbit")
    two.limit("unlimited")
    assert transfer(two, 12_500_000)[0] < 0.5  # a second at 100 Mbit/s


def test_nothing_is_left_after_an_exception() -> None:
    found: set[Path] = set()

    def fail() -> None:
        with hosts(2) as made:
            found.update(holders(" ".join([*made.command(0, []), *made.command(1, [])])))
            assert all(path.exists() for path in found)
            raise KeyError

    try:
        with pytest.raises(KeyError):
            fail()
    except NoHostsError as error:
        pytest.skip(f"no network namespaces here: {error}")
    assert len(found) == 2
    assert not any(path.exists() for path in found)


def test_nothing_is_left_when_the_maker_is_killed(two: Hosts) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        assert maker.stdout
        found = holders(maker.stdout.readline())
        assert len(found) == 2
        assert all(path.exists() for path in found)
        os.kill(maker.pid, signal.SIGKILL)
    ends_s = time.monotonic() + 5
    while any(path.exists() for path in found) and time.monotonic() < ends_s:
        time.sleep(0.01)
    assert not any(path.exists() for path in found)


def test_missing_root_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoHostsError, match="network namespaces need root"), hosts(2):
        pass


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoHostsError, match="the program unshare is not installed"), hosts(2):
        pass
