"""How a batch of unrolls is divided into minibatches: by environments, or by steps.

By environments a minibatch has whole unrolls, as networks with memory and V-trace need them. By
steps it has any steps of the batch; only an algorithm that computes everything that follows from
the order of steps before the first update (`prepare`) can train on those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.algos.ops.frame_stacks import FrameStacks, take_rows
from penstock.algos.slots import BEGINS, OLDER
from penstock.core.interfaces import Share
from penstock.device.transfers import DeviceUploader


def deal(alive: npt.NDArray[np.bool_], updates: int, epochs: int) -> list[Share]:
    """Deal the environments of a batch out to ``updates`` equal shares, once for each epoch.

    The first epoch takes them in their order, without a copy; the others by torch's global random
    generator, which is part of the checkpoint.

    Args:
        alive: which rows are agent steps, bool ``[T, E]``.
        updates: shares of an epoch.
        epochs: how often each environment is dealt.

    Returns:
        ``updates * epochs`` shares.
    """
    envs = alive.shape[1]
    size = envs // updates
    shares = []
    for first in range(0, size * updates, size):
        places = slice(first, first + size)
        shares.append(Share(places, int(np.count_nonzero(alive[:, places]))))
    if updates == 1:
        return shares * epochs

    steps_by_env = np.count_nonzero(alive, axis=0)
    for _ in range(epochs - 1):
        for places in torch.randperm(envs).split(size):
            shares.append(Share(places, int(steps_by_env[places.numpy()].sum())))
    return shares


def deal_steps(alive: npt.NDArray[np.bool_], updates: int, epochs: int) -> list[Share]:
    """Deal the steps of a batch out to ``updates`` shares, once for each epoch.

    Their order is drawn by torch's global random generator, and their sizes differ by at most one.
    Rows that are not alive are dealt too, so that shapes are the same for each batch.

    Args:
        alive: which rows are agent steps, bool ``[T, E]``.
        updates: shares of an epoch.
        epochs: how often each step is dealt.

    Returns:
        ``updates * epochs`` shares, which have an order.
    """
    is_step = alive.reshape(-1)
    bounds = [len(is_step) * update // updates for update in range(updates + 1)]
    shares = []
    for _ in range(epochs):
        order = torch.randperm(len(is_step))
        is_step_in_order = is_step[order.numpy()]
        for part in map(slice, bounds, bounds[1:]):
            shares.append(Share(part, int(np.count_nonzero(is_step_in_order[part])), order))
    return shares


def pieces(places: slice | Tensor, size: int) -> Iterator[slice | Tensor]:
    """Yields the places of a minibatch, at most ``size`` at a time."""
    if isinstance(places, Tensor):
        yield from places.split(size)
        return
    for first in range(places.start, places.stop, size):
        yield slice(first, min(first + size, places.stop))


class BatchSteps:
    """The steps of a batch ``[T(+1), E, ...]`` in the order of an epoch.

    A column is gathered once for each epoch, so that minibatches are parts of it. Stacks of frames
    are made for one minibatch at a time.
    """

    def __init__(
        self, columns: Mapping[str, Tensor], per_slot: frozenset[str], uploader: DeviceUploader
    ) -> None:
        """``per_slot`` names the columns that have no rows."""
        shape = columns["alive"].shape
        self._flat = {
            name: tensor.flatten(0, 1)
            for name, tensor in columns.items()
            if name not in per_slot and name != "obs" and tensor.shape[:2] == shape
        }
        """The columns ``[T * E, ...]``, without observations."""

        obs = columns["obs"]
        self._obs = obs.reshape(-1, *obs.shape[2:])
        """Observations ``[(T + 1) * E, ...]``, or single frames if stacks are made of them."""
        self._stacks: FrameStacks | None = None
        if OLDER in columns:
            self._stacks = FrameStacks(obs, columns[OLDER], columns[BEGINS])

        self._uploader = uploader
        self._order: Tensor | None = None
        """The order of the present epoch, as its shares have it."""
        self._device_order = torch.empty(0, dtype=torch.int64)
        """The same on the device of the columns."""
        self._ordered: dict[str, Tensor] = {}
        """The columns that were gathered in this order."""

    def set_order(self, order: Tensor) -> None:
        """Begin the epoch of this ``order``, if it has not begun yet."""
        if order is not self._order:
            self._order = order
            self._ordered = {}
            self._device_order = self._uploader.send(
                {"order": order.numpy()}
            ).tensors_on_current_stream()["order"]

    def gather(self, name: str, part: slice) -> Tensor:
        """Returns a part of one column, ``[1, B, ...]``. Raises KeyError if it is not by steps."""
        if name == "obs" and self._stacks is not None:
            return self._stacks.of(self._device_order[part])[None]

        if name not in self._ordered:
            rows = self._obs if name == "obs" else self._flat[name]
            self._ordered[name] = take_rows(rows, self._device_order)
        return self._ordered[name][None, part]


class Minibatch(dict[str, Tensor]):
    """A part of an epoch as a batch of one row ``[1, B, ...]``, without the observations after it.

    Each column is gathered when it is first read.
    """

    def __init__(self, steps: BatchSteps, part: slice) -> None:
        super().__init__()
        self._steps = steps
        self._part = part

    def __missing__(self, name: str) -> Tensor:
        self[name] = column = self._steps.gather(name, self._part)
        return column
