"""Hosts on one machine: network namespaces joined by a switch, each on a link of its own.

    hosts[i] ── eth0 ══ veth ══ bridge ── switch

A namespace lives as long as a process that is in it. Each is held by a `cat` that reads a pipe of
ours, so all of it, the links and the bridge too, is gone when this process is, whatever ended it,
and nothing has a name that could be left behind. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

WHOLE = 65536
# What an interface may be handed as one packet, in bytes, and the token bucket behind it. A bucket
# lets its burst through at once, so it is far less than a step sends; and it cuts up whatever is
# larger than its burst, one frame at a time, which costs more than sending it.
LINKS = {
    "100mbit": (12_000, "tbf rate 100mbit burst 16kb latency 100ms"),
    "1gbit": (WHOLE, "tbf rate 1gbit burst 256kb latency 100ms"),
    "unlimited": (WHOLE, "pfifo_fast"),
}
INTERFACE = "eth0"
SUBNET = "10.77.0"
MOST = 250  # hosts in the subnet
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")  # where tc is, though PATH may leave them out


class NoHostsError(Exception):
    """Why this machine cannot have hosts of its own; completes "because ..."."""


class Hosts:
    """``count`` hosts that reach each other by TCP; made by `hosts`."""

    def __init__(self, stack: contextlib.ExitStack, count: int) -> None:
        self._switch = switch = stack.enter_context(_namespace())
        self._pids = [stack.enter_context(_namespace()) for _ in range(count)]
        self.addresses = [f"{SUBNET}.{i + 1}" for i in range(count)]
        wires = [
            line
            for i, pid in enumerate(self._pids)
            for line in (
                f"link add v{i} type veth peer name {INTERFACE} netns {pid}",
                f"link set v{i} master br0 up",
            )
        ]
        _batch(switch, "ip", ["link add br0 type bridge", "link set br0 up", *wires])
        for pid, address in zip(self._pids, self.addresses, strict=True):
            route = f"route change {SUBNET}.0/24 dev {INTERFACE} src {address}"
            lines = [
                f"link set {INTERFACE} addrgenmode none",  # nothing but ours on the wire
                f"addr add {address}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                "link set lo up",
                f"{route} congctl cubic",  # bbr, which some systems have, starts slowly
            ]
            _batch(pid, "ip", lines)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """``command`` as it runs on a host; its process is that of the command itself."""
        return [*_inside(self._pids[host]), *command]

    def limit(self, link: str) -> None:
        """Let every host send no faster than ``link``, one of LINKS, from now on."""
        nbytes, queue = LINKS[link]
        for pid in self._pids:
            _batch(pid, "ip", [f"link set {INTERFACE} gso_max_size {nbytes}"])
            _batch(pid, "tc", [f"qdisc replace dev {INTERFACE} root {queue}"])

    def traffic(self, host: int) -> tuple[int, int]:
        """Bytes that a host has received and sent so far, with all headers."""
        for line in Path(f"/proc/{self._pids[host]}/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == INTERFACE:
                fields = counts.split()
                return int(fields[0]), int(fields[8])
        raise NoHostsError(f"host {host} has no interface {INTERFACE}")

    def cut(self, host: int) -> None:
        """Cut the link of one host: what it sends, and what is sent to it, is lost in silence."""
        _batch(self._pids[host], "ip", [f"link set {INTERFACE} down"])

    def limit_both_ways(self, host: int, link: str) -> None:
        """Let one host neither send nor receive faster than ``link``, one of LINKS."""
        nbytes, queue = LINKS[link]
        for pid, interface in ((self._pids[host], INTERFACE), (self._switch, f"v{host}")):
            _batch(pid, "ip", [f"link set {interface} gso_max_size {nbytes}"])
            _batch(pid, "tc", [f"qdisc replace dev {interface} root {queue}"])


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Make hosts and remove them; what still runs on one keeps that one.

    Raises NoHostsError where that is not possible here.
    """
    if os.geteuid() != 0:
        raise NoHostsError("network namespaces need root")
    with contextlib.ExitStack() as stack:
        yield Hosts(stack, count)


@contextlib.contextmanager
def _namespace() -> Iterator[int]:
    """A new network namespace, by the process that holds it."""
    with _started(["unshare", "--net", "cat"]) as holder:
        try:
            assert holder.stdin
            assert holder.stdout
            holder.stdin.write(b"\n")  # comes back from within the namespace
            holder.stdin.flush()
            if not holder.stdout.readline():
                raise NoHostsError(f"network namespaces are refused here ({_complaint(holder)})")
            yield holder.pid
        finally:
            holder.kill()


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    try:
        # Of a session of its own: a Ctrl-C at the terminal must not take the network first.
        return subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except FileNotFoundError:
        raise NoHostsError(f"the program {command[0]} is not installed") from None


def _complaint(holder: subprocess.Popen[bytes]) -> str:
    assert holder.stderr
    return holder.stderr.read().decode(errors="replace").strip()


def _inside(pid: int) -> list[str]:
    return ["nsenter", f"--net={Path('/proc') / str(pid)}/ns/net", "--"]


def _batch(pid: int, program: Literal["ip", "tc"], lines: Sequence[str]) -> None:
    """Carry out lines of `ip` or `tc` in a namespace."""
    where = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS])
    command = shutil.which(program, path=where) or program
    with _started([*_inside(pid), command, "-batch", "-"]) as process:
        out, error = process.communicate("\n".join([*lines, ""]).encode())
    if process.returncode:
        text = " ".join((out + error).decode(errors="replace").split())
        raise NoHostsError(f"{program} failed: {text}")
