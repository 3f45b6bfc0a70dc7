"""The verdict that a rule returns, and the thresholds from which on rules return one.

Shares are of wall time, unless another whole is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.profiling.evidence import SIMILAR_SHARES, Evidence

Kind = Literal[
    "empty",
    "filling",
    "slow_gather",
    "slow_wire",
    "straggler",
    "turns",
    "few_slots",
    "slow_environment",
    "waiting_environment",
    "slow_inference",
    "slow_actor",
    "starved",
    "reduction",
    "slow_rank",
    "crowded",
    "slow_copy",
    "launch_bound",
    "slow_publish",
    "bookkeeping",
    "other",
    "big_lag",
    "slow_learner",
    "healthy",
]

# A cost is named from this share on: two windows of the same run differ by as much.
SIGNIFICANT_COST = SIMILAR_SHARES
# A process that works more of the time has no reserve: jitter of the others eats the rest.
BUSY = 0.8
# A cause is named if it explains at least half of the learner's wait.
EXPLAINING_SHARE = 0.5
# An actor is slow at less than half the pace of the others; noise stays within a third.
SLOW_PACE = 0.5
# A learner is slowed by others from this share of its clock on. A ceiling is measured by itself,
# for some seconds; on a shared host that is off by a tenth.
SIGNIFICANT_SLOWDOWN = 0.15
# If more of the cores are busy, some process always waits for one.
CROWDED_CORES = 0.9
# Actors that could make a third more than is trained, and so wait a quarter of the time, are the
# reserve that keeps a learner fed in spite of jitter; more is surplus.
ACTOR_RESERVE = 0.25
# A queue that is so full has more than the learner takes.
FULL_QUEUE = 0.9
# A GPU may run no kernel for less than this share of its time: gaps of a microsecond or two between
# kernels of ten are in every network.
KERNEL_GAPS = 0.2
# If an environment waits for this share of a step, stepping several at once may pay: by a third
# less time, steps are half as many again.
ENV_WAITS = 1 / 3
# A change that is expected to raise the rate by a smaller factor is no advice.
HELPFUL_GAIN = 1.25
# Of two numbers of threads whose rates differ by a smaller factor the smaller number is taken.
SIMILAR_GAIN = 1.1
# Samples are old at so many times the lag that the queue needs; its defaults stay below twice.
LARGE_LAG = 3.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A bottleneck that a rule has found, as sentences, and as ``kind`` for programs."""

    kind: Kind
    finding: str
    reason: str
    next_step: str
    cost: float = 0.0
    """The share of throughput that the run would not lose without it."""


Rule = Callable[[Evidence], Verdict | None]
"""Looks for one bottleneck in the evidence; returns None if it is not there."""


def nothing_to_judge(what: str, next_step: str, cost: float = 0.0) -> Verdict:
    """Returns the verdict on a window without learners, actors or steps; ``what`` says which."""
    return Verdict(
        kind="empty",
        finding=f"nothing to judge: {what}",
        reason="the window saw none at work",
        next_step=next_step,
        cost=cost,
    )
