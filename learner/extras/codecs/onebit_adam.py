"""One bit per value of Adam's momentum, or of LAMB's, which is the same.

That is 1-bit Adam (Tang et al. 2021, arXiv 2102.02888), 0/1 Adam (Lu et al. 2022, arXiv 2202.06009)
and 1-bit LAMB (Li et al. 2021, arXiv 2104.06069).
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.configs.reduce import CODECS
from penstock.core.interfaces import AdamState, Bucket, Collective
from penstock.learner.codecs.buckets import VALUE_NBYTES, buckets_of
from penstock.learner.extras.codecs.onebit import OneBit
from penstock.learner.extras.codecs.variance import RenewedVariance
from penstock.learner.optimizers.flat_optimizer import CLIP_MARGIN
from penstock.learner.optimizers.rules import BETAS, adam_denominator

LARGEST_STEP = (1 - BETAS[0]) / (1 - BETAS[1]) ** 0.5
"""Bound on |m| / sqrt(v) in Adam (Kingma & Ba 2015, section 2.1)."""


class OneBitMomentum(OneBit):
    """m = sum over ranks of C(b1 m / world + (1 - b1) g), with `OneBit`'s code C and its residuals.

    In updates for which the spec's `reduces_gradients` is true, gradients are summed in float32,
    and the optimizer (`FrozenVarianceAdam` or `FrozenVarianceLamb`) computes momentum m and
    variance v from them. 1-bit Adam and 1-bit LAMB do so in their warm-up, 0/1 Adam on a schedule
    without end. In the other updates ranks send their momentum, and the variance stays the same
    (`OneBitAdam` renews it). g is a rank's share of the mean gradient, so m is that of the mean
    over all samples. m is equal on all ranks and belongs to the optimizer; this codec keeps only
    residuals.

    Differences from the papers:

    - C codes ``m / (sqrt(v) + eps)``, of which all values have about the same size, so that one
      scale suits the layers of a block; 1-bit LAMB multiplies m by a constant for each layer
      instead. Residuals are in the same unit, that of steps.
    - No rank sends more than its share of `LARGEST_STEP`, Adam's own bound: a constant variance
      does not shorten the steps of a parameter when its gradients grow.
    - Where 0/1 Adam sums gradients for the variance, the momentum comes from the same sum. Its
      local steps, which skip reductions, are left out.

    Gradients are clipped before they enter the momentum, in the optimizer's place: their sum to
    ``learner.grad_clip``, and a rank's own to grad_clip / sqrt(world), as in `Dgc`. That needs the
    norm of the whole gradient, so everything is one bucket, sent after the backward pass. A group
    of one needs no code, but the momentum.
    """

    works_alone = True

    def _set_up(self) -> None:
        super()._set_up()
        context = self._context
        self.buckets = buckets_of(context.parts, context.size * VALUE_NBYTES)
        self._reduces_gradients = CODECS.specs[context.cfg.codec].reduces_gradients
        self._adam = context.adam or _make_state(context.size, context.device)
        self._variance: RenewedVariance | None = None  # only 1-bit Adam renews it
        if self._world == 1:  # nothing is coded
            self._residuals.clear()
            self._new_residuals.clear()

    def _is_plain(self, update: int) -> bool:
        """Whether gradients are summed in float32 in ``update``, and not the momentum."""
        assert self._reduces_gradients is not None
        return self._reduces_gradients(self._context.cfg, update)

    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int:
        momentum_nbytes = super()._bucket_nbytes(bucket, update)
        if self._variance is None or self._is_plain(update):
            return momentum_nbytes
        return momentum_nbytes + self._variance.nbytes(update)

    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Replace ``grads`` by their sum over ranks, or by the momentum of that sum."""
        if self._is_plain(self._update):
            if self._world > 1:
                ring.all_reduce(grads)
            self._clip(grads, 1.0)
            return

        self._clip(grads, self._world**-0.5)
        if self._variance:
            self._variance.begin(
                self._update,
                grads,
                change=self._residuals["variance"],
                new_change=self._new_residuals["variance"],
                ring=ring,
            )

        # The momentum is computed in place of the gradient.
        grads.mul_(1 - BETAS[0]).add_(self._adam.exp_avg, alpha=BETAS[0] / self._world)
        if self._world > 1:
            self._reduce_momentum(bucket, grads, ring)
        if self._variance:
            self._variance.end(grads, torch.linalg.vector_norm(grads).isfinite())

    def _reduce_momentum(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Replace the ranks' shares of the momentum, in ``grads``, by their sum.

        They are coded in the unit of steps, m / (sqrt(v) + eps).
        """
        out = self._memory("denominator", (len(grads),), torch.float32)
        denominator = adam_denominator(self._adam, out)
        bound = LARGEST_STEP / self._world
        grads.div_(denominator).clamp_(-bound, bound)
        super()._reduce(bucket, grads, ring)
        grads.mul_(denominator)

    def _clip(self, grads: Tensor, share: float) -> None:
        """Clip ``grads`` to a ``share`` of the bound; without a finite norm they become NaN."""
        norm = torch.linalg.vector_norm(grads)
        factor = torch.ones_like(norm)
        if self._context.grad_clip is not None:
            factor = (self._context.grad_clip * share / (norm + CLIP_MARGIN)).clamp_(max=1.0)
        grads.mul_(torch.where(norm.isfinite(), factor, torch.nan))


class OneBitAdam(OneBitMomentum):
    """1-bit Adam, with a `RenewedVariance` unless ``learner.reduce.variance_interval`` is null."""

    def _set_up(self) -> None:
        super()._set_up()
        context = self._context
        interval = context.cfg.variance_interval
        if interval is None:
            return
        self._add_residual("variance")
        # Without an optimizer this state is not `_adam`, since the variance of that one stays zero.
        state = context.adam or _make_state(context.size, context.device)
        self._variance = RenewedVariance(state, self._world, interval)


def _make_state(size: int, device: torch.device) -> AdamState:
    """Returns the state before the first step, with an epsilon of 1, so that nothing is divided."""
    return AdamState(
        exp_avg=torch.zeros(size, device=device),
        exp_avg_sq=torch.zeros(size, device=device),
        steps=torch.zeros((), device=device),
        eps=1.0,
    )
