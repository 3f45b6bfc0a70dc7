"""The parameter server as a role: a process that reports, ends when told to, and may be killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.configs.schema import Config
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.engines.local import LocalHandle
from penstock.launch.topology import role_arguments
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.parameter_server.client import ServerClient
from transport_world import RUN_ID, exit_code, heard

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
def server(folder: Path, address: str, incarnation: int = 0) -> Iterator[LocalHandle]:
    arguments = role_arguments(folder, folder) | {
        "config": CONFIG.model_dump(mode="json"),
        "run_id": RUN_ID,
        "grace_s": 10.0,
    }
    main = "penstock.learner.parameter_server.server:run"
    spec = RoleSpec("server", 0, main, Stage.CARRIERS, address=address)
    child = LocalHandle(spec, incarnation, arguments, folder / f"server-{incarnation}.log")
    try:
        yield child
    finally:
        child.signal(signal.SIGKILL)
        child.reap()


def test_it_reports_and_its_workers_go_on_with_a_new_one(tmp_path: Path) -> None:
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
