"""The flat optimizer against torch's optimizers, and its learning rate by hand."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.configs.reduce import ReduceConfig
from penstock.configs.schedules import constant
from penstock.configs.sections import LearnerConfig
from penstock.core.interfaces import GradientPart
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer, learning_rate

KINDS = ["adam", "adamw", "rmsprop", "sgd"]
LARGE = ["lars", "lamb"]
TORCHS: dict[str, Callable[[Iterable[nn.Parameter], LearnerConfig], torch.optim.Optimizer]] = {
    "adam": lambda p, cfg: torch.optim.Adam(p, lr=constant(cfg.lr), eps=cfg.eps),
    "adamw": lambda p, cfg: torch.optim.AdamW(
        [
            {"params": [each], "weight_decay": cfg.weight_decay if each.ndim > 1 else 0.0}
            for each in p
        ],
        lr=constant(cfg.lr),
        eps=cfg.eps,
    ),
    "rmsprop": lambda p, cfg: torch.optim.RMSprop(p, lr=constant(cfg.lr), eps=cfg.eps),
    "sgd": lambda p, cfg: torch.optim.SGD(
        p, lr=constant(cfg.lr), momentum=cfg.momentum, weight_decay=cfg.weight_decay
    ),
}


def flat(net: nn.Module, kind: Any = "adam", **settings: Any) -> FlatOptimizer:
    if kind in LARGE:
        pytest.importorskip("pytorch_optimizer", reason="the extra 'large' is not installed")
    return FlatOptimizer(net.named_parameters(), LearnerConfig(optimizer=kind, **settings))


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
    decay = 0.3 if kind == "adamw" else 0.0
    cfg = LearnerConfig(optimizer=kind, lr=3e-3, grad_clip=grad_clip, weight_decay=decay)
    net, other = make_net(), make_net()
    norms = train(net, FlatOptimizer(net.named_parameters(), cfg), range(50))
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


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_sgd_of_each_momentum_and_decay_equals_torchs(momentum: float, decay: float) -> None:
    cfg = LearnerConfig(optimizer="sgd", lr=1e-2, momentum=momentum, weight_decay=decay)
    net, other = make_net(), make_net()
    norms = train(net, FlatOptimizer(net.named_parameters(), cfg), range(20))
    reference = TORCHS["sgd"](other.parameters(), cfg)
    for step in range(20):
        reference.zero_grad()
        (loss_of(other, step) / 8).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        reference.step()
    assert min(norms) < 0.5 < max(norms)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_adamw_without_decay_is_adam() -> None:
    net, other = make_net(), make_net()
    train(net, flat(net, "adamw"), range(10))
    train(other, flat(other, "adam"), range(10))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_adamw_decays_weights_and_no_biases() -> None:
    net = make_net()
    optimizer = flat(net, "adamw", lr=0.1, weight_decay=0.5)
    expected = [p * 0.95 if p.ndim > 1 else p.clone() for p in net.parameters()]
    optimizer.step(1, 0)
    for parameter, value in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter, value)


def test_adamw_decays_beside_a_codec_that_sends_its_momentum() -> None:
    net, other = make_net(), make_net()
    codec = ReduceConfig.model_validate({"codec": "onebit_adam", "warmup_updates": 3})
    settings: dict[str, Any] = {"lr": 0.1, "count": 2, "reduce": codec}
    ours = flat(net, "adamw", weight_decay=0.5, **settings)
    reference = flat(other, "adam", **settings)
    weights = [parameter.data for parameter in other.parameters() if parameter.ndim > 1]
    for step in range(6):  # in the last three the gradient stands for the momentum
        for weight in weights:
            weight.mul_(0.95)
        for optimizer in (ours, reference):
            optimizer.grads.fill_(1.0 + step)
            optimizer.step(1, 0)
        torch.testing.assert_close(ours.values, reference.values)


def one_weight(value: float, **settings: Any) -> FlatOptimizer:
    cfg = LearnerConfig(grad_clip=None, **settings)
    return FlatOptimizer([("w", nn.Parameter(torch.tensor([value])))], cfg)


def test_sgd_steps_match_figures_by_hand() -> None:
    optimizer = one_weight(1.0, optimizer="sgd", lr=0.1, momentum=0.5)
    seen = []
    for gradient in (8.0, 4.0, -8.0):  # summed over four samples: 2, 1, -2
        optimizer.grads[:] = gradient
        optimizer.step(4, 0)
        seen.append(optimizer.values.item())
    # u = 2, then 1 + 1 = 2, then -2 + 1 = -1
    assert seen == pytest.approx([0.8, 0.6, 0.7])


@pytest.mark.parametrize(("count", "expected"), [(2, 1 - 0.2 - 0.1), (1, 1 - 0.2 - 0.2)])
def test_codec_with_its_own_momentum_replaces_that_of_the_optimizer(
    count: int, expected: float
) -> None:
    dgc = ReduceConfig(codec="dgc")  # which does nothing for one learner alone
    optimizer = one_weight(1.0, optimizer="sgd", lr=0.1, momentum=0.5, count=count, reduce=dgc)
    for gradient in (2.0, 1.0):
        optimizer.grads[:] = gradient
        optimizer.step(1, 0)
    assert optimizer.values.item() == pytest.approx(expected)


def test_weight_decay_gets_momentum_when_the_codec_has_that_of_gradients() -> None:
    dgc = ReduceConfig(codec="dgc")
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}
    ours = one_weight(1.0, optimizer="sgd", count=2, reduce=dgc, **settings)
    weight = nn.Parameter(torch.tensor([1.0]))
    reference = torch.optim.SGD([weight], **settings)
    velocity = 0.0
    for step, gradient in enumerate((2.0, 1.0, -3.0, 0.5, 0.0, 0.0)):
        if step == 3:  # a skipped step changes nothing
            ours.grads[:] = torch.nan
            ours.step(1, 0)
        velocity = 0.9 * velocity + gradient
        ours.grads[:] = velocity
        ours.step(1, 0)
        weight.grad = torch.tensor([gradient])
        reference.step()
        assert ours.values.item() == pytest.approx(weight.item(), rel=1e-5)


def test_codec_with_its_own_momentum_clips_instead_of_the_optimizer() -> None:
    """What it sends is a velocity, several times as long as a gradient."""
    cfg = LearnerConfig(
        optimizer="sgd", lr=0.1, grad_clip=0.5, count=2, reduce=ReduceConfig(codec="dgc")
    )
    optimizer = FlatOptimizer([("w", nn.Parameter(torch.tensor([1.0])))], cfg)
    optimizer.grads[:] = 3.0
    optimizer.step(1, 0)
    assert optimizer.values.item() == pytest.approx(0.7)


def test_parts_give_the_span_of_each_parameter() -> None:
    net = make_net()
    optimizer = flat(net)
    assert optimizer.parts == (
        GradientPart("0.weight", 0, 54, False, 3),
        GradientPart("0.bias", 54, 57, True),
        GradientPart("3.weight", 57, 105, False, 4),
        GradientPart("3.bias", 105, 109, True),
    )
    assert all(a is b for a, b in zip(optimizer.parameters, net.parameters(), strict=True))
    optimizer.values.copy_(torch.arange(109.0))
    firsts = [parameter.flatten()[0].item() for parameter in net.parameters()]
    assert firsts == [0, 54, 57, 105]


def test_parameters_and_gradients_are_views_of_the_flat_vectors() -> None:
    net = make_net()
    before = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    optimizer = flat(net)
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
@pytest.mark.parametrize("kind", KINDS + LARGE)
def test_nonfinite_gradient_gives_a_nonfinite_norm_and_no_step(kind: Any, bad: float) -> None:
    net = make_net()
    optimizer = flat(net, kind, weight_decay=0.1)
    train(net, optimizer, range(3))
    before = optimizer.values.clone()
    state = {name: array.copy() for name, array in optimizer.state_dict().items()}
    optimizer.grads[5] = bad
    assert not optimizer.step(8, 0).isfinite()
    assert torch.equal(optimizer.values, before)
    after = optimizer.state_dict()
    assert all(np.array_equal(array, after[name]) for name, array in state.items())
    assert train(net, optimizer, range(3, 4))[0].isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_lowered_learning_rate_factor_applies_to_later_steps(kind: Any) -> None:
    net, other = make_net(), make_net()
    optimizer, half = flat(net, kind, lr=2e-3), flat(other, kind, lr=1e-3)
    optimizer.lr_factor = 0.5
    for n, o in ((net, optimizer), (other, half)):
        train(n, o, range(3))
    assert torch.equal(optimizer.values, half.values)


@pytest.mark.parametrize("kind", KINDS + LARGE)
def test_resumed_training_is_equal_bit_for_bit(kind: Any) -> None:
    net, other = make_net(), make_net(seed=1)
    optimizer, resumed = (flat(n, kind, lr_warmup_updates=30) for n in (net, other))
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
    adam, rmsprop = (flat(make_net(), kind) for kind in ("adam", "rmsprop"))
    with pytest.raises(ValueError, match="rmsprop needs"):
        rmsprop.load_state_dict(adam.state_dict())


@pytest.mark.parametrize("kind", KINDS + LARGE)
def test_step_uses_the_given_learning_rate(kind: Any) -> None:
    optimizer = flat(make_net(), kind, lr=0.5, lr_end_fraction=0.0, lr_decay_steps=10)
    before = optimizer.values.clone()
    optimizer.grads.fill_(1.0)
    optimizer.step(1, env_steps=10)
    assert torch.equal(optimizer.values, before)
    optimizer.step(1, env_steps=5)
    assert not torch.equal(optimizer.values, before)


def test_updates_are_counted_for_the_warm_up() -> None:
    optimizer = one_weight(0.0, optimizer="sgd", momentum=0.0, lr=0.4, lr_warmup_updates=4)
    seen = []
    for _ in range(6):
        optimizer.grads[:] = -1.0
        optimizer.step(1, 0)
        seen.append(optimizer.values.item())
    assert seen == pytest.approx([0.1, 0.3, 0.6, 1.0, 1.4, 1.8])


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "adam" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_no_part_of_a_learner_step_imports_dynamo(kind: str) -> None:
    code = f"""
import sys, torch
from penstock.configs.sections import LearnerConfig
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.models.actions import discrete
from penstock.models.layout import MlpShape
from penstock.models.torch_nets import build_net
net = build_net(MlpShape(3, discrete(2), (4,), "tanh", 1.0))
optimizer = FlatOptimizer(net.named_parameters(), LearnerConfig(optimizer="{kind}"))
sum(output.sum() for output in net(torch.ones(1, 3))).backward()
optimizer.step(1, 0)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS + LARGE)
def test_gpu_steps_equal_cpu_steps(kind: Any) -> None:
    net, other = make_net(), make_net().cuda()
    optimizer, on_gpu = flat(net, kind), flat(other, kind)
    for step in range(10):
        for each, model in ((optimizer, net), (on_gpu, other)):
            each.zero_grad()
            sum(p.sum() * (step + i) for i, p in enumerate(model.parameters())).backward()  # type: ignore[union-attr]
            each.step(8, 0)
    torch.testing.assert_close(on_gpu.values.cpu(), optimizer.values)


@contextmanager
def refuse_to_wait() -> Iterator[None]:
    """Whatever makes the host wait for the GPU raises RuntimeError."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS + LARGE)
def test_nonfinite_gradient_on_a_gpu_changes_no_weight_without_a_wait(kind: Any) -> None:
    optimizer = flat(make_net().cuda(), kind)
    optimizer.grads.fill_(1.0)
    optimizer.step(8, 0)
    before = optimizer.values.clone()
    optimizer.grads[5] = float("nan")
    with refuse_to_wait():
        optimizer.step(8, 0)
    assert torch.equal(optimizer.values, before)


def test_the_learning_rate_is_constant_without_a_schedule() -> None:
    cfg = LearnerConfig(lr=0.5)
    assert learning_rate(cfg, 0, 1, 1) == learning_rate(cfg, 10**9, 10**6, 1) == 0.5


def test_learning_rate_falls_linearly_by_agent_steps_to_its_end() -> None:
    cfg = LearnerConfig(lr=0.5, lr_end_fraction=0.2, lr_decay_steps=1000)
    rates = [learning_rate(cfg, steps, 1, 1) for steps in (0, 250, 500, 1000, 5000)]
    assert rates == pytest.approx([0.5, 0.4, 0.3, 0.1, 0.1])


@pytest.mark.parametrize(
    ("scaling", "count", "expected"),
    [("none", 4, 0.1), ("sqrt", 4, 0.2), ("linear", 4, 0.4), ("sqrt", 1, 0.1), ("linear", 1, 0.1)],
)
def test_the_learning_rate_is_scaled_by_learners(scaling: Any, count: int, expected: float) -> None:
    cfg = LearnerConfig(lr=0.1, lr_scaling=scaling, count=4)
    assert learning_rate(cfg, 0, 1, count) == pytest.approx(expected)


def test_the_learning_rate_follows_the_learners_that_are_alive() -> None:
    optimizer = one_weight(1.0, optimizer="sgd", lr=0.1, lr_scaling="linear", count=4)
    rates = []
    for optimizer.learners_in_step in (4, 3, 4):
        optimizer.grads[:] = 1.0
        optimizer.step(1, 0)
        rates.append(optimizer.lr)
    assert rates == pytest.approx([0.4, 0.3, 0.4])


def test_the_learning_rate_warms_up_from_the_rate_of_one_learner() -> None:
    cfg = LearnerConfig(lr=0.1, lr_scaling="linear", count=4, lr_warmup_updates=3)
    rates = [learning_rate(cfg, 0, update, 4) for update in (1, 2, 3, 4, 100)]
    assert rates == pytest.approx([0.2, 0.3, 0.4, 0.4, 0.4])


def test_learning_rate_warms_up_from_zero_without_scaling() -> None:
    cfg = LearnerConfig(lr=0.1, lr_scaling="linear", count=1, lr_warmup_updates=5)
    rates = [learning_rate(cfg, 0, update, 1) for update in (1, 2, 5, 6)]
    assert rates == pytest.approx([0.02, 0.04, 0.1, 0.1])


def test_learning_rate_combines_scaling_warm_up_and_decay() -> None:
    cfg = LearnerConfig(
        lr=0.1,
        lr_scaling="sqrt",
        count=9,
        lr_warmup_updates=10,
        lr_end_fraction=0.5,
        lr_decay_steps=100,
    )
    # half-way from 0.1 to 0.3, a fifth of the way from 1 to 0.5
    assert learning_rate(cfg, 20, 5, 9) == pytest.approx(0.2 * 0.9)
    assert learning_rate(cfg, 100, 50, 9) == pytest.approx(0.3 * 0.5)
