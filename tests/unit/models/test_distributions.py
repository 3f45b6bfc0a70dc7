"""Log-probability, entropy and divergence against torch.distributions and numeric integration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributions as reference

from penstock.models.actions import Choices, Numbers, discrete
from penstock.models.distributions import Squashed, distribution, log_slope

ROWS = 40
PAIR = Choices((3, 2, 4), (3,))


def outputs(width: int, seed: int = 0, scale: float = 1.5) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((scale * rng.normal(size=(ROWS, width))).astype(np.float32))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == (ROWS,)
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


def masks(counts: tuple[int, ...]) -> Tensor:
    """Random ones, uint8, that leave at least one of each choice."""
    rng = np.random.default_rng(5)
    columns = []
    for count in counts:
        mask = rng.random((ROWS, count)) < 0.5
        mask[np.arange(ROWS), rng.integers(0, count, ROWS)] = True
        columns.append(mask)
    return torch.from_numpy(np.concatenate(columns, 1).astype(np.uint8))


def plain(logits: Tensor, mask: Tensor | None, counts: tuple[int, ...]) -> list[Tensor]:
    """Probabilities of each choice, float64 ``[B, count]``, straight from the definition."""
    weights = logits.double().exp() * (1 if mask is None else mask.double())
    return [part / part.sum(1, keepdim=True) for part in weights.split(counts, 1)]


@pytest.mark.parametrize("actions", [discrete(5), PAIR])
@pytest.mark.parametrize("masked", [False, True])
def test_choices_match_plain_formulas(actions: Choices, masked: bool) -> None:
    counts = actions.counts
    mask = masks(counts) if masked else None
    mine, other = (distribution(actions, outputs(actions.outputs, i), mask) for i in range(2))
    p, q = (plain(outputs(actions.outputs, i), mask, counts) for i in range(2))
    drawn = [torch.multinomial(part, 1)[:, 0] for part in p]
    action = torch.stack(drawn, 1).int().reshape(ROWS, *actions.shape)
    logp = sum(part.gather(1, at[:, None]).log()[:, 0] for part, at in zip(p, drawn, strict=True))
    entropy = -sum(torch.special.xlogy(part, part).sum(1) for part in p)
    kl = sum(
        (torch.special.xlogy(a, a) - torch.special.xlogy(a, b)).sum(1)
        for a, b in zip(p, q, strict=True)
    )
    assert isinstance(logp, Tensor)
    assert isinstance(entropy, Tensor)
    assert isinstance(kl, Tensor)
    close(mine.logp(action), logp)
    close(mine.entropy(), entropy)
    close(mine.kl(other), kl)


def test_choices_match_torch_categorical() -> None:
    logits = outputs(4)
    theirs = reference.Categorical(logits=logits)
    mine = distribution(discrete(4), logits)
    action = theirs.sample()
    close(mine.logp(action.int()), theirs.log_prob(action))
    close(mine.entropy(), theirs.entropy())


def test_a_masked_choice_has_no_probability_and_no_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.uint8)
    found = distribution(discrete(3), logits, mask)
    assert found.logp(torch.tensor([1, 0]))[0] < -1e8
    # Where nothing is allowed all are alike, which is finite: such rows are not trained on.
    assert found.entropy()[1].item() == pytest.approx(math.log(3))
    total = found.entropy()[0] + found.logp(torch.tensor([2, 0]))[0]
    (gradient,) = torch.autograd.grad(total, logits)
    assert gradient[0, 1] == 0
    assert gradient[0, 0] != 0
    assert torch.isfinite(gradient).all()


def test_gaussian_matches_torch_normal() -> None:
    actions = Numbers((2, 2))
    mine, other = (distribution(actions, outputs(8, i)) for i in range(2))
    theirs = [
        reference.Normal(out[:, :4], out[:, 4:].exp())
        for out in (outputs(8, i).double() for i in range(2))
    ]
    action = theirs[0].sample().float()
    close(mine.logp(action.view(ROWS, 2, 2)), theirs[0].log_prob(action.double()).sum(1))
    close(mine.entropy(), theirs[0].entropy().sum(1))
    close(mine.kl(other), reference.kl_divergence(*theirs).sum(1))


def test_log_density_of_a_squashed_gaussian_is_that_of_the_action() -> None:
    out = outputs(4, scale=0.7)
    mine = distribution(Numbers((2,), squashed=True), out)
    base = reference.Normal(out[:, :2].double(), out[:, 2:].double().exp())
    before = base.sample().float().double()
    # Change of variables, with 1 - tanh(x)^2 = 1 / cosh(x)^2; torch's own way round, by the inverse
    # of tanh, is less exact where tanh is near 1.
    expected = (base.log_prob(before) + 2 * before.cosh().log()).sum(1)
    close(mine.logp(before.float()), expected)
    theirs = reference.TransformedDistribution(base, [reference.TanhTransform(cache_size=1)])
    close(mine.logp(before.float()), theirs.log_prob(before.tanh()).sum(1), 2e-5)


@pytest.mark.parametrize("before", [0.0, 0.5, -3.0, 8.0, -40.0, 90.0])
def test_slope_of_tanh_is_never_0(before: float) -> None:
    """log(1 - tanh(x)^2) = -2 log cosh(x), by exact arithmetic on large numbers."""
    exact = -2 * (abs(before) + math.log1p(math.exp(-2 * abs(before))) - math.log(2))
    found = log_slope(torch.tensor(before)).item()
    assert found == pytest.approx(exact, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("std", [0.01, 0.1, 0.5, 1.0, 2.0, 3.0, 5.0])
def test_entropy_of_a_squashed_gaussian_by_numeric_integration(std: float) -> None:
    """-E[log p(a)] over the numbers before tanh, on a grid a thousand times finer, in float64."""
    means = torch.linspace(-3, 3, ROWS)
    out = torch.stack([means, torch.full_like(means, math.log(std))], 1)
    found = distribution(Numbers((1,), squashed=True), out).entropy()
    noise = np.linspace(-12, 12, 200_001)
    density = np.exp(-0.5 * noise**2) / math.sqrt(2 * math.pi)
    expected = []
    for mean in means.double().tolist():
        x = mean + std * noise
        log_density = (
            -0.5 * noise**2
            - math.log(std * math.sqrt(2 * math.pi))
            + 2 * (np.logaddexp(x, -x) - math.log(2))
        )
        expected.append(-np.trapezoid(density * log_density, noise))
    close(found, torch.tensor(expected))


def test_entropy_of_a_squashed_gaussian_has_the_gradient_of_its_values() -> None:
    actions = Numbers((1,), squashed=True)

    def entropy(mean: float, log_std: float) -> float:
        return distribution(actions, torch.tensor([[mean, log_std]])).entropy().double().item()

    out = torch.tensor([[0.7, -0.3]], requires_grad=True)
    (gradient,) = torch.autograd.grad(distribution(actions, out).entropy().sum(), out)
    step = 1e-2
    slopes = [
        (entropy(0.7 + a * step, -0.3 + b * step) - entropy(0.7 - a * step, -0.3 - b * step))
        / (2 * step)
        for a, b in ((1, 0), (0, 1))
    ]
    assert gradient[0].tolist() == pytest.approx(slopes, abs=1e-3)


def test_squashing_does_not_change_divergences() -> None:
    plain, squashed = Numbers((3,)), Numbers((3,), squashed=True)
    for a, b in itertools.permutations((outputs(6, 0), outputs(6, 1))):
        found = distribution(squashed, a).kl(distribution(squashed, b))
        torch.testing.assert_close(found, distribution(plain, a).kl(distribution(plain, b)))
    assert isinstance(distribution(squashed, outputs(6)), Squashed)
