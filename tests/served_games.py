"""Policies of random weights, and a server of games in a thread of the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import penstock
from penstock import LoadedPolicy
from penstock.algos.samples import network_shape
from penstock.configs.load import dump, resolve
from penstock.core import used_names
from penstock.core.web.listen import Listen
from penstock.envs import probe
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.serving.port import Port
from penstock.serving.server import make_server
from penstock.serving.service import Service

WAIT_S = 20.0
RECURRENT = ("model.core=lstm", "model.core_size=16")


class Pretended(gymnasium.Env[Any, Any]):
    """An environment that only has spaces."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self.observation_space = observation
        self.action_space = action

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.0, False, False, {}


PARTS = spaces.Dict(
    {
        "place": spaces.Discrete(4, start=2),
        "inner": spaces.Dict({"speed": spaces.Box(-1, 1, (3,), np.float32)}),
        "flags": spaces.Box(0, 1, (5,), np.bool_),  # type: ignore[arg-type]
        "lamps": spaces.MultiBinary(3),
        "ways": spaces.MultiDiscrete([3, 2], start=[1, 0]),
        "action_mask": spaces.Box(0, 1, (3,), np.int8),
    }
)
"""Parts of every kind."""


def parts() -> Pretended:
    return Pretended(PARTS, spaces.Discrete(3, start=5))


def numbered() -> Pretended:
    return Pretended(spaces.Discrete(6, start=2), spaces.MultiDiscrete([2, 3], start=[1, 10]))


def bounded() -> Pretended:
    low, high = np.array([[0.0, -4.0], [10.0, 0.0]], np.float32)
    seen = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    return Pretended(seen, spaces.Box(low, high, dtype=np.float32))


def paired() -> Pretended:
    seen = spaces.Tuple([spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(3)])
    return Pretended(seen, spaces.MultiBinary(3))


def frames() -> Pretended:
    return Pretended(spaces.Box(0, 255, (3, 3, 1), np.uint8), spaces.Discrete(2))


def random_policy(folder: Path, target: str, *overrides: str, seed: int = 0) -> LoadedPolicy:
    """A policy of random weights, of a preset or a function of this module."""
    own = {"parts", "numbered", "bounded", "paired", "frames"}
    config = resolve(f"{__name__}:{target}" if target in own else target, [*overrides])
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump(config))
    used_names.note(config)
    layout = network_shape(config, probe(config.env)).layout
    weights = 0.3 * np.random.default_rng(seed).standard_normal(layout.size, np.float32)
    checkpoint_format.save(folder / "checkpoints" / "last", Checkpoint(layout, weights))
    return penstock.load_policy(folder, sample=False)


@contextmanager
def served(service: Service, most_games: int = 64, **options: Any) -> Iterator[int]:
    """The port at which a service is served, with options of `Listen`."""
    listen = Listen(**{"port": 0, **options})
    port = Port(service, listen.token, most_games)
    server = make_server(port, listen, started=lambda: None, ended=lambda figures: None)
    with closing(listen.bind()) as listener:
        thread = threading.Thread(target=server.run, args=[[listener]])
        thread.start()
        try:
            ends_s = time.monotonic() + WAIT_S
            while not server.started and time.monotonic() < ends_s:
                time.sleep(0.01)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def wait_for_end(connection: socket.socket) -> bytes:
    """All that arrives until the peer closes the connection."""
    content = b""
    try:
        while data := connection.recv(1 << 16):
            content += data
    except ConnectionError:
        pass
    return content
