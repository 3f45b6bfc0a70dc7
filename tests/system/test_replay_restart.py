"""`penstock replay serve` killed and started again, and a client that does not read from it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.replay.remote import ReplayClient

pytestmark = pytest.mark.system

SPEC = """
columns:
  obs: [float32, [4]]
  action: [int64, []]
envs: 2
"""


class Server:
    """A server process with snapshots, that may be started again at its address."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._options, self._bind = folder, options, "tcp://127.0.0.1:*"
        (folder / "spec.yaml").write_text(SPEC)
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "penstock", "replay", "serve", "--bind", self._bind]
        command += ["--spec", str(self._folder / "spec.yaml"), "--capacity", "5000", "--json"]
        command += ["--snapshot", str(self._folder / "snapshots"), *self._options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.said = [self.process.stderr.readline() for _ in range(2)]
        self.address = self._bind = self.said[1].split()[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[dict[str, Any], str]:
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=20)
        assert self.process.returncode == 0
        return json.loads(out.splitlines()[-1]), err


def add(client: ReplayClient, first: int, count: int) -> None:
    for i in range(first, first + count):
        client.add(
            obs=np.full((2, 4), i, np.float32),
            next_obs=np.full((2, 4), i + 1, np.float32),
            action=np.full(2, i),
            reward=np.zeros(2, np.float32),
            terminated=np.zeros(2, bool),
            truncated=np.zeros(2, bool),
        )
    client.flush()


def test_client_continues_after_its_server_was_killed(tmp_path: Path) -> None:
    server = Server(tmp_path, "--snapshot-every", "0.3")
    try:
        assert "contains no snapshot" in server.said[0]
        with ReplayClient(server.address, prefetch=2) as client:
            add(client, 0, 500)
            deadline_s = time.monotonic() + 10
            saved = client.stats()["server"]["snapshots"]["saved"]
            while client.stats()["server"]["snapshots"]["saved"] < saved + 2:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            server.kill()
            server.start()
            assert "restored 1000 rows from the snapshot" in server.said[0]
            batch = client.sample(64, timeout_s=10)
            np.testing.assert_array_equal(batch.obs[:, 0], batch.action)
            add(client, 500, 100)
            assert client.stats()["inserted"] == 1200
            assert client.lost == 0
        stats, _ = server.end()
        assert stats["stored"] == 1200
        server.start()  # from the last snapshot, which the end wrote
        assert "restored 1200 rows" in server.said[0]
    finally:
        server.kill()


def test_unread_replies_of_a_client_take_bounded_memory(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        with ReplayClient(server.address) as client, ReplayClient(server.address) as silent:
            add(client, 0, 2600)
            client.sample(5000)
            before = rss_nbytes(server.process.pid)
            silent._requests.choose(5000, stacked=True)
            ends_s = time.monotonic() + 60
            numbers = itertools.count(1)
            while not client.stats()["server"]["rejected"].get("refused"):
                assert time.monotonic() < ends_s
                for _ in range(100):  # those that do not fit the connection are dropped
                    silent._requests.send(next(numbers), 64)
            for _ in range(20):
                client.sample(256)
                time.sleep(0.01)
            assert rss_nbytes(server.process.pid) - before < 150e6
        _, err = server.end()
        assert err.count("rejected (refused): more than 64 requests wait") == 1
    finally:
        server.kill()


def rss_nbytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
