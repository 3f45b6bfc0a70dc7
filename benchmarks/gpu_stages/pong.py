"""Pong by PPO: the rate with actors on most cores, and if asked the time to a return of 18.

The time is measured with the preset's two actors, although they leave cores idle: with many actors
the policy lag is tens of updates, and the run learned less (`docs/results/README.md`, "On a GPU").
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpu_stages.finding import Finding, Options
from penstock.bench.whole import FOREVER, train, trained_rate

RESERVED = 3  # cores of the learner, its feeder and the evaluator
WARM_UP_S = 10.0
MOST_MINUTES = 15.0
SMALL = ("actors.count=1", "actors.envs=2", "learner.batch_slots=1", "stop.learner_steps=16")


def run(options: Options) -> Iterator[Finding]:
    device = f"learner.device={options.place}"
    if options.small:
        summary = train("pong", device, *FOREVER[:2], FOREVER[3], *SMALL, "run.interval_s=0.1")
        yield Finding("trained agent steps/s", trained_rate(summary))
        return
    actors = f"actors.count={max(2, len(os.sched_getaffinity(0)) - RESERVED)}"
    minutes = f"stop.minutes={(WARM_UP_S + 3 * options.seconds) / 60}"
    summary = train("pong", device, actors, *FOREVER, minutes, "run.interval_s=1")
    yield Finding("trained agent steps/s", trained_rate(summary, WARM_UP_S))
    if options.train:
        summary = train("pong", device, f"stop.minutes={MOST_MINUTES}")
        reached_s = summary["return_reached_at_s"]
        note = f"{summary['trained_steps']:,} steps, return {summary['episode_return_mean']}"
        yield Finding("minutes to 18", None if reached_s is None else reached_s / 60, note)
