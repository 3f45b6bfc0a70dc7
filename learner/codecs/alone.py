"""A group of one process that looks like one of many, for timing what a codec computes."""

from __future__ import annotations

from torch import Tensor


class SoloCollective:
    """Stands in for a group of ``world``: the others give what this rank does, at once."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.mul_(self.world)

    def all_reduce_max(self, tensor: Tensor) -> None:
        pass

    def all_to_all(self, out: Tensor, given: Tensor) -> None:
        rows = given.view(self.world, -1)
        out.view(self.world, -1).copy_(rows[self.rank].expand_as(rows))

    def all_gather(self, out: Tensor, given: Tensor) -> None:
        out.view(self.world, -1).copy_(given.reshape(1, -1).expand(self.world, -1))
