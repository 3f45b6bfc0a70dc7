"""Observations shifted and scaled by the statistics of those seen so far, in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from penstock.configs.value_types import MemoryFormat
from penstock.models.frame_order import in_order
from penstock.models.layout import CLIP, EPSILON

MOST = 1e9  # samples counted: beyond float32's precision the statistics become a moving average
FAR = 100.0  # times 1 + mean + deviation: what lies beyond counts as no farther
FARTHEST = 1e18  # whose square float32 holds
LEAST_LEVELS = 4.0  # byte levels; the square is added to a pixel's variance: noise stays small
IN_CACHE = 2**16  # float64 numbers that stay in a CPU's cache
MOST_FRAMES = 32  # of a batch that statistics of pixels are taken from


class Normalizer(nn.Module):
    """Normalises ``inputs`` numbers of an observation, each by its own mean and variance.

    Mean, variance and count are buffers: they are published and saved with the weights. Until it
    has seen any observations, it leaves them as they are.
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    most_rows: int | None = None
    """Of a batch that `observe` needs; None: all."""
    _begun = False  # whether `observe` was called

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
        sums = torch.zeros(3, len(self.mean), dtype=torch.float64, device=rows.device)
        sums[2] = alive.sum()
        at_once = max(1, IN_CACHE // len(self.mean)) if rows.device.type == "cpu" else len(rows)
        for part, living in zip(rows.split(at_once), alive.split(at_once), strict=True):
            exact = part.to(torch.float64, copy=True).clamp_(-limit, limit)
            exact.mul_(living[:, None])
            sums[0] += exact.sum(0)
            sums[1] += exact.square_().sum(0)
        if add_others is not None:
            add_others(sums)
        more = sums[2, :1]
        mean = sums[0] / more.clamp(min=1)
        var = (sums[1] / more.clamp(min=1) - mean.square()).clamp_(min=0)
        before = self.count.double().clamp(max=MOST)
        share = more / (before + more).clamp(min=1)
        shift = mean - self.mean.double()
        self.var.copy_(self.var.double().lerp(var, share) + shift.square() * share * (1 - share))
        self.mean.copy_(self.mean.double() + shift * share)
        self.count.copy_(before + more)

    def _limit(self, rows: Tensor) -> Tensor:
        """Returns the largest absolute numbers that count, float64 ``[inputs]``.

        They are limited by mean and deviation, or by the median of these rows where none was seen
        before.
        """
        typical = self.mean.double().abs() + self.var.double().sqrt()
        if not self._begun:  # a median takes long
            self._begun = True
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
        mean, var = (tensor[pixels].view(shape) for tensor in (self.mean, self.var))
        if frames.dtype != torch.uint8:
            scale = (var + EPSILON).rsqrt()
            return (frames.float() - mean).mul_(scale).clamp_(-CLIP, CLIP).to(dtype)
        var = torch.where(self.count > 0, var + LEAST_LEVELS**2, 255.0**2)
        # Differences of whole numbers below 256 are exact in bfloat16.
        mean, scale = (
            in_order(pixels[None], dtype, memory_format) for pixels in (mean.round(), var.rsqrt_())
        )
        frames = in_order(frames, dtype, memory_format)
        return frames.sub_(mean).mul_(scale).clamp_(-CLIP, CLIP)
