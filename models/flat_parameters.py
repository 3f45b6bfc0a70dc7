"""Parameters of a network as views of one flat vector."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def flatten(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Move parameters into one vector and return it; each parameter becomes a view of it."""
    listed = list(parameters)
    vector = torch.cat([parameter.flatten() for parameter in listed])
    for parameter, values in zip(listed, split(vector, listed), strict=True):
        parameter.data = values.view(parameter.shape)
    return vector


def split(vector: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor, ...]:
    """Returns the part of each parameter in a vector that is laid out like them."""
    return tuple(vector.split([parameter.numel() for parameter in parameters]))
