"""`penstock train --engine ray` on hosts with addresses and temporary folders of their own.

Hosts are network namespaces joined by a switch, each with a link of 1 Gbit/s; they share the file
system but for /tmp. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from hosts import Hosts, NoHostsError, hosts
from penstock.launch.engines import ray_engine
from train_command import SMALL, assert_balanced, last, metrics

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

COUNT, CORES, PORT = 4, 1, 6379
WAIT_S = 100.0
PRIVATE = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
RAY = str(Path(sys.executable).with_name("ray"))


class Cluster:
    """A Ray node on each host."""

    def __init__(self, network: Hosts) -> None:
        self.network = network
        self.address = f"{network.addresses[0]}:{PORT}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        for host in range(COUNT):
            here = network.addresses[host]
            role = f"--head --port {PORT} --include-dashboard=false"
            if host:
                self._wait_for_head()
                role = f"--address {self.address}"
            options = f"--node-ip-address {here} --num-cpus {CORES} --disable-usage-stats --block"
            command = f"mount -t tmpfs tmpfs /tmp && exec {RAY} start {role} {options}"
            self._nodes.append(
                subprocess.Popen(
                    network.command(host, [*PRIVATE, command]),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            )

        probe = (
            f"import ray; ray.init({self.address!r}, log_to_driver=False); "
            f"assert sum(node['Alive'] for node in ray.nodes()) == {COUNT}"
        )
        self._wait_for(self.inside(0, [sys.executable, "-c", probe]))

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """A command as it runs on a host, with the /tmp of its node."""
        return ["nsenter", "-t", str(self._nodes[host].pid), "-n", "-m", "-w", "--", *command]

    def processes(self, host: int) -> list[psutil.Process]:
        return list(psutil.Process(self._nodes[host].pid).children(recursive=True))

    def host_of(self, role: str) -> int | None:
        for host in range(COUNT):
            for process in self.processes(host):
                with contextlib.suppress(psutil.Error):
                    words = process.cmdline()
                    if "penstock.launch.role" in words and "-c" not in words and role in words:
                        return host
        return None

    def _wait_for_head(self) -> None:
        probe = f"import socket; socket.create_connection({self.address.split(':')!r}, 1)"
        command = self.network.command(0, [sys.executable, "-c", probe])
        self._wait_for(command)

    def _wait_for(self, command: Sequence[str]) -> None:
        wait_until(lambda: not subprocess.run(command, stderr=subprocess.DEVNULL).returncode)

    def close(self) -> None:
        everything = [p for host in range(COUNT) for p in self.processes(host)]
        for node in self._nodes:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everything, WAIT_S)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    monkeypatch.setenv("TMPDIR", "/tmp")
    try:
        with hosts(COUNT) as network:
            network.limit("1gbit")
            made = Cluster(network)
            try:
                yield made
            finally:
                made.close()
    except NoHostsError as error:
        pytest.skip(str(error))


def wait_until(condition: Any, wait_s: float = WAIT_S) -> None:
    ends_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.1)


def test_a_host_that_falls_silent_costs_the_others_moments(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as shared:
        run_dir = Path(shared) / "run"
        options = ["learner.count=2", "actors.count=2", f"run.dir={run_dir}", *SMALL]
        flags = ["--engine", "ray", "--address", cluster.address]
        command = [sys.executable, "-m", "penstock", "train", "cartpole", *options, *flags]
        log = Path(shared) / "log"
        with log.open("w") as out:
            run = subprocess.Popen(
                cluster.inside(0, command), cwd=shared, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            wait_until(lambda: metrics(run_dir) and last(run_dir)["trained_steps"] > 2000)
            assert last(run_dir)["learners_alive"] == 2
            names = ("learner-0", "learner-1", "actor-0", "actor-1")
            places = {name: cluster.host_of(name) for name in names}
            assert set(places.values()) == set(range(COUNT)), log.read_text()
            lost = next(name for name in names[:2] if places[name])  # not on the head
            host = places[lost]
            assert host
            of_roles = cluster.processes(host)
            cluster.network.cut(host)
            began_s = time.monotonic()
            wait_until(lambda: last(run_dir)["learners_alive"] == 1)
            steps = last(run_dir)["trained_steps"]
            wait_until(lambda: last(run_dir)["trained_steps"] > steps + 1000)
            assert time.monotonic() - began_s < ray_engine.SILENT_S + 5
            # Without the engine the lost learner ends too, and disturbs nothing.
            roles = [
                p for p in of_roles if p.is_running() and "penstock.launch.role" in p.cmdline()
            ]
            _, alive = psutil.wait_procs(roles, ray_engine.LEASE_S + 30)
            assert not alive
            steps = last(run_dir)["trained_steps"]
            wait_until(lambda: last(run_dir)["trained_steps"] > steps + 1000)
        finally:
            driver = next(iter(psutil.Process(run.pid).children()), psutil.Process(run.pid))
            driver.send_signal(signal.SIGTERM)
            code = run.wait(WAIT_S)
        assert code == 143, log.read_text()
        summary = json.loads((run_dir / "summary.json").read_text())
        assert_balanced(summary)
        assert summary["accounting"]["lost"]["learner"] > 0
