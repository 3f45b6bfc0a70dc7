"""How a batch of unrolls is divided into minibatches: by environments, or by steps.

By environments a minibatch has whole unrolls, as networks with memory and V-trace need them. By
steps it has any steps of the batch; only an algorithm that computes everything that follows from
the order of steps before the first update (`prepare`) can train on those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.algos.ops.frame_stacks import FrameStacks, take_rows
from penstock.algos.slots import BEGINS, OLDER


class Share(NamedTuple):
    """One minibatch: its environments, or its steps, and the number of agent steps in it."""

    places: slice | Tensor
    """Environments; of a division by steps a tensor of indices, each ``row * environments +
    environment``."""
    steps: int


def deal(alive: npt.NDArray[np.bool_], updates: int, epochs: int) -> list[Share]:
    """Deal the environments of a batch out to ``updates`` equal shares, once for each epoch.

    ``alive`` is ``[T, E]``. The first epoch takes them in their order, without a copy; the others
    by torch's global random generator, which is part of the checkpoint.
    """
    steps = np.count_nonzero(alive, axis=0)
    size = len(steps) // updates
    shares = []
    for first in range(0, size * updates, size):
        envs = slice(first, first + size)
        shares.append(Share(envs, int(steps[envs].sum())))
    for _ in range(epochs - 1):
        if updates == 1:
            shares.append(shares[0])
            continue
        for part in torch.randperm(len(steps)).split(size):
            shares.append(Share(part, int(steps[part.numpy()].sum())))
    return shares


def deal_steps(alive: npt.NDArray[np.bool_], updates: int, epochs: int) -> list[Share]:
    """Deal the steps of a batch out to ``updates`` shares, once for each epoch, by torch's global
    random generator. Their sizes differ by at most one.

    Rows that are not alive are dealt too, so that shapes are the same for each batch.
    """
    flat = alive.reshape(-1)
    return [
        Share(part, int(np.count_nonzero(flat[part.numpy()])))
        for _ in range(epochs)
        for part in torch.randperm(len(flat)).tensor_split(updates)
    ]


def pieces(places: slice | Tensor, size: int) -> Iterator[slice | Tensor]:
    """The environments or steps of a minibatch, at most ``size`` at a time."""
    if isinstance(places, Tensor):
        yield from places.split(size)
        return
    for first in range(places.start, places.stop, size):
        yield slice(first, min(first + size, places.stop))


class BatchSteps:
    """The steps of a batch ``[T(+1), E, ...]``, of which minibatches are gathered."""

    def __init__(self, columns: Mapping[str, Tensor], per_slot: frozenset[str]) -> None:
        """``per_slot`` names the columns that have no rows."""
        shape = columns["alive"].shape
        self._flat = {
            name: tensor.flatten(0, 1)
            for name, tensor in columns.items()
            if name not in per_slot and name != "obs" and tensor.shape[:2] == shape
        }
        obs = columns["obs"]
        self._obs = obs.reshape(-1, *obs.shape[2:])
        self._stacks: FrameStacks | None = None
        if OLDER in columns:
            self._stacks = FrameStacks(obs, columns[OLDER], columns[BEGINS])

    def minibatch(self, steps: Tensor) -> Minibatch:
        """The steps with these indices, as a batch of one row ``[1, B, ...]`` without the
        observations after it."""
        return Minibatch(self, steps)

    def gather(self, name: str, steps: Tensor) -> Tensor:
        """Some steps of one column, ``[1, B, ...]``. Raises KeyError where it is not by steps."""
        if name != "obs":
            return self._flat[name].index_select(0, steps)[None]
        if self._stacks is not None:
            return self._stacks.of(steps)[None]
        return take_rows(self._obs, steps)[None]


class Minibatch(dict[str, Tensor]):
    """Columns of a minibatch by name, each gathered when it is first read."""

    def __init__(self, steps: BatchSteps, places: Tensor) -> None:
        super().__init__()
        self._steps, self._places = steps, places

    def __missing__(self, name: str) -> Tensor:
        self[name] = column = self._steps.gather(name, self._places)
        return column
