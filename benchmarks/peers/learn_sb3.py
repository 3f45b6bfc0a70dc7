"""A learning curve of stable-baselines3's PPO, with the settings of RL Baselines3 Zoo.

Not part of the package: it runs under a Python that has it (`make peers`), and is called by
`benchmarks/learning.py --peers`:

    python benchmarks/peers/learn_sb3.py HalfCheetah-v5 --steps 1000000 --seed 0

prints one JSON object: the points of the curve, each evaluated on episodes of its own, with the
seconds of training until then, without those of the evaluations. Each point is also printed on
stderr as soon as it is known.

MinAtar is played through Penstock's own environment, with the zoo's settings for Atari and a
network of Penstock's size, as the zoo has none for it. The other environments are gymnasium's own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

ROOT = Path(__file__).parents[2]
EVALUATED_ENVS = 8
MINATAR, ATARI = "penstock/MinAtar-v0", "ALE/"


def falling(value: float) -> Callable[[float], float]:
    """The zoo's `lin_`: from ``value`` to 0, by the share of the steps that is left."""
    return lambda left: left * value


ATARI_SETTINGS = {
    "n_steps": 128,
    "batch_size": 256,
    "n_epochs": 4,
    "learning_rate": falling(2.5e-4),
    "clip_range": falling(0.1),
    "vf_coef": 0.5,
    "ent_coef": 0.01,
}
SETTINGS: dict[str, dict[str, Any]] = {  # hyperparams/ppo.yml of the zoo
    "HalfCheetah-v5": {
        "envs": 1,
        "normalize": True,
        "n_steps": 512,
        "batch_size": 64,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
        "policy_kwargs": {
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
        },
    },
    "LunarLander-v3": {
        "envs": 16,
        "n_steps": 1024,
        "batch_size": 64,
        "gae_lambda": 0.98,
        "gamma": 0.999,
        "n_epochs": 4,
        "ent_coef": 0.01,
    },
    "CartPole-v1": {
        "envs": 8,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "ent_coef": 0.0,
        "learning_rate": falling(1e-3),
        "clip_range": falling(0.2),
    },
    MINATAR: ATARI_SETTINGS
    | {"policy_kwargs": {"net_arch": [128, 128], "activation_fn": torch.nn.ReLU}},
    ATARI: ATARI_SETTINGS | {"policy": "CnnPolicy"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env_id")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="of the environment, as JSON")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=100_000, help="steps between evaluations")
    parser.add_argument("--episodes", type=int, default=20, help="of each evaluation")
    parser.add_argument("--last-episodes", type=int, default=100, help="of the last one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prefix = ATARI if options.env_id.startswith(ATARI) else options.env_id
    settings = dict(SETTINGS[prefix])
    count, normalize = settings.pop("envs", 8), settings.pop("normalize", False)
    policy = settings.pop("policy", "MlpPolicy")
    envs = make(options, count, options.seed)
    if normalize:
        envs = VecNormalize(envs, gamma=settings["gamma"])
    model = PPO(policy, envs, seed=options.seed, device="cpu", **settings)
    curve = Curve(options)
    model.learn(options.steps, callback=curve)
    curve.evaluate(options.last_episodes)
    print(json.dumps({"curve": curve.points, "version": version("stable-baselines3")}))


def make(options: argparse.Namespace, count: int, seed: int) -> Any:
    """A vector of environments."""
    if options.env_id.startswith(ATARI):
        import ale_py  # noqa: F401 - tells gymnasium of its games

        name = options.env_id.removeprefix(ATARI).removesuffix("-v5")
        return VecFrameStack(make_atari_env(f"{name}NoFrameskip-v4", count, seed=seed), 4)
    if options.env_id == MINATAR:
        spec = importlib.util.spec_from_file_location("minatar_env", ROOT / "envs/games/minatar.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return make_vec_env(module.MinAtarEnv, count, seed=seed, env_kwargs=options.kwargs)
    kwargs = {"env_kwargs": options.kwargs} if options.kwargs else {}
    assert options.env_id in gymnasium.registry, options.env_id
    return make_vec_env(options.env_id, count, seed=seed, **kwargs)


class Curve(BaseCallback):  # type: ignore[misc]
    """Evaluates after each rollout that passes a multiple of ``every`` steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self._options = options
        self._envs = make(options, EVALUATED_ENVS, options.seed + 1_000)
        self._due = options.every
        self._began_s = 0.0
        self._evaluating_s = 0.0
        self.points: list[dict[str, float]] = []

    def _on_training_start(self) -> None:
        self._began_s = time.monotonic()

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self._due:
            self.evaluate(self._options.episodes)
            self._due = (self.num_timesteps // self._options.every + 1) * self._options.every

    def _on_step(self) -> bool:
        return True

    def evaluate(self, episodes: int) -> None:
        """Add a point: greedy and sampled returns of whole games."""
        began_s = time.monotonic()
        point = {
            "steps": self.num_timesteps,
            "seconds": began_s - self._began_s - self._evaluating_s,
        }
        envs = self._envs
        training = self.model.get_vec_normalize_env()
        if training is not None:
            envs = VecNormalize(envs, training=False, norm_reward=False)
            envs.obs_rms = training.obs_rms
        for way in ("greedy", "sampled"):
            returns, _ = evaluate_policy(
                self.model,
                envs,
                episodes,
                deterministic=way == "greedy",
                return_episode_rewards=True,
            )
            point[way] = sum(returns) / len(returns)
        self.points.append(point)
        print(json.dumps(point), file=sys.stderr, flush=True)
        self._evaluating_s += time.monotonic() - began_s


if __name__ == "__main__":
    main()
