"""How gradients are encoded between learners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from penstock.configs.reduce import ReduceConfig


class GradientPart(NamedTuple):
    """The weight or bias of a layer in the flat gradient vector: its values ``start`` to ``stop``.

    It is one parameter, or one tower of a parameter that holds the same layer of several towers.
    """

    name: str
    """The parameter's name."""
    start: int
    stop: int
    is_bias: bool
    """Whether it is a bias by its name, or has fewer than two dimensions."""
    rows: int = 1
    """Size of its first dimension, for codecs that treat it as a matrix; 1 for a bias."""
    tower: int = 0
    """Its number among the towers that the parameter holds."""

    @property
    def size(self) -> int:
        """The number of values."""
        return self.stop - self.start


class Bucket(NamedTuple):
    """A slice of the flat gradient vector that holds whole parameters, in their order."""

    start: int
    stop: int
    parts: tuple[GradientPart, ...]

    @property
    def size(self) -> int:
        """The number of values."""
        return self.stop - self.start


class Collective(Protocol):
    """Collective operations of a group of ranks, for codecs.

    All ranks call the same methods in the same order, from one thread. Tensors are contiguous, of
    any dtype, and have the same shape on all ranks. A rank that is gone or late makes a call raise
    RuntimeError; the group cannot be used afterwards.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int:
        """The number of ranks in the group."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its sum over ranks, bitwise the same on all."""

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its maximum over ranks. Not for NaN, which gloo may lose."""

    def all_to_all(self, out: Tensor, given: Tensor) -> None:
        """Send row r of ``given`` ``[world, k]`` to rank r.

        Row r of ``out`` is received from rank r.
        """

    def all_gather(self, out: Tensor, given: Tensor) -> None:
        """Collect ``given`` of every rank r as row r of ``out`` ``[world, k]``."""


class AdamState(NamedTuple):
    """The state of an Adam optimizer, for a codec that sends its momentum.

    The tensors are equal on all ranks and change in place: the optimizer steps after each
    reduction, and `learner.extras.codecs.variance` renews the variance in a reduction.
    """

    exp_avg: Tensor
    """The momentum, float32 ``[size]``."""
    exp_avg_sq: Tensor
    """The variance, not corrected for its start at zero, float32 ``[size]``."""
    steps: Tensor
    """Number of steps in the moments, float32 ``[]``."""
    eps: float


class CodecContext(NamedTuple):
    """The arguments of a codec: one rank's part in one group, and one optimizer's gradients."""

    cfg: ReduceConfig
    """``learner.reduce``."""
    parts: Sequence[GradientPart]
    """The layers, which make up the flat vector without gaps."""
    size: int
    """The number of values in the flat vector."""
    device: torch.device
    """The device of gradients and of all state kept for them."""
    world: int
    rank: int
    momentum: float = 0.9
    """The optimizer's momentum, for a codec that applies it in the optimizer's place."""
    grad_clip: float | None = None
    """The optimizer's bound on the norm of a gradient, for such a codec."""
    adam: AdamState | None = None
    """Given to a codec that sends the momentum of Adam or LAMB; None without an optimizer, in a
    measurement."""


class CodecFactory(Protocol):
    """The kind of object that `CodecSpec.entry_point` names: a class of codecs, or a function."""

    def __call__(self, context: CodecContext) -> Codec: ...


class Codec(Protocol):
    """Sums gradients over ranks, in an encoding of its own.

    One codec belongs to one rank of a group; a group of another size needs a new one. In each
    optimizer step all ranks call, from one thread,

        begin(update)
        reduce(bucket, grads, ring)        for every bucket of `buckets`, in their order

    and between two steps any of `nbytes`, `residuals` and `reset`. A rank without samples takes
    part with zeros, and so sends the residuals of earlier steps.

    A gradient that is not finite (or whose norm is not, in float32) results in values that are not
    finite on all ranks, and leaves the residuals of all unchanged: the optimizer skips the step,
    and the next one is not affected.
    """

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Slices of the flat vector, in the order in which a backward pass completes them."""

    def begin(self, update: int) -> None:
        """Called before the buckets of a step.

        ``update`` counts the optimizer steps of the run so far. A number below the last one means
        that the run has returned to an earlier state (`learner.nonfinite`): residuals become zero.
        """

    def reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Turn ``grads`` into their sum over ranks, in place, bitwise the same on all ranks.

        ``grads``: float32 ``[bucket.size]``, this rank's share of the mean gradient. Where
        `CodecSpec.reduces_gradients` is false for the update, they become the momentum of the sum.
        """

    def nbytes(self, update: int) -> int:
        """Theoretical payload in bytes that this rank sends in step ``update``."""

    def residuals(self) -> Mapping[str, Tensor]:
        """The values held back on this rank for later steps, by name, float32 ``[size]``.

        They are the codec's own memory, which the next step may exchange for other. They go into
        checkpoints, and are written in place when one is loaded: with the same residuals and
        updates, another codec of this kind continues as this one would.
        """

    def reset(self) -> None:
        """Clear the residuals; called when the members of the group have changed."""
