"""Replay buffers of other libraries, each measured in a process of its own.

Not part of the package: it runs under the Python that has the peers installed
(`benchmarks/peers/requirements.txt`) and is called by `benchmarks/replay.py --peers`:

    python benchmarks/peers/replay.py sb3 uniform f32 --seconds 2

prints one JSON object with the transitions per second, or why there are none.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

BATCH = 256
TURN_S = 0.05
FRAMES = 4
ATARI_SHAPE = (FRAMES, 84, 84)
Step = dict[str, Any]


class Case(NamedTuple):
    """What is measured: ``envs`` rows are added at a time, ``capacity`` transitions are held."""

    operation: str
    kind: str
    envs: int
    capacity: int

    @property
    def atari(self) -> bool:
        return self.kind == "atari"


class Unsupported(Exception):
    """The peer has no such operation."""


def steps(case: Case, rng: np.random.Generator) -> list[Step]:
    """Transitions of ``envs`` environments that follow each other, as gymnasium gives them."""
    made: list[Step] = []
    shape = ATARI_SHAPE if case.atari else (4,)
    frames = rng.integers(0, 255, (16, case.envs, 84, 84), np.uint8) if case.atari else None
    obs = np.zeros((case.envs, *shape), np.uint8 if case.atari else np.float32)
    if frames is not None:  # what the last transition will end with, so that the first follows it
        obs = np.ascontiguousarray(frames[8 - shape[0] : 8].swapaxes(0, 1))
    following: np.ndarray[Any, Any]
    for i in range(8):
        if frames is not None:
            following = np.concatenate([obs[:, 1:], frames[i][:, None]], axis=1)
        else:
            following = np.asarray(rng.random(obs.shape), np.float32)
        made.append(
            {
                "obs": obs,
                "next_obs": following,
                "action": rng.integers(0, 4, case.envs),
                "reward": rng.standard_normal(case.envs, np.float32),
                "terminated": np.zeros(case.envs, np.bool_),
                "truncated": np.zeros(case.envs, np.bool_),
            }
        )
        obs = following
    made[0]["obs"] = obs
    return made


class Sb3:
    """stable-baselines3's ReplayBuffer; it has no prioritised one."""

    package = "stable-baselines3"

    def __init__(self, case: Case) -> None:
        if case.operation == "prioritized":
            raise Unsupported("no prioritised buffer")
        from gymnasium.spaces import Box, Discrete
        from stable_baselines3.common.buffers import ReplayBuffer

        space = Box(0, 255, ATARI_SHAPE, np.uint8) if case.atari else Box(-9, 9, (4,), np.float32)
        self._infos: list[dict[str, Any]] = [{} for _ in range(case.envs)]
        self._buffer = ReplayBuffer(case.capacity, space, Discrete(4), "cpu", case.envs)

    def add(self, step: Step) -> None:
        self._buffer.add(
            step["obs"],
            step["next_obs"],
            step["action"],
            step["reward"],
            step["terminated"],
            self._infos,
        )

    def sample(self) -> None:
        self._buffer.sample(BATCH)


class Cpprb:
    """cpprb's buffers; Atari with its own frame compression."""

    package = "cpprb"

    def __init__(self, case: Case) -> None:
        from cpprb import PrioritizedReplayBuffer, ReplayBuffer

        columns: dict[str, dict[str, Any]] = {
            "obs": {"shape": (4,)},
            "act": {"dtype": np.int64},
            "rew": {},
            "done": {},
        }
        options: dict[str, Any] = {}
        if case.atari:
            columns["obs"] = {"shape": (84, 84, FRAMES), "dtype": np.uint8}
            options = {"next_of": "obs", "stack_compress": "obs"}
        else:
            columns["next_obs"] = {"shape": (4,)}
        made = PrioritizedReplayBuffer if case.operation == "prioritized" else ReplayBuffer
        self._buffer = made(case.capacity, columns, **options)
        self._atari = case.atari
        self._rng = np.random.default_rng(1)

    def add(self, step: Step) -> None:
        obs, following = step["obs"], step["next_obs"]
        if self._atari:
            obs, following = np.moveaxis(obs, 1, -1), np.moveaxis(following, 1, -1)
        self._buffer.add(
            obs=obs,
            next_obs=following,
            act=step["action"],
            rew=step["reward"],
            done=step["terminated"],
        )

    def sample(self) -> None:
        self._buffer.sample(BATCH)

    def sample_and_update(self) -> None:
        batch = self._buffer.sample(BATCH)
        self._buffer.update_priorities(batch["indexes"], self._rng.random(BATCH))


class Tianshou:
    """tianshou's buffers, with numba where it uses it."""

    package = "tianshou"

    def __init__(self, case: Case) -> None:
        from tianshou.data import Batch, PrioritizedVectorReplayBuffer, VectorReplayBuffer

        options: dict[str, Any] = {}
        if case.atari:
            options = {"stack_num": FRAMES, "ignore_obs_next": True, "save_only_last_obs": True}
        if case.operation == "prioritized":
            self._buffer: Any = PrioritizedVectorReplayBuffer(
                case.capacity, case.envs, alpha=0.6, beta=0.4, **options
            )
        else:
            self._buffer = VectorReplayBuffer(case.capacity, case.envs, **options)
        self._batch = Batch
        self._rng = np.random.default_rng(1)

    def add(self, step: Step) -> None:
        self._buffer.add(
            self._batch(
                obs=step["obs"],
                obs_next=step["next_obs"],
                act=step["action"],
                rew=step["reward"],
                terminated=step["terminated"],
                truncated=step["truncated"],
                info=self._batch(),
            )
        )

    def sample(self) -> None:
        self._buffer.sample(BATCH)

    def sample_and_update(self) -> None:
        _, indices = self._buffer.sample(BATCH)
        self._buffer.update_weight(indices, self._rng.random(BATCH))


class TorchRl:
    """TorchRL's buffer over preallocated tensors."""

    package = "torchrl"

    def __init__(self, case: Case) -> None:
        from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

        del ReplayBuffer
        if case.operation == "prioritized":
            raise Unsupported("its C++ part is needed, and the wheel's does not load")
        self._buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(case.capacity), batch_size=BATCH
        )

    def add(self, step: Step) -> None:
        import torch
        from tensordict import TensorDict

        columns = {name: torch.from_numpy(array) for name, array in step.items()}
        self._buffer.extend(TensorDict(columns, batch_size=[len(step["reward"])]))

    def sample(self) -> None:
        self._buffer.sample()


PEERS: dict[str, Callable[[Case], Any]] = {
    "sb3": Sb3,
    "cpprb": Cpprb,
    "tianshou": Tianshou,
    "torchrl": TorchRl,
}


def measure(buffer: Any, case: Case, seconds: float) -> float:
    """Transitions per second in the best of many short turns, as ours are measured."""
    made = steps(case, np.random.default_rng(0))
    for i in range(case.capacity // case.envs):
        buffer.add(made[i % len(made)])
        if case.operation == "add" and i * case.envs > case.capacity // 4:
            break
    if case.operation == "add":
        calls = [partial(buffer.add, step) for step in made]
        rows = case.envs
    else:
        call = buffer.sample if case.operation == "uniform" else buffer.sample_and_update
        calls, rows = [call], BATCH
    best, done = 0.0, 0
    for _ in range(max(1, round(seconds / TURN_S))):
        first, began_s = done, time.perf_counter()
        while time.perf_counter() < began_s + TURN_S:
            calls[done % len(calls)]()
            done += 1
        best = max(best, (done - first) * rows / (time.perf_counter() - began_s))
    return best


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("peer", choices=sorted(PEERS))
    args.add_argument("operation", choices=["add", "uniform", "prioritized"])
    args.add_argument("kind", choices=["f32", "atari"])
    args.add_argument("--envs", type=int, default=BATCH)
    args.add_argument("--capacity", type=int, required=True)
    args.add_argument("--seconds", type=float, default=2.0)
    options = args.parse_args()
    case = Case(options.operation, options.kind, options.envs, options.capacity)
    made = PEERS[options.peer]
    try:
        rate = measure(made(case), case, options.seconds)
    except (Unsupported, ImportError, OSError, AttributeError, MemoryError) as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    print(json.dumps({"rate": rate, "version": version(getattr(made, "package"))}))  # noqa: B009


if __name__ == "__main__":
    main()
