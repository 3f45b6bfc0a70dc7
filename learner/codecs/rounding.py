"""Codecs that only round: float32 unchanged, and two formats of half its size."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from penstock.core.interfaces import Bucket, Collective
from penstock.learner.codecs.buckets import VALUE_NBYTES
from penstock.learner.codecs.codec import BaseCodec
from penstock.learner.codecs.collective import all_reduce_nbytes
from penstock.learner.codecs.two_phase import TwoPhase


class Fp32(BaseCodec):
    """torch's all-reduce: exact but for the order of the sum."""

    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        ring.all_reduce(grads)

    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int:
        return all_reduce_nbytes(bucket.size * VALUE_NBYTES, self._world)


class Half(TwoPhase):
    """A format of two bytes per value, ``dtype``.

    Sums are float32 and rounded once, not at every rank of a ring.
    """

    bits = 16
    block = 1 << 16  # only the size of the work done at a time
    dtype: ClassVar[torch.dtype]

    def encode(self, values: Tensor, pads: Tensor, heads: Tensor, codes: Tensor) -> None:
        codes.view(self.dtype).copy_(values)

    def decode(self, heads: Tensor, codes: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(self.dtype))


class Bf16(Half):
    """Range of float32, eight bits of precision: relative error up to 2^-8 each way."""

    dtype = torch.bfloat16


class Fp16(Half):
    """Eleven bits of precision between 6e-5 and 65504.

    Larger values end the step as infinite, and those below 3e-8 become zero. Mean gradients are
    small, so `bf16` is the safer half.
    """

    dtype = torch.float16
