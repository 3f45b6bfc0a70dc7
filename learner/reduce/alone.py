"""A group of one process that looks like one of many, for timing what a codec computes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from penstock.learner.reduce.collective import Collective


class Alone(Collective):
    """Stands in for a group of ``world``: the others give what this rank does, at once."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.sent_nbytes = rank, world, 0
        self.group = _Group(world)  # type: ignore[assignment]  # what torch's own hooks use of it

    def all_reduce(self, values: Tensor) -> None:
        values.mul_(self.world)

    def all_reduce_max(self, values: Tensor) -> None:
        pass

    def all_to_all(self, out: Tensor, given: Tensor) -> None:
        rows = given.view(self.world, -1)
        out.view(self.world, -1).copy_(rows[self.rank].expand_as(rows))

    def all_gather(self, out: Tensor, given: Tensor) -> None:
        out.view(self.world, -1).copy_(given.reshape(1, -1).expand(self.world, -1))


class _Group:
    def __init__(self, world: int) -> None:
        self._world = world

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> _Done:
        for tensor in tensors:
            tensor.mul_(self._world)
        return _Done(tensors)


class _Done:
    """Work that is over."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._future: Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)

    def get_future(self) -> Future[list[Tensor]]:
        return self._future

    def wait(self) -> bool:
        return True
