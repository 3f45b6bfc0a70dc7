"""Equilibria of symmetric zero-sum games between the members of a pool.

The members' mixture that no member beats is what the next one should learn to beat, in PSRO
(Lanctot et al. 2017).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.league.payoffs import Payoffs

Floats = npt.NDArray[np.float64]

MOST_STEPS = 3000
"""Steps at most. For 200 members they take 0.04 s, and leave a gain of a few 1e-4 of the largest
payoff."""
STEPS_PER_CHECK = 100
SMALLEST_GAIN = 1e-7
"""The mixture is good enough if no member gains more of the largest payoff against it."""


def symmetric_nash(payoffs: Floats) -> Floats:
    """Returns a mixture of members ``[n]`` against which no member gains.

    It is the mean strategy of predictive regret matching+ (Farina, Kroer and Sandholm 2021, "Faster
    game solving via predictive Blackwell approachability"), which plays against itself; the
    strategy of step t has weight t².

    Args:
        payoffs: ``[n, n]``, what the member of the row gains against that of the column; the column
            loses as much, so the matrix is antisymmetric.
    """
    count = len(payoffs)
    scale = np.abs(payoffs).max(initial=0.0)
    mixture = np.full(count, 1 / count)
    if scale == 0:
        return mixture

    gains = payoffs / scale
    strategy = mixture
    regrets = np.zeros(count)
    total = np.zeros(count)
    for step in range(1, MOST_STEPS + 1):
        # A strategy gains nothing against itself, so a member's gain is its regret.
        regret = gains @ strategy
        regrets = np.maximum(regrets + regret, 0)
        predicted = np.maximum(regrets + regret, 0)
        if not predicted.any():
            return strategy
        strategy = predicted / predicted.sum()

        total += step**2 * strategy
        if step % STEPS_PER_CHECK == 0:
            mixture = total / total.sum()
            if (gains @ mixture).max() <= SMALLEST_GAIN:
                break
    return mixture


def nash_weights(payoffs: Payoffs, members: Sequence[str]) -> Mapping[str, float]:
    """Returns the equilibrium among those members whose games against each other were played.

    Args:
        payoffs: what is known of games between members.
        members: ids, in the order in which they are admitted. One that has not played against all
            admitted before it is left out, and has no weight.
    """
    admitted: list[str] = []
    for member in members:
        if all(payoffs.meeting(member, other).counts.games > 0 for other in admitted):
            admitted.append(member)
    if not admitted:
        return {}

    mixture = symmetric_nash(payoffs.mean_returns(admitted))
    return dict(zip(admitted, mixture.tolist(), strict=True))
