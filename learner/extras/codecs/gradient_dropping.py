"""Sends the few largest values, the others later (Aji & Heafield 2017, Gradient Dropping)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.interfaces import Bucket
from penstock.learner.extras.codecs.sparse import FewValues, Sparse


class Dropping(Sparse):
    """error += g; send the largest of error, and set error to zero there.

    g is a rank's share of the mean gradient. What is sent is exactly ``learner.reduce.density`` of
    all values, unlike the paper's threshold from a sample.
    """

    kinds = ("error",)

    def _set_up(self) -> None:
        super()._set_up()
        self._density = self._context.cfg.density

    def density(self, update: int) -> float:
        return self._density

    def _take(self, bucket: Bucket, grads: Tensor, norm: Tensor) -> FewValues:
        """Add ``grads`` to the error, and take the largest of it."""
        span = slice(bucket.start, bucket.stop)
        error = self._new_residuals["error"][span]
        torch.add(self._residuals["error"][span], grads, out=error)
        return self._take_largest(bucket, error)
