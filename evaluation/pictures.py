"""Pictures for a video: of observations, where a game does not draw itself; and their size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.observations import views
from penstock.envs import EnvInfo

Picture = npt.NDArray[np.uint8]

LEAST_HEIGHT = 320  # smaller ones are enlarged by a whole number
LEAST_SIDE = 8  # of what is taken for a picture
COLOURS = 3


def drawn(info: EnvInfo, observation: npt.NDArray[Any]) -> list[Picture]:
    """What a policy sees, as pictures ``[H, W, 3]``: the newest frame, of the first part that is
    one; nothing where none is."""
    found = views(info.parts, observation) if info.parts else {"": observation}
    for array in found.values():
        picture = _picture(array)
        if picture is not None:
            return [picture]
    return []


def enlarged(pictures: list[Picture]) -> list[Picture]:
    """Large enough to look at, of even sides, which a video must have."""
    return [_even(_grown(picture)) for picture in pictures]


def _picture(array: npt.NDArray[Any]) -> Picture | None:
    """``[H, W]``, ``[H, W, 1 or 3]``, ``[frames, H, W]`` or ``[frames, H, W, 3]``, of uint8."""
    if array.dtype != np.uint8 or array.ndim not in (2, 3, 4):
        return None
    if array.ndim == 4 or (array.ndim == 3 and array.shape[-1] not in (1, COLOURS)):
        array = array[-1]
    if min(array.shape[:2]) < LEAST_SIDE:
        return None
    if array.ndim == 2:
        array = array[..., None]
    if array.shape[-1] not in (1, COLOURS):
        return None
    return np.broadcast_to(array, (*array.shape[:2], COLOURS))


def _grown(picture: Picture) -> Picture:
    factor = math.ceil(LEAST_HEIGHT / picture.shape[0])
    return picture.repeat(factor, 0).repeat(factor, 1) if factor > 1 else picture


def _even(picture: Picture) -> Picture:
    height, width = picture.shape[:2]
    if not height % 2 and not width % 2:
        return picture
    return np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)))
