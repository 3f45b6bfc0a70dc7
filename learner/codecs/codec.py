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
    """A `core.interfaces.Codec`; subclasses implement `_reduce` and `_bucket_nbytes`.

    `_reduce` reads a bucket's slice of ``_residuals`` and writes all of the same slice of
    ``_new_residuals``. After the last bucket of a step, `_commit` makes these the residuals if all
    sums are finite.
    """

    kinds: ClassVar[tuple[str, ...]] = ()
    """Names of the residuals: one float32 per value each."""
    works_alone: ClassVar[bool] = False
    """Whether gradients of a group of one are coded too; otherwise they pass unchanged."""

    def __init__(self, context: CodecContext) -> None:
        """Cut the gradients into buckets, and begin with residuals of zero."""
        self.buckets = buckets_of(
            context.parts, bucket_nbytes(context.cfg.bucket_mb, context.device)
        )
        self._context = context
        self._device = context.device
        self._world = context.world
        self._rank = context.rank
        self._update = 0  # number of the present step
        self._is_finite = torch.tensor(True)  # whether the sums of the step so far are, bool []
        # Memory by its use, and views of it by use and shape.
        self._scratch: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        # Residuals by name, and what replaces them after the step; each float32 [size].
        self._residuals: dict[str, Tensor] = {}
        self._new_residuals: dict[str, Tensor] = {}
        for kind in self.kinds:
            self._add_residual(kind)

        self._set_up()

    def _set_up(self) -> None:  # noqa: B027 (most need nothing)
        """Prepare further state of a subclass."""

    def _add_residual(self, kind: str) -> None:
        """Add a residual of that name, of zeros."""
        for values in (self._residuals, self._new_residuals):
            values[kind] = torch.zeros(self._context.size, device=self._device)

    def begin(self, update: int) -> None:
        """Begin step ``update``; after a rollback, clear the residuals."""
        if update < self._update:  # after a rollback residuals are of gradients that are undone
            self.reset()
        self._update = update

    def reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Turn ``grads`` of a bucket into their sum over ranks, in place."""
        if self._world == 1 and not self.works_alone:
            return
        self._reduce(bucket, grads, ring)
        if self._residuals:
            self._commit(bucket, grads)

    def nbytes(self, update: int) -> int:
        if self._world == 1:
            return 0
        return sum(self._bucket_nbytes(bucket, update) for bucket in self.buckets)

    def residuals(self) -> dict[str, Tensor]:
        return self._residuals

    def reset(self) -> None:
        for values in (*self._residuals.values(), *self._new_residuals.values()):
            values.zero_()

    def _commit(self, bucket: Bucket, sums: Tensor) -> None:
        """After the last bucket of a step replace all residuals, if all sums are finite.

        The sums are equal on all ranks, so all ranks decide alike. No optimizer step uses the sums
        of a skipped step, so the values that were sent for it must stay in the residuals: on every
        rank, and in buckets with a finite sum too.
        """
        is_finite = torch.linalg.vector_norm(sums).isfinite()
        if bucket == self.buckets[0]:
            self._is_finite = is_finite
        else:
            self._is_finite = self._is_finite & is_finite
        if bucket != self.buckets[-1]:
            return

        for kind, residual in self._residuals.items():
            new_residual = self._new_residuals[kind]
            if runs_behind(residual):
                # The host does not read `_is_finite`, as it would wait for the device.
                torch.where(self._is_finite, new_residual, residual, out=residual)
            elif self._is_finite:
                self._residuals[kind], self._new_residuals[kind] = new_residual, residual

    @abstractmethod
    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Turn ``grads``, float32 ``[bucket.size]``, into their sum over ranks, in place."""

    @abstractmethod
    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int:
        """Returns the bytes that this rank sends for a bucket in step ``update``."""

    def _memory(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns memory of a shape, for one ``use`` at a time; its content is arbitrary.

        It is kept for the next call: new pages cost more than the arithmetic.
        """
        view = self._views.get((use, shape))
        if view is None:
            size = prod(shape)
            if use not in self._scratch or len(self._scratch[use]) < size:
                self._scratch[use] = torch.empty(size, dtype=dtype, device=self._device)
                # Views of the memory that it replaces are of no use any more.
                self._views = {key: old for key, old in self._views.items() if key[0] != use}
            view = self._scratch[use][:size].view(shape)
            self._views[use, shape] = view
        return view
