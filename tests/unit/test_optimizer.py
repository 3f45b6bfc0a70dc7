"""The flat optimizer against torch's own classes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.configs.schema import LearnerConfig
from penstock.learner.optimizer import FlatOptimizer, learning_rate

KINDS = ["adam", "rmsprop"]
TORCHS: dict[str, Callable[[Iterable[nn.Parameter], LearnerConfig], torch.optim.Optimizer]] = {
    "adam": lambda p, cfg: torch.optim.Adam(p, lr=cfg.lr, eps=cfg.eps),
    "rmsprop": lambda p, cfg: torch.optim.RMSprop(p, lr=cfg.lr, eps=cfg.eps),
}


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))


def loss_of(net: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 2, 4, 4, generator=generator)
    return net(images).square().sum() * (10 if step % 5 == 0 else 0.1)  # type: ignore[no-any-return]


def train(net: nn.Module, optimizer: FlatOptimizer, steps: range) -> list[Tensor]:
    norms = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step).backward()
        norms.append(optimizer.step(8, env_steps=step))
    return norms


@pytest.mark.parametrize("grad_clip", [None, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_equal_torchs(kind: Any, grad_clip: float | None) -> None:
    cfg = LearnerConfig(optimizer=kind, lr=3e-3, grad_clip=grad_clip)
    net, other = make_net(), make_net()
    norms = train(net, FlatOptimizer(net.parameters(), cfg), range(50))
    reference = TORCHS[kind](other.parameters(), cfg)
    for step in range(50):
        reference.zero_grad()
        (loss_of(other, step) / 8).backward()
        bound = float("inf") if grad_clip is None else grad_clip
        norm = nn.utils.clip_grad_norm_(other.parameters(), bound)
        assert norms[step].item() == pytest.approx(norm.item(), rel=1e-4)
        reference.step()
    assert min(norms) < 0.5 < max(norms)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_parameters_and_gradients_are_views_of_the_flat_vectors() -> None:
    net = make_net()
    before = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    optimizer = FlatOptimizer(net.parameters(), LearnerConfig())
    assert torch.equal(optimizer.values, before)
    loss_of(net, 0).backward()
    once = optimizer.grads.clone()
    loss_of(net, 0).backward()
    assert once.any()
    assert torch.equal(optimizer.grads, 2 * once)  # they add up until zero_grad
    optimizer.step(1, 0)
    assert torch.equal(optimizer.values, nn.utils.parameters_to_vector(net.parameters()))
    assert not torch.equal(optimizer.values, before)
    optimizer.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in net.parameters())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_shows_in_the_norm_and_changes_no_weight(
    kind: Any, bad: float
) -> None:
    net = make_net()
    optimizer = FlatOptimizer(net.parameters(), LearnerConfig(optimizer=kind))
    train(net, optimizer, range(3))
    before = optimizer.values.clone()
    optimizer.grads[5] = bad
    assert not optimizer.step(8, 0).isfinite()
    assert torch.equal(optimizer.values, before)
    assert all(torch.isfinite(torch.from_numpy(a)).all() for a in optimizer.state_dict().values())
    assert train(net, optimizer, range(3, 4))[0].isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_training_is_equal_bit_for_bit(kind: Any) -> None:
    cfg = LearnerConfig(optimizer=kind)
    net, other = make_net(), make_net(seed=1)
    optimizer, resumed = (FlatOptimizer(n.parameters(), cfg) for n in (net, other))
    train(net, optimizer, range(20))
    state = {name: array.copy() for name, array in optimizer.state_dict().items()}
    other.load_state_dict(net.state_dict())
    train(net, optimizer, range(20, 40))
    resumed.load_state_dict(state)
    train(other, resumed, range(20, 40))
    assert torch.equal(optimizer.values, resumed.values)
    for name, array in optimizer.state_dict().items():
        assert (array == resumed.state_dict()[name]).all()


def test_the_state_of_another_optimizer_is_refused() -> None:
    adam, rmsprop = (
        FlatOptimizer(make_net().parameters(), LearnerConfig(optimizer=kind))  # type: ignore[arg-type]
        for kind in KINDS
    )
    with pytest.raises(ValueError, match="rmsprop needs"):
        rmsprop.load_state_dict(adam.state_dict())


def test_learning_rate_falls_linearly_and_stays() -> None:
    assert learning_rate(LearnerConfig(lr=0.5), 10**9) == 0.5
    cfg = LearnerConfig(lr=0.5, lr_end_fraction=0.2, lr_decay_steps=1000)
    rates = [learning_rate(cfg, steps) for steps in (0, 250, 500, 1000, 5000)]
    assert rates == pytest.approx([0.5, 0.4, 0.3, 0.1, 0.1])


def test_the_learning_rate_is_used() -> None:
    cfg = LearnerConfig(lr=0.5, lr_end_fraction=0.0, lr_decay_steps=10)
    net = make_net()
    optimizer = FlatOptimizer(net.parameters(), cfg)
    before = optimizer.values.clone()
    train(net, optimizer, range(10, 11))
    assert torch.equal(optimizer.values, before)


@pytest.mark.parametrize("kind", KINDS)
def test_no_part_of_a_learner_step_imports_dynamo(kind: str) -> None:
    code = f"""
import sys, torch
from penstock.configs.schema import LearnerConfig
from penstock.learner.optimizer import FlatOptimizer
from penstock.models.layout import MlpShape
from penstock.models.torch_nets import build_net
net = build_net(MlpShape(3, 2, (4,), "tanh", 1.0))
optimizer = FlatOptimizer(net.parameters(), LearnerConfig(optimizer="{kind}"))
sum(output.sum() for output in net(torch.ones(1, 3))).backward()
optimizer.step(1, 0)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_steps_the_same(kind: Any) -> None:
    cfg = LearnerConfig(optimizer=kind)
    net, other = make_net(), make_net().cuda()
    optimizer, on_gpu = (FlatOptimizer(n.parameters(), cfg) for n in (net, other))
    for step in range(10):
        for flat, model in ((optimizer, net), (on_gpu, other)):
            flat.zero_grad()
            sum(p.sum() * (step + i) for i, p in enumerate(model.parameters())).backward()  # type: ignore[union-attr]
            flat.step(8, 0)
    torch.testing.assert_close(on_gpu.values.cpu(), optimizer.values)
