"""Low-rank gradients (Vogels et al. 2019, PowerSGD), by torch's own communication hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.learner.reduce.codec import Codec
from penstock.learner.reduce.collective import Collective, all_reduce_nbytes
from penstock.learner.reduce.layout import VALUE_NBYTES, Bucket, Part

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

EPSILON = 1e-8  # a layer without gradients has columns of zeros
GAIN = 2  # torch compresses a matrix only if that leaves less than half of it


class PowerSgd(Codec):
    """M = P Q^T of rank ``learner.reduce.powersgd_rank`` for each matrix.

    Torch's are the factors, their orthogonalisation, warm start and all-reduces, and the choice
    which parameters gain by it (the others, and all biases, are averaged as they are). Ours are the
    buckets, the float32 updates before ``learner.reduce.warmup_updates``, and ``error``, which lies
    in the flat vector as everywhere. Q, from which torch starts each time, is alike on all ranks
    and not saved: after a resume it is drawn again.
    """

    name = "powersgd"
    kinds = ("error",)

    def _set_up(self) -> None:
        self._state: PowerSGDState | None = None

    def reset(self) -> None:
        super().reset()
        self._state = None  # a new member has no Q, and draws must be alike

    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int:
        factors = [self._factors(part) for part in bucket.parts]
        plain = sum(p.stop - p.start for p, f in zip(bucket.parts, factors, strict=True) if not f)
        rows, columns = (sum(f[i] for f in factors if f) for i in range(2))
        if update < self._cfg.warmup_updates or not rows:
            plain, rows, columns = bucket.size, 0, 0
        sizes = (plain, rows, columns)
        return sum(all_reduce_nbytes(VALUE_NBYTES * size, self._world) for size in sizes)

    def _factors(self, part: Part) -> tuple[int, int] | None:
        """Sizes of P and Q; None if torch leaves the parameter as it is."""
        size = part.stop - part.start
        rows, columns = (size, 1) if part.is_bias else (part.rows, size // part.rows)
        rank = min(rows, columns, self._cfg.powersgd_rank)
        if (rows + columns) * rank * GAIN >= size:
            return None
        return rows * rank, columns * rank

    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        if self._update < self._cfg.warmup_updates or not any(map(self._factors, bucket.parts)):
            ring.all_reduce(grads)
            return
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs

        if self._state is None:
            self._state = torchs.PowerSGDState(
                None,
                self._cfg.powersgd_rank,
                start_powerSGD_iter=2,
                min_compression_rate=GAIN,
                orthogonalization_epsilon=EPSILON,
            )
            self._state.iter = 2  # its own count of updates stays where compression begins
        state, index = self._state, bucket.start
        error = self._residuals["error"][bucket.start : bucket.stop]
        group = state.process_group = _HookGroup(ring)
        state.error_dict[index] = error
        hook: Any = torchs.powerSGD_hook
        try:
            hook(state, _HookBucket(bucket, grads))
        except Exception as hooks:
            raise group.error or hooks from None
        if grads.isfinite().all():
            error.copy_(state.error_dict[index])
        else:  # the same on all ranks: a warm start from these would never end
            del state.p_memory_dict[index], state.q_memory_dict[index]
        grads *= self._world  # torch averages


class _HookBucket:
    """What torch's hook asks of a bucket of DDP."""

    def __init__(self, bucket: Bucket, grads: Tensor) -> None:
        self._bucket = bucket
        self._grads = grads

    def buffer(self) -> Tensor:
        return self._grads

    def gradients(self) -> list[Tensor]:
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
    """A collective as the process group that torch's hook takes; ``error`` is what it raised,
    which torch would not pass on as it is."""

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
    """Work that is done, and its future: what is to follow runs at once, in the same thread."""

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
