"""Figures of an actor-critic's batch: lag, importance weights, advantages, fit of the values.

The device sums up moments of samples (`batch_sums`), and the host computes figures of their means
(`figures`). The names of the sums are known without torch, which `batch_sums` imports when it is
called.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LAG = ("kl", "rho", "rho_clipped")
"""Names of the last sums of `batch_sums`; they compare the learner's policy with the actor's."""
MOMENTS = (
    *("samples", "weight", "advantage", "value_error", "value_target"),
    *("weight_square", "advantage_square", "value_error_square", "value_target_square"),
)
"""Names of the other sums of `batch_sums`, which come first."""
FIGURES = (
    *("effective_sample_share", "explained_variance"),
    *("advantage_mean", "advantage_std", "value_target_mean", "value_target_std"),
)
"""Names of the figures that `figures` computes of `MOMENTS`."""
MOST_LOG_RHO = 20.0  # V-trace clips far below; beyond it the statistics would overflow
# Importance weights of the same policy differ from 1 by a smaller factor, also in bfloat16.
ROUNDING = 1.02


def batch_sums(
    mask: Tensor,
    log_rhos: Tensor,
    advantages: Tensor,
    errors: Tensor,
    targets: Tensor,
    *,
    rho_clip: float,
) -> Tensor:
    """Returns sums over the alive rows of a batch, in the order of `MOMENTS` and then `LAG`.

    All tensors are float32 ``[B]`` without a gradient.

    Args:
        mask: 1 for alive rows, 0 for others.
        log_rhos: logarithms of the importance weights ``rho``, the learner's probability of an
            action over the actor's.
        advantages: of the actions.
        errors: targets of the values minus the values.
        targets: of the values.
        rho_clip: upper bound on the weights in `MOMENTS`. Weights above it count as clipped,
            rounding apart.

    Returns:
        Float64 ``[len(MOMENTS) + len(LAG)]``. "kl" is the sum of ``rho - 1 - log(rho)``, an
        estimate of KL(actor | learner).
    """
    import torch

    log_rhos = log_rhos.clamp(-MOST_LOG_RHO, MOST_LOG_RHO)
    rhos = log_rhos.exp()
    squared = (rhos.clamp(max=rho_clip), advantages, errors, targets)
    lag = (rhos - 1 - log_rhos, rhos, (rhos > ROUNDING * rho_clip).float())

    # All quantities are rows of one matrix: one call gives all sums, and another all squares.
    rows = torch.stack((mask, *squared, *lag)).mul_(mask)
    sums = rows.sum(1, dtype=torch.float64)
    lag_start = 1 + len(squared)
    squares = rows[1:lag_start].double().square_().sum(1)
    return torch.cat((sums[:lag_start], squares, sums[lag_start:]))


def figures(means: Mapping[str, float]) -> dict[str, float]:
    """Returns ``means`` with the means of `MOMENTS` replaced by `FIGURES`.

    The effective sample share is ``(sum w)^2 / (n sum w^2)`` of the importance weights w. The
    explained variance is ``1 - Var(target - value) / Var(target)``. A figure whose denominator is 0
    is left out. If a moment is missing, the result is a copy of ``means``.
    """
    if not means.keys() >= set(MOMENTS):
        return dict(means)

    def variance(name: str) -> float:
        # Rounding may make the difference slightly negative.
        return max(0.0, means[f"{name}_square"] - means[name] ** 2)

    metrics = {name: mean for name, mean in means.items() if name not in MOMENTS}
    if means["weight_square"] > 0:
        metrics["effective_sample_share"] = means["weight"] ** 2 / means["weight_square"]

    if variance("value_target") > 0:
        metrics["explained_variance"] = 1 - variance("value_error") / variance("value_target")

    for name in ("advantage", "value_target"):
        metrics[f"{name}_mean"] = means[name]
        metrics[f"{name}_std"] = sqrt(variance(name))
    return metrics
