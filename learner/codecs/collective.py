"""The bytes that collectives send, and a `core.interfaces.Collective` of one process.

The collective of several processes is `learner.group.collective`.
"""

from __future__ import annotations

from torch import Tensor


def all_reduce_nbytes(nbytes: int, world: int) -> int:
    """Returns the bytes that each rank of a ring sends to sum ``nbytes``.

    Every chunk goes round twice, less one step each time.
    """
    return 2 * (world - 1) * nbytes // world


def all_to_all_nbytes(nbytes: int, world: int) -> int:
    """Returns the bytes that each rank sends of its ``nbytes``: its own row stays."""
    return (world - 1) * nbytes // world


def all_gather_nbytes(nbytes: int, world: int) -> int:
    """Returns the bytes that each rank of a ring sends: its own ``nbytes``, and those that it
    forwards."""
    return (world - 1) * nbytes


class SoloCollective:
    """Stands in for a group of ``world`` ranks, to time the computation of a codec.

    The other ranks give the same values as this one, at once.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.mul_(self.world)

    def all_reduce_max(self, tensor: Tensor) -> None:
        pass

    def all_to_all(self, out: Tensor, given: Tensor) -> None:
        rows = given.view(self.world, -1)
        out.view(self.world, -1).copy_(rows[self.rank].expand_as(rows))

    def all_gather(self, out: Tensor, given: Tensor) -> None:
        out.view(self.world, -1).copy_(given.reshape(1, -1).expand(self.world, -1))
