"""Collective calls of a process group, whose failures are a `GroupLostError`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from penstock.learner.codecs.collective import (
    all_gather_nbytes,
    all_reduce_nbytes,
    all_to_all_nbytes,
)
from penstock.learner.sync.gradient_sync import GroupLostError

# A wait is interrupted so often for a look at whether a member is lost.
WATCHED = timedelta(seconds=0.5)


class GroupCollective:
    """The `core.interfaces.Collective` of a torch process ``group`` (gloo or NCCL)."""

    def __init__(self, group: dist.ProcessGroup, is_lost: Callable[[], bool] | None = None) -> None:
        """Make the calls of a group.

        Args:
            group: all ranks of which make the same calls.
            is_lost: a wait ends once this returns true: a host that has lost its power closes no
                connection. Only gloo waits on the host.
        """
        self.group = group
        self.rank = group.rank()
        self.world = group.size()
        self.sent_nbytes = 0
        """The payload that this rank gave to the network so far, by the algorithms that gloo and
        NCCL use (see `all_reduce_nbytes`, `all_to_all_nbytes`, `all_gather_nbytes`)."""
        self._is_lost = is_lost

    def all_reduce(self, tensor: Tensor) -> None:
        self._reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: Tensor) -> None:
        self._reduce(tensor, dist.ReduceOp.MAX)

    def all_to_all(self, out: Tensor, given: Tensor) -> None:
        self.sent_nbytes += all_to_all_nbytes(given.nbytes, self.world)
        with as_group_lost("all-to-all"):
            self._wait(self.group.alltoall_base(out.view(-1), given.view(-1), [], []))

    def all_gather(self, out: Tensor, given: Tensor) -> None:
        self.sent_nbytes += all_gather_nbytes(given.nbytes, self.world)
        with as_group_lost("all-gather"):
            self._wait(self.group._allgather_base(out.view(-1), given.view(-1)))

    def _reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self.sent_nbytes += all_reduce_nbytes(tensor.nbytes, self.world)
        options = dist.AllreduceOptions()
        options.reduceOp = op  # type: ignore[assignment]
        with as_group_lost("all-reduce"):
            self._wait(self.group.allreduce([tensor], options))

    def _wait(self, work: dist.Work) -> None:
        """Wait for a collective call to complete.

        Raises:
            GroupLostError: a member is lost.
            RuntimeError: the call has failed.
        """
        if self._is_lost is None:
            work.wait()
            return

        while True:
            try:
                work.wait(WATCHED)
                return
            except RuntimeError:
                # Either the wait was interrupted, or the call has failed or completed just now.
                if work.is_completed():
                    work.wait()
                    return

            if self._is_lost():
                raise GroupLostError("a member has ended, or its host does not answer")


@contextmanager
def as_group_lost(what: str, *also: type[Exception]) -> Iterator[None]:
    """Turn exceptions of torch for a member that is gone or late into a `GroupLostError`.

    Args:
        what: the call that is surrounded, for the message.
        also: further types, raised where the store holds other values than a member wrote.
    """
    failure = ""
    types: tuple[type[Exception], ...] = (RuntimeError, *also)
    try:
        yield
    except types as error:
        failure = str(error).strip() or type(error).__name__

    # It is not raised "from" the exception, whose traceback would hold the process group, and so
    # the connections, open.
    if failure:
        raise GroupLostError(f"{what} failed: {failure.splitlines()[0]}")
