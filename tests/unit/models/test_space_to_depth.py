"""The first convolution over blocks of pixels is that over pixels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from penstock.models.actions import discrete
from penstock.models.layout import CnnShape
from penstock.models.space_to_depth import divides, kernel_over_depth, space_to_depth
from penstock.models.torch_nets import build_net


@pytest.mark.parametrize("given", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_a_convolution_over_blocks_is_the_convolution(given: torch.dtype, channels: int) -> None:
    torch.manual_seed(0)
    frames = torch.randint(256, (3, channels, 2 * 20, 24), dtype=torch.uint8).to(given)[:, :, ::2]
    kernel = torch.randn(5, channels, 8, 8, dtype=torch.float64)
    blocks = space_to_depth(frames, torch.float64)
    assert blocks.is_contiguous(memory_format=torch.channels_last)
    found = F.conv2d(blocks, kernel_over_depth(kernel))
    torch.testing.assert_close(found, F.conv2d(frames.double(), kernel, stride=4))


def test_frames_of_whole_blocks_alone_are_divided() -> None:
    assert divides(84, 84)
    assert divides(96, 64)
    assert not divides(84, 82)
    assert not divides(85, 84)


@pytest.mark.parametrize("size", [84, 86])
def test_a_network_over_blocks_has_the_gradients_of_one_over_pixels(size: int) -> None:
    """In bfloat16, so up to the rounding of its products; 86 is not divided."""
    frames = torch.randint(256, (16, 4, size, size), dtype=torch.uint8)
    found = []
    for order in ("contiguous", "channels_last"):
        torch.manual_seed(0)
        shape = CnnShape(4, size, size, discrete(6), 1 / 255, memory_format=order)
        net = build_net(shape, torch.bfloat16)
        outputs, values = net(frames)
        loss = outputs.square().sum() + values.square().sum()
        found.append([outputs.detach(), *torch.autograd.grad(loss, list(net.parameters()))])
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= 0.03 * one.norm() + 1e-6
