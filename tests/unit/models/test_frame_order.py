"""The order of frames in memory: the faster one is chosen, and changes no result."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.models.actions import discrete
from penstock.models.frame_order import in_order
from penstock.models.layout import CnnShape
from penstock.models.torch_encoders import ImpalaEncoder
from penstock.models.torch_nets import build_net


def is_channels_last(frames: Tensor) -> bool:
    return frames.is_contiguous(memory_format=torch.channels_last) and not frames.is_contiguous()


@pytest.mark.parametrize(
    ("dtype", "training", "expected"),
    [(torch.float32, True, True), (torch.float32, False, False), (torch.bfloat16, True, False)],
)
def test_float32_is_trained_in_channels_last(
    dtype: torch.dtype, training: bool, expected: bool
) -> None:
    frames = torch.randint(256, (2, 4, 6, 6), dtype=torch.uint8)
    with torch.set_grad_enabled(training):
        found = in_order(frames, dtype)
    assert found.dtype == dtype
    assert is_channels_last(found) == expected
    assert torch.equal(found, frames.to(dtype))


def test_the_order_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = build_net(CnnShape(4, 84, 84, discrete(6), 1 / 255))
    frames = torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8)
    found = []
    for _ in range(2):
        outputs, values = net(frames)
        loss = outputs.square().sum() + values.square().sum()
        found.append([outputs.detach(), *torch.autograd.grad(loss, list(net.parameters()))])
        monkeypatch.setattr(
            "penstock.models.torch_trunks.in_order", lambda frames, dtype: frames.to(dtype)
        )
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_the_residual_network_computes_in_channels_last() -> None:
    net = ImpalaEncoder(4, 20, 20)
    seen: list[bool] = []
    for section in net.sections:
        section.register_forward_hook(lambda _, __, out: seen.append(is_channels_last(out)))
    with torch.no_grad():
        net(torch.rand(2, 4, 20, 20))
    assert seen == [True, True, True]
