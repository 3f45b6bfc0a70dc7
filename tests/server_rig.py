"""A parameter server in a thread, its workers, and a problem for them: a quadratic one of eight
parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.configs.sections import LearnerConfig
from penstock.learner.extras.parameter_server.client import Reply, ServerClient
from penstock.learner.extras.parameter_server.protocol import Tally
from penstock.learner.extras.parameter_server.server import ParameterServer
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer

SIZE = 8
OPTIMUM = torch.linspace(-3.0, 4.0, SIZE)
SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.3, "grad_clip": None}


def config(pace: str, count: int = 4, **settings: Any) -> LearnerConfig:
    """Returns a learner config with this pace and plain SGD."""
    return LearnerConfig.model_validate({"pace": pace, "count": count} | SGD | settings)


def optimizer_of(cfg: LearnerConfig, values: Tensor | None = None) -> FlatOptimizer:
    """Returns a flat optimizer over ``values``, or over zeros."""
    start = torch.zeros(SIZE) if values is None else values
    device = "cuda" if cfg.device == "cuda" else "cpu"
    return FlatOptimizer([("x", nn.Parameter(start.to(device, copy=True)))], cfg)


class Rig:
    """A server in a thread, with all of its shards."""

    def __init__(self, folder: Path, cfg: LearnerConfig, curve: Path | None = None) -> None:
        self.cfg = cfg
        self.addresses = [f"ipc://{folder}/s{n}" for n in range(cfg.server_shards)]
        self.servers = [
            ParameterServer(cfg, address, shard=n, curve=curve)
            for n, address in enumerate(self.addresses)
        ]
        self._clients: list[ServerClient] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def server(self) -> ParameterServer:
        """Returns the first shard."""
        return self.servers[0]

    @property
    def address(self) -> str:
        """Returns the address of the first shard."""
        return self.addresses[0]

    def _run(self) -> None:
        while not self._stop:
            for server in self.servers:
                server.turn(0.02 / len(self.servers))

    def client(self, rank: int, values: Tensor | None = None, **begun: Any) -> ServerClient:
        """Starts a worker of this rank."""
        optimizer = optimizer_of(self.cfg, values)
        self._clients.append(ServerClient(self.addresses, rank, optimizer, self.cfg, **begun))
        return self._clients[-1]

    def stop(self) -> None:
        """Ends only the server; its workers stay."""
        self._stop = True
        self._thread.join()
        for server in self.servers:
            server.close()

    def close(self) -> None:
        while self._clients:
            self._clients.pop().close()
        if not self._stop:
            self.stop()


def rigs(folder: Path, shards: int = 1) -> Iterator[Callable[..., Rig]]:
    """Returns a function that makes a `Rig` of so many shards; all rigs end with it."""
    made: list[Rig] = []

    def make(cfg: LearnerConfig, **options: Any) -> Rig:
        if shards > 1 and cfg.pace == "backup":
            pytest.skip("refused by the config")
        cfg = cfg.model_copy(update={"server_shards": shards}) if shards > 1 else cfg
        made.append(Rig(folder, cfg, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def pulled(client: ServerClient, timeout_s: float = 10.0) -> Reply:
    """Pulls parameters and returns the reply, which must come in time."""
    reply = client.pull(timeout_s)
    assert reply is not None, client.last_notice
    return reply


def push(client: ServerClient, mean: list[float] | Tensor, samples: int = 1, **told: Any) -> None:
    """Pushes a gradient whose mean over ``samples`` is ``mean``."""
    client._optimizer.grads.copy_(torch.as_tensor(mean) * samples)
    client.push(samples, counted(samples), **told)


def counted(steps: int, returns: float = 0.0) -> Tally:
    """Returns the counts of so many agent steps and of recent episodes with these returns."""
    return (0.0, float(steps), 0.0, returns, 0.0, 1.0)


def values(client: ServerClient) -> Tensor:
    """Returns a worker's parameters."""
    return client._optimizer.values
