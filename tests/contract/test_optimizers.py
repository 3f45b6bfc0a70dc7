"""Every registered optimizer keeps the contract, and has the properties by which codecs choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.configs.learner import OPTIMIZERS, OptimizerSpec
from penstock.configs.sections import LearnerConfig
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer

ROWS, COLUMNS = 6, 4
SIZE = ROWS * COLUMNS + COLUMNS  # a matrix and a bias
SPECS = list(OPTIMIZERS.specs.values())
DECAYING = set(OPTIMIZERS.using("weight_decay"))


def make(name: str, values: Tensor, **settings: Any) -> FlatOptimizer:
    if name in ("lars", "lamb"):
        pytest.importorskip("pytorch_optimizer", reason="the extra 'large' is not installed")
    if name in DECAYING:
        settings = {"weight_decay": 0.1} | settings
    cfg = LearnerConfig(optimizer=name, lr=0.01, **({"grad_clip": None} | settings))
    weight, bias = values[: ROWS * COLUMNS].view(ROWS, COLUMNS), values[ROWS * COLUMNS :]
    named = [("weight", nn.Parameter(weight.clone())), ("bias", nn.Parameter(bias.clone()))]
    return FlatOptimizer(named, cfg)


def random(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def steps(optimizer: FlatOptimizer, gradients: list[Tensor]) -> Tensor:
    """The values after a step by each gradient."""
    for gradient in gradients:
        optimizer.grads.copy_(gradient)
        optimizer.step(1.0, 0)
    return optimizer.values.clone()


each = pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
GRADIENTS = [random(seed) for seed in (1, 2, 3)]


@each
def test_moments_are_laid_out_like_the_values_or_the_parameters(spec: OptimizerSpec) -> None:
    optimizer = make(spec.name, random(0))
    before = {name: moment.shape for name, moment in optimizer.moments.items()}
    steps(optimizer, GRADIENTS)
    assert {name: moment.shape for name, moment in optimizer.moments.items()} == before
    assert set(before.values()) <= {torch.Size([SIZE]), torch.Size([len(optimizer.parts)])}
    assert all(moment.dtype == torch.float32 for moment in optimizer.moments.values())
    assert int(optimizer.tensors()["steps"]) == len(GRADIENTS)


@each
def test_a_gradient_that_is_not_finite_changes_nothing(spec: OptimizerSpec) -> None:
    optimizer = make(spec.name, random(0))
    values = steps(optimizer, GRADIENTS)
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    steps(optimizer, [torch.full((SIZE,), torch.inf)])
    assert torch.equal(optimizer.values, values)
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.tensors().items())


@each
def test_is_elementwise_states_whether_each_value_moves_independently(spec: OptimizerSpec) -> None:
    """A parameter server holds the values in one vector, in any place."""
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(7))
    values = steps(make(spec.name, random(0)), GRADIENTS)
    moved = steps(make(spec.name, random(0)[order]), [gradient[order] for gradient in GRADIENTS])
    is_same = torch.allclose(values[order], moved, rtol=1e-5, atol=1e-7)
    assert is_same is spec.is_elementwise


@each
def test_an_optimizer_that_divides_by_the_variance_steps_as_far_by_large_gradients(
    spec: OptimizerSpec,
) -> None:
    start = torch.ones(SIZE)
    gradient = torch.ones(SIZE)
    gradient[0] = 100.0
    moves = (steps(make(spec.name, start, **_without_decay(spec)), [gradient]) - start).abs()
    ratio = float(moves[0] / moves[1])
    assert (ratio < 2.0) is spec.divides_by_variance


@each
def test_an_optimizer_that_leaves_its_momentum_takes_a_velocity_for_a_gradient(
    spec: OptimizerSpec,
) -> None:
    if not spec.leaves_momentum:
        return
    alone = steps(make(spec.name, random(0)), GRADIENTS)
    optimizer = make(spec.name, random(0))
    momentum, optimizer.momentum = optimizer.momentum, 0.0
    velocities, velocity = [], torch.zeros(SIZE)
    for gradient in GRADIENTS:
        velocity = momentum * velocity + gradient
        velocities.append(velocity)
    torch.testing.assert_close(steps(optimizer, velocities), alone)


@each
def test_scales_layers_states_whether_steps_follow_the_norm_of_the_weights(
    spec: OptimizerSpec,
) -> None:
    start, settings = random(0), _without_decay(spec)
    weights = slice(0, ROWS * COLUMNS)
    moves = []
    for factor in (0.1, 0.2):
        values = steps(make(spec.name, factor * start, **settings), [GRADIENTS[0]])
        moves.append(torch.linalg.vector_norm((values - factor * start)[weights]))
    is_longer = float(moves[1] / moves[0]) > 1.5
    assert is_longer is spec.scales_layers


@each
def test_a_form_with_frozen_variance_is_the_same_while_gradients_are_summed(
    spec: OptimizerSpec,
) -> None:
    if not spec.frozen_variance:
        return
    codec = "onebit_lamb" if spec.scales_layers else "onebit_adam"
    reduce = {"codec": codec, "warmup_updates": 10}
    frozen = make(spec.name, random(0), count=2, reduce=reduce)
    assert frozen.adam is not None
    steps(frozen, GRADIENTS)
    plain = make(spec.name, random(0))
    steps(plain, GRADIENTS)
    torch.testing.assert_close(frozen.moments["exp_avg"], plain.moments["exp_avg"])
    torch.testing.assert_close(frozen.moments["exp_avg_sq"], plain.moments["exp_avg_sq"])
    state = {name: array.copy() for name, array in frozen.state_dict().items()}
    plain.load_state_dict(state)  # another codec: the run goes on
    frozen.load_state_dict(plain.state_dict())


def _without_decay(spec: OptimizerSpec) -> dict[str, Any]:
    return {"weight_decay": 0.0} if spec.name in DECAYING else {}
