"""Running statistics of observations, against numpy over all of them at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from net_weights import flat_of
from penstock.models.acting.numpy_mlp import NumpyMlp
from penstock.models.actions import discrete
from penstock.models.layout import CnnShape, MlpShape
from penstock.models.normalizer import LEAST_LEVELS, FrameNormalizer, Normalizer
from penstock.models.torch_nets import build_net

SHAPE = MlpShape(3, discrete(2), (8,), "tanh", 1.0, normalize=True)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Observations ``[T + 1, E, 3]`` far from 0, and which rows are alive."""
    rng = np.random.default_rng(0)
    scale, shift = np.array([1.0, 100.0, 1e-3]), np.array([50.0, -2000.0, 0.0])
    return [
        (
            torch.from_numpy((rng.normal(size=(9, 4, 3)) * scale + shift + i).astype(np.float32)),
            torch.from_numpy(rng.random((8, 4)) < 0.8),
        )
        for i in range(count)
    ]


def alive_rows(seen: list[tuple[Tensor, Tensor]]) -> np.ndarray[Any, Any]:
    return np.concatenate([obs[:-1][alive].double().numpy() for obs, alive in seen])


def test_statistics_are_over_all_alive_rows() -> None:
    net, seen = build_net(SHAPE), batches(5)
    for obs, alive in seen:
        net.observe(obs, alive)
    rows = alive_rows(seen)
    assert net.normalizer is not None
    np.testing.assert_allclose(net.normalizer.mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(net.normalizer.var, rows.var(0), rtol=1e-4)
    assert net.normalizer.count.item() == len(rows)


def test_two_learners_have_the_statistics_of_one() -> None:
    """Each adds the sums of the other, and both go on from the same statistics."""
    first, second = batches(2)
    nets = [build_net(SHAPE) for _ in range(2)]
    asked: list[Tensor] = []

    def note(sums: Tensor) -> None:
        asked.append(sums.clone())

    for net, (obs, alive) in zip(nets, (first, second), strict=True):
        build_net(SHAPE).observe(obs, alive, note)
        assert net.normalizer is not None
    for i, (net, (obs, alive)) in enumerate(zip(nets, (first, second), strict=True)):
        net.observe(obs, alive, lambda sums, other=asked[1 - i]: sums.add_(other))  # type: ignore[misc]
    rows = alive_rows([first, second])
    for net in nets:
        assert net.normalizer is not None
        np.testing.assert_allclose(net.normalizer.mean, rows.mean(0), rtol=1e-5)
        assert net.normalizer.count.item() == len(rows)


def test_batch_without_alive_rows_does_not_change_statistics() -> None:
    net, ((obs, alive),) = build_net(SHAPE), batches(1)
    net.observe(obs, alive)
    before = [buffer.clone() for buffer in net.buffers()]
    net.observe(obs, torch.zeros_like(alive))
    for buffer, old in zip(net.buffers(), before, strict=True):
        torch.testing.assert_close(buffer, old)


@pytest.mark.parametrize("outlier", [1e20, -3e38])
@pytest.mark.parametrize("first", [False, True])
def test_statistics_recover_from_an_outlier(outlier: float, first: bool) -> None:
    """Noise of mean 2 and deviation 3 is normalised as such again, soon after."""
    rng = np.random.default_rng(0)
    normalizer, alive = Normalizer(1), torch.ones(5_000, dtype=torch.bool)
    for i in range(40):
        rows = torch.from_numpy(rng.normal(2, 3, (5_000, 1)).astype(np.float32))
        if i == (0 if first else 20):
            rows[7] = outlier
        normalizer.observe(rows, alive)
        assert torch.isfinite(normalizer.var)
    np.testing.assert_allclose(normalizer.mean, 2, atol=0.1)
    np.testing.assert_allclose(normalizer.var.sqrt(), 3, rtol=0.2)


def test_statistics_follow_a_growing_value() -> None:
    """Always 0 for long, then far beyond what bounds an outlier: of the last two in three batches
    it is 1e6."""
    normalizer, alive = Normalizer(1), torch.ones(64, dtype=torch.bool)
    for i in range(300):
        normalizer.observe(torch.full((64, 1), 0.0 if i < 100 else 1e6), alive)
    np.testing.assert_allclose(normalizer.mean, 2e6 / 3, rtol=0.05)
    np.testing.assert_allclose(normalizer.var.sqrt(), 1e6 * (2 / 9) ** 0.5, rtol=0.05)


def test_numbers_are_shifted_scaled_and_clipped() -> None:
    normalizer = Normalizer(2)
    rows = torch.tensor([[0.5, -3.0], [70.0, -1e9]])
    torch.testing.assert_close(normalizer(rows), torch.tensor([[0.5, -3.0], [10.0, -10.0]]))
    normalizer.mean.copy_(torch.tensor([1.0, -1.0]))
    normalizer.var.copy_(torch.tensor([4.0, 0.25]))
    expected = torch.tensor([[-0.25, -4.0], [10.0, -10.0]])
    torch.testing.assert_close(normalizer(rows), expected)


@pytest.mark.parametrize("rounds", [0, 3])
def test_numpy_normalizes_as_torch_does(rounds: int) -> None:
    torch.manual_seed(0)
    net = build_net(SHAPE)
    torch.nn.init.normal_(net.policy.weight)
    seen = batches(4)
    for obs, alive in seen[:rounds]:
        net.observe(obs, alive)
    flat = flat_of(net)
    assert flat.size == SHAPE.layout.size
    outputs = np.empty((2, 4), np.float32)
    network = NumpyMlp(SHAPE, outputs)
    network.load(flat)
    network.forward(seen[3][0][0].numpy())
    with torch.no_grad():
        expected = net(seen[3][0][:1])[0]
    np.testing.assert_allclose(outputs.T, expected, rtol=1e-4, atol=1e-4)


def frames(count: int, seed: int = 0) -> Tensor:
    """Bytes ``[count, 4, 36, 36]``: a background, and a bright square that moves."""
    rng = np.random.default_rng(seed)
    made = np.tile(rng.integers(80, 120, (4, 36, 36), dtype=np.uint8), (count, 1, 1, 1))
    for frame, (row, column) in zip(made, rng.integers(0, 34, (count, 2)), strict=True):
        frame[:, row : row + 2, column : column + 2] = 236
    return torch.from_numpy(made)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.04)])
def test_frames_are_normalised_pixel_by_pixel(dtype: torch.dtype, atol: float) -> None:
    normalizer, seen = FrameNormalizer(4 * 36 * 36), frames(200)
    normalizer.observe(seen.flatten(1), torch.ones(200, dtype=torch.bool))
    pixels = seen.numpy().astype(np.float64)
    deviation = np.sqrt(pixels.var(0) + LEAST_LEVELS**2)
    expected = ((pixels - np.round(pixels.mean(0))) / deviation).clip(-10, 10)
    found = normalizer.frames(seen, dtype)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.float().numpy(), expected, atol=atol, rtol=0.01)


def test_frames_of_floats_are_normalised_as_numbers_are() -> None:
    rows = torch.randn(50, 3, 36, 36) * 3 + 1
    normalizer, numbers = FrameNormalizer(3 * 36 * 36), Normalizer(3 * 36 * 36)
    for each in (normalizer, numbers):
        each.observe(rows.flatten(1), torch.ones(50, dtype=torch.bool))
    torch.testing.assert_close(
        normalizer.frames(rows, torch.float32).flatten(1), numbers(rows.flatten(1))
    )


def test_bytes_are_scaled_to_1_before_any_observation() -> None:
    found = FrameNormalizer(4 * 36 * 36).frames(frames(3), torch.float32)
    torch.testing.assert_close(found, frames(3).float() / 255)


def test_a_cnn_sees_normalised_frames() -> None:
    shape = CnnShape(4, 36, 36, discrete(2), 1.0, normalize=True)
    torch.manual_seed(0)
    net = build_net(shape)
    plain = build_net(CnnShape(4, 36, 36, discrete(2), 1.0))
    plain.load_state_dict(net.state_dict(), strict=False)
    obs = frames(64).view(8, 8, 4, 36, 36)
    net.observe(obs, torch.ones(8, 8, dtype=torch.bool))
    assert isinstance(net.normalizer, FrameNormalizer)
    seen = net.normalizer.frames(obs.flatten(0, 1), torch.float32)
    for found, expected in zip(net(obs), plain(seen), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_frames_are_normalised_on_a_gpu_as_on_a_cpu() -> None:
    seen, alive = frames(64), torch.ones(64, dtype=torch.bool)
    here, there = FrameNormalizer(4 * 36 * 36), FrameNormalizer(4 * 36 * 36).to("cuda")
    here.observe(seen.flatten(1), alive)
    there.observe(seen.flatten(1).to("cuda"), alive.to("cuda"))
    for dtype in (torch.float32, torch.bfloat16):
        found = there.frames(seen.to("cuda"), dtype).cpu()
        torch.testing.assert_close(found, here.frames(seen, dtype), rtol=0.02, atol=0.05)
