"""Observations shifted and scaled by the statistics of those seen so far, in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from penstock.configs.value_types import MemoryFormat
from penstock.models.frame_order import in_order
from penstock.models.layout import CLIP, EPSILON

MOST = 1e9  # samples counted: beyond float32's precision the statistics become a moving average
FAR = 100.0  # numbers beyond `FAR * (1 + |mean| + deviation)` count as lying at that limit
FARTHEST = 1e18  # upper bound on that limit, whose square float32 holds
LEAST_LEVELS = 4.0  # byte levels; the square is added to a pixel's variance: noise stays small
IN_CACHE = 2**16  # float64 numbers that stay in a CPU's cache
MOST_FRAMES = 32  # frames of a batch that the statistics of pixels are taken from


class Normalizer(nn.Module):
    """Normalises ``inputs`` numbers of an observation, each by its own mean and variance.

    Mean, variance and count are buffers: they are published and saved with the weights. Until it
    has seen any observations, it leaves them as they are.
    """

    mean: Tensor
    """``[inputs]``."""
    var: Tensor
    """``[inputs]``."""
    count: Tensor
    """Samples seen, ``[1]``."""
    most_rows: int | None = None
    """Rows of a batch that `observe` needs; None: all."""
    _has_observed = False
    """Whether `observe` was called."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("var", torch.ones(inputs))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        """Returns rows ``[B, inputs]`` of any dtype as float32, normalised and within ± `CLIP`."""
        scale = (self.var + EPSILON).rsqrt()
        return (rows.float() - self.mean).mul_(scale).clamp_(-CLIP, CLIP)

    @torch.no_grad()
    def observe(
        self, rows: Tensor, alive: Tensor, add_others: Callable[[Tensor], None] | None = None
    ) -> None:
        """Add a batch to the statistics: Chan et al. 1979, equation 2.1, by sums in float64.

        Numbers count as no farther than `_limit`, which depends on those seen before: a single
        broken one is soon forgotten, and a scale that grows is followed within some batches.

        Args:
            rows: ``[B, inputs]``, of any dtype.
            alive: which of the rows count, bool ``[B]``.
            add_others: adds to a tensor, in place, those of other learners.
        """
        limit = self._limit(rows)

        # Sums of the numbers, of their squares, and of the rows. A CPU computes them by chunks of
        # rows, each of which stays in its cache.
        sums = torch.zeros(3, len(self.mean), dtype=torch.float64, device=rows.device)
        sums[2] = alive.sum()
        chunk_rows = len(rows)
        if rows.device.type == "cpu":
            chunk_rows = max(1, IN_CACHE // len(self.mean))
        chunks = zip(rows.split(chunk_rows), alive.split(chunk_rows), strict=True)
        for chunk, chunk_alive in chunks:
            exact = chunk.to(torch.float64, copy=True).clamp_(-limit, limit)
            exact.mul_(chunk_alive[:, None])
            sums[0] += exact.sum(0)
            sums[1] += exact.square_().sum(0)
        if add_others is not None:
            add_others(sums)

        # Mean and variance of the batch.
        batch_count = sums[2, :1]
        divisor = batch_count.clamp(min=1)
        batch_mean = sums[0] / divisor
        batch_var = (sums[1] / divisor - batch_mean.square()).clamp_(min=0)

        # Both become means of old and new, weighted by their counts.
        old_count = self.count.double().clamp(max=MOST)
        share = batch_count / (old_count + batch_count).clamp(min=1)
        shift = batch_mean - self.mean.double()
        mean_of_vars = self.var.double().lerp(batch_var, share)
        self.var.copy_(mean_of_vars + shift.square() * share * (1 - share))
        self.mean.copy_(self.mean.double() + shift * share)
        self.count.copy_(old_count + batch_count)

    def _limit(self, rows: Tensor) -> Tensor:
        """Returns the largest absolute numbers that count, float64 ``[inputs]``.

        They are limited by mean and deviation, or by the median of these rows where none was seen
        before.
        """
        typical = self.mean.double().abs() + self.var.double().sqrt()
        if not self._has_observed:  # a median takes long
            self._has_observed = True
            median = rows.double().abs().median(0).values
            typical = torch.where(self.count > 0, typical, median)
        return (FAR * (1 + typical)).clamp(max=FARTHEST)


class FrameNormalizer(Normalizer):
    """A normaliser of frames, with a mean and a variance for each pixel.

    What moves stands out from a background that is constant, and is learned from fewer samples.
    Until it has seen any frames, bytes are scaled to 0 ... 1.
    """

    most_rows = MOST_FRAMES

    def frames(
        self,
        frames: Tensor,
        dtype: torch.dtype,
        first: int = 0,
        memory_format: MemoryFormat = "auto",
    ) -> Tensor:
        """Returns frames normalised, in ``dtype`` and within ± `CLIP`.

        Args:
            frames: ``[B, *shape]`` of any dtype.
            dtype: of the result.
            first: index of their first pixel in the statistics.
            memory_format: order of the result in memory, where frames are bytes.
        """
        shape = frames.shape[1:]
        pixels = slice(first, first + shape.numel())
        mean = self.mean[pixels].view(shape)
        var = self.var[pixels].view(shape)
        if frames.dtype != torch.uint8:
            scale = (var + EPSILON).rsqrt()
            return (frames.float() - mean).mul_(scale).clamp_(-CLIP, CLIP).to(dtype)

        # Differences of whole numbers below 256 are exact in bfloat16, so the mean is rounded.
        var = torch.where(self.count > 0, var + LEAST_LEVELS**2, 255.0**2)
        mean = in_order(mean.round()[None], dtype, memory_format)
        scale = in_order(var.rsqrt_()[None], dtype, memory_format)
        frames = in_order(frames, dtype, memory_format)
        return frames.sub_(mean).mul_(scale).clamp_(-CLIP, CLIP)
