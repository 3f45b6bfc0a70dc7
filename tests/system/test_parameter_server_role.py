"""The parameter server as a role: a process that reports, ends when told to, and may be killed."""

from __future__ import annotations

import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch
import zmq
from torch import nn

from idle_peers import connecting, processor_s
from penstock.configs.schema import Config
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.engines.local import LocalHandle
from penstock.launch.topology import role_arguments
from penstock.learner.extras.parameter_server.client import ServerClient
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.transport.zmq import keys
from penstock.transport.zmq.sockets import dealer
from transport_world import RUN_ID, exit_code, heard
from waiting import free_port

pytestmark = pytest.mark.system

CONFIG = Config.model_validate(
    {
        "env": {"id": "Test-v0"},
        "learner": {"pace": "ssp", "count": 2, "optimizer": "sgd", "momentum": 0.0, "lr": 0.5},
        "actors": {"count": 2},
        "run": {"interval_s": 0.1},
    }
)


@contextmanager
def server(
    folder: Path,
    address: str,
    incarnation: int = 0,
    curve: Path | None = None,
    grace_s: float = 10.0,
) -> Iterator[LocalHandle]:
    transport = CONFIG.transport.model_copy(update={"curve": str(curve) if curve else None})
    run = CONFIG.run.model_copy(update={"grace_s": grace_s})
    config = CONFIG.model_copy(update={"transport": transport, "run": run})
    arguments = role_arguments(folder, folder) | {
        "config": config.model_dump(mode="json"),
        "run_id": RUN_ID,
        "grace_s": grace_s,
    }
    main = "penstock.learner.extras.parameter_server.server:run"
    spec = RoleSpec("server", 0, main, Stage.CARRIERS, address=address)
    child = LocalHandle(spec, incarnation, arguments, folder / f"server-{incarnation}.log")
    try:
        yield child
    finally:
        child.signal(signal.SIGKILL)
        child.reap()


def test_server_reports_figures_and_workers_continue_with_its_successor(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/s"
    optimizer = FlatOptimizer([("x", nn.Parameter(torch.ones(3)))], CONFIG.learner)
    client = ServerClient([address], 0, optimizer, CONFIG.learner)
    with server(tmp_path, address) as first:
        heard(first, "ready")
        assert client.pull(5.0) is not None
        optimizer.grads.copy_(torch.tensor([0.1, 0.2, 0.0]) * 4)
        client.push(4)
        reply = client.pull(5.0)
        assert reply is not None
        assert reply.version == 1
        while (told := heard(first, "server"))["version"] == 0:
            pass
        assert told["samples"] == 4
        assert told["lag_histogram"] == {"0": 1}
        assert told["clocks"] == {"0": 1}
    with server(tmp_path, address, 1) as second:
        heard(second, "ready")
        again = client.pull(5.0)
        assert again is not None
        assert again.version == 1
        torch.testing.assert_close(optimizer.values, torch.tensor([0.95, 0.9, 1.0]))
        client.close()
        second.signal(signal.SIGTERM)
        assert exit_code(second) == 0


@pytest.mark.parametrize("lost", ["signal", "supervisor"])
def test_stopping_server_serves_its_state_until_learners_have_left(
    tmp_path: Path, lost: str
) -> None:
    address = f"ipc://{tmp_path}/s"
    optimizer = FlatOptimizer([("x", nn.Parameter(torch.ones(3)))], CONFIG.learner)
    with server(tmp_path, address) as child:
        heard(child, "ready")
        client = ServerClient([address], 0, optimizer, CONFIG.learner)
        assert client.pull(5.0) is not None
        if lost == "signal":
            child.signal(signal.SIGTERM)
        else:
            child.channel.close()
        time.sleep(0.5)
        assert client.fetch(5.0) is not None
        client.close()
        assert exit_code(child) == 0


@pytest.mark.parametrize(("grace_s", "message"), [(0.5, "other"), (60.0, "finish")])
def test_stopping_server_does_not_wait_for_a_learner_that_stays(
    tmp_path: Path, grace_s: float, message: str
) -> None:
    """Its supervisor says "finish" when all learners have ended; else it waits for so long."""
    address = f"ipc://{tmp_path}/s"
    optimizer = FlatOptimizer([("x", nn.Parameter(torch.ones(3)))], CONFIG.learner)
    with server(tmp_path, address, grace_s=grace_s) as child:
        heard(child, "ready")
        client = ServerClient([address], 0, optimizer, CONFIG.learner)
        assert client.pull(5.0) is not None
        child.send({"kind": message})
        child.signal(signal.SIGTERM)
        assert exit_code(child, 10.0) == 0
        client.close()


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq without CURVE")
def test_server_on_the_network_serves_only_holders_of_the_learners_secret(tmp_path: Path) -> None:
    """Garbage, actors of the run, and 200 connections that never speak, where 128 descriptors are
    allowed: a learner that was there goes on, and one that comes later gets in."""
    folder, port = tmp_path / "keys", free_port()
    address = f"tcp://127.0.0.1:{port}"
    keys.make_keys(folder)
    optimizer = FlatOptimizer([("x", nn.Parameter(torch.ones(3)))], CONFIG.learner)
    with server(tmp_path, address, curve=folder) as child, ExitStack() as others:
        heard(child, "ready")
        client = ServerClient([address], 0, optimizer, CONFIG.learner, curve=folder)
        others.callback(client.close)
        assert client.pull(10.0) is not None
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1 << 20), b"\xff" * 64):
            with socket.create_connection(("127.0.0.1", port)) as made, suppress(OSError):
                made.sendall(noise)
        context = others.enter_context(zmq.Context())
        for pair in (None, keys.load_actor(folder)):
            stranger = others.enter_context(dealer(context, address, pair))
            assert not stranger.poll(500, zmq.POLLOUT)
            stranger.close(0)
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (128, 128))
        for _ in range(200):
            others.enter_context(connecting(port))
        event = heard(child, "event")
        assert (event["event"], event["data"]["reason"]) == ("refused", "descriptors")
        before_s = processor_s(child.pid)
        time.sleep(1)
        assert processor_s(child.pid) - before_s < 0.5
        optimizer.grads.copy_(torch.tensor([0.1, 0.2, 0.0]))
        client.push(1)
        reply = client.pull(10.0)
        assert reply is not None
        assert reply.version == 1
        late = ServerClient([address], 1, optimizer, CONFIG.learner, curve=folder)
        others.callback(late.close)
        assert late.pull(40.0) is not None  # once those that never spoke were closed


def test_server_reachable_from_other_hosts_needs_keys(tmp_path: Path) -> None:
    with server(tmp_path, f"tcp://*:{free_port()}") as child:
        assert "can be reached from other hosts" in heard(child, "error")["message"]
        assert exit_code(child) == 2
