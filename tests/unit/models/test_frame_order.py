"""The memory format of frames: the faster one is chosen, and no result changes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from penstock.configs.model import ModelConfig
from penstock.configs.schema import Config
from penstock.configs.value_types import MemoryFormat
from penstock.models.actions import discrete
from penstock.models.compute_form import in_memory_format
from penstock.models.fitting import actor_critic_shape
from penstock.models.frame_order import divides, in_order, kernel_over_depth, space_to_depth
from penstock.models.general import Input
from penstock.models.layout import CnnShape, QCnnShape, SingleHead
from penstock.models.torch_encoders import Encoder, ImpalaEncoder
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [1, 3, 4, 5, 12])
@pytest.mark.parametrize("given", [torch.uint8, torch.float32])
def test_frames_with_any_number_of_channels_are_put_in_channels_last(
    given: torch.dtype, channels: int, dtype: torch.dtype
) -> None:
    frames = torch.randint(256, (3, 2 * channels, 6, 7), dtype=torch.uint8).to(given)[:, ::2]
    found = in_order(frames, dtype, "channels_last")
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
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
            "penstock.models.torch_trunks.in_order", lambda frames, dtype, _: frames.to(dtype)
        )
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("wanted", "expected"), [("auto", True), ("channels_last", True), ("contiguous", False)]
)
def test_the_residual_network_computes_in_channels_last_by_rule(
    wanted: MemoryFormat, expected: bool
) -> None:
    frames = Input("obs", (4, 20, 20), "|u1", part=None, is_image=True)
    net = Encoder([frames], ModelConfig(kind="impala_cnn"), wanted)
    seen: list[bool] = []
    [image] = net.images
    assert isinstance(image, ImpalaEncoder)
    for section in image.sections:
        section.register_forward_hook(lambda _, __, out: seen.append(is_channels_last(out)))
    with torch.no_grad():
        net({"obs": torch.rand(2, 4, 20, 20)})
    assert seen == [expected] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.contiguous_format, torch.channels_last])
def test_explicit_memory_format_is_used(dtype: torch.dtype, given: torch.memory_format) -> None:
    frames = torch.randint(256, (2, 4, 6, 6), dtype=torch.uint8).contiguous(memory_format=given)
    assert is_channels_last(in_order(frames, dtype, "channels_last"))
    assert in_order(frames, dtype, "contiguous").is_contiguous()


def test_the_order_of_a_shape_reaches_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(frames: Tensor, dtype: torch.dtype, wanted: MemoryFormat = "auto") -> Tensor:
        seen.append(wanted)
        return in_order(frames, dtype, wanted)

    for module in ("torch_trunks", "torch_encoders", "normalizer"):
        monkeypatch.setattr(f"penstock.models.{module}.in_order", note)
    plain = CnnShape(4, 36, 36, discrete(6), 1 / 255)
    space = spaces.Box(0, 255, (4, 36, 36), np.uint8)
    game: Any = SimpleNamespace(observation_space=space, action_space=spaces.Discrete(2))
    general = Config.model_validate({"env": {"id": "x"}, "model": {"core": "gru"}})
    for shape in (
        plain,
        replace(plain, normalize=True),
        QCnnShape(4, 36, 36, SingleHead(2), 1 / 255),
    ):
        build_net(in_memory_format(shape, "channels_last"))(torch.zeros(2, 4, 36, 36).byte())
    with_memory = in_memory_format(actor_critic_shape(general, game), "channels_last")
    build_net(with_memory)(torch.zeros(1, 2, 4, 36, 36).byte())
    assert set(seen) == {"channels_last"}
    assert len(seen) == 1 + 3 + 1 + 1


# ---------------------------------------------------------------------------- over blocks of pixels


@pytest.mark.parametrize("given", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_convolution_over_blocks_equals_the_plain_convolution(
    given: torch.dtype, channels: int
) -> None:
    torch.manual_seed(0)
    frames = torch.randint(256, (3, channels, 2 * 20, 24), dtype=torch.uint8).to(given)[:, :, ::2]
    kernel = torch.randn(5, channels, 8, 8, dtype=torch.float64)
    blocks = space_to_depth(frames, torch.float64)
    assert blocks.is_contiguous(memory_format=torch.channels_last)
    found = torch.nn.functional.conv2d(blocks, kernel_over_depth(kernel))
    torch.testing.assert_close(found, torch.nn.functional.conv2d(frames.double(), kernel, stride=4))


def test_only_frames_of_whole_blocks_are_divided() -> None:
    assert divides(84, 84)
    assert divides(96, 64)
    assert not divides(84, 82)
    assert not divides(85, 84)


@pytest.mark.parametrize("size", [84, 86])
def test_network_over_blocks_has_the_gradients_of_one_over_pixels(size: int) -> None:
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
