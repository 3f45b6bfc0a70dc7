"""Stacks of frames, made on the learner's device from an unroll that stores each frame once.

The frames of an unroll are the newest of every row, and the older ones of its first stack.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.algos.slots import AFTER_ZEROS, BEGINS, OLDER

WORD = 8  # bytes: a GPU takes frames several times faster as words than as bytes


def observations(batch: Mapping[str, Tensor], envs: slice | Tensor) -> Tensor:
    """Returns the observations of all rows of some environments of a batch, as actors saw them.

    ``envs`` selects the environments, by slice or by index. The result is ``[T + 1, E, *shape]``.
    """
    obs = batch["obs"][:, envs]
    if OLDER not in batch:
        return obs
    return stacks(obs, batch[OLDER][envs], batch[BEGINS][:, envs])


def some_observations(batch: Mapping[str, Tensor], most: int | None) -> tuple[Tensor, Tensor]:
    """Returns observations of a batch, and which of them are alive.

    A batch of at most ``most`` steps, or any batch if that is None, is returned whole:
    ``[T + 1, E, *shape]`` and ``[T, E]``. Of a larger one, ``most`` steps before the last row are
    drawn by torch's global random generator: ``[most, *shape]`` and ``[most]``.
    """
    obs = batch["obs"]
    alive = batch["alive"]
    if most is None or alive.numel() <= most:
        return observations(batch, slice(None)), alive

    steps = torch.randint(alive.numel(), (most,)).to(obs.device, non_blocking=True)
    if OLDER in batch:
        drawn = FrameStacks(obs, batch[OLDER], batch[BEGINS]).of(steps)
    else:
        drawn = take_rows(obs.flatten(0, 1), steps)
    return drawn, alive.flatten()[steps]


@torch.no_grad()
def stacks(newest: Tensor, older: Tensor, begins: Tensor) -> Tensor:
    """Returns all stacks of an unroll ``[T + 1, E, K, *frame]``, bit for bit as they were.

    Args:
        newest: the newest frame of each row, ``[T + 1, E, *frame]``.
        older: the other frames of the first row's stack, oldest first, ``[E, K - 1, *frame]``.
        begins: ``[T, E]``, at row t how an episode begins with row t + 1, if one does; its values
            are `penstock.algos.slots.REPEATS` and `AFTER_ZEROS`.
    """
    frame_stacks = FrameStacks(newest, older, begins)
    return frame_stacks.of(slice(None)).view(*newest.shape[:2], *frame_stacks.shape)


class FrameStacks:
    """The stacks of a batch of frames, of which some are made at a time.

    The arguments are those of `stacks`.
    """

    @torch.no_grad()
    def __init__(self, newest: Tensor, older: Tensor, begins: Tensor) -> None:
        envs = newest.shape[1]
        depth = older.shape[1] + 1
        self.shape = (depth, *newest.shape[2:])
        """Shape of one stack, ``[K, *frame]``."""

        # Row 0 is zeros, rows 1 to K - 1 the older frames, row r + K the newest frame of row r.
        frames = torch.cat([torch.zeros_like(newest[:1]), older.transpose(0, 1), newest])
        self._frames = frames.flatten(0, 1)

        # For each step the K indices of its frames in the flat `_frames`.
        index = _frame_rows(begins.long(), depth) + depth
        index.mul_(envs).add_(torch.arange(envs, device=index.device)[:, None])
        self._index = index.flatten(0, 1)

    @torch.no_grad()
    def of(self, steps: slice | Tensor) -> Tensor:
        """Returns the stacks of some steps, ``[B, K, *frame]``.

        A step is given by the index ``row * environments + environment``.
        """
        return take_rows(self._frames, self._index[steps].flatten()).view(-1, *self.shape)


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Returns ``rows[index]`` of a tensor ``[N, ...]``, copied by words where their size allows."""
    flat = rows.reshape(len(rows), -1).contiguous()
    if flat.shape[1] * flat.itemsize % WORD == 0:
        flat = flat.view(torch.int64)
    return flat.index_select(0, index).view(rows.dtype).view(-1, *rows.shape[1:])


def _frame_rows(begins: Tensor, depth: int) -> Tensor:
    """Returns for each stack the rows whose newest frames it consists of, oldest first.

    Args:
        begins: int64 ``[T, E]``, as in `stacks`.
        depth: K, the number of frames in a stack.

    Returns:
        int64 ``[T + 1, E, K]``. Rows -1 down to 1 - K are the older frames of the first stack, and
        -K stands for zeros.
    """
    # For each row, the row of the episode's first frame; 0 where it lies before the unroll.
    rows = torch.arange(len(begins) + 1, device=begins.device)[:, None]
    first = torch.zeros(len(rows), begins.shape[1], dtype=torch.int64, device=begins.device)
    first[1:] = torch.where(begins > 0, rows[1:], 0)
    first = first.cummax(0).values

    # How that episode began; meaningless where `first` is 0.
    beginning = begins.take_along_dim((first - 1).clamp(min=0), 0)
    is_padded = (beginning == AFTER_ZEROS) & (first > 0)

    # A stack ends with the frame of its own row. Frames from before the episode are replaced by the
    # episode's first frame, or by zeros.
    earliest = torch.where(first > 0, first, 1 - depth)[..., None]
    frame_rows = rows[..., None] + torch.arange(1 - depth, 1, device=rows.device)
    is_blank = is_padded[..., None] & (frame_rows < earliest)
    return torch.where(is_blank, -depth, frame_rows.maximum(earliest))
