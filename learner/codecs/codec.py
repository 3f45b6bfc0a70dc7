"""The seam: what a codec does with a bucket of gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from penstock.configs.reduce import ReduceConfig
from penstock.learner.codecs.buckets import Bucket, GradientPart, buckets_of
from penstock.learner.codecs.collective import Collective


class Codec(ABC):
    """Sums gradients over ranks, in a form of its own on the wire.

    One codec belongs to one rank of a group of ``world``; a group of another size needs a new one.
    All ranks call `begin` and then `reduce` for the same ``buckets`` in the same order, from one
    thread. A rank without samples takes part with zeros; what it holds back from before is sent.

    A gradient that is not finite (or whose norm is not, in float32) ends as values that are not
    finite on all ranks, and leaves what is held back as it was: the optimizer skips the step, and
    the next one is sound.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]] = ()
    """What is held back: a float32 per value for each."""
    works_alone: ClassVar[bool] = False
    """Whether a group of one is coded too; otherwise its gradients pass unchanged."""

    def __init__(
        self,
        cfg: ReduceConfig,
        parts: Sequence[GradientPart],
        size: int,
        device: torch.device,
        world: int,
        rank: int,
        momentum: float = 0.9,
    ) -> None:
        """``parts`` make up the flat vector of ``size`` values. ``momentum`` is the optimizer's,
        for the codec that has it in the optimizer's place."""
        self.buckets = buckets_of(parts, round(cfg.bucket_mb * 1e6))
        """In the order in which a backward pass makes them."""
        self._cfg = cfg
        self._device = device
        self._world = world
        self._rank = rank
        self._momentum = momentum
        self._update = 0
        self._scratch: dict[str, Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._residuals = {
            kind: torch.zeros(size, dtype=torch.float32, device=device) for kind in self.kinds
        }
        self._set_up()

    def _set_up(self) -> None:  # noqa: B027 (most need nothing)
        """What a class needs besides."""

    def begin(self, update: int) -> None:
        """Before the buckets of ``update`` (optimizer steps of the run before it)."""
        self._update = update

    def reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Turn ``grads`` into their sum over ranks, in place.

        ``grads``: float32 ``[bucket.size]``, this rank's share of the mean gradient.
        """
        if self._world > 1 or self.works_alone:
            self._reduce(bucket, grads, ring)

    def nbytes(self, update: int) -> int:
        """Payload bytes that this rank sends in such an update, by theory."""
        if self._world == 1:
            return 0
        return sum(self._bucket_nbytes(bucket, update) for bucket in self.buckets)

    def residuals(self) -> dict[str, Tensor]:
        """What this rank holds back, by kind: float32 ``[size]``, the codec's own memory.

        With these, and the same updates, another codec of this kind goes on as this one would.
        """
        return self._residuals

    def reset(self) -> None:
        """The group's members have changed: nothing is held back any more."""
        for residual in self._residuals.values():
            residual.zero_()

    @abstractmethod
    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None: ...

    @abstractmethod
    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int: ...

    def _memory(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for one ``use`` at a time, kept: fresh pages cost more than the arithmetic."""
        held = self._views.get((use, shape))
        if held is None:
            size = prod(shape)
            if use not in self._scratch or len(self._scratch[use]) < size:
                self._scratch[use] = torch.empty(size, dtype=dtype, device=self._device)
                self._views = {key: view for key, view in self._views.items() if key[0] != use}
            held = self._views[use, shape] = self._scratch[use][:size].view(shape)
        return held
