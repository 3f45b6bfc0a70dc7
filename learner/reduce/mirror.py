"""What coding costs, without a network."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from penstock.learner.reduce.codec import Codec
from penstock.learner.reduce.collective import Collective


class Mirror(Collective):
    """A group of ``world`` ranks, all of which give what this one gives, at once."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.sent_nbytes = rank, world, 0

    def all_reduce(self, tensor: Tensor) -> None:
        tensor *= self.world

    def all_reduce_max(self, tensor: Tensor) -> None:
        pass

    def all_to_all(self, out: Tensor, given: Tensor) -> None:
        shares = given.view(self.world, -1)
        out.view(self.world, -1).copy_(shares[self.rank].expand_as(shares))

    def all_gather(self, out: Tensor, given: Tensor) -> None:
        out.view(self.world, -1).copy_(given.view(1, -1))


def coding_s(codec: Codec, gradient: Tensor, ring: Mirror, update: int) -> float:
    """Seconds in which one rank encodes and decodes everything of one update.

    On a CPU it is the time of this thread, in which nobody else's work counts. ``gradient``:
    float32 ``[size]``; left as it is.
    """
    is_cuda = gradient.is_cuda
    clock = time.perf_counter if is_cuda else time.thread_time
    work = gradient.clone()
    if is_cuda:
        torch.cuda.synchronize(gradient.device)
    began_s = clock()
    codec.begin(update)
    for bucket in codec.buckets:
        codec.reduce(bucket, work[bucket.start : bucket.stop], ring)
    if is_cuda:
        torch.cuda.synchronize(gradient.device)
    return clock() - began_s
