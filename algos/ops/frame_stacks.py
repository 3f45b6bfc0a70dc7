"""Stacks of frames, made on the learner's device of the frames of an unroll, each of which was
written once: the newest of every row, and before them those that made up the first stack."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.algos.slots import AFTER_ZEROS, BEGINS, OLDER

WORD = 8  # bytes: a GPU takes frames several times faster as words than as bytes


def observations(batch: Mapping[str, Tensor], envs: slice | Tensor) -> Tensor:
    """What actors saw, ``[T + 1, E, *shape]``: all rows of some environments of a batch."""
    obs = batch["obs"][:, envs]
    if OLDER not in batch:
        return obs
    return stacks(obs, batch[OLDER][envs], batch[BEGINS][:, envs])


def some_observations(batch: Mapping[str, Tensor], most: int | None) -> tuple[Tensor, Tensor]:
    """Observations of a batch, and which of them are alive: all, ``[T + 1, E, *shape]`` and
    ``[T, E]``; or if there are more, ``[most, *shape]`` and ``[most]`` of those before the last
    row, drawn by torch's global random generator."""
    obs, alive = batch["obs"], batch["alive"]
    if most is None or alive.numel() <= most:
        return observations(batch, slice(None)), alive
    steps = torch.randint(alive.numel(), (most,)).to(obs.device, non_blocking=True)
    if OLDER in batch:
        seen = FrameStacks(obs, batch[OLDER], batch[BEGINS]).of(steps)
    else:
        seen = take_rows(obs.flatten(0, 1), steps)
    return seen, alive.flatten()[steps]


@torch.no_grad()
def stacks(newest: Tensor, older: Tensor, begins: Tensor) -> Tensor:
    """Stacks ``[T + 1, E, K, *frame]``, bit for bit as they were, of frames ``newest``
    ``[T + 1, E, *frame]`` and ``older`` ``[E, K - 1, *frame]``.

    ``begins`` ``[T, E]`` says at row t how an episode begins with row t + 1, if one does
    (`penstock.algos.slots`).
    """
    made = FrameStacks(newest, older, begins)
    return made.of(slice(None)).view(*newest.shape[:2], *made.shape)


class FrameStacks:
    """The stacks of a batch of frames (see `stacks`), of which some are made at a time."""

    @torch.no_grad()
    def __init__(self, newest: Tensor, older: Tensor, begins: Tensor) -> None:
        envs, depth = newest.shape[1], older.shape[1] + 1
        # Row 0 is zeros, row r + depth the newest frame of row r.
        frames = torch.cat([torch.zeros_like(newest[:1]), older.transpose(0, 1), newest])
        where = _frames_of(begins.long(), depth) + depth
        where.mul_(envs).add_(torch.arange(envs, device=where.device)[:, None])
        self._frames, self._where = frames.flatten(0, 1), where.flatten(0, 1)
        self.shape = (depth, *newest.shape[2:])
        """Of one stack."""

    @torch.no_grad()
    def of(self, steps: slice | Tensor) -> Tensor:
        """Stacks ``[B, K, *frame]`` of some steps, each ``row * environments + environment``."""
        return take_rows(self._frames, self._where[steps].flatten()).view(-1, *self.shape)


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Some rows of a tensor ``[N, ...]``, by words where their size allows it."""
    flat = rows.reshape(len(rows), -1)
    if flat.shape[1] * flat.itemsize % WORD == 0:
        flat = flat.view(torch.int64)
    return flat.index_select(0, index).view(rows.dtype).view(-1, *rows.shape[1:])


def _frames_of(begins: Tensor, depth: int) -> Tensor:
    """Rows whose newest frames make up each stack, ``[T + 1, E, K]``: from -1 down to 1 - K those
    before the unroll, -K zeros."""
    rows = torch.arange(len(begins) + 1, device=begins.device)[:, None]
    first = torch.zeros(len(rows), begins.shape[1], dtype=torch.int64, device=begins.device)
    first[1:] = (begins > 0) * rows[1:]
    first = first.cummax(0).values  # row of the episode's first frame; 0: before the unroll
    how = begins.take_along_dim((first - 1).clamp(min=0), 0)
    limit = torch.where(first > 0, first, 1 - depth)[..., None]
    wanted = rows[..., None] + torch.arange(1 - depth, 1, device=rows.device)
    blank = (how == AFTER_ZEROS) & (first > 0)
    return torch.where(blank[..., None] & (wanted < limit), -depth, wanted.maximum(limit))
