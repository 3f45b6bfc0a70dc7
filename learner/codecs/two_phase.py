"""Dense codes: each rank sums a share of the values, and every message is coded.

Each rank codes its values in ``world`` shares and sends share r to rank r (all-to-all). Rank r
decodes what it received, adds it up in the order of ranks in float32, codes the sum and sends it to
all (all-gather). So b bytes per value are 4 / b times less than float32 in a ring, for any number
of ranks, where an all-gather of coded gradients would cost more with every rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from penstock.core.interfaces import Bucket, Collective
from penstock.device.choice import device_of
from penstock.learner.codecs.buckets import VALUE_NBYTES
from penstock.learner.codecs.codec import BaseCodec
from penstock.learner.codecs.collective import all_gather_nbytes, all_to_all_nbytes

PIECE = 1 << 19  # values that are coded at a time, so that they stay in a cache


class BucketShares(NamedTuple):
    """A bucket that is cut in a share for each rank, of equal blocks; the last ones are padded."""

    start: int
    """Start of the bucket in the flat vector."""
    stop: int
    """Its end there."""
    world: int
    """Number of shares."""
    blocks: int
    """Number of blocks in a share."""
    width: int
    """Number of values in a block."""
    block_nbytes: int
    """Bytes of a block in a message: its head, and the codes of its values."""

    def inside(self, block: int, count: int) -> slice:
        """Returns the position of ``count`` blocks from ``block`` on in the flat vector, without
        padding."""
        start = min(self.start + block * self.width, self.stop)
        return slice(start, min(start + count * self.width, self.stop))


def share_bucket(bucket: Bucket, world: int, block: int, head: int, bits: int) -> BucketShares:
    """Cut ``bucket`` in blocks of about ``block`` values, all of one width.

    The codes of a block fill whole words of four bytes.

    Args:
        bucket: what is cut.
        world: number of shares.
        block: most values in a block, but for those that fill its last word.
        head: number of float32 in front of each block.
        bits: size of each value's code.
    """
    share = _up(bucket.size, world)
    blocks = _up(share, block)
    words = _up(_up(share, blocks) * bits, 32)
    nbytes = VALUE_NBYTES * (head + words)
    return BucketShares(bucket.start, bucket.stop, world, blocks, words * 32 // bits, nbytes)


class TwoPhase(BaseCodec):
    """A code for blocks of values, with error feedback where the class has residuals.

    ``error``: the coding error of this rank's values, added to its next ones. ``server_error``:
    that of the sums that this rank made; zero outside of its share of each bucket.
    """

    head: ClassVar[int] = 0
    """Number of float32 in front of each block."""
    bits: ClassVar[int]
    """Bits of each value's code."""
    block: int
    """Most values in a block."""

    def _set_up(self) -> None:
        self._padding: dict[BucketShares, Tensor] = {}  # results of `_pads`

    @abstractmethod
    def encode(self, values: Tensor, pads: Tensor, heads: Tensor, codes: Tensor) -> None:
        """Encode blocks of values.

        Args:
            values: float32 ``[b, width]``.
            pads: float32 ``[b]``, the number of padding zeros at the end of each block.
            heads: output, float32 ``[b, head]``.
            codes: output, uint8 ``[b, width * bits / 8]``.
        """

    @abstractmethod
    def decode(self, heads: Tensor, codes: Tensor, out: Tensor) -> None:
        """Decode the result of `encode`, equally on every rank; shapes as there."""

    def _cut(self, bucket: Bucket) -> BucketShares:
        return share_bucket(bucket, self._world, self.block, self.head, self.bits)

    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int:
        made = self._cut(bucket)
        share = made.blocks * made.block_nbytes
        spread = all_to_all_nbytes(self._world * share, self._world)
        return spread + all_gather_nbytes(share, self._world)

    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        made = self._cut(bucket)
        total = made.world * made.blocks
        sent, got = (
            self._memory(use, (total, made.block_nbytes), torch.uint8) for use in ("sent", "got")
        )
        for first, count in self._pieces(made, total):
            self._encode_own(grads, made, first, sent[first : first + count])
        ring.all_to_all(got, sent)
        for first, count in self._pieces(made, made.blocks):
            self._encode_sum(got, made, first, sent[first : first + count])
        ring.all_gather(got, sent[: made.blocks])
        for first, count in self._pieces(made, total):
            self._read(got[first : first + count], made, first, grads)

    def _pieces(self, made: BucketShares, blocks: int) -> Iterator[tuple[int, int]]:
        """``blocks`` in runs of (first, count), so that passes over one find it in the cache."""
        behind = device_of(self._device).runs_behind
        step = blocks if behind else max(1, PIECE // made.width)
        for first in range(0, blocks, step):
            yield first, min(step, blocks - first)

    def _encode_own(self, grads: Tensor, made: BucketShares, first: int, out: Tensor) -> None:
        where = made.inside(first, len(out))
        values = self._memory("values", (len(out), made.width), torch.float32)
        inside = values.view(-1)[: _length(where)]
        own = grads[where.start - made.start : where.stop - made.start]
        if "error" in self._residuals:
            torch.add(own, self._residuals["error"][where], out=inside)
        else:
            inside.copy_(own)
        self._encode("error", values, made, first, out)

    def _encode_sum(self, got: Tensor, made: BucketShares, first: int, out: Tensor) -> None:
        """Add up the ranks' messages for the blocks from ``first`` of the own share on."""
        values = self._decode("values", got[first : first + len(out)], made.width)
        for r in range(1, made.world):
            start = r * made.blocks + first
            values += self._decode("read", got[start : start + len(out)], made.width)
        first += self._rank * made.blocks
        if "server_error" in self._residuals:
            residual = self._residuals["server_error"][made.inside(first, len(out))]
            values.view(-1)[: len(residual)] += residual
        self._encode("server_error", values, made, first, out)

    def _encode(
        self, kind: str, values: Tensor, made: BucketShares, first: int, out: Tensor
    ) -> None:
        """Encode blocks from ``first`` of the bucket on, and keep the coding error."""
        where = made.inside(first, len(out))
        size = _length(where)
        values.view(-1)[size:] = 0.0  # padding, whose codes may decode to other values
        heads, codes = self._fields(out)
        self.encode(values, self._pads(made)[first : first + len(out)], heads, codes)
        if kind not in self._residuals:
            return
        read = self._decode("read", out, made.width)
        torch.sub(values.view(-1)[:size], read.view(-1)[:size], out=self._new[kind][where])

    def _read(self, messages: Tensor, made: BucketShares, first: int, grads: Tensor) -> None:
        """Decode blocks from ``first`` on into ``grads``."""
        where = made.inside(first, len(messages))
        out = grads[where.start - made.start : where.stop - made.start]
        if len(out) == len(messages) * made.width:
            self.decode(*self._fields(messages), out.view(len(messages), made.width))
        else:
            out.copy_(self._decode("read", messages, made.width).view(-1)[: len(out)])

    def _pads(self, made: BucketShares) -> Tensor:
        """The number of padding values of each block: float32 ``[world * blocks]``."""
        if made not in self._padding:
            ends = torch.arange(1, made.world * made.blocks + 1, device=self._device) * made.width
            beyond = ends - (made.stop - made.start)
            self._padding[made] = beyond.clamp_(0, made.width).float()
        return self._padding[made]

    def _decode(self, use: str, messages: Tensor, width: int) -> Tensor:
        """Returns the values of blocks, float32 ``[b, width]``, in the memory for ``use``."""
        out = self._memory(use, (len(messages), width), torch.float32)
        self.decode(*self._fields(messages), out)
        return out

    def _fields(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Returns heads and codes of ``messages``, uint8 ``[b, block_nbytes]``."""
        head = VALUE_NBYTES * self.head
        return messages[:, :head].view(torch.float32), messages[:, head:]


def _length(where: slice) -> int:
    return int(where.stop - where.start)


def _up(amount: int, of: int) -> int:
    """``amount / of``, rounded up."""
    return -(-amount // of)
