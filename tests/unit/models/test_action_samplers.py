"""Multi-discrete and continuous actions: their distributions and recorded log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.models.acting.categorical import (
    ActionSampler,
    CategoricalSampler,
    EpsilonGreedySampler,
    MultiCategoricalSampler,
)
from penstock.models.acting.gaussian import GaussianSampler
from penstock.models.actions import Choices, Numbers
from penstock.models.distributions import distribution

ENVS, ROUNDS = 200, 300


def with_outputs(decider: ActionSampler, outputs: list[float]) -> ActionSampler:
    decider.outputs[:] = np.array(outputs, np.float32)[:, None]
    return decider


def test_several_choices_are_drawn_independently_by_their_logits() -> None:
    logits = [0.5, -0.5, 1.0, 0.0, 2.0]
    decider = MultiCategoricalSampler((2, 3), (2,), ENVS, np.random.default_rng(0))
    counts = np.zeros((2, 3))
    for _ in range(ROUNDS):
        first, second = with_outputs(decider, logits).sample().T
        np.add.at(counts, (first, second), 1)
    weights = [np.exp(part) / np.exp(part).sum() for part in np.split(np.array(logits), [2])]
    expected = np.outer(*weights) * ENVS * ROUNDS
    assert ((counts - expected) ** 2 / expected).sum() < 20.5  # 0.999 of chi square with 5
    assert with_outputs(decider, logits).greedy().tolist() == [[0, 2]] * ENVS


@pytest.mark.parametrize("counts", [(2, 3), (4, 4, 4, 2)])
def test_log_probabilities_of_choices_equal_the_learners(counts: tuple[int, ...]) -> None:
    spec = Choices(counts, (len(counts) // 2, 2) if len(counts) > 2 else (2,))
    rng = np.random.default_rng(1)
    outputs = rng.normal(size=(ENVS, spec.outputs)).astype(np.float32) * 3
    decider = MultiCategoricalSampler(spec.counts, spec.shape, ENVS, rng)
    decider.outputs[:] = outputs.T
    action = decider.sample()
    assert action.shape == (ENVS, *spec.shape)
    assert action.dtype == np.int32
    found = distribution(spec, torch.from_numpy(outputs)).logp(torch.from_numpy(action))
    np.testing.assert_allclose(decider.recorded["behaviour_logp"], found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("squashed", [False, True])
def test_continuous_actions_are_normally_distributed(squashed: bool) -> None:
    """Means and deviations over many draws, to four standard errors."""
    means, deviations = np.array([0.5, -1.0]), np.array([0.2, 1.5])
    decider = GaussianSampler((2,), ENVS, squashed, np.random.default_rng(2))
    outputs = [*means.tolist(), *np.log(deviations).tolist()]
    drawn = []
    for _ in range(ROUNDS):
        actions = with_outputs(decider, outputs).sample()
        numbers = decider.recorded["action"]
        np.testing.assert_allclose(actions, np.tanh(numbers) if squashed else numbers, rtol=1e-6)
        drawn.append(numbers.copy())
    numbers, count = np.concatenate(drawn), ENVS * ROUNDS
    assert np.abs(numbers.mean(0) - means).max() < 4 * 1.5 / math.sqrt(count)
    assert np.abs(numbers.std(0) / deviations - 1).max() < 4 / math.sqrt(2 * count)
    assert abs(np.corrcoef(numbers.T)[0, 1]) < 4 / math.sqrt(count)
    best = np.tanh(means) if squashed else means
    np.testing.assert_allclose(with_outputs(decider, outputs).greedy(), [best] * ENVS, rtol=1e-6)


@pytest.mark.parametrize("squashed", [False, True])
@pytest.mark.parametrize("log_std", [-5.0, 0.0, 1.5])
def test_log_densities_of_continuous_actions_equal_the_learners(
    squashed: bool, log_std: float
) -> None:
    """Also of small deviations, where a number keeps few digits of the noise in it."""
    spec = Numbers((2, 2), squashed)
    rng = np.random.default_rng(3)
    outputs = rng.normal(size=(ENVS, 8)).astype(np.float32)
    outputs[:, 4:] = log_std
    decider = GaussianSampler(spec.shape, ENVS, squashed, rng)
    decider.outputs[:] = outputs.T
    decider.sample()
    recorded = torch.from_numpy(decider.recorded["action"])
    assert recorded.shape == (ENVS, 2, 2)
    found = distribution(spec, torch.from_numpy(outputs)).logp(recorded)
    np.testing.assert_allclose(decider.recorded["behaviour_logp"], found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["categorical", "choices", "epsilon_greedy", "gaussian"])
def test_actions_drawn_without_records_equal_those_of_sample(kind: str) -> None:
    make: dict[str, Callable[[np.random.Generator], ActionSampler]] = {
        "categorical": lambda rng: CategoricalSampler(4, ENVS, rng),
        "choices": lambda rng: MultiCategoricalSampler((3, 1), (2,), ENVS, rng),
        "epsilon_greedy": lambda rng: EpsilonGreedySampler(4, np.full(ENVS, 0.3), rng),
        "gaussian": lambda rng: GaussianSampler((2,), ENVS, squashed=False, rng=rng),
    }
    sampling, drawing = (make[kind](np.random.default_rng(5)) for _ in range(2))
    outputs = np.random.default_rng(6).normal(size=(3, *sampling.outputs.shape))
    for values in outputs:
        sampling.outputs[:] = drawing.outputs[:] = values
        assert drawing.draw().tobytes() == sampling.sample().tobytes()
        assert drawing.state_dict() == sampling.state_dict()
