"""What a student learns of its teachers, against `torch.distributions`, integrals and numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal, kl_divergence

from penstock.algos.action_rule import ActionRule
from penstock.algos.distill import algorithm as distill
from penstock.algos.distill.config import DistillConfig
from penstock.algos.impala import algorithm as impala
from penstock.algos.impala.config import ImpalaConfig
from penstock.algos.ops.gae import lambda_returns
from penstock.algos.ops.teaching import (
    OUTPUTS,
    VALUE,
    mean_outputs,
    policy_outputs,
    teacher_kl,
)
from penstock.algos.ppo import algorithm as ppo
from penstock.algos.ppo.config import PpoConfig
from penstock.algos.registry import algorithm
from penstock.models.actions import ActionSpec, Choices, Numbers, discrete
from penstock.models.distributions import distribution
from penstock.models.torch_heads import ActorCritic
from random_unrolls import ACTIONS, make_batch, make_net

TAUGHT = DistillConfig(teachers=["a"])


def with_teacher(batch: dict[str, Tensor], outputs: int = ACTIONS) -> dict[str, Tensor]:
    """Returns a batch with random outputs and values of a teacher."""
    generator = torch.Generator().manual_seed(5)
    rows = batch["alive"].shape
    return {
        **batch,
        OUTPUTS: 2 * torch.randn(*rows, outputs, generator=generator),
        VALUE: torch.randn(*rows, generator=generator),
    }


def divergence(actions: ActionSpec, teacher: Tensor, student: Tensor) -> Tensor:
    """KL(teacher | student) of rows ``[B, outputs]``, as a loss computes it."""
    batch = {OUTPUTS: teacher[None], "alive": torch.ones(1, len(teacher), dtype=torch.bool)}
    policy = distribution(actions, student)
    return teacher_kl(TAUGHT, actions, batch, slice(None), policy)


def of_torch(actions: ActionSpec, outputs: Tensor) -> list[Any]:
    """The independent distributions of an action, as torch defines them."""
    if isinstance(actions, Choices):
        return [Categorical(logits=part) for part in outputs.split(actions.counts, 1)]
    mean, log_std = outputs.chunk(2, 1)
    return [Independent(Normal(mean, log_std.exp()), 1)]


@pytest.mark.parametrize("actions", [discrete(5), Choices((2, 3), (2,)), Numbers((3,))])
def test_the_divergence_and_its_gradient_are_those_of_torch(actions: ActionSpec) -> None:
    torch.manual_seed(1)
    teacher, student = torch.randn(2, 7, actions.outputs).double()
    ours, reference = (student.clone().requires_grad_() for _ in range(2))
    found = divergence(actions, teacher, ours)
    found.sum().backward()

    pairs = zip(of_torch(actions, teacher), of_torch(actions, reference), strict=True)
    expected = torch.stack([kl_divergence(one, other) for one, other in pairs]).sum(0)
    expected.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-9, atol=1e-9)


def test_q_values_become_probabilities_by_the_temperature() -> None:
    """Rusu et al. 2015, equation 3, by hand; a forbidden action has probability 0."""
    rule = ActionRule(discrete(3), has_values=True)
    values, mask = torch.tensor([[1.0, 1.02, 5.0]]), torch.tensor([[1, 1, 0]])
    found = policy_outputs(rule, values, mask, 0.01).softmax(1)
    np.testing.assert_allclose(found, [[1 / (1 + math.e**2), 1 / (1 + math.e**-2), 0]], rtol=1e-4)


def test_forbidden_choices_add_nothing_to_the_divergence() -> None:
    mask = torch.tensor([[1, 0, 1]])
    rule = ActionRule(discrete(3))
    teacher = policy_outputs(rule, torch.tensor([[0.0, 9.0, 1.0]]), mask, 1.0)
    policy = distribution(discrete(3), torch.tensor([[1.0, 4.0, 0.0]]), mask)
    batch = {OUTPUTS: teacher[None], "alive": torch.ones(1, 1, dtype=torch.bool)}
    found = teacher_kl(TAUGHT, discrete(3), batch, slice(None), policy)
    p = 1 / (1 + math.e)  # of the first choice for the teacher; of the last for the student
    assert found.item() == pytest.approx((1 - 2 * p) * 1.0, rel=1e-6)


def test_deviations_of_a_teacher_stay_within_its_bounds() -> None:
    rule = ActionRule(Numbers((2,), squashed=True), log_std=(-1.0, 0.5))
    found = policy_outputs(rule, torch.tensor([[3.0, -3.0, 4.0, -4.0]]), None, 1.0)
    assert found.tolist() == [[3.0, -3.0, 0.5, -1.0]]


@pytest.mark.parametrize("actions", [discrete(4), Choices((2, 3), (2,))])
def test_several_teachers_are_the_mean_of_their_probabilities(actions: Choices) -> None:
    outputs = torch.randn(3, 5, actions.outputs, generator=torch.Generator().manual_seed(0))
    mean = mean_outputs(actions, list(outputs))
    for found, *each in zip(
        mean.split(actions.counts, 1), *(o.split(actions.counts, 1) for o in outputs), strict=True
    ):
        expected = torch.stack([logits.softmax(1) for logits in each]).mean(0)
        torch.testing.assert_close(found.softmax(1), expected)


def test_several_teachers_of_numbers_differ_from_their_mixture_by_a_constant() -> None:
    """Two students compare alike by the mixture, whose divergence is an integral over a grid."""
    actions, outputs = Numbers((1,)), torch.tensor([[[-1.0, -0.5]], [[2.0, 0.3]]]).double()
    grid = torch.linspace(-30, 30, 200_001, dtype=torch.float64)
    density = torch.stack([Normal(m, s.exp()).log_prob(grid).exp() for m, s in outputs[:, 0]])
    mixture = density.mean(0)

    students = torch.tensor([[[0.1, 0.4]], [[1.5, -0.2]]]).double()
    by_integral = []
    for mean, log_std in students[:, 0]:
        logp = Normal(mean, log_std.exp()).log_prob(grid)
        by_integral.append(torch.trapezoid(mixture * (mixture.log() - logp), grid))
    found = [divergence(actions, mean_outputs(actions, list(outputs)), s) for s in students]
    assert (found[0] - found[1]).item() == pytest.approx(
        (by_integral[0] - by_integral[1]).item(), abs=1e-6
    )


def expected_kl(net: ActorCritic, batch: dict[str, Tensor]) -> float:
    """The sum over alive rows of KL(teacher | student), one row after the other, in numpy."""
    with torch.no_grad():
        logits, _ = net(batch["obs"])
    students = logits.double().numpy().reshape(*batch["obs"].shape[:2], -1)
    total = 0.0
    for t, e in np.argwhere(batch["alive"].numpy()).tolist():
        teacher = np.exp(batch[OUTPUTS][t, e].double().numpy())
        student = np.exp(students[t, e])
        p, q = teacher / teacher.sum(), student / student.sum()
        total += float((p * np.log(p / q)).sum())
    return total


def test_the_loss_of_distillation_is_the_sum_over_alive_rows() -> None:
    net, batch = make_net(), with_teacher(make_batch())
    cfg = DistillConfig(teachers=["a"], value_cost=0.3)
    parts = [slice(0, 4)]
    total, sums = distill.loss(net, batch | distill.prepare(net, batch, cfg, parts), cfg)

    with torch.no_grad():
        values = net(batch["obs"])[1].view(7, 4)[:-1]
    errors = 0.5 * (values - batch[VALUE]).square()[batch["alive"]].sum().item()
    kl = expected_kl(net, batch)
    assert sums[:2].tolist() == pytest.approx([kl, errors], rel=1e-5)
    assert total.item() == pytest.approx(kl + 0.3 * errors, rel=1e-5)
    assert not sums.requires_grad


def test_without_values_of_teachers_a_student_learns_its_returns() -> None:
    net, batch = make_net(), make_batch()
    found = distill.prepare(net, batch, TAUGHT, [slice(0, 1), slice(1, 4)])["target"]
    with torch.no_grad():
        values = net(batch["obs"])[1].view(7, 4)
    expected = lambda_returns(values, batch, discount=0.99, gae_lambda=distill.RETURNS_LAMBDA)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["ppo", "impala"])
def test_a_kick_start_adds_the_weighted_divergence_to_the_loss(name: str) -> None:
    net, batch = make_net(), with_teacher(make_batch())
    plain: Any = {"ppo": PpoConfig, "impala": ImpalaConfig}[name]()
    taught = plain.model_copy(update={"teacher": "a", "teacher_cost": 0.7})
    if name == "ppo":
        batch |= ppo.prepare(make_net(seed=1), batch, plain, [slice(0, 4)])
    loss: Any = {"ppo": ppo, "impala": impala}[name].loss

    total, sums = loss(net, batch, plain)
    taught_total, taught_sums = loss(net, batch, taught)
    kl = expected_kl(net, batch)
    assert (taught_total - total).item() == pytest.approx(0.7 * kl, rel=1e-4)
    torch.testing.assert_close(taught_sums[:-1], sums)
    assert taught_sums[-1].item() == pytest.approx(kl, rel=1e-5)
    assert algorithm(taught).statistics == (*algorithm(plain).statistics, "teacher_kl")  # type: ignore[union-attr]


def test_at_a_cost_of_0_nobody_teaches() -> None:
    """Then a batch has no columns of a teacher."""
    net, batch = make_net(), make_batch()
    cfg = ImpalaConfig(teacher="a", teacher_cost=0.0)
    total, sums = impala.loss(net, batch, cfg)
    assert total.item() == impala.loss(net, batch, ImpalaConfig())[0].item()
    assert sums[-1] == 0
    assert cfg.teaching is None
