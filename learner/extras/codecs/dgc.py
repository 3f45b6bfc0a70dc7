"""Deep Gradient Compression (Lin et al. 2018): a thousandth of the values, with momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.interfaces import Bucket
from penstock.learner.extras.codecs.sparse import FewValues, Sparse
from penstock.learner.optimizers.flat_optimizer import CLIP_MARGIN

LADDER = (0.25, 0.0625, 0.015625, 0.004, 0.001)  # densities of the warm-up, by its stages


class Dgc(Sparse):
    """u = m u + g; v = v + u; send the largest of v, and set u and v to zero there.

    g is a rank's share of the mean gradient; u and v are the residuals ``momentum`` and ``error``.
    m is the optimizer's momentum (of heavy-ball kind), so the optimizer beside it must have none:
    `learner.optimizer=sgd` is used with momentum 0. Therefore a group of one is coded too.

    With ``learner.reduce.dgc_clip``, else ``learner.grad_clip``, the whole g of a rank is first
    clipped to the norm dgc_clip / sqrt(world), as in the paper's section 3.2. The largest of v are
    those of all layers together, unlike in the paper's algorithms (see `Sparse`). The density falls
    by the paper's ladder, ``learner.reduce.warmup_updates`` on each step, to
    ``learner.reduce.dgc_density``.
    """

    kinds = ("momentum", "error")
    works_alone = True

    def _set_up(self) -> None:
        super()._set_up()
        dgc_clip = self._context.cfg.dgc_clip
        self._clip = self._context.grad_clip if dgc_clip is None else dgc_clip

    def density(self, update: int) -> float:
        final_density = self._context.cfg.dgc_density
        stage_updates = self._context.cfg.warmup_updates
        if update >= stage_updates * len(LADDER):
            return final_density
        return max(final_density, LADDER[update // stage_updates])

    def _take(self, bucket: Bucket, grads: Tensor, norm: Tensor) -> FewValues:
        """Clip ``grads``, add them to u and that to v, and take the largest of v."""
        if self._clip is not None:
            bound = self._clip * self._world**-0.5
            grads *= (bound / (norm + CLIP_MARGIN)).clamp_(max=1.0)

        span = slice(bucket.start, bucket.stop)
        momentum = self._new_residuals["momentum"][span]
        torch.mul(self._residuals["momentum"][span], self._context.momentum, out=momentum)
        momentum += grads
        error = self._new_residuals["error"][span]
        torch.add(self._residuals["error"][span], momentum, out=error)

        largest = self._take_largest(bucket, error)
        momentum.index_fill_(0, largest.indices, 0.0)
        return largest
