"""Low-rank gradients (Vogels et al. 2019, PowerSGD), by torch's own communication hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock.core.interfaces import Bucket, Collective, GradientPart
from penstock.device.choice import runs_behind
from penstock.learner.codecs.buckets import VALUE_NBYTES
from penstock.learner.codecs.codec import BaseCodec
from penstock.learner.codecs.collective import all_reduce_nbytes

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

EPSILON = 1e-8  # a layer without gradients has columns of zeros
GAIN = 2  # torch compresses a matrix only if that leaves less than half of it


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
        sizes = [bucket.size]
        if self._is_coded(bucket, update):
            plain = [part.size for part in bucket.parts if not self._factors(part)]
            sizes = [sum(plain), *self._sizes(bucket)]
        return sum(all_reduce_nbytes(VALUE_NBYTES * size, self._world) for size in sizes)

    def _is_coded(self, bucket: Bucket, update: int) -> bool:
        """Whether torch compresses some parameter of a bucket in ``update``."""
        return update >= self._context.cfg.warmup_updates and any(map(self._factors, bucket.parts))

    def _sizes(self, bucket: Bucket) -> tuple[int, int]:
        """Number of values in all Ps and all Qs of a bucket."""
        factors = [found for part in bucket.parts if (found := self._factors(part))]
        return sum(p for p, _ in factors), sum(q for _, q in factors)

    def _factors(self, part: GradientPart) -> tuple[int, int] | None:
        """Returns the sizes of P and Q; None if torch does not compress the parameter."""
        size = part.size
        rows, columns = (size, 1) if part.is_bias else (part.rows, size // part.rows)
        rank = min(rows, columns, self._context.cfg.powersgd_rank)
        if (rows + columns) * rank * GAIN >= size:
            return None
        return rows * rank, columns * rank

    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        span = slice(bucket.start, bucket.stop)
        error, new = (values["error"][span] for values in (self._residuals, self._new))
        if not self._is_coded(bucket, self._update):
            new.copy_(error)
            ring.all_reduce(grads)
            return
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

        if self._state is None:
            self._state = self._make_state(torchs.PowerSGDState)
        state, index = self._state, bucket.start
        if index not in state.q_memory_dict:
            rows, columns = self._sizes(bucket)
            first = torch.randn(columns, generator=torch.Generator().manual_seed(index))
            state.q_memory_dict[index] = first.to(self._device)
            state.p_memory_dict[index] = torch.empty(rows, device=self._device)
        norm = torch.linalg.vector_norm(grads + error) * self._world
        if not norm.square().isfinite():  # P would be divided by infinity, and the layer stay zero
            grads.fill_(torch.nan)
        group = state.process_group = _HookGroup(ring)
        state.error_dict[index] = error
        hook: Any = torchs.powerSGD_hook
        try:
            with nullcontext() if runs_behind(grads) else _without_synchronize():
                hook(state, _HookBucket(bucket, grads))
        except Exception as hooks:
            raise group.error or hooks from None
        if grads.isfinite().all():
            new.copy_(state.error_dict[index])
        else:  # the same on all ranks: a warm start from these would never end
            del state.p_memory_dict[index], state.q_memory_dict[index]
        grads *= self._world  # torch averages

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
        start = self._bucket.start
        return [
            self._grads[part.start - start : part.stop - start].view(
                (-1,) if part.is_bias else (part.rows, -1)
            )
            for part in self._bucket.parts
        ]

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
