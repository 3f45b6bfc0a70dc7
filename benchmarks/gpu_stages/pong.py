"""Pong by PPO: the rate with actors on most cores, and if asked the time to a return of 18.

The rate is that of batches with one unroll of each actor, by which the policy lag is two batches
however many actors play. The preset's minibatches of 64 samples are bound by kernel launches: the
learner of an H100 trained 16,000 steps/s with them beside 13 actors and computed 69 % of the time,
so 23,000 would be the most. Whether Pong is learned with the larger batches was not tried.

The time is measured with the preset and its two first actors, although they leave cores idle: with
13 the lag was 60 updates, and the run learned less (`docs/results/README.md`, "On a GPU").
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpu_stages.finding import Finding, Options
from penstock.bench.whole import FOREVER, train, trained_rate

RESERVED = 1  # cores of the learner and its feeder; nothing is evaluated meanwhile
WARM_UP_S = 10.0
MOST_MINUTES = 8.0  # with the start and the rate before it, less than the 10 of one call
SMALL = ("actors.count=1", "actors.envs=2", "learner.batch_slots=1", "stop.learner_steps=16")


def run(options: Options) -> Iterator[Finding]:
    device = f"learner.device={options.place}"
    if options.small:
        summary = train("pong", device, *FOREVER[:2], FOREVER[3], *SMALL, "run.interval_s=0.1")
        yield Finding("trained agent steps/s", trained_rate(summary))
        return
    minutes = f"stop.minutes={(WARM_UP_S + 3 * options.seconds) / 60}"
    fed = on_cores(len(os.sched_getaffinity(0)))
    summary = train("pong", device, *fed, *FOREVER, minutes, "run.interval_s=1")
    yield Finding("trained agent steps/s", trained_rate(summary, WARM_UP_S), " ".join(fed))
    if options.train:
        minutes = f"stop.minutes={MOST_MINUTES}"
        summary = train("pong", device, "actors.count=2", minutes)
        reached_s = summary["return_reached_at_s"]
        note = f"{summary['trained_steps']:,} steps, return {summary['episode_return_mean']}"
        yield Finding("minutes to 18", None if reached_s is None else reached_s / 60, note)


def on_cores(cores: int) -> tuple[str, ...]:
    """Options of `pong` for a learner with a GPU and actors on so many cores."""
    actors = max(2, cores - RESERVED)
    return (
        f"actors.count={actors}",
        "actors.envs=16",  # a step of 8 took 1.2 times as long on a busy machine of 2 cores
        f"learner.batch_slots={actors}",
        "transport.slots=2",  # actors play on while the slowest of them ends its unroll
    )
