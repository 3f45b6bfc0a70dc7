"""What tests of networks need of any module: its vector, its layout, and weights of no kind."""

from __future__ import annotations

import torch
from torch import nn

from penstock.core.params import Float32, ParamLayout


def flat_of(net: nn.Module) -> Float32:
    """Returns parameters, then buffers, in one vector, as they are published."""
    tensors = (*net.parameters(), *net.buffers())
    flat: Float32 = torch.cat([tensor.detach().flatten() for tensor in tensors]).numpy()
    return flat


def layout_of(net: nn.Module) -> ParamLayout:
    """Returns the layout of that vector."""
    tensors = (*net.named_parameters(), *net.named_buffers())
    return ParamLayout(tuple((name, tuple(tensor.shape)) for name, tensor in tensors))


def shake(net: nn.Module, scale: float = 0.1, seed: int = 1) -> None:
    """Move all parameters by noise, so that nothing in them is special."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=rng))
