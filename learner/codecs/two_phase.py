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


def share_bucket(bucket: Bucket, *, world: int, block: int, head: int, bits: int) -> BucketShares:
    """Cut ``bucket`` in blocks of about ``block`` values, all of one width.

    The codes of a block fill whole words of four bytes.

    Args:
        bucket: what is cut.
        world: number of shares.
        block: most values in a block, but for those that fill its last word.
        head: number of float32 in front of each block.
        bits: size of each value's code.
    """
    share_size = _ratio_up(bucket.size, world)
    blocks = _ratio_up(share_size, block)
    words = _ratio_up(_ratio_up(share_size, blocks) * bits, 32)

    return BucketShares(
        start=bucket.start,
        stop=bucket.stop,
        world=world,
        blocks=blocks,
        width=words * 32 // bits,
        block_nbytes=VALUE_NBYTES * (head + words),
    )


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
        """Begin with no paddings computed."""
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

    def _shares(self, bucket: Bucket) -> BucketShares:
        """Returns how a bucket is cut."""
        return share_bucket(
            bucket, world=self._world, block=self.block, head=self.head, bits=self.bits
        )

    def _bucket_nbytes(self, bucket: Bucket, update: int) -> int:
        shares = self._shares(bucket)
        share_nbytes = shares.blocks * shares.block_nbytes
        first_phase = all_to_all_nbytes(self._world * share_nbytes, self._world)
        return first_phase + all_gather_nbytes(share_nbytes, self._world)

    def _reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Sum ``grads`` over ranks, in two phases whose messages are coded."""
        shares = self._shares(bucket)
        blocks = shares.world * shares.blocks
        sent = self._memory("sent", (blocks, shares.block_nbytes), torch.uint8)
        received = self._memory("received", (blocks, shares.block_nbytes), torch.uint8)

        # First phase: each rank gets its share of all ranks' values.
        for piece in self._pieces(shares, blocks):
            self._encode_own(grads, shares, first=piece.start, out=sent[piece])
        ring.all_to_all(received, sent)

        # Second phase: each rank sums its share, and sends the sum to all.
        for piece in self._pieces(shares, shares.blocks):
            self._encode_sum(received, shares, first=piece.start, out=sent[piece])
        ring.all_gather(received, sent[: shares.blocks])
        for piece in self._pieces(shares, blocks):
            self._decode_sum(received[piece], shares, first=piece.start, grads=grads)

    def _pieces(self, shares: BucketShares, blocks: int) -> Iterator[slice]:
        """Yields ``blocks`` blocks in runs, so that several passes over one find it in the cache.

        A device that runs behind its host gets all at once.
        """
        behind = device_of(self._device).runs_behind
        step = blocks if behind else max(1, PIECE // shares.width)
        for first in range(0, blocks, step):
            yield slice(first, min(first + step, blocks))

    def _encode_own(self, grads: Tensor, shares: BucketShares, *, first: int, out: Tensor) -> None:
        """Encode this rank's values of the blocks from ``first`` on into ``out``.

        ``grads`` are those of the bucket; ``out`` is uint8 ``[b, block_nbytes]``.
        """
        where = shares.inside(first, len(out))
        own_values = grads[where.start - shares.start : where.stop - shares.start]
        values = self._memory("values", (len(out), shares.width), torch.float32)
        inside = values.view(-1)[: _length(where)]

        if "error" in self._residuals:
            torch.add(own_values, self._residuals["error"][where], out=inside)
        else:
            inside.copy_(own_values)
        self._encode("error", values, shares, first=first, out=out)

    def _encode_sum(
        self, received: Tensor, shares: BucketShares, *, first: int, out: Tensor
    ) -> None:
        """Add up the ranks' messages for the blocks from ``first`` of the own share on, and encode
        the sums into ``out``."""
        values = self._decode("values", received[first : first + len(out)], shares.width)
        for rank in range(1, shares.world):
            start = rank * shares.blocks + first
            values += self._decode("decoded", received[start : start + len(out)], shares.width)

        first_in_bucket = self._rank * shares.blocks + first
        if "server_error" in self._residuals:
            where = shares.inside(first_in_bucket, len(out))
            residual = self._residuals["server_error"][where]
            values.view(-1)[: len(residual)] += residual
        self._encode("server_error", values, shares, first=first_in_bucket, out=out)

    def _encode(
        self, kind: str, values: Tensor, shares: BucketShares, *, first: int, out: Tensor
    ) -> None:
        """Encode blocks, and keep the coding error in the residual ``kind``, if there is one.

        Args:
            kind: "error" or "server_error".
            values: float32 ``[b, width]``, with anything in the padding.
            shares: how the bucket is cut.
            first: number of the first block in the bucket.
            out: output, uint8 ``[b, block_nbytes]``.
        """
        where = shares.inside(first, len(out))
        size = _length(where)
        values.view(-1)[size:] = 0.0  # padding, whose codes may decode to other values
        heads, codes = self._fields(out)
        self.encode(values, self._pads(shares)[first : first + len(out)], heads, codes)
        if kind not in self._residuals:
            return

        decoded = self._decode("decoded", out, shares.width)
        new_residual = self._new_residuals[kind][where]
        torch.sub(values.view(-1)[:size], decoded.view(-1)[:size], out=new_residual)

    def _decode_sum(
        self, messages: Tensor, shares: BucketShares, *, first: int, grads: Tensor
    ) -> None:
        """Decode blocks from ``first`` of the bucket on into ``grads``, those of the bucket."""
        where = shares.inside(first, len(messages))
        out = grads[where.start - shares.start : where.stop - shares.start]
        if len(out) == len(messages) * shares.width:
            self.decode(*self._fields(messages), out.view(len(messages), shares.width))
        else:  # the last block is padded
            decoded = self._decode("decoded", messages, shares.width)
            out.copy_(decoded.view(-1)[: len(out)])

    def _pads(self, shares: BucketShares) -> Tensor:
        """Returns the number of padding values of each block: float32 ``[world * blocks]``."""
        if shares not in self._padding:
            blocks = torch.arange(1, shares.world * shares.blocks + 1, device=self._device)
            beyond = blocks * shares.width - (shares.stop - shares.start)
            self._padding[shares] = beyond.clamp_(0, shares.width).float()
        return self._padding[shares]

    def _decode(self, use: str, messages: Tensor, width: int) -> Tensor:
        """Returns the values of blocks, float32 ``[b, width]``, in the memory for ``use``."""
        out = self._memory(use, (len(messages), width), torch.float32)
        self.decode(*self._fields(messages), out)
        return out

    def _fields(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Returns heads and codes of ``messages``, uint8 ``[b, block_nbytes]``."""
        head_nbytes = VALUE_NBYTES * self.head
        return messages[:, :head_nbytes].view(torch.float32), messages[:, head_nbytes:]


def _length(where: slice) -> int:
    return int(where.stop - where.start)


def _ratio_up(amount: int, divisor: int) -> int:
    """Returns ``amount / divisor``, rounded up."""
    return -(-amount // divisor)
