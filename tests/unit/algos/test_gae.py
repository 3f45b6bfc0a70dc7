"""GAE against sums by hand and against the definition, row by row in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.algos.ops.gae import gae, lambda_returns
from random_unrolls import make_batch, random_ends


def flags(*rows: int, steps: int) -> Tensor:
    found = torch.zeros(steps, 1, dtype=torch.bool)
    found[list(rows)] = True
    return found


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def test_advantages_of_three_steps_match_a_sum_by_hand() -> None:
    """Deltas: 1 + .5 * 4 - 2 = 1; 2 + .5 * 6 - 4 = 1; 3 + .5 * 8 - 6 = 1; carried by .5 * .5."""
    none = flags(steps=3)
    found = gae(
        column(2, 4, 6, 8), column(1, 2, 3), none, none, ~none, discount=0.5, gae_lambda=0.5
    )
    torch.testing.assert_close(found, column(1 + 0.25 + 0.0625, 1.25, 1.0))


def test_a_terminated_row_has_no_next_value_and_cuts_the_trace() -> None:
    """Row 1: 2 - 4; row 0 goes on into it: 1 + .25 * -2."""
    found = gae(
        column(2, 4, 6, 8),
        column(1, 2, 3),
        flags(1, steps=3),
        flags(1, steps=3),  # terminated wins
        ~flags(2, steps=3),
        discount=0.5,
        gae_lambda=0.5,
    )
    torch.testing.assert_close(found, column(0.5, -2.0, 0.0))


def test_a_truncated_row_goes_on_with_the_value_of_its_final_observation() -> None:
    """Row 1: 2 + .5 * 6 - 4; the reset row 2 counts nothing; row 3: 4 + .5 * 2 - 8."""
    found = gae(
        column(2, 4, 6, 8, 2),
        column(1, 2, 99, 4),
        flags(steps=4),
        flags(1, steps=4),
        ~flags(2, steps=4),
        discount=0.5,
        gae_lambda=0.5,
    )
    torch.testing.assert_close(found, column(1.25, 1.0, 0.0, -3.0))


def plain(
    values: np.ndarray, rewards: np.ndarray, ends: tuple[np.ndarray, ...], g: float, lam: float
) -> np.ndarray:
    """The sum of equation 16, forwards from each row to the end of its episode."""
    terminated, truncated, alive = ends
    steps, envs = rewards.shape
    found = np.zeros((steps, envs))
    for e in range(envs):
        for t in range(steps):
            weight = float(alive[t, e])
            for k in range(t, steps):
                following = 0.0 if terminated[k, e] else values[k + 1, e]
                found[t, e] += weight * (rewards[k, e] + g * following - values[k, e])
                if terminated[k, e] or truncated[k, e]:
                    break
                weight *= g * lam
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_random_episodes_match_the_definition(gae_lambda: float, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    steps, envs = 20, 7
    terminated, truncated, alive = random_ends(rng, steps, envs, 0.15)
    values, rewards = rng.normal(size=(steps + 1, envs)), rng.normal(size=(steps, envs))
    found = gae(
        torch.from_numpy(values).to(dtype),
        torch.from_numpy(rewards).to(dtype),
        *map(torch.from_numpy, (terminated, truncated, alive)),
        discount=0.9,
        gae_lambda=gae_lambda,
    )
    expected = plain(values, rewards, (terminated, truncated, alive), 0.9, gae_lambda)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-6
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=tolerance)
    assert not found.numpy()[~alive].any()


@pytest.mark.parametrize("gae_lambda", [0.0, 0.65, 1.0])
def test_lambda_returns_are_those_of_a_loop_backwards(gae_lambda: float) -> None:
    """Gallici et al. 2024, algorithm 1. An episode that was truncated goes on with its value."""
    batch = make_batch(steps=9, envs=5)
    values = torch.randn(10, 5, generator=torch.Generator().manual_seed(0))
    found = lambda_returns(values, batch, discount=0.9, gae_lambda=gae_lambda).numpy()

    next_values = values[1:].double().numpy()
    rewards, terminated, truncated, alive = (
        batch[name].numpy() for name in ("reward", "terminated", "truncated", "alive")
    )
    expected = np.zeros((9, 5))
    for t, e in reversed(np.argwhere(alive).tolist()):
        following = next_values[t, e]
        if t < 8 and not truncated[t, e]:
            following = (1 - gae_lambda) * following + gae_lambda * expected[t + 1, e]
        expected[t, e] = rewards[t, e] + 0.9 * following * (not terminated[t, e])
    np.testing.assert_allclose(found[alive], expected[alive], 1e-6, 1e-6)
