"""stable-baselines3's PPO with eight environments, as its documentation starts it.

Not part of the package: it runs under a Python that has it (`make peers`), and is called by
`penstock bench --peers`:

    python benchmarks/peers/run_sb3.py cartpole --seconds 30

prints one JSON object with its agent steps per second, and the seconds from the start of training
to a mean return of 475 over a hundred episodes.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from typing import Any

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack

ENVS = 8
SOLVED = 475.0
FOREVER = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=("cartpole", "cartpole-475", "pong"))
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    watch = Watch(options.seconds, until_solved=options.target.endswith("475"))
    make_model(options.target).learn(FOREVER, callback=watch)
    print(json.dumps(watch.result() | {"version": version("stable-baselines3")}))


def make_model(target: str) -> Any:
    if target != "pong":
        return PPO("MlpPolicy", make_vec_env("CartPole-v1", ENVS), device="cpu")
    import ale_py  # noqa: F401 - tells gymnasium of its games

    games = VecFrameStack(make_atari_env("PongNoFrameskip-v4", ENVS, seed=0), 4)
    return PPO("CnnPolicy", games, n_steps=128, batch_size=256, n_epochs=4, device="cpu")


class Watch(BaseCallback):  # type: ignore[misc]
    """Stops after some seconds; notes the steps after each rollout and its training."""

    def __init__(self, seconds: float, *, until_solved: bool) -> None:
        super().__init__()
        self._seconds, self._until_solved = seconds, until_solved
        self._began_s = 0.0
        self._points: list[tuple[float, int]] = []
        self._solved_at_s: float | None = None

    def _on_training_start(self) -> None:
        self._began_s = time.monotonic()

    def _on_rollout_start(self) -> None:
        self._points.append((self._spent_s, self.num_timesteps))

    def _on_step(self) -> bool:
        returns = [episode["r"] for episode in self.model.ep_info_buffer]
        if self._solved_at_s is None and returns and sum(returns) / len(returns) >= SOLVED:
            self._solved_at_s = self._spent_s
        done = self._until_solved and self._solved_at_s is not None
        return self._spent_s < self._seconds and not done

    @property
    def _spent_s(self) -> float:
        return time.monotonic() - self._began_s

    def result(self) -> dict[str, Any]:
        rate = None  # of whole rollouts with their training
        if len(self._points) > 1:
            (begin_s, begin), (end_s, end) = self._points[0], self._points[-1]
            rate = (end - begin) / (end_s - begin_s)
        return {"steps_per_s": rate, "solved_at_s": self._solved_at_s}


if __name__ == "__main__":
    main()
