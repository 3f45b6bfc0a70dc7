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
from functools import partial
from pathlib import Path

import psutil
import pytest

import waiting
from hosts import Hosts, NoHostsError, hosts
from penstock.launch.engines import ray_agent
from train_command import SMALL, assert_balanced, last, metrics

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(300)]

COUNT, PORT = 6, 6379  # the head node, four hosts of roles, and one more
WAIT_S = 100.0
wait_until = partial(waiting.wait_until, timeout_s=WAIT_S, every_s=0.1)
PRIVATE = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
RAY = str(Path(sys.executable).with_name("ray"))


class Cluster:
    """A Ray node of one core on each host; the head node has none, and so no roles."""

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
            options = (
                f"--node-ip-address {here} --num-cpus {int(host > 0)} --disable-usage-stats --block"
            )
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


@contextlib.contextmanager
def training(cluster: Cluster, *options: str) -> Iterator[tuple[Path, Path]]:
    """CartPole on the cluster, in a folder that all hosts share; that of the run, and its output.
    In the end the run is stopped, and its accounting must balance."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as shared:
        run_dir = Path(shared) / "run"
        flags = [f"run.dir={run_dir}", *SMALL, "--engine", "ray", "--address", cluster.address]
        command = [sys.executable, "-m", "penstock", "train", "cartpole", *options, *flags]
        log = Path(shared) / "log"
        with log.open("w") as out:
            run = subprocess.Popen(
                cluster.inside(0, command), cwd=shared, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            wait_until(lambda: metrics(run_dir) and last(run_dir)["trained_steps"] > 2000)
            yield run_dir, log
        finally:
            driver = next(iter(psutil.Process(run.pid).children()), psutil.Process(run.pid))
            driver.send_signal(signal.SIGTERM)
            code = run.wait(WAIT_S)
        assert code == 143, log.read_text()
        assert_balanced(json.loads((run_dir / "summary.json").read_text()))


def trains_on(run_dir: Path) -> None:
    """Wait until the run has trained further."""
    steps = last(run_dir)["trained_steps"]
    wait_until(lambda: last(run_dir)["trained_steps"] > steps + 1000)


@pytest.mark.parametrize("count", ["2", "1..2"])
def test_silent_host_interrupts_the_others_only_briefly(cluster: Cluster, count: str) -> None:
    with training(cluster, f"learner.count={count}", "actors.count=2") as (run_dir, log):
        wait_until(lambda: last(run_dir)["learners_alive"] == 2)
        names = ("learner-0", "learner-1", "actor-0", "actor-1")
        places = {name: cluster.host_of(name) for name in names}
        assert len(set(places.values())) == len(names), log.read_text()
        lost = "learner-1"
        host = places[lost]
        assert host
        of_roles = cluster.processes(host)
        cluster.network.cut(host)
        began_s = time.monotonic()
        wait_until(lambda: last(run_dir)["learners_alive"] == 1)
        trains_on(run_dir)
        assert time.monotonic() - began_s < ray_agent.SILENT_S + 5
        # Without the engine the lost learner ends too, and disturbs nothing.
        roles = [p for p in of_roles if p.is_running() and "penstock.launch.role" in p.cmdline()]
        _, alive = psutil.wait_procs(roles, ray_agent.LEASE_S + 30)
        assert not alive
        # It comes back on the host that was free, at another address, with its actors.
        wait_until(lambda: last(run_dir)["learners_alive"] == 2)
        assert cluster.host_of(lost) not in {host, None}
        trains_on(run_dir)
        rank = int(lost.removeprefix("learner-"))
        wait_until(lambda: last(run_dir)["ranks"][rank]["trained_steps_per_s"] > 0)


def test_only_learner_restarts_on_another_host_and_its_actors_follow(
    cluster: Cluster,
) -> None:
    options = ("actors.count=3", "checkpoint.every_s=0.5")
    with training(cluster, *options) as (run_dir, log):
        wait_until((run_dir / "checkpoints" / "last").exists)
        host = cluster.host_of("learner-0")
        assert host
        assert host not in {cluster.host_of(f"actor-{i}") for i in range(3)}, log.read_text()
        cluster.network.cut(host)
        wait_until(lambda: last(run_dir).get("learners_restarted"))
        assert cluster.host_of("learner-0") not in {host, None}
        trains_on(run_dir)
