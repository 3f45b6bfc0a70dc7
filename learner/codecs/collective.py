"""The `core.interfaces.Collective` of a process group, and a stand-in of one process."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


class GroupCollective:
    """The `core.interfaces.Collective` of a torch process ``group`` (gloo or NCCL).

    ``sent_nbytes`` adds up the payload that this rank gave to the network, by the algorithms that
    gloo and NCCL use (see `all_reduce_nbytes`, `all_to_all_nbytes`, `all_gather_nbytes`).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.world = group.size()
        self.sent_nbytes = 0

    def all_reduce(self, tensor: Tensor) -> None:
        self._reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._reduce(tensor, dist.ReduceOp.MAX)

    def all_to_all(self, out: Tensor, given: Tensor) -> None:
        self.sent_nbytes += all_to_all_nbytes(given.nbytes, self.world)
        self._wait(self.group.alltoall_base(out.view(-1), given.view(-1), [], []))

    def all_gather(self, out: Tensor, given: Tensor) -> None:
        self.sent_nbytes += all_gather_nbytes(given.nbytes, self.world)
        self._wait(self.group._allgather_base(out.view(-1), given.view(-1)))

    def _reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self.sent_nbytes += all_reduce_nbytes(tensor.nbytes, self.world)
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        self._wait(self.group.allreduce([tensor], options))

    def _wait(self, work: dist.Work) -> None:
        work.wait()


def all_reduce_nbytes(nbytes: int, world: int) -> int:
    """Bytes sent by each rank of a ring: every chunk goes round twice, less one step each time."""
    return 2 * (world - 1) * nbytes // world


def all_to_all_nbytes(nbytes: int, world: int) -> int:
    """Bytes sent by each rank: its own row stays."""
    return (world - 1) * nbytes // world


def all_gather_nbytes(nbytes: int, world: int) -> int:
    """Bytes sent by each rank of a ring: its own ``nbytes``, and those that it forwards."""
    return (world - 1) * nbytes


class SoloCollective:
    """Stands in for a group of ``world`` ranks, to time the computation of a codec.

    The other ranks give the same values as this one, at once.
    """

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
