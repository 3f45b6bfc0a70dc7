"""Sample Factory's APPO on its own environments, as its users start it.

Not part of the package: it runs under a Python that has it (`make peers`), and is called by
`penstock bench --peers`:

    python benchmarks/peers/run_sample_factory.py pong --seconds 60

prints one JSON object with its agent steps per second (it logs emulator frames), the mean returns
that its log has every five seconds, and the seconds from the beginning of training until they reach
`--goal` (475 for the targets that end in it). Its own time limit does not stop it, so it is ended
from outside. `pong` has the settings that were fastest here, `pong-own` its own for Atari.
`cartpole-vector` steps gymnasium's numpy vector of 64 CartPoles, as Penstock does, by its batched
sampling; `cartpole` steps single ones, as its example does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from importlib.metadata import version
from typing import Any

import ale_py  # noqa: F401 - tells gymnasium of its games, in each process
import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

WARM_UP_S = 5.0
START_S = 120.0
STOP_S = 30.0
COMMON = ["--algo=APPO", "--device=cpu", "--num_workers=2", "--restart_behavior=overwrite"]
CARTPOLE = [
    *COMMON, "--env=CartPole-v1", "--use_rnn=False", "--recurrence=1", "--num_envs_per_worker=20",
    "--policy_workers_per_policy=1", "--with_vtrace=False", "--batch_size=512", "--rollout=32",
    "--reward_scale=0.1", "--encoder_mlp_layers", "64", "64", "--nonlinearity=tanh",
]  # fmt: skip
TUNED = ["--learning_rate=0.001", "--gamma=0.98", "--gae_lambda=0.8", "--num_epochs=2"]
PONG = [
    *COMMON, "--env=atari_pong", "--num_envs_per_worker=8", "--worker_num_splits=2",
    "--async_rl=True", "--batched_sampling=False", "--rollout=32", "--batch_size=1024",
    "--num_batches_per_epoch=1", "--num_epochs=1",
]  # fmt: skip
VECTOR = [
    *COMMON, "--env=cartpole_vector", "--use_rnn=False", "--recurrence=1",
    "--batched_sampling=True", "--num_envs_per_worker=1", "--worker_num_splits=1",
    "--policy_workers_per_policy=1", "--with_vtrace=False", "--batch_size=2048", "--rollout=32",
    "--reward_scale=0.1", "--encoder_mlp_layers", "64", "64", "--nonlinearity=tanh",
]  # fmt: skip
VECTOR_ENVS = 64
PUBLISHED = ["--algo=APPO", "--device=cpu", "--restart_behavior=overwrite", "--env=atari_pong"]
TARGETS = {
    "cartpole": CARTPOLE,
    "cartpole-475": [*CARTPOLE, *TUNED],
    "cartpole-vector": VECTOR,
    "cartpole-vector-475": [*VECTOR, *TUNED],
    "pong": PONG,
    "pong-own": PUBLISHED,
}
GOALS = {"cartpole-475": 475.0, "cartpole-vector-475": 475.0}
FRAMES_PER_STEP = {"pong": 4, "pong-own": 4}

STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\]")
FRAMES = re.compile(r"Total num frames: (\d+)")
REWARD = re.compile(r"Avg episode reward: \[\(0, '([-\d.]+)'\)\]")
# When workers take their first steps, and when batched ones may begin to.
BEGUN = re.compile("Decorrelating experience|Signal rollout workers to start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--goal", type=float, help="a mean return that ends it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and what it has started ends with it
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "inside", options.target, f"--train_dir={folder}"]
        with subprocess.Popen(
            [*command, "--experiment=bench"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                goal = options.goal or GOALS.get(options.target)
                log = Log(FRAMES_PER_STEP.get(options.target, 1), goal)
                follow(process, log, options.seconds)
            finally:
                end(process)
    print(json.dumps(log.result() | {"version": version("sample-factory")}))


class Log:
    """What its lines say, as they come."""

    def __init__(self, frames_per_step: int, goal: float | None) -> None:
        self._frames_per_step = frames_per_step
        self._goal = goal
        self._begun_s = 0.0  # the last that is known of nothing being trained
        self._points: list[tuple[float, int]] = []
        self._rewards: list[tuple[float, float]] = []
        self.lines: list[str] = []

    def read(self, line: str) -> None:
        self.lines.append(line)
        stamp = STAMP.search(line)
        if stamp is None:
            return
        at_s = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        if BEGUN.search(line) and not self._points:
            self._begun_s = at_s
        if frames := FRAMES.search(line):
            if int(frames[1]):
                self._points.append((at_s, int(frames[1]) // self._frames_per_step))
            else:
                self._begun_s = at_s
        if reward := REWARD.search(line):
            self._rewards.append((at_s, float(reward[1])))

    @property
    def trains(self) -> bool:
        return bool(self._points)

    @property
    def solved_at_s(self) -> float | None:
        if self._goal is None:
            return None
        first = next((at_s for at_s, reward in self._rewards if reward >= self._goal), None)
        return None if first is None else first - self._begun_s

    def _steps_at(self, at_s: float) -> int:
        return max((steps for when_s, steps in self._points if when_s <= at_s), default=0)

    def result(self) -> dict[str, Any]:
        first_s = self._points[0][0] if self._points else 0.0
        warm = [point for point in self._points if point[0] >= first_s + WARM_UP_S - 0.5]
        rate = None
        if len(warm) > 1:
            (begin_s, begin), (end_s, end) = warm[0], warm[-1]
            rate = (end - begin) / (end_s - begin_s)
        elif not self._points:
            sys.exit("it trained on nothing: " + " | ".join(self.lines[-3:]))
        return {
            "steps_per_s": rate,
            "solved_at_s": self.solved_at_s,
            "steps": self._points[-1][1],
            "return": self._rewards[-1][1] if self._rewards else None,
            "curve": [
                {"seconds": at_s - self._begun_s, "steps": self._steps_at(at_s), "return": reward}
                for at_s, reward in self._rewards
            ],
        }


def follow(process: Any, log: Log, seconds: float) -> None:
    """Read its log until ``seconds`` after it began to train, or its goal is reached."""
    ends_s = time.monotonic() + START_S
    begun = False
    while (left_s := ends_s - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], left_s)[0]:
            return
        line = process.stdout.readline().decode(errors="replace")
        if not line:
            return
        log.read(line)
        if log.trains and not begun:
            begun, ends_s = True, time.monotonic() + seconds
        if log.solved_at_s is not None:
            return


def end(process: Any) -> None:
    """As Ctrl-C would, which removes its shared memory and semaphores; then by force."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=STOP_S)
    ends_s = time.monotonic() + STOP_S  # for those that clean up after it
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < ends_s:
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)


def inside() -> None:
    """What a user would start: its own command line."""
    _, _, target, *arguments = sys.argv
    sys.argv = [sys.argv[0], *TARGETS[target], *arguments]
    if target.startswith("pong"):
        from sf_examples.atari.train_atari import main as train
    else:
        from sample_factory.envs.env_utils import register_env
        from sf_examples.train_gym_env import main as train

        register_env("cartpole_vector", make_vector)
    sys.exit(train())


def make_vector(*_: Any, **__: Any) -> gymnasium.Env[Any, Any]:
    """What Sample Factory calls in each of its processes."""
    return VectorOfCartPoles()


class VectorOfCartPoles(gymnasium.Env[Any, Any]):
    """gymnasium's vector of CartPoles, as an environment of as many agents."""

    num_agents, is_multiagent = VECTOR_ENVS, True

    def __init__(self) -> None:
        self._vector = CartPoleVectorEnv(VECTOR_ENVS)
        self.observation_space = self._vector.single_observation_space
        self.action_space = self._vector.single_action_space
        self._infos: list[dict[str, Any]] = [{} for _ in range(VECTOR_ENVS)]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._vector.reset(seed=seed)[0], self._infos

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = self._vector.step(np.asarray(action))
        return obs, reward.astype(np.float32), terminated, truncated, self._infos


if __name__ == "__main__":
    inside() if sys.argv[1:2] == ["inside"] else main()
