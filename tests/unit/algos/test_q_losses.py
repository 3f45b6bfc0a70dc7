"""Losses of quantiles and of several choices against loops, written from the papers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.algos.dqn import losses, update
from penstock.algos.dqn.config import DqnConfig

BATCH, STATES = 12, 5


def quantile_loss_of_pairs(quantiles: Any, target: Any, kappa: float) -> float:
    """Dabney et al. 2017, algorithm 1 with equation 10, for one row."""
    count = len(quantiles)
    total = 0.0
    for i, quantile in enumerate(quantiles):
        midpoint = (2 * (i + 1) - 1) / (2 * count)
        for sample in target:
            u = sample - quantile
            inside = abs(u) <= kappa
            huber = 0.5 * u * u if inside else kappa * (abs(u) - 0.5 * kappa)
            total += abs(midpoint - (1.0 if u < 0 else 0.0)) * huber / len(target)
    return total


@pytest.mark.parametrize("kappa", [1.0, 0.3])
@pytest.mark.parametrize(("count", "samples"), [(1, 1), (5, 5), (4, 7)])
def test_quantile_loss_is_that_of_all_pairs(kappa: float, count: int, samples: int) -> None:
    rng = np.random.default_rng(count)
    quantiles, target = rng.normal(size=(BATCH, count)), rng.normal(0, 2, (BATCH, samples))
    rows = torch.from_numpy(quantiles), torch.from_numpy(target)
    expected = [
        quantile_loss_of_pairs(*pair, kappa) for pair in zip(quantiles, target, strict=True)
    ]
    np.testing.assert_allclose(losses.quantile_huber(*rows, kappa), expected, rtol=1e-6)


def test_quantiles_of_a_known_distribution_are_learned() -> None:
    """The loss is least where they are the quantiles at the midpoints of equal parts."""
    samples = torch.from_numpy(np.random.default_rng(0).exponential(size=4000)).float()
    quantiles = torch.zeros(1, 4, requires_grad=True)
    optimizer = torch.optim.Adam([quantiles], lr=0.05)
    for _ in range(400):
        optimizer.zero_grad()
        losses.quantile_huber(quantiles, samples[None], 0.01).sum().backward()
        optimizer.step()
    expected = np.quantile(samples.numpy(), [1 / 8, 3 / 8, 5 / 8, 7 / 8])
    np.testing.assert_allclose(quantiles.detach()[0], expected, atol=0.03)


def nets(outputs: tuple[int, ...], seed: int = 0) -> tuple[Any, Any, Any, Any]:
    """Returns two networks that are tables, as functions of states and as arrays."""
    tables = np.random.default_rng(seed).normal(0, 2, (2, STATES, *outputs)).astype(np.float32)
    online, target = map(torch.from_numpy, tables)
    online.requires_grad_()
    return (lambda obs: online[obs]), (lambda obs: target[obs]), *tables


def transitions(action: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    arrays = {
        "obs": rng.integers(0, STATES, BATCH),
        "next_obs": rng.integers(0, STATES, BATCH),
        "action": action,
        "reward": rng.normal(size=BATCH).astype(np.float32),
        "discount": np.where(rng.random(BATCH) < 0.3, 0, 0.9).astype(np.float32),
        "weights": rng.uniform(0.1, 1, BATCH).astype(np.float32),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.mark.parametrize("double", [True, False])
def test_loss_of_quantiles_equals_a_loop_over_transitions(double: bool) -> None:
    actions, count = 3, 4
    net, target_net, online, target = nets((actions, count))
    batch = transitions(np.random.default_rng(2).integers(0, actions, BATCH))
    mask = np.array([[1, 0, 1]] * BATCH)
    cfg = DqnConfig(double=double, huber=0.7)
    found = update.loss(net, target_net, batch, cfg, torch.from_numpy(mask))

    total, differences = 0.0, []
    for obs, next_obs, action, reward, discount, weight in zip(
        *(batch[name].tolist() for name in ("obs", "next_obs", "action")),
        *(batch[name].tolist() for name in ("reward", "discount", "weights")),
        strict=True,
    ):
        chooser = online if double else target
        best = max((0, 2), key=lambda a: chooser[next_obs, a].mean())
        wanted = [reward + discount * value for value in target[next_obs, best]]
        total += weight * quantile_loss_of_pairs(online[obs, action], wanted, 0.7)
        differences.append(np.mean(wanted) - online[obs, action].mean())
    loss, errors, sums = found
    assert loss.item() == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(errors, differences, rtol=1e-5, atol=1e-6)
    named = dict(zip(update.STATISTICS, sums.tolist(), strict=True))
    assert named["q_target_mean"] - named["q_mean"] == pytest.approx(sum(differences), rel=1e-4)


@pytest.mark.parametrize("double", [True, False])
def test_loss_of_several_choices_equals_a_loop_over_transitions(double: bool) -> None:
    """Tavakoli et al. 2018, equations 5 and 6: one target, the mean over the choices."""
    branches = (3, 2, 4)
    net, target_net, online, target = nets((sum(branches),))
    rng = np.random.default_rng(3)
    action = np.stack([rng.integers(0, count, BATCH) for count in branches], 1)
    batch = transitions(action)
    mask = rng.integers(0, 2, (BATCH, sum(branches)))
    mask[0] = 0  # nothing is allowed, so nothing is forbidden
    mask[1] = [1, 1, 0, 0, 0, 0, 0, 0, 1]  # the same for the second choice alone
    cfg = DqnConfig(double=double, huber=1.0)
    found = update.loss(net, target_net, batch, cfg, torch.from_numpy(mask), branches)

    starts = np.cumsum([0, *branches])
    total, all_errors = 0.0, []
    for row in range(BATCH):
        next_values = []
        for d in range(len(branches)):
            part = slice(starts[d], starts[d + 1])
            allowed = mask[row, part].nonzero()[0]
            choices = allowed if len(allowed) else range(branches[d])
            next_obs = batch["next_obs"][row]
            chooser = (online if double else target)[next_obs, part]
            best = max(choices, key=lambda a, q=chooser: q[a])
            next_values.append(target[next_obs, part][best])
        wanted = batch["reward"][row].item()
        wanted += batch["discount"][row].item() * float(np.mean(next_values))
        errors = [
            wanted - online[batch["obs"][row], starts[d] + action[row, d]]
            for d in range(len(branches))
        ]
        huber = [0.5 * e * e if abs(e) <= 1 else abs(e) - 0.5 for e in errors]
        total += batch["weights"][row].item() * float(np.mean(huber))
        all_errors.append(np.abs(errors).mean())
    assert found[0].item() == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(found[1], all_errors, rtol=1e-5)
