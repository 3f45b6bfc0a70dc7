"""Low-rank gradients (Vogels et al. 2019, PowerSGD), by torch's own communication hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from penstock.core.interfaces import Bucket, Collective, GradientPart
from penstock.device.choice import runs_behind
from penstock.learner.codecs.buckets import VALUE_NBYTES
from penstock.learner.codecs.codec import BaseCodec
from penstock.learner.codecs.collective import all_reduce_nbytes

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

# A layer without gradients has columns of zeros, which the orthogonalisation divides by their norm.
EPSILON = 1e-8
GAIN = 2  # torch compresses a matrix only if that leaves less than half of it


class FactorSizes(NamedTuple):
    """Numbers of values in the factors P and Q."""

    p_size: int
    q_size: int


class PowerSgd(BaseCodec):
    """M = P Q^T of rank ``learner.reduce.powersgd_rank`` for each matrix.

    torch computes the factors, their orthogonalisation, warm start and all-reduces, and chooses the
    parameters that gain by it (the others, and all biases, are averaged unchanged). This class adds
    the buckets, the float32 updates before ``learner.reduce.warmup_updates``, the first Q (torch
    would seed the process's own generator, from this thread), and ``error``, which lies in the flat
    vector as in other codecs. Later Qs are equal on all ranks and not saved: a resumed run begins
    with the first again.
    """

    kinds = ("error",)

    def _set_up(self) -> None:
        self._state: PowerSGDState | None = None

    def reset(self) -> None:
        super().reset()
        self._state = None  # a new member has no Q

    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int:
        if not self._is_coded(bucket, update):
            return all_reduce_nbytes(VALUE_NBYTES * bucket.size, self._world)
        factors = self._bucket_factors(bucket)
        plain_size = sum(part.size for part in bucket.parts if self._factors(part) is None)
        sizes = (plain_size, factors.p_size, factors.q_size)  # each in an all-reduce of its own
        return sum(all_reduce_nbytes(VALUE_NBYTES * size, self._world) for size in sizes)

    def _is_coded(self, bucket: Bucket, update: int) -> bool:
        """Whether torch compresses some parameter of a bucket in ``update``."""
        if update < self._context.cfg.warmup_updates:
            return False
        return any(self._factors(part) is not None for part in bucket.parts)

    def _bucket_factors(self, bucket: Bucket) -> FactorSizes:
        """Returns the sizes of all Ps and of all Qs of a bucket."""
        by_part = [self._factors(part) for part in bucket.parts]
        factors = [part_factors for part_factors in by_part if part_factors is not None]
        return FactorSizes(
            p_size=sum(part_factors.p_size for part_factors in factors),
            q_size=sum(part_factors.q_size for part_factors in factors),
        )

    def _factors(self, part: GradientPart) -> FactorSizes | None:
        """Returns the sizes of P and Q; None if torch does not compress the parameter."""
        if part.is_bias:
            rows = part.size
            columns = 1
        else:
            rows = part.rows
            columns = part.size // part.rows
        rank = min(rows, columns, self._context.cfg.powersgd_rank)
        if (rows + columns) * rank * GAIN >= part.size:
            return None
        return FactorSizes(p_size=rows * rank, q_size=columns * rank)

    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Sum ``grads`` over ranks: in float32, or by the factors that torch's hook computes."""
        span = slice(bucket.start, bucket.stop)
        error = self._residuals["error"][span]
        new_error = self._new_residuals["error"][span]
        if not self._is_coded(bucket, self._update):
            new_error.copy_(error)
            ring.all_reduce(grads)
            return

        # An infinite norm would divide P by infinity, and the layer would stay zero.
        norm = torch.linalg.vector_norm(grads + error) * self._world
        if not norm.square().isfinite():
            grads.fill_(torch.nan)

        # torch's hook knows a bucket by its index, here its start in the flat vector.
        index = bucket.start
        state = self._prepare_state(bucket, index)
        state.error_dict[index] = error
        self._run_hook(state, bucket, grads, ring)
        if grads.isfinite().all():
            new_error.copy_(state.error_dict[index])
        else:
            # A warm start from these factors would never end. All ranks have the same sums, so all
            # drop them.
            del state.p_memory_dict[index], state.q_memory_dict[index]
        grads *= self._world  # torch averages

    def _prepare_state(self, bucket: Bucket, index: int) -> PowerSGDState:
        """Returns the state of torch's hook, which has factors of the bucket for a warm start."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        if self._state is None:
            self._state = self._make_state(PowerSGDState)
        if index not in self._state.q_memory_dict:
            factors = self._bucket_factors(bucket)
            generator = torch.Generator().manual_seed(index)  # equal on all ranks
            first_q = torch.randn(factors.q_size, generator=generator)
            self._state.q_memory_dict[index] = first_q.to(self._device)
            self._state.p_memory_dict[index] = torch.empty(factors.p_size, device=self._device)
        return self._state

    def _run_hook(
        self, state: PowerSGDState, bucket: Bucket, grads: Tensor, ring: Collective
    ) -> None:
        """Let torch replace ``grads`` by their mean over ranks. Raises what ``ring`` raises."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        group = _HookGroup(ring)
        state.process_group = group
        hook: Any = powerSGD_hook  # takes a bucket of its own type, by its annotation
        try:
            with nullcontext() if runs_behind(grads) else _without_synchronize():
                hook(state, _HookBucket(bucket, grads))
        except Exception as hook_error:
            raise group.error or hook_error from None

    def _make_state(self, make: type[PowerSGDState]) -> PowerSGDState:
        """Make the state of torch's hook, which compresses from its first call on."""
        state = make(
            None,
            self._context.cfg.powersgd_rank,
            start_powerSGD_iter=2,
            min_compression_rate=GAIN,
            orthogonalization_epsilon=EPSILON,
        )

        # Its own count of updates stays where compression begins.
        state.iter = 2
        return state


@contextmanager
def _without_synchronize() -> Iterator[None]:
    """Skip torch's synchronisation of a GPU for buckets on the CPU.

    Where there is a GPU, torch's hook synchronizes it for such a bucket too, and
    `torch.cuda.synchronize` refuses a device that is a CPU. A learner on a CPU has no other use of
    it.
    """
    synchronize = torch.cuda.synchronize
    torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.synchronize = synchronize


class _HookBucket:
    """The part of a DDP bucket that torch's hook uses."""

    def __init__(self, bucket: Bucket, grads: Tensor) -> None:
        self._bucket = bucket
        self._grads = grads

    def buffer(self) -> Tensor:
        return self._grads

    def gradients(self) -> list[Tensor]:
        """Returns the gradient of each part: a matrix, or a vector for a bias."""
        gradients = []
        for part in self._bucket.parts:
            first = part.start - self._bucket.start
            gradient = self._grads[first : first + part.size]
            gradients.append(gradient if part.is_bias else gradient.view(part.rows, -1))
        return gradients

    def parameters(self) -> list[Tensor]:
        return []

    def index(self) -> int:
        return self._bucket.start

    def is_last(self) -> bool:
        return False


class _HookGroup:
    """A collective as the process group that torch's hook takes.

    ``error`` is its exception, which torch would not pass on unchanged.
    """

    def __init__(self, ring: Collective) -> None:
        self._ring = ring
        self.error: Exception | None = None

    def size(self) -> int:
        return self._ring.world

    def allreduce(self, tensors: list[Tensor], options: object) -> _Done:
        try:
            self._ring.all_reduce(tensors[0])
        except Exception as error:
            self.error = error
            raise
        return _Done(tensors)


class _Done:
    """Completed work, and its future: callbacks run at once, in the same thread."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def get_future(self) -> _Done:
        return self

    def then(self, callback: Callable[[_Done], Any]) -> _Done:
        return _Done(callback(self))

    def value(self) -> Any:
        return self._result

    def wait(self) -> Any:
        return self._result
