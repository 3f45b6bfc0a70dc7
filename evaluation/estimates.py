"""Estimates of a policy's mean return, and the decisions that follow from them.

A policy is played in two ways: `greedy` takes the most probable action, `sampled` draws actions as
in training. The better of two estimates is biased upwards, because it was selected for being high.
So whether a return is reached is decided in two parts: the way is chosen by the episodes of one
part, and its mean is bounded by other episodes, which were not used to choose.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

Way = Literal["greedy", "sampled"]
WAYS: tuple[Way, ...] = ("greedy", "sampled")
LEAST = 10  # episodes by which a standard error says something
Z = 1.96  # standard errors from the mean to either end of a 95 % confidence interval


class Estimate(NamedTuple):
    """The mean return of ``episodes`` and its standard error, 0 for a single episode."""

    mean: float
    se: float
    episodes: int

    @property
    def lower(self) -> float:
        """Lower end of the 95 % confidence interval of the mean."""
        return self.mean - Z * self.se

    @property
    def upper(self) -> float:
        """Upper end of that interval."""
        return self.mean + Z * self.se


def estimate(returns: Sequence[float]) -> Estimate:
    """The estimate from independent episodes; the standard error is s / sqrt(n), with the unbiased
    variance s²."""
    n = len(returns)
    se = statistics.stdev(returns) / math.sqrt(n) if n > 1 else 0.0
    return Estimate(statistics.fmean(returns), se, n)


def better_way(found: Mapping[Way, Estimate]) -> Way:
    """The way with the higher mean; greedy if they are equal."""
    return "sampled" if found["sampled"].mean > found["greedy"].mean else "greedy"


def out_of_reach(found: Mapping[Way, Estimate], goal: float) -> bool:
    """Whether the better way is so far below ``goal`` that further episodes need not be played."""
    better = found[better_way(found)]
    return better.episodes >= LEAST and better.upper < goal


def reaches(found: Estimate, goal: float) -> bool:
    """Whether the mean return is at least ``goal``, with 95 % confidence."""
    return found.lower >= goal


def evidence(
    found: Mapping[Way, Estimate], trained_steps: int, closing: Estimate | None = None
) -> dict[str, Any]:
    """How to play a policy, and by which evaluation, as JSON: it is stored with checkpoints and
    exported policies, and read by `way_of`.

    Args:
        found: the estimate of each way.
        trained_steps: agent steps that the evaluated weights were trained on.
        closing: the estimate by further episodes of the better way, if there were any.
    """
    by_way: dict[str, Any] = {way: {"mean": found[way].mean, "se": found[way].se} for way in WAYS}
    about: dict[str, Any] = {
        "way": better_way(found),
        "episodes": found["greedy"].episodes,
        "trained_steps": trained_steps,
    }
    about |= by_way
    return about if closing is None else {**about, "closing": closing._asdict()}


def way_of(found: object) -> Way:
    """The way in `evidence`; greedy without any, as in files of earlier versions."""
    way = found.get("way") if isinstance(found, Mapping) else None
    return "sampled" if way == "sampled" else "greedy"


def spacing(every: int, cost_s: float, share: float | None, steps_per_s: float) -> int:
    """Agent steps between two evaluations: ``every`` times the smallest power of two with which
    they take at most ``share`` of a core.

    With powers of two, the steps of the evaluations of a run with a wider spacing are also those of
    a run with a narrower one, so that seeds can be compared.

    Args:
        cost_s: CPU seconds of one evaluation.
        share: None: no limit.
        steps_per_s: agent steps that are trained on in a second.
    """
    if share is None:
        return every
    wanted = cost_s / share * steps_per_s / every
    return every * 2 ** max(0, math.ceil(math.log2(wanted))) if wanted > 1 else every
