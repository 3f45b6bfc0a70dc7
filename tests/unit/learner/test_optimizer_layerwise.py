"""LARS and LAMB: single layers by hand, whole networks against the library."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.configs.sections import LearnerConfig
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer

needs_library = pytest.mark.skipif(
    not importlib.util.find_spec("pytorch_optimizer"),
    reason="the extra 'large' is not installed",
)


def layer(values: list[list[float]] | list[float], **settings: Any) -> FlatOptimizer:
    cfg = LearnerConfig(grad_clip=None, **settings)
    return FlatOptimizer([("w", nn.Parameter(torch.tensor(values)))], cfg)


def steps(optimizer: FlatOptimizer, *gradients: list[float]) -> list[Tensor]:
    """Values after each step by the mean of two samples."""
    seen = []
    for gradient in gradients:
        optimizer.grads[:] = 2 * torch.tensor(gradient)
        optimizer.step(2, 0)
        seen.append(optimizer.values.clone())
    return seen


@needs_library
def test_lars_step_matches_figures_by_hand() -> None:
    optimizer = layer([[3.0, 4.0]], optimizer="lars", lr=10.0, momentum=0.5)
    first, second = steps(optimizer, [0.6, 0.8], [0.0, 2.0])
    # |x| = 5, |g| = 1: u = 0.001 * 5 / 1 * g = (0.003, 0.004)
    assert first.tolist() == pytest.approx([2.97, 3.96])
    # |x| = 4.95, |g| = 2: u = u / 2 + 0.001 * 4.95 / 2 * g = (0.0015, 0.002 + 0.00495)
    assert second.tolist() == pytest.approx([2.955, 3.8905])


@needs_library
def test_lars_step_with_decay_matches_figures_by_hand() -> None:
    optimizer = layer([[3.0, 4.0]], optimizer="lars", lr=10.0, momentum=0.0, weight_decay=0.2)
    (first,) = steps(optimizer, [0.6, 0.8])
    # g + 0.2 x = (1.2, 1.6), times 0.001 * 5 / (1 + 0.2 * 5) = 0.0025
    assert first.tolist() == pytest.approx([2.97, 3.96])


@needs_library
def test_lars_updates_a_bias_like_sgd() -> None:
    optimizer = layer([3.0, 4.0], optimizer="lars", lr=0.1, momentum=0.0, weight_decay=0.2)
    (first,) = steps(optimizer, [0.6, 0.8])
    assert first.tolist() == pytest.approx([2.94, 3.92])


def towers(**settings: Any) -> FlatOptimizer:
    """Two towers of one layer, with weights 3, 4 and 6, 8 and biases of 1."""
    cfg = LearnerConfig(grad_clip=None, **settings)
    weight = torch.tensor([[[3.0], [4.0]], [[6.0], [8.0]]])
    named = [("w.weight", nn.Parameter(weight)), ("w.bias", nn.Parameter(torch.ones(2, 1)))]
    return FlatOptimizer(named, cfg)


@needs_library
def test_lars_has_a_trust_ratio_for_each_tower_and_none_for_a_bias() -> None:
    optimizer = towers(optimizer="lars", lr=10.0, momentum=0.0)
    (first,) = steps(optimizer, [0.6, 0.8, 0.0, 5.0, 0.01, 0.02])
    # 0.001 * 5 / 1 of the first tower's gradient, 0.001 * 10 / 5 of the second's
    expected = [3 - 0.03, 4 - 0.04, 6.0, 8 - 0.1, 1 - 0.1, 1 - 0.2]
    assert first.tolist() == pytest.approx(expected)


@needs_library
def test_lamb_scales_the_step_of_each_tower() -> None:
    optimizer = towers(optimizer="lamb", lr=0.1, eps=1e-12)
    (first,) = steps(optimizer, [1.0, -2.0, 3.0, 4.0, 0.5, -0.5])
    # The first step goes by the signs; its length is 0.1 |x| of each tower's weight or bias.
    of_first, of_second = 0.5 / sqrt(2), 1.0 / sqrt(2)
    expected = [3 - of_first, 4 + of_first, 6 - of_second, 8 - of_second, 0.9, 1.1]
    assert first.tolist() == pytest.approx(expected)


@needs_library
def test_lamb_step_matches_figures_by_hand() -> None:
    optimizer = layer([[3.0, 4.0]], optimizer="lamb", lr=0.1, eps=1e-12)
    first, second = steps(optimizer, [1.0, -2.0], [1.0, 0.0])
    # The first step goes by the signs, at length 0.1 * 5.
    assert first.tolist() == pytest.approx([3 - 0.5 / sqrt(2), 4 + 0.5 / sqrt(2)])
    m = (0.9 * 0.1 + 0.1, 0.9 * -0.2)
    v = (0.999 * 0.001 + 0.001, 0.999 * 0.004)
    r = (m[0] / sqrt(v[0]), m[1] / sqrt(v[1]))
    scale = 0.1 * first.norm().item() / sqrt(r[0] ** 2 + r[1] ** 2)
    expected = [first[0].item() - scale * r[0], first[1].item() - scale * r[1]]
    assert second.tolist() == pytest.approx(expected)


@needs_library
def test_lamb_step_with_decay_matches_figures_by_hand() -> None:
    optimizer = layer([[3.0, 4.0]], optimizer="lamb", lr=0.1, weight_decay=0.5, eps=1e-12)
    (first,) = steps(optimizer, [1.0, -2.0])
    r = (sqrt(10) + 0.5 * 3, -sqrt(10) + 0.5 * 4)  # 0.1 / sqrt(0.001) = sqrt(10)
    scale = 0.1 * 5 / sqrt(r[0] ** 2 + r[1] ** 2)
    assert first.tolist() == pytest.approx([3 - scale * r[0], 4 - scale * r[1]])


@needs_library
def test_trust_ratio_of_lamb_is_bounded_by_ten() -> None:
    optimizer = layer([[300.0, 400.0]], optimizer="lamb", lr=0.1, eps=1e-12)
    (first,) = steps(optimizer, [1.0, -1.0])
    assert first.tolist() == pytest.approx([300 - 1 / sqrt(2), 400 + 1 / sqrt(2)])


def plain(kind: str, net: nn.Module, cfg: LearnerConfig) -> torch.optim.Optimizer:
    import pytorch_optimizer as library

    settings: dict[str, Any] = {"lr": cfg.lr, "weight_decay": cfg.weight_decay}
    optimizer: torch.optim.Optimizer
    if kind == "lars":
        optimizer = library.LARS(net.parameters(), momentum=cfg.momentum, **settings)
    else:
        settings |= {"eps": cfg.eps, "weight_decouple": False, "adam_debias": True}
        optimizer = library.Lamb(net.parameters(), **settings)
    return optimizer


@needs_library
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_twenty_steps_equal_the_librarys(kind: Any, decay: float) -> None:
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 4)))
    cfg = LearnerConfig(optimizer=kind, lr=0.02, weight_decay=decay, grad_clip=None)
    ours = FlatOptimizer(nets[0].named_parameters(), cfg)
    theirs = plain(kind, nets[1], cfg)
    before = ours.values.clone()
    for step in range(20):
        images = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(step))
        ours.zero_grad()
        nets[0](images).square().sum().backward()
        ours.step(8, 0)
        theirs.zero_grad()
        (nets[1](images).square().sum() / 8).backward()
        theirs.step()
    expected = nn.utils.parameters_to_vector(nets[1].parameters())
    assert (expected - before).norm() > 0.01
    torch.testing.assert_close(ours.values, expected, rtol=1e-4, atol=1e-6)


@needs_library
@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_optimizer_moments_are_flat_vectors(kind: Any) -> None:
    net = nn.Linear(3, 2)
    optimizer = FlatOptimizer(net.named_parameters(), LearnerConfig(optimizer=kind, lr=0.1))
    name = {"lars": "momentum_buffer", "lamb": "exp_avg"}[kind]
    optimizer.grads.copy_(torch.arange(8.0))
    optimizer.step(1, 0)
    moment = optimizer.state_dict()[name]
    assert moment.shape == (8,)
    assert (moment != 0).tolist() == [False] + [True] * 7


def test_missing_library_is_named_with_its_install_command() -> None:
    code = """
import sys
sys.modules["pytorch_optimizer"] = None  # as if it were not installed
import torch
from penstock.configs.errors import UserError
from penstock.configs.sections import LearnerConfig
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
try:
    FlatOptimizer(torch.nn.Linear(2, 2).named_parameters(), LearnerConfig(optimizer="lars"))
except UserError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "learner.optimizer lars needs pytorch-optimizer, which is not installed; run pip install "
        "'penstock[large]', or set learner.optimizer=sgd or adam\n"
    )
