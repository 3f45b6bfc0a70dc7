"""The verdict that a rule returns, and the thresholds from which on rules return one.

Shares are of wall time, unless another whole is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.profiling.evidence import NEAR, Evidence

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

WORTH = NEAR  # a smaller cost is within what two windows of the same run differ by
BUSY = 0.8  # who works more of the time has no reserve: jitter of the others eats the rest
EXPLAINS = 0.5  # a cause is named if it explains at least half of the learner's wait
SLOW = 0.5  # an actor at less than half the pace of the others; noise stays within a third
# A ceiling is measured by itself, for some seconds; on a shared host that is off by a tenth.
SLOWED = 0.15
CROWDED = 0.9  # share of the cores above which somebody always waits for one
# Actors that could make a third more than is trained, and so wait a quarter of the time, are the
# reserve that keeps a learner fed in spite of jitter; more is surplus.
RESERVE = 0.25
FULL = 0.9
# Gaps of a microsecond or two between kernels of ten are in every network.
GAPS = 0.2
# Share of a step in which an environment waits, from which on stepping several at once may pay: by
# a third less time, steps are half as many again.
WAITS = 1 / 3
HELPS = 1.25  # times the rate: what is expected to gain less is no advice
ALIKE = 1.1  # times the rate: the smaller of two numbers that differ by less is taken
FAR = 3.0  # times the lag that the queue needs; its defaults stay below twice


@dataclass(frozen=True)
class Verdict:
    """A bottleneck that a rule has found, as sentences, and as ``kind`` for programs."""

    kind: Kind
    finding: str
    reason: str
    next_step: str
    cost: float = 0.0


Rule = Callable[[Evidence], Verdict | None]


def empty(what: str, step: str, cost: float = 0.0) -> Verdict:
    """Nothing that could be judged was seen."""
    return Verdict("empty", f"nothing to judge: {what}", "the window saw none at work", step, cost)
