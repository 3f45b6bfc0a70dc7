"""Estimates of a policy's mean return, and the decisions that follow from them.

A policy is played in two ways: `greedy` takes the most probable action, `sampled` draws actions as
in training. The better of two estimates is biased upwards, because it was selected for being high.
So whether a return is reached is decided in two steps: the way is chosen by the episodes of one
part, and its mean is bounded by other episodes, which were not used to choose.

Weights, and the ways to play them, are compared by the lower end of the interval of their mean
(`lower_end`), so that a few lucky episodes do not win over many good ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

Way = Literal["greedy", "sampled"]
WAYS: tuple[Way, ...] = ("greedy", "sampled")
LEAST = 10  # episodes by which a spread says something
Z = 1.96  # standard errors from the mean to either end of a 95 % confidence interval
PRIOR = 10  # episodes for which the spread of the returns in training counts, in `lower_end`


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
    """Returns the estimate from the ``returns`` of independent episodes.

    The standard error is s / sqrt(n), with the unbiased variance s².
    """
    n = len(returns)
    se = statistics.stdev(returns) / math.sqrt(n) if n > 1 else 0.0
    return Estimate(statistics.fmean(returns), se, n)


def pooled(one: Estimate, other: Estimate) -> Estimate:
    """Returns the estimate from the episodes of both, of the same weights played in the same way.

    The sum of squares splits into that within each part, about the part's mean, and that between
    the parts, about the common mean.
    """
    parts, n = (one, other), one.episodes + other.episodes
    mean = sum(part.episodes * part.mean for part in parts) / n

    within = sum(part.se**2 * part.episodes * (part.episodes - 1) for part in parts)
    between = sum(part.episodes * (part.mean - mean) ** 2 for part in parts)
    return Estimate(mean, math.sqrt((within + between) / (n - 1) / n), n)


def lower_end(found: Estimate, spread: float | None) -> float:
    """Returns the figure by which evaluated weights are compared.

    It is the lower end of the 95 % confidence interval of the mean, where the variance also counts
    ``spread``² as `PRIOR` episodes would. Few episodes say little about their own spread: four that
    all succeed have a standard error of 0.

    Args:
        measured: the estimate from the episodes of an evaluation.
        spread: standard deviation of the returns in training at that time; None if it is unknown.
    """
    if spread is None:
        return found.lower
    own = found.episodes - 1
    variance = (own * found.episodes * found.se**2 + PRIOR * spread**2) / (own + PRIOR)
    return found.mean - Z * math.sqrt(variance / found.episodes)


class BestWay(NamedTuple):
    """The way to play weights, its estimate, and the `lower_end` by which it was chosen."""

    way: Way
    found: Estimate
    lower: float
    informed: bool
    """Whether ``lower`` counts the spread in training."""

    def beats(self, other: BestWay) -> bool:
        """Whether these weights are better than the ``other`` ones.

        Without the spread in training, luck cannot be told from skill, so a choice with it is
        better than one without.
        """
        return (self.informed, self.lower) > (other.informed, other.lower)


def choose(found: Mapping[Way, Estimate], spread: float | None) -> BestWay:
    """Returns the way with the higher `lower_end`, and greedy if they are equal.

    ``spread`` is the standard deviation of the returns in training; None if it is unknown.
    """
    greedy, sampled = (
        BestWay(way, found[way], lower_end(found[way], spread), spread is not None) for way in WAYS
    )
    return sampled if sampled.beats(greedy) else greedy


def spread_of(returns: Sequence[float]) -> float | None:
    """Returns the standard deviation of the returns in training; None for fewer than `LEAST`."""
    return statistics.stdev(returns) if len(returns) >= LEAST else None


def out_of_reach(better: Estimate, goal: float) -> bool:
    """Whether the better way is so far below ``goal`` that further episodes need not be played."""
    return better.episodes >= LEAST and better.upper < goal


def reaches(found: Estimate, goal: float) -> bool:
    """Whether the mean return is at least ``goal``, with 95 % confidence."""
    return found.lower >= goal


def evidence(
    found: Mapping[Way, Estimate], way: Way, trained_steps: int, closing: Estimate | None = None
) -> dict[str, Any]:
    """Returns how to play a policy, and by which evaluation, as a JSON object.

    It is stored with checkpoints and exported policies, and read by `way_of`.

    Args:
        estimates: those of each way, by all episodes.
        way: the better one.
        trained_steps: agent steps that the evaluated weights were trained on.
        closing: the estimate by further episodes, if there were any; ``estimates`` include them.
    """
    about: dict[str, Any] = {
        "way": way,
        "episodes": found[way].episodes,
        "trained_steps": trained_steps,
        **{each: found[each]._asdict() for each in WAYS},
    }
    return about if closing is None else {**about, "closing": closing._asdict()}


def way_of(found: object) -> Way:
    """Returns the way in `evidence`; greedy without any, as in files of earlier versions."""
    way = found.get("way") if isinstance(found, Mapping) else None
    return "sampled" if way == "sampled" else "greedy"
