"""Adam's variance from the squares of each rank's own gradients, summed a part at a time.

The gradients of reinforcement learning grow and shrink as the policy changes, and the constant
variance of 1-bit Adam no longer fits them. In Local AdaAlter (Xie et al. 2019, arXiv 1911.09030)
each rank adds its own squares to its denominator, and denominators are averaged at intervals. Here
the denominators of all ranks stay equal: own squares are held back until they are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.interfaces import AdamState, Collective
from penstock.learner.codecs.buckets import VALUE_NBYTES
from penstock.learner.codecs.collective import all_reduce_nbytes
from penstock.learner.optimizers.rules import BETAS, correction

EVERY = 16
"""Updates from one sum to the next: more would only make parts smaller, and each has a latency."""


class RenewedVariance:
    """Keeps ``state.exp_avg_sq`` near what Adam's would be, where only the momentum is reduced.

    g_r is rank r's share of the mean gradient, W the number of ranks, v the variance and v̂ the same
    corrected for its start at zero. Where ranks have equal numbers of samples and differ by noise
    alone, the square of their sum is on average ``sum of g_r^2 + (1 - 1/W) mean^2``. The momentum m
    stands for the mean. If all samples are one rank's, its square is already that of the sum, and v
    becomes too large by ``(1 - 1/W) mean^2``: steps are shorter then, never longer. Each rank keeps
    its part of the difference to v,

        change_r = b2 change_r + (1 - b2) (g_r^2 + m^2 (1 - 1/W) / W - v̂ / W)

    and in every 16th update the changes of a part of the values are summed in float32, added to v,
    and set to zero, so that each value is renewed once in ``interval`` updates. With an interval
    below 16 all values are summed after each interval: with one rank and an interval of 1, v is
    Adam's, an update late.
    """

    def __init__(self, state: AdamState, world: int, interval: int) -> None:
        """Prepare to renew a variance.

        Args:
            state: has the variance, which changes in place.
            world: number of ranks.
            interval: updates after which all values were renewed.
        """
        self._state = state
        self._world = world
        self._every = min(EVERY, interval)
        self._parts = interval // self._every
        # Between `begin` and `end` of an update: the part that it renews, the part's variance
        # before, and the changes of this rank after it.
        self._part = slice(0, 0)
        self._previous_variance = state.exp_avg_sq[self._part]
        self._new_change = state.exp_avg_sq[self._part]

    def nbytes(self, update: int) -> int:
        """Returns the bytes that each rank sends for it in ``update``."""
        part = self._part_of(update)
        return all_reduce_nbytes((part.stop - part.start) * VALUE_NBYTES, self._world)

    def begin(
        self,
        update: int,
        grads: Tensor,
        *,
        change: Tensor,
        new_change: Tensor,
        ring: Collective,
    ) -> None:
        """Sum the changes of this update's part into v, and add this rank's squares to its changes.

        Vectors are float32 ``[size]``.

        Args:
            update: number of the update.
            grads: this rank's clipped gradient.
            change: the changes that it holds back, a residual of the codec.
            new_change: output, the next value of that residual, which `end` completes.
            ring: the group of ranks.
        """
        self._new_change = new_change
        part = self._part_of(update)
        self._part = part

        variance = self._state.exp_avg_sq[part]
        summed_change = change[part].clone()
        self._previous_variance = variance.clone()
        if self._world > 1 and len(summed_change):
            ring.all_reduce(summed_change)
        variance.add_(summed_change).clamp_(min=0.0)  # less than zero by rounding only

        torch.mul(change, BETAS[1], out=new_change)
        new_change[part].zero_()
        new_change.addcmul_(grads, grads, value=1 - BETAS[1])

    def end(self, momentum: Tensor, is_finite: Tensor) -> None:
        """Complete the update, or undo it.

        Args:
            momentum: the new one, float32 ``[size]``, equal on all ranks.
            is_finite: whether to complete it, bool ``[]``; else v is restored. The codec drops the
                new changes then, with its other residuals.
        """
        state = self._state
        world = self._world
        of_mean = (1 - BETAS[1]) * (1 - 1 / world) / world
        of_variance = (1 / (correction(BETAS[1], state.steps) * world)).float()
        self._new_change.addcmul_(momentum, momentum, value=of_mean)
        self._new_change.addcmul_(state.exp_avg_sq, of_variance, value=BETAS[1] - 1)

        variance = state.exp_avg_sq[self._part]
        torch.where(is_finite, variance, self._previous_variance, out=variance)

    def _part_of(self, update: int) -> slice:
        """Returns the range of values that is renewed in ``update``; empty in most updates."""
        turn, remainder = divmod(update, self._every)
        if remainder:
            return slice(0, 0)
        part = turn % self._parts
        size = len(self._state.exp_avg_sq)
        return slice(part * size // self._parts, (part + 1) * size // self._parts)
