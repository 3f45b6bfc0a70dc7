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
LEAST = 10
"""Fewer episodes say too little about the spread of their returns."""
Z = 1.96
"""Standard errors from the mean to either end of a 95 % confidence interval."""
PRIOR = 10
"""Number of episodes as which the spread of the returns in training counts, in `lower_end`."""


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
    parts = (one, other)
    n = one.episodes + other.episodes
    mean = sum(part.episodes * part.mean for part in parts) / n

    within = sum(part.se**2 * part.episodes * (part.episodes - 1) for part in parts)
    between = sum(part.episodes * (part.mean - mean) ** 2 for part in parts)
    return Estimate(mean, math.sqrt((within + between) / (n - 1) / n), n)


class WinRate(NamedTuple):
    """The share of games that were won, where a draw counts half, with its 95 % interval."""

    mean: float
    lower: float
    upper: float


def win_rate(outcomes: Sequence[float]) -> WinRate:
    """Returns the win rate of independent games, from their ``outcomes`` of -1 (lost) to 1 (won).

    The interval is that of Wilson (1927) for a share of n games. With draws it is a little too wide
    rather than too narrow, since a draw varies less than a win or a loss. Unlike mean ± 1.96 s /
    sqrt(n) it does not shrink to nothing when all of a few games are won.
    """
    n = len(outcomes)
    mean = (1 + statistics.fmean(outcomes)) / 2
    centre = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    return WinRate(mean, max(0.0, centre - half), min(1.0, centre + half))


def lower_end(measured: Estimate, spread: float | None) -> float:
    """Returns the figure by which evaluated weights are compared.

    It is the lower end of the 95 % confidence interval of the mean, where the variance also counts
    ``spread``² as `PRIOR` episodes would. Few episodes say little about their own spread: four that
    all succeed have a standard error of 0.

    Args:
        measured: the estimate from the episodes of an evaluation.
        spread: standard deviation of the returns in training at that time; None if it is unknown.
    """
    if spread is None:
        return measured.lower

    # The variance of single returns: measured (se² times the episodes) and known from training,
    # weighted by the degrees of freedom of the one and by `PRIOR`.
    freedom = measured.episodes - 1
    sum_of_squares = freedom * measured.episodes * measured.se**2 + PRIOR * spread**2
    variance = sum_of_squares / (freedom + PRIOR)
    return measured.mean - Z * math.sqrt(variance / measured.episodes)


class BestWay(NamedTuple):
    """The way to play weights, its estimate, and the `lower_end` by which it was chosen."""

    way: Way
    estimate: Estimate
    lower: float
    informed: bool
    """Whether ``lower`` counts the spread in training."""

    def beats(self, other: BestWay) -> bool:
        """Whether these weights are better than the ``other`` ones.

        Without the spread in training, luck cannot be told from skill, so a choice with it is
        better than one without.
        """
        return (self.informed, self.lower) > (other.informed, other.lower)


def better_way(estimates: Mapping[Way, Estimate], spread: float | None) -> BestWay:
    """Returns the way with the higher `lower_end`, and greedy if they are equal.

    ``spread`` is the standard deviation of the returns in training; None if it is unknown.
    """
    greedy, sampled = (
        BestWay(
            way,
            estimates[way],
            lower=lower_end(estimates[way], spread),
            informed=spread is not None,
        )
        for way in WAYS
    )
    return sampled if sampled.beats(greedy) else greedy


def spread_of(returns: Sequence[float]) -> float | None:
    """Returns the standard deviation of the returns in training; None for fewer than `LEAST`."""
    return statistics.stdev(returns) if len(returns) >= LEAST else None


def out_of_reach(better: Estimate, goal: float) -> bool:
    """Whether the better way is so far below ``goal`` that further episodes need not be played."""
    return better.episodes >= LEAST and better.upper < goal


def reaches(measured: Estimate, goal: float) -> bool:
    """Whether the mean return is at least ``goal``, with 95 % confidence."""
    return measured.lower >= goal


def evidence(
    estimates: Mapping[Way, Estimate],
    way: Way,
    trained_steps: int,
    closing: Estimate | None = None,
) -> dict[str, Any]:
    """Returns how to play a policy, and by which evaluation, as a JSON object.

    It is stored with checkpoints and exported policies, and read by `way_of`.

    Args:
        estimates: the estimate of each way, by all episodes.
        way: the better one.
        trained_steps: agent steps that the evaluated weights were trained on.
        closing: the estimate by further episodes, if there were any; ``estimates`` include them.
    """
    fields: dict[str, Any] = {
        "way": way,
        "episodes": estimates[way].episodes,
        "trained_steps": trained_steps,
        **{each: estimates[each]._asdict() for each in WAYS},
    }
    if closing is not None:
        fields["closing"] = closing._asdict()
    return fields


def way_of(play: object) -> Way:
    """Returns the way in `evidence`; greedy without any, as in files of earlier versions."""
    way = play.get("way") if isinstance(play, Mapping) else None
    return "sampled" if way == "sampled" else "greedy"
