"""Pong on the cores of this machine: trained agent steps per second, and what the parts allow.

The ideal is cores / (environment + inference + learning core-seconds per step), each measured alone
in this run, with the settings of the preset. Then the preset trains for some minutes over shared
memory and over ZeroMQ. Rates are agent steps (four emulator frames each), each trained once.

    python benchmarks/pong.py [--minutes 5] [--kinds shm zmq] [--json] [--save]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common import finish, median_of, parser
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.specs import HEADER
from penstock.envs import VectorGame, make
from penstock.learner.staging import StagingBatch
from penstock.learner.trainer import Trainer
from penstock.models.policy import make_policy
from penstock.transport.shm.store import Slot
from runs import dropped_fraction, train, trained_rate

WARM_UP_S = 15.0
PEERS = {"sample_factory": 512, "rllib_impala": 311, "ppo_150_lines": 887}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--minutes", type=float, default=5.0)
    args.add_argument("--kinds", nargs="*", default=["shm", "zmq"])
    args.add_argument("override", nargs="*", help="options of the config")
    options = args.parse_args()
    config = resolve("pong", options.override)
    parts = core_ms_per_step(config)
    cores = len(os.sched_getaffinity(0))
    ideal = cores / (sum(parts.values()) / 1000)
    runs = {
        kind: one(kind, f"stop.minutes={options.minutes}", *options.override)
        for kind in options.kinds
    }
    result: dict[str, Any] = {
        "core_ms_per_step": parts,
        "ideal_steps_per_s": ideal,
        "runs": runs,
        "asked": {"steps_per_s": 1600, "aim": 2150, "zmq_over_shm": 0.85},
        "peers_elsewhere": PEERS,
    }
    rows: list[list[Any]] = [["what", "steps/s", "of the ideal", "dropped", "policy lag"]]
    rows += [[f"{part} alone, one core", 1000 / ms, "", "", ""] for part, ms in parts.items()]
    rows.append([f"ideal on {cores} cores", ideal, 1.0, "", ""])
    for kind, run in runs.items():
        rate = run["steps_per_s"]
        rows.append([f"training over {kind}", rate, rate / ideal, run["dropped"], run["lag"]])
    if {"shm", "zmq"} <= runs.keys():
        result["zmq_over_shm"] = runs["zmq"]["steps_per_s"] / runs["shm"]["steps_per_s"]
        rows.append(["zmq / shm", result["zmq_over_shm"], "", "", ""])
    finish("pong", result, rows, options)


def one(kind: str, *overrides: str) -> dict[str, Any]:
    summary = train("pong", f"transport.kind={kind}", *overrides)
    return {
        "steps_per_s": trained_rate(summary, WARM_UP_S),
        "dropped": dropped_fraction(summary),
        "lag": summary["policy_lag_mean"],
        "return": summary["episode_return_mean"],
        "learner_wait_fraction": summary["learner_wait_fraction"],
    }


def core_ms_per_step(config: Config) -> dict[str, float]:
    """Core-milliseconds per agent step of each part, alone in this process on one thread."""
    game = make(config.env, config.actors.envs, config.actors.env_threads)
    trainer = Trainer(config, game.info)
    policy = make_policy(config, game.info, 0)
    policy.load(trainer.optimizer.values.numpy())
    space = game.info.observation_space
    obs = np.zeros((game.count, *space.shape), space.dtype)
    game.reset_into(0, obs)
    actions = policy.act(obs)
    batch = recorded(trainer, game)
    steps = {
        "environment": (lambda: game.step_into(actions, obs), game.count),
        "inference": (lambda: policy.act(obs), game.count),
        "learning": (lambda: trainer.train(batch), batch.steps),
    }
    found = {name: core_ms(call, count) for name, (call, count) in steps.items()}
    game.close()
    return found


def recorded(trainer: Trainer, game: VectorGame) -> StagingBatch:
    """A batch of real frames, played at random."""
    spec = trainer.spec
    payload = spec.zeros()
    columns = spec.views(payload)
    rng = np.random.default_rng(0)
    actions = len(trainer.model.policy.bias)
    for t in range(spec.unroll + 1):
        chosen = rng.integers(0, actions, spec.envs, dtype=np.int32)
        game.step_into(chosen, columns["obs"][t])
        if t < spec.unroll:
            columns["action"][t] = chosen
    columns["alive"][...] = True
    columns["behaviour_logp"][...] = -np.log(actions)
    header = np.zeros((), HEADER)
    header["steps"] = spec.unroll * spec.envs
    batch = StagingBatch(spec, 1, trainer.device)
    batch.gather([Slot(0, header, tuple(payload), columns)])
    return batch


def core_ms(call: Callable[[], object], count: int) -> float:
    def measure() -> float:
        calls, began_s, end_s = 0, time.process_time(), time.perf_counter() + 2.0
        while time.perf_counter() < end_s:
            call()
            calls += 1
        return (time.process_time() - began_s) * 1000 / (calls * count)

    call()
    return median_of(measure)[0]


if __name__ == "__main__":
    main()
