"""One bit per value, with error feedback (Seide et al. 2014, 1-Bit Stochastic Gradient Descent)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.interfaces import Bucket, Collective
from penstock.learner.codecs.buckets import VALUE_NBYTES
from penstock.learner.codecs.collective import all_reduce_nbytes
from penstock.learner.codecs.two_phase import TwoPhase
from penstock.learner.extras.codecs.packing import Packing


class OneBit(TwoPhase):
    """x = g + error; q = c+ where x >= 0, else c-; error = x - q.

    g is a rank's share of the mean gradient, q what is sent. The owner of a share does the same
    with the sum and its ``server_error``. c+ and c- are the means of the values of each sign in a
    block of ``learner.reduce.onebit_block`` values (the paper has columns of a matrix; blocks cost
    less and know no shapes). The first ``learner.reduce.warmup_updates`` updates of the run are
    float32.
    """

    kinds = ("error", "server_error")
    head = 2
    bits = 1

    def _set_up(self) -> None:
        super()._set_up()
        self.block = self._context.cfg.onebit_block
        self._bits = Packing(bits=1, offset=0, device=self._device)

    def _is_plain(self, update: int) -> bool:
        """Whether gradients are summed in float32 in ``update``."""
        return update < self._context.cfg.warmup_updates

    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int:
        if self._is_plain(update):
            return all_reduce_nbytes(bucket.size * VALUE_NBYTES, self._world)
        return super()._bucket_nbytes(bucket, update)

    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Sum ``grads`` over ranks: in float32 at first, later in two coded phases."""
        if self._is_plain(self._update):
            ring.all_reduce(grads)
        else:
            super()._reduce(bucket, grads, ring)

    def _commit(self, bucket: Bucket, sums: Tensor) -> None:
        if not self._is_plain(self._update):
            super()._commit(bucket, sums)

    def encode(self, values: Tensor, pads: Tensor, heads: Tensor, codes: Tensor) -> None:
        """Encode blocks as signs and two means, c+ and c-; `TwoPhase.encode` has the shapes."""
        # The code of a value is 1 where it is not negative, else 0.
        work = self._memory("work", values.shape, torch.float32)
        signs = self._memory("signs", values.shape, torch.int8)
        torch.ge(values, 0.0, out=work)
        signs.copy_(work)
        self._bits.pack(signs, codes)
        above = work.sum(1)  # number of these values in each block, with the padding
        below = values.shape[1] - above

        # The head has the means of both kinds. `work` holds first the values that are not negative,
        # with zeros for the others, then the reverse.
        work *= values
        heads[:, 0] = work.sum(1) / (above - pads).clamp_(min=1.0)
        torch.sub(values, work, out=work)
        heads[:, 1] = work.sum(1) / below.clamp_(min=1.0)

    def decode(self, heads: Tensor, codes: Tensor, out: Tensor) -> None:
        """Decode blocks to c+ and c-."""
        signs = self._memory("signs", out.shape, torch.int8)
        self._bits.unpack(codes, signs)
        high = heads[:, :1]
        low = heads[:, 1:]
        out.copy_(signs).mul_(high - low).add_(low)
