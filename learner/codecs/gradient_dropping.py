"""The largest few values, the others later (Aji & Heafield 2017, Gradient Dropping)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.learner.codecs.buckets import Bucket
from penstock.learner.codecs.collective import Collective
from penstock.learner.codecs.sparse import Sparse


class Dropping(Sparse):
    """error += g; send the largest of error, and set them to zero there.

    ``learner.reduce.density`` of the values of a bucket: exactly, unlike the paper's threshold from
    a sample.
    """

    name = "dropping"
    kinds = ("error",)

    def density(self, update: int) -> float:
        return self._cfg.density

    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        if not torch.linalg.vector_norm(grads).isfinite():
            self._sum_nan(bucket, grads, ring)
            return
        error = self._residuals["error"][bucket.start : bucket.stop]
        error += grads
        places = self._largest(error, self.count(bucket, self._update))
        values = error[places]
        error[places] = 0.0
        self._sum(bucket, grads, places, values, ring)
