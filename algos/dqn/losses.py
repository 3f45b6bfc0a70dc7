"""Losses of Q-values, for rows of any batch: of transitions, or of the steps of sequences.

A row's values are ``[R, outputs]``, or of a network of quantiles ``[R, outputs, N]``: entry i is
the quantile of the return at ``(2 i - 1) / 2 N`` (Dabney et al. 2017, arXiv 1710.10044, lemma 2).
Where an action is several choices, those of each choice lie side by side among the outputs, and the
value of an action is the mean over its choices (Tavakoli et al. 2018, arXiv 1711.08946).

A target is made of these functions: `best_actions` chooses, `action_values` evaluates, `row_losses`
compares.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.models.torch_heads import of_allowed


class RowLosses(NamedTuple):
    """Losses and temporal differences of R rows."""

    losses: Tensor
    """``[R]``; of several choices the mean over them."""
    differences: Tensor
    """Target minus value ``[R]``, both means over quantiles, without a gradient. Of several choices
    it is the mean of the absolute differences."""


def best_actions(values: Tensor, mask: Tensor | None, branches: tuple[int, ...]) -> Tensor:
    """Returns the actions of the highest values, int64 ``[R, choices]``.

    Args:
        values: ``[R, outputs]`` or ``[R, outputs, N]``, whose mean decides.
        mask: ``[R, outputs]``, 0 where an action is forbidden; None allows all.
        branches: number of actions of each choice.
    """
    if values.ndim == 3:
        values = values.mean(2)
    allowed_values = of_allowed(values, mask, branches=branches)
    if len(branches) == 1:
        return allowed_values.argmax(1, keepdim=True)
    return torch.stack([part.argmax(1) for part in allowed_values.split(branches, 1)], 1)


def action_values(values: Tensor, action: Tensor, branches: tuple[int, ...]) -> Tensor:
    """Returns the values of actions for each of their choices, ``[R, choices]``.

    Args:
        values: ``[R, outputs]``; of ``[R, outputs, N]`` the result is ``[R, choices, N]``.
        action: int64 ``[R, choices]``, each counted among the actions of its choice.
        branches: number of actions of each choice.
    """
    if len(branches) > 1:
        action = action + _offsets(branches, action.device)
    if values.ndim == 3:
        action = action[..., None].expand(-1, -1, values.shape[2])
    return values.gather(1, action)


def row_losses(values: Tensor, target: Tensor, bound: float) -> RowLosses:
    """Compare values of actions with their targets.

    Args:
        values: those of `action_values`, ``[R, choices]`` or ``[R, choices, N]``.
        target: ``[R]``, or ``[R, N]``, without a gradient.
        bound: threshold of the Huber loss.
    """
    if values.ndim == 2:
        differences = target[:, None] - values
        losses = huber(differences, bound)
    else:
        differences = target.mean(1, keepdim=True) - values.mean(2)
        losses = quantile_huber(values, target[:, None], bound)

    differences = differences.detach()
    if values.shape[1] > 1:
        differences = differences.abs()
    return RowLosses(over_choices(losses), over_choices(differences))


def over_choices(values: Tensor) -> Tensor:
    """Returns the mean over the choices of ``[R, choices, ...]``, ``[R, ...]``."""
    return values[:, 0] if values.shape[1] == 1 else values.mean(1)


def sum_of_means(values: Tensor) -> Tensor:
    """Returns the sum over rows of the mean of each row's values, ``[]``."""
    total = values.sum()
    return total if values.numel() == len(values) else total * (len(values) / values.numel())


def huber(differences: Tensor, bound: float) -> Tensor:
    """Returns half the square within the bounds, and linear beyond, in the shape of the argument.

    Its gradient is the clipped difference.
    """
    clipped = differences.clamp(-bound, bound)
    return clipped * (differences - 0.5 * clipped)


def quantile_huber(quantiles: Tensor, target: Tensor, bound: float) -> Tensor:
    """Returns the quantile Huber loss of Dabney et al. 2017, equation 10 and algorithm 1.

    Of each pair of a quantile and a target quantile, the Huber loss is weighted by how probable the
    quantile should be that the target is below it. The result sums up the quantiles, and is the
    mean over those of the target.

    Args:
        quantiles: ``[..., N]``.
        target: ``[..., M]``, samples of the same distribution.
        bound: kappa.
    """
    differences = target[..., None, :] - quantiles[..., :, None]
    count = quantiles.shape[-1]
    fractions = (torch.arange(count, device=quantiles.device) + 0.5)[:, None] / count
    weights = (fractions - (differences.detach() < 0).float()).abs()
    return (weights * huber(differences, bound)).mean(-1).sum(-1)


@lru_cache(maxsize=8)
def _offsets(branches: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the number of outputs before those of each choice, int64 ``[choices]``."""
    counts = torch.tensor((0, *branches[:-1]), device=device)
    return counts.cumsum(0)
