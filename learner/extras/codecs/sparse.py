"""Few values with their indices: which to send, and how they are summed."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.core.interfaces import Bucket, Collective
from penstock.device.choice import runs_behind
from penstock.learner.codecs.buckets import VALUE_NBYTES, buckets_of
from penstock.learner.codecs.codec import BaseCodec
from penstock.learner.codecs.collective import all_gather_nbytes, all_reduce_nbytes

ENTRY_NBYTES = 8  # int32 index, float32 value
STRIDE = 101  # prime, so that a sample does not walk down one column of a matrix
SAMPLED_FROM = 1 << 14  # number of values from which on a sample is taken


class FewValues(NamedTuple):
    """Some values of a vector."""

    indices: Tensor
    """Where they are, int64 ``[count]``."""
    values: Tensor
    """float32 ``[count]``."""


class Sparse(BaseCodec):
    """Sends exactly `count` values of the whole gradient, those of largest magnitude.

    So everything is one bucket, sent after the backward pass: one threshold for all layers, as of
    Aji & Heafield 2017, which no size of buckets changes. A threshold for each layer, their other
    choice, was tried: Catch then ended at 0.58 to 0.98 with `dgc` instead of 0.99.

    An all-gather collects every rank's indices and values, which are added in the order of ranks.
    Where that were more bytes than float32 for every value, the same few are summed densely. A
    gradient that is not finite is sent as NaN.
    """

    @abstractmethod
    def density(self, update: int) -> float:
        """Returns the fraction of the values that is sent in step ``update``."""

    @abstractmethod
    def _take(self, bucket: Bucket, grads: Tensor, norm: Tensor) -> FewValues:
        """Add gradients to the residuals, and take out what is sent.

        Args:
            bucket: the only one.
            grads: float32 ``[size]``; zeros where their norm is not finite.
            norm: their norm, float32 ``[]``.

        Returns:
            `count` values that are sent.
        """

    def _set_up(self) -> None:
        self.buckets = buckets_of(self._context.parts, self._context.size * VALUE_NBYTES)

    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Replace ``grads`` by the sum of the few values that all ranks send."""
        norm = torch.linalg.vector_norm(grads)
        is_finite = norm.isfinite()
        finite_grads = grads
        if runs_behind(grads) or not is_finite:  # to ask a GPU would be to wait
            finite_grads = torch.where(is_finite, grads, 0.0)

        largest_values = self._take(bucket, finite_grads, norm)
        values = torch.where(is_finite, largest_values.values, torch.nan)
        self._sum(bucket, grads, FewValues(largest_values.indices, values), ring)

    def count(self, bucket: Bucket, update: int) -> int:
        """Returns the number of values to send, at least one."""
        return max(1, round(self.density(update) * bucket.size))

    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int:
        count = self.count(bucket, update)
        if self._is_dense(bucket, count):
            return all_reduce_nbytes(VALUE_NBYTES * bucket.size, self._world)
        return all_gather_nbytes(ENTRY_NBYTES * count, self._world)

    def _is_dense(self, bucket: Bucket, count: int) -> bool:
        """Whether all values take fewer bytes than ``count`` values with their indices."""
        return count * self._world >= bucket.size

    def _sum(self, bucket: Bucket, grads: Tensor, sent: FewValues, ring: Collective) -> None:
        """Set ``grads`` to the sum of what all ranks send; ``sent`` is this rank's."""
        count = sent.indices.numel()
        grads.zero_()
        if self._is_dense(bucket, count):
            grads.index_copy_(0, sent.indices, sent.values)
            ring.all_reduce(grads)
            return

        # A message is indices, then the bits of the values, both as int32.
        message = torch.stack((sent.indices.int(), sent.values.view(torch.int32)))
        received = self._memory("received", (self._world, 2, count), torch.int32)
        ring.all_gather(received, message)
        for rank_indices, rank_bits in received:
            grads.index_add_(0, rank_indices, rank_bits.view(torch.float32))

    def _take_largest(self, bucket: Bucket, residual: Tensor) -> FewValues:
        """Take the values of largest magnitude out of a residual, which is zero there then."""
        keys = self._memory("keys", (residual.numel(),), torch.int32)
        indices = largest(residual, self.count(bucket, self._update), keys)
        values = residual[indices]
        residual.index_fill_(0, indices, 0.0)  # assigning would copy the number to a GPU, and wait
        return FewValues(indices, values)


def largest(values: Tensor, count: int, keys: Tensor | None = None) -> Tensor:
    """Find the values of largest magnitude.

    A strided sample gives a threshold that a few more than ``count`` pass (Lin et al. 2018, 3.1);
    the exact cut is made among those.

    Args:
        values: float32 ``[size]``.
        count: how many to find.
        keys: int32 ``[size]``, memory for this function.

    Returns:
        Indices (int64) of exactly ``count`` values. Of equal ones they are the first; on a device
        that runs behind its host, which is not asked for a threshold, any.
    """
    # Magnitudes are compared as the integers of their bits, by which NaN is the largest.
    keys = torch.bitwise_and(values.view(torch.int32), 0x7FFFFFFF, out=keys)
    if runs_behind(keys):
        return torch.topk(keys, count, sorted=False).indices

    # Enough candidates: those above the threshold, else all that are not zero, else zeros too.
    threshold = _threshold(keys, count)
    candidates = _at_least(keys, threshold)
    if candidates.numel() < count and threshold > 1:
        candidates = _at_least(keys, 1)
    if candidates.numel() < count:
        zeros = (keys == 0).nonzero().view(-1)
        return torch.cat((candidates, zeros[: count - candidates.numel()]))

    # The exact cut: all above the smallest of the `count` largest, and the first of those equal.
    candidate_keys = keys[candidates]
    smallest = torch.topk(candidate_keys, count, sorted=False).values.min()
    above = candidates[candidate_keys > smallest]
    equal = candidates[candidate_keys == smallest]
    return torch.cat((above, equal[: count - above.numel()]))


def _threshold(keys: Tensor, count: int) -> int:
    """Returns a threshold that usually ``count`` keys pass, by a sample.

    It is four standard deviations below the sample's estimate. 1 lets all keys pass but zeros.
    """
    if keys.numel() < SAMPLED_FROM:
        return 1

    sample = keys[::STRIDE]
    expected = count / STRIDE  # keys of the sample among the `count` largest
    sample_count = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if sample_count >= sample.numel():
        return 1
    return max(1, int(torch.topk(sample, sample_count, sorted=False).values.min()))


def _at_least(keys: Tensor, threshold: int) -> Tensor:
    """Returns the indices of keys that reach ``threshold``, in order."""
    return torch.from_numpy(np.flatnonzero(keys.numpy() >= threshold))  # 8 times faster than torch
