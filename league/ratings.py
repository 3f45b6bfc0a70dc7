"""How strong the members of a pool are, from games between them while they were frozen.

The model is that of Bradley and Terry (1952): a member with rating r beats one with rating s with
probability 1 / (1 + exp(s - r)). A draw is half a win and half a loss. Ratings are shown on Elo's
scale, on which 400 points more are odds of ten to one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

ELO = 400 / np.log(10)
"""Points of Elo's scale in one of the model's."""
PRIOR_DRAWS = 1.0
"""Draws that a member is given besides, divided among those whom it has played. Without them, a
member that won every game would have no finite rating."""
MOST_STEPS = 100
SMALLEST_CHANGE = 1e-9


class Ratings(NamedTuple):
    """The strengths of n members, in Elo's points above the anchor."""

    values: Floats
    """``[n]``; NaN for a member whom no chain of games connects with the anchor."""
    errors: Floats
    """Standard errors of the differences to the anchor, ``[n]``; 0 of the anchor itself."""


def fit(wins: Floats, anchor: int = 0) -> Ratings:
    """Returns the ratings by which the games are likeliest, and their standard errors.

    Standard errors are those of the inverse Hessian of the log-likelihood. Where many games are
    draws, they are too large rather than too small.

    Args:
        wins: ``[n, n]``, how many games the member of the row won against that of the column; a
            draw is half a win for both.
        anchor: the member whose rating is 0.
    """
    games = wins + wins.T
    has_played = games > 0
    rated = _connected(has_played, anchor)
    others = np.flatnonzero(rated & (np.arange(len(wins)) != anchor))
    draws = PRIOR_DRAWS * has_played / np.maximum(has_played.sum(1), 1)[:, None]
    draws = (draws + draws.T) / 2
    games = games + draws
    own_wins = (wins + draws / 2).sum(1)

    # Newton's method on the log-likelihood, which is concave; a step is cut at ±1, as the curvature
    # vanishes where ratings are far apart.
    strengths = np.zeros(len(wins))
    covariance: npt.NDArray[np.floating] = np.zeros((len(others), len(others)))
    for _ in range(MOST_STEPS):
        expected = 1 / (1 + np.exp(strengths[None] - strengths[:, None]))
        gradient = own_wins - (games * expected).sum(1)
        weights = games * expected * (1 - expected)
        information = np.diag(weights.sum(1)) - weights
        covariance = np.linalg.inv(information[np.ix_(others, others)])
        step = covariance @ gradient[others]
        strengths[others] += np.clip(step, -1, 1)
        if not len(others) or np.abs(step).max() < SMALLEST_CHANGE:
            break

    errors = np.zeros(len(wins))
    errors[others] = np.sqrt(np.diag(covariance))
    return Ratings(
        values=np.where(rated, ELO * strengths, np.nan),
        errors=np.where(rated, ELO * errors, np.nan),
    )


def _connected(has_played: Flags, member: int) -> Flags:
    """Returns the members that a chain of games connects with one, bool ``[n]``."""
    reached = np.zeros(len(has_played), np.bool_)
    reached[member] = True
    for _ in range(len(has_played)):
        reached |= has_played[reached].any(0)
    return reached
