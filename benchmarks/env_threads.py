"""Single environments stepped side by side: steps/s with 1, 2, 4, 8 threads, against the limit.

Two games: one that sleeps in its step, as a simulator elsewhere would have it wait, and Doom, whose
step waits for a process of its own on this machine (where vizdoom is installed). The limit of the
first is a step's sleep by the threads; of Doom, the processor time that a step takes, of the actor
and its games, by as many cores as there are threads. Thread counts take turns, and the median over
rounds counts. Other work on the machine takes from Doom's rates, and hardly from its limit.

    python benchmarks/env_threads.py [--envs 16] [--seconds 1] [--rounds 5] [--json] [--save]
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from common import finish, parser
from penstock.configs.sections import EnvConfig
from penstock.envs import BatchedEnv, make
from penstock.launch.measuring import cpu_seconds

THREADS = (1, 2, 4, 8)
SLEEP_S = 0.005
SLEEPS = EnvConfig(
    id="penstock/Synthetic-v0",
    kwargs={"step_time_s": SLEEP_S},
    wrappers=["gymnasium.wrappers:FlattenObservation"],  # turns its vector form off
)
DOOM = EnvConfig(id="penstock/Doom-v0")


class Rate(NamedTuple):
    """Of one game and number of threads, in one round."""

    steps_per_s: float
    cpu_s: float
    """Processor time of a step, of this process and the games' own."""


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--envs", type=int, default=16)
    args.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    args.add_argument("--rounds", type=int, default=5)
    options = args.parse_args()
    games = {"sleeps 5 ms": SLEEPS}
    if importlib.util.find_spec("vizdoom"):
        games["Doom"] = DOOM
    rows: list[list[Any]] = [["game", "threads", "steps/s", "of 1 thread", "limit", "of the limit"]]
    result: dict[str, Any] = {"envs": options.envs, "rounds": options.rounds, "games": {}}
    for name, env in games.items():
        rates = measure(env, options.envs, options.seconds, options.rounds)
        figures = result["games"][name] = [*told(env, rates)]
        rows += [[name, *line.values()] for line in figures]
    finish("env_threads", result, rows, options)


def measure(env: EnvConfig, envs: int, seconds: float, rounds: int) -> dict[int, list[Rate]]:
    """Rates by number of threads; each plays games of its own."""
    found: dict[int, list[Rate]] = {threads: [] for threads in THREADS}
    with ExitStack() as stack:
        plays = {}
        for threads in THREADS:
            game = make(env, envs, threads)
            stack.callback(game.close)
            plays[threads] = played(game, seconds)
        for number in range(rounds + 1):
            for threads, play in plays.items():
                rate = next(play)
                found[threads] += [rate] if number else []  # the first is to get warm
    return found


def played(game: BatchedEnv, seconds: float) -> Iterator[Rate]:
    """Plays for so long each time it is asked."""
    space = game.info.observation_space
    out = np.zeros((game.count, *space.shape), space.dtype)
    actions = np.random.default_rng(0).integers(2, size=(256, game.count))
    game.reset_into(0, out)
    while True:
        steps, began_s, cpu_s = 0, time.perf_counter(), cpu_seconds()
        while time.perf_counter() < began_s + seconds:
            game.step_into(actions[steps % len(actions)], out)
            steps += 1
        took_s = time.perf_counter() - began_s
        steps *= game.count
        yield Rate(steps / took_s, (cpu_seconds() - cpu_s) / steps)


def told(env: EnvConfig, rates: dict[int, list[Rate]]) -> Iterator[dict[str, float]]:
    """A line for each number of threads."""
    cores = len(os.sched_getaffinity(0))
    cpu_s = statistics.median(rate.cpu_s for each in rates.values() for rate in each)
    one = statistics.median(rate.steps_per_s for rate in rates[1])
    for threads, each in rates.items():
        limit = min(threads, cores) / cpu_s if env is DOOM else threads / SLEEP_S
        rate = statistics.median(rate.steps_per_s for rate in each)
        yield {
            "threads": threads,
            "steps_per_s": rate,
            "of_one_thread": rate / one,
            "limit_steps_per_s": limit,
            "of_limit": rate / limit,
        }


if __name__ == "__main__":
    main()
