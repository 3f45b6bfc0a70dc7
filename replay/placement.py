"""Where the rows of a table lie in its store's memory, and the preset values of a slot."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.specs import SlotSpec
from penstock.replay.errors import ReplayError

Array = npt.NDArray[Any]


def preset(columns: dict[str, Array]) -> None:
    """Set the columns of a fresh slot: every row counts, and the sampler rates it."""
    if "alive" in columns:
        columns["alive"][...] = 1
    if "priority" in columns:
        columns["priority"][...] = np.nan


def place_columns(
    spec: SlotSpec, blocks: dict[str, Array]
) -> tuple[Array, dict[str, Array], dict[str, Array], dict[str, Array]]:
    """Records, big columns, frames and side rows of all slots, by physical row.

    ``blocks`` are those of a store.
    """
    rows = {column.name: column.rows for column in spec.columns}
    columns: dict[str, Array] = {}
    frames: dict[str, Array] = {}
    sides: dict[str, Array] = {}
    places = {"unroll": columns, "unroll+1": frames, "frames": frames, "side": sides}
    for block in spec.blocks:
        if (kind := rows.get(block.name, "")) in places:
            own = block.shape[1:] if kind == "side" else block.shape[2:]
            places[kind][block.name] = blocks[block.name].reshape(-1, *own)
    return blocks["records"].reshape(-1), columns, frames, sides


class FrameRows(NamedTuple):
    """The position of frames: row ``slot * slots + t * steps + env * envs`` of `Table.frames`."""

    slots: int
    steps: int
    envs: int


def frame_rows(spec: SlotSpec) -> FrameRows:
    """Strides of the frames of ``spec``.

    Frames lie by step, as actors fill them, or by environment (rows "frames"), which is fastest to
    sample. Raises ReplayError where one spec has both.
    """
    kinds = {column.rows for column in spec.columns} & {"unroll+1", "frames"}
    if len(kinds) == 2:
        raise ReplayError('columns of rows "unroll+1" and "frames" cannot be mixed; choose one')
    steps = spec.unroll + 1
    by_environment = "frames" in kinds
    strides = (1, steps) if by_environment else (spec.envs, 1)
    return FrameRows(steps * spec.envs, *strides)
