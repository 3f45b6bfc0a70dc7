"""The base class of Penstock's codecs: residuals, skipped steps, scratch memory, groups of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from penstock.core.interfaces import Bucket, CodecContext, Collective
from penstock.device.choice import runs_behind
from penstock.learner.codecs.buckets import bucket_nbytes, buckets_of


class BaseCodec(ABC):
    """A `core.interfaces.Codec`; subclasses implement `_reduce` and `_bucket_nbytes`."""

    kinds: ClassVar[tuple[str, ...]] = ()
    """Names of the residuals: one float32 per value each."""
    works_alone: ClassVar[bool] = False
    """Whether gradients of a group of one are coded too; otherwise they pass unchanged."""

    def __init__(self, context: CodecContext) -> None:
        self.buckets = buckets_of(
            context.parts, bucket_nbytes(context.cfg.bucket_mb, context.device)
        )
        self._context = context
        self._device = context.device
        self._world = context.world
        self._rank = context.rank
        self._update = 0
        self._finite = torch.tensor(True)  # the sums of the step's buckets so far
        self._scratch: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._residuals = {
            kind: torch.zeros(context.size, dtype=torch.float32, device=context.device)
            for kind in self.kinds
        }
        self._set_up()

    def _set_up(self) -> None:  # noqa: B027 (most need nothing)
        """Prepare further state of a subclass."""

    def begin(self, update: int) -> None:
        if update < self._update:  # after a rollback residuals are of gradients that are undone
            self.reset()
        self._update = update

    def reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        if self._world == 1 and not self.works_alone:
            return
        span = slice(bucket.start, bucket.stop)
        for kind, residual in self._residuals.items():
            self._before(kind)[span] = residual[span]
        self._reduce(bucket, grads, ring)
        if self._residuals:
            self._restore_if_skipped(bucket, torch.linalg.vector_norm(grads).isfinite())

    def nbytes(self, update: int) -> int:
        if self._world == 1:
            return 0
        return sum(self._bucket_nbytes(bucket, update) for bucket in self.buckets)

    def residuals(self) -> dict[str, Tensor]:
        return self._residuals

    def reset(self) -> None:
        for residual in self._residuals.values():
            residual.zero_()

    def _before(self, kind: str) -> Tensor:
        """Memory for a residual as it was before the step."""
        return self._memory(f"{kind} before", (self._context.size,), torch.float32)

    def _restore_if_skipped(self, bucket: Bucket, finite: Tensor) -> None:
        """After the last bucket restore all residuals where a sum of the step was not finite.

        The sums are equal on all ranks, so that all restore theirs: also a rank with a finite
        gradient, whose values were sent in vain, and in buckets with a finite sum.
        """
        self._finite = finite if bucket == self.buckets[0] else self._finite & finite
        if bucket != self.buckets[-1] or (not runs_behind(finite) and self._finite):
            return
        for kind, residual in self._residuals.items():
            torch.where(self._finite, residual, self._before(kind), out=residual)

    @abstractmethod
    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None: ...

    @abstractmethod
    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int: ...

    def _memory(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for one ``use`` at a time, kept: new pages cost more than the arithmetic."""
        held = self._views.get((use, shape))
        if held is None:
            size = prod(shape)
            if use not in self._scratch or len(self._scratch[use]) < size:
                self._scratch[use] = torch.empty(size, dtype=dtype, device=self._device)
                self._views = {key: view for key, view in self._views.items() if key[0] != use}
            held = self._views[use, shape] = self._scratch[use][:size].view(shape)
        return held
