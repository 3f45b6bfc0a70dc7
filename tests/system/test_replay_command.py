"""`penstock replay serve` as a process: it serves, ends cleanly, and says what is wrong."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from idle_peers import connecting, processor_s
from pages import blocks, code
from penstock.replay.errors import ReplayError
from penstock.replay.remote import ReplayClient

pytestmark = pytest.mark.system

SPEC = """
columns:
  obs: [float32, [4]]
  action: [int64, []]
envs: 2
n_step: 2
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock", "replay", "serve", *arguments]


@contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its address."""
    process = subprocess.Popen(
        command("--bind", "tcp://127.0.0.1:*", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        yield process, process.stderr.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_replay_server_serves_until_a_signal(spec: Path, signum: signal.Signals) -> None:
    options = ("--spec", str(spec), "--capacity", "1000", "--sampler", "prioritized", "--json")
    with served(*options) as (process, address):
        with ReplayClient(address) as client:
            for count in range(10):
                client.add(
                    obs=np.full((2, 4), count, np.float32),
                    action=np.full(2, count),
                    reward=np.ones(2, np.float32),
                    terminated=np.zeros(2, bool),
                    truncated=np.zeros(2, bool),
                    next_obs=np.full((2, 4), count + 1, np.float32),
                )
            client.flush()
            batch = client.sample(8)
            client.update_priorities(batch.keys, np.ones(8))
        inner = batch.action < 9  # the newest rows have no second reward yet
        np.testing.assert_allclose(batch.reward, np.where(inner, 1 + 0.99, 1.0), rtol=1e-6)
        process.send_signal(signum)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    answer = json.loads(out.splitlines()[-1])
    assert (answer["inserted"], answer["stored"], answer["address"]) == (20, 20, address)


def test_documented_code_adds_and_samples(spec: Path) -> None:
    names: dict[str, Any] = {"td_error": np.ones(256)}
    exec(code("replay.md", "python", 0), names)
    names["obs"] = names["obs"].copy()  # the loop ends with obs = next_obs, which `add` refuses
    spec.write_text(code("replay.md", "yaml", 0))
    client = next(b for b in blocks("replay.md", "python") if "ReplayClient" in b)
    with served("--spec", str(spec), "--capacity", "1000") as (_, address):
        exec(client.replace("tcp://127.0.0.1:7800", address), names)
    assert names["batch"].obs.shape == (8, 4)


def test_clients_beyond_max_clients_are_refused(spec: Path) -> None:
    options = ("--spec", str(spec), "--capacity", "1000", "--max-clients", "1")
    with (
        served(*options) as (_, address),
        ReplayClient(address),
        pytest.raises(ReplayError, match="1 clients are connected"),
    ):
        ReplayClient(address).close()


@pytest.mark.parametrize(
    ("text", "options", "error"),
    [
        (SPEC, ["--bind", "tcp://0.0.0.0:7800"], "can be reached from other hosts"),
        (SPEC, ["--bind", "nonsense"], "nonsense"),
        (SPEC, ["--capacity", "0"], "capacity 0 must be a whole number and at least 1"),
        (SPEC, ["--spec", "/nowhere.yaml"], "--spec /nowhere.yaml cannot be read"),
        (SPEC, ["--curve", "/nowhere"], "/nowhere"),
        (SPEC, ["--batches-mb", "16"], "--client-mb 32 is more than --batches-mb 16, the limit"),
        (SPEC, ["--sampler", "prioritized", "--alpha", "-1"], "alpha"),
        ("columns: [", [], "this is not YAML"),
        ("", [], "the file: "),
        ("envs: 3", [], "columns: Field required"),
        ("columns: {obs: [float32, [4]], action: [nope, []]}", [], "column action is declared as"),
        ("columns: {}\nsize: 3", [], "size: Extra inputs are not permitted; the keys are columns"),
    ],
)
def test_invalid_options_or_spec_are_refused_in_one_sentence(
    tmp_path: Path, text: str, options: list[str], error: str
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    given = [] if "--spec" in options else ["--spec", str(path)]
    done = subprocess.run(
        command(*given, *options), capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert error in done.stderr
    assert done.stderr.count("\n") == 1


def test_idle_connections_do_not_block_clients(spec: Path) -> None:
    """200 that never speak, where 128 descriptors are allowed."""
    with ExitStack() as idle, served("--spec", str(spec), "--capacity", "1000") as (child, address):
        port = int(address.rpartition(":")[2])
        with ReplayClient(address) as client:
            resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (128, 128))
            for _ in range(200):
                idle.enter_context(connecting(port))
            assert child.stderr is not None
            assert "new connections are turned away" in child.stderr.readline()
            before_s = processor_s(child.pid)
            time.sleep(1)
            assert processor_s(child.pid) - before_s < 0.25
            assert client.stats()["stored"] == 0  # who was there is as well as before
            with ReplayClient(address) as late:  # once some that never spoke were closed
                assert late.stats()["stored"] == 0
