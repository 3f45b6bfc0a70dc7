"""-1, 0 or 1 per value (Wen et al. 2017, TernGrad)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.configs.errors import UserError
from penstock.core.interfaces import Bucket, Collective, GradientPart
from penstock.learner.codecs.buckets import VALUE_NBYTES
from penstock.learner.codecs.codec import BaseCodec
from penstock.learner.codecs.collective import (
    all_gather_nbytes,
    all_reduce_nbytes,
    all_to_all_nbytes,
)
from penstock.learner.extras.codecs.packing import Packing

CLIP = 2.5  # standard deviations
MOST_RANKS = 127  # an int8 holds the sum of so many
SMALLEST = torch.finfo(torch.float32).tiny  # smallest scale that has a reciprocal
MULTIPLE = 16  # a share is a multiple of so many values, whose codes are four bytes


class BucketParts(NamedTuple):
    """The parts of a bucket by what is sent of them."""

    weights: list[GradientPart]
    """Sent as -1, 0 or 1."""
    biases: list[GradientPart]
    """Sent in float32."""


class TernGrad(BaseCodec):
    """s * t for each weight, E[s * t] = clipped gradient; there are no residuals.

    Per layer and rank, the gradient is clipped to 2.5 standard deviations (about zero, so that a
    layer of equal values is not clipped away). s is the largest value over all ranks, and t is the
    sign with probability |g| / s, else 0. The owner of a share adds the t of all ranks and sends
    the sum, which is exact, in the fewest of 4 or 8 bits that hold it; or, with
    `learner.reduce.reternarize`, as -1, 0, 1 times the number of ranks, drawn again: fewer bytes
    and more variance.

    Biases are float32, those of one bucket together: they are few, and their gradients are sums
    over positions that a layer's s does not fit. A layer whose s is below 1.2e-38 becomes zero.

    Draws depend only on (rank, update, bucket), so that there is no generator to save.
    """

    def _set_up(self) -> None:
        """Choose how draws are packed. Raises UserError for too many ranks."""
        if self._world > MOST_RANKS:
            raise UserError(
                f"learner.reduce.codec terngrad sums in 8 bits, of {MOST_RANKS} learners at most, "
                f"and learner.count is {self._world}; set learner.reduce.codec=onebit"
            )
        self._reternarize = self._context.cfg.reternarize
        self._random = torch.Generator(self._device)

        # How t is packed, and how the sums of t over ranks are.
        self._ternary = Packing(bits=2, offset=1, device=self._device)
        self._sums = self._ternary
        if not self._reternarize:
            bits = 4 if 2 * self._world + 1 <= 16 else 8
            self._sums = Packing(bits, offset=self._world, device=self._device)

    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int:
        weights, biases = _split(bucket)
        total = all_reduce_nbytes(VALUE_NBYTES * _size(biases), self._world)
        if not weights:
            return total

        share = _share(_size(weights), self._world)
        total += all_reduce_nbytes(VALUE_NBYTES * len(weights), self._world)  # the scales
        total += all_to_all_nbytes(self._world * share // self._ternary.per_byte, self._world)
        return total + all_gather_nbytes(share // self._sums.per_byte, self._world)

    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Sum ``grads`` over ranks: biases in float32, weights by draws of -1, 0 and 1."""
        weights, biases = _split(bucket)
        if biases:
            _sum_exactly(_views(bucket, biases, grads), ring)
        if not weights:
            return

        seed = np.random.SeedSequence((self._rank, self._update, bucket.start))
        self._random.manual_seed(int(seed.generate_state(1)[0]))

        # The scale of a layer, s, is the largest of the ranks' bounds.
        views = _views(bucket, weights, grads)
        bounds = torch.stack([self._bound(view) for view in views])
        scales = bounds.nan_to_num(nan=torch.inf, posinf=torch.inf)  # gloo's maximum may lose a NaN
        ring.all_reduce_max(scales)

        sums = self._exchange(self._ternarize(views, bounds, scales), ring)
        if self._reternarize:
            scales = scales * self._world
        for view, scale, view_sums in zip(views, scales, _cut(sums, views), strict=True):
            view.copy_(view_sums).mul_(scale)

    def _bound(self, values: Tensor) -> Tensor:
        """Returns the largest value of a layer after clipping (float32 ``[]``)."""
        work = self._memory("work", (values.numel(),), torch.float32)
        largest = torch.abs(values, out=work).amax()
        deviation = torch.linalg.vector_norm(values, dtype=torch.float64) / values.numel() ** 0.5
        return torch.minimum(largest, (CLIP * deviation).float())

    def _ternarize(self, views: Sequence[Tensor], bounds: Tensor, scales: Tensor) -> Tensor:
        """Draw -1, 0 or 1 for each value.

        Args:
            views: the gradients of the layers.
            bounds: what each layer is clipped to, float32 ``[layers]``.
            scales: s of each layer, float32 ``[layers]``.

        Returns:
            The draws of all ``views`` in a row, int8 ``[world, share]``, padded with zeros.
        """
        factors = scales.reciprocal().masked_fill_(scales < SMALLEST, 0.0)
        scaled_bounds = bounds * factors
        size = sum(view.numel() for view in views)
        shape = (self._world, _share(size, self._world))
        values = self._memory("values", shape, torch.float32)

        for view, bound, factor, out in zip(
            views, scaled_bounds, factors, _cut(values, views), strict=True
        ):
            torch.mul(view, factor, out=out).clamp_(-bound, bound)
        values.view(-1)[size:] = 0.0
        return self._draw(values)

    def _draw(self, values: Tensor) -> Tensor:
        """Round ``values`` in -1 .. 1 to a neighbouring integer, int8, correct on average."""
        uniform = self._memory("uniform", values.shape, torch.float32)
        uniform.uniform_(generator=self._random)
        uniform.add_(values).floor_().clamp_(max=1.0)  # 1 + the largest draw is rounded to 2
        return self._memory("drawn", values.shape, torch.int8).copy_(uniform)

    def _exchange(self, drawn: Tensor, ring: Collective) -> Tensor:
        """Sum draws over ranks.

        Args:
            drawn: this rank's, int8 ``[world, share]``; overwritten.
            ring: the group of ranks.

        Returns:
            The sums, or the values drawn for them, int8 ``[world, share]``.
        """
        # Each rank gets its share of all ranks' draws.
        world, share = drawn.shape
        sent = self._memory("sent", (world, share // self._ternary.per_byte), torch.uint8)
        received = self._memory("received", sent.shape, torch.uint8)
        self._ternary.pack(drawn, sent)
        ring.all_to_all(received, sent)
        self._ternary.unpack(received, drawn)

        # It sums them, and sends the sum to all.
        total = drawn.sum(0, dtype=torch.int8)
        if self._reternarize:
            total = self._draw(total / world)
        sums = self._memory("sums", (share // self._sums.per_byte,), torch.uint8)
        all_sums = self._memory("all_sums", (world, sums.numel()), torch.uint8)
        self._sums.pack(total, sums)
        ring.all_gather(all_sums, sums)
        self._sums.unpack(all_sums, drawn)
        return drawn


def _sum_exactly(views: Sequence[Tensor], ring: Collective) -> None:
    """Replace ``views`` by their sums over ranks, in float32."""
    together = torch.cat(list(views))
    ring.all_reduce(together)
    for view, total in zip(views, _cut(together, views), strict=True):
        view.copy_(total)


def _split(bucket: Bucket) -> BucketParts:
    """Returns weights and biases of a bucket."""
    return BucketParts(
        weights=[part for part in bucket.parts if not part.is_bias],
        biases=[part for part in bucket.parts if part.is_bias],
    )


def _views(bucket: Bucket, parts: Sequence[GradientPart], grads: Tensor) -> list[Tensor]:
    """Returns the slices of ``parts`` of a bucket's gradients."""
    return [grads[part.start - bucket.start : part.stop - bucket.start] for part in parts]


def _cut(values: Tensor, views: Sequence[Tensor]) -> list[Tensor]:
    """Returns the slices of ``values`` that belong to ``views`` in a row."""
    flat = values.view(-1)
    ends = accumulate(view.numel() for view in views)
    return [flat[end - view.numel() : end] for end, view in zip(ends, views, strict=True)]


def _size(parts: Sequence[GradientPart]) -> int:
    """Returns the number of values in ``parts``."""
    return sum(part.size for part in parts)


def _share(size: int, world: int) -> int:
    """Returns the number of values in the share of each of ``world`` ranks."""
    return -(-size // (world * MULTIPLE)) * MULTIPLE
