"""Multi-discrete and continuous actions: their distributions and recorded log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from penstock.models.acting.categorical import (
    ActionSampler,
    CategoricalSampler,
    EpsilonGreedySampler,
    Ladder,
    MultiCategoricalSampler,
    MultiEpsilonGreedySampler,
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


@pytest.mark.parametrize(
    "kind", ["categorical", "choices", "epsilon_greedy", "q_choices", "gaussian"]
)
def test_actions_drawn_without_records_equal_those_of_sample(kind: str) -> None:
    make: dict[str, Callable[[np.random.Generator], ActionSampler]] = {
        "categorical": lambda rng: CategoricalSampler(4, ENVS, rng),
        "choices": lambda rng: MultiCategoricalSampler((3, 1), (2,), ENVS, rng),
        "epsilon_greedy": lambda rng: EpsilonGreedySampler(4, np.full(ENVS, 0.3), rng),
        "q_choices": lambda rng: MultiEpsilonGreedySampler((3, 1), (2,), np.full(ENVS, 0.3), rng),
        "gaussian": lambda rng: GaussianSampler((2,), ENVS, squashed=False, rng=rng),
    }
    sampling, drawing = (make[kind](np.random.default_rng(5)) for _ in range(2))
    outputs = np.random.default_rng(6).normal(size=(3, *sampling.outputs.shape))
    for values in outputs:
        sampling.outputs[:] = drawing.outputs[:] = values
        assert drawing.draw().tobytes() == sampling.sample().tobytes()
        assert drawing.state_dict() == sampling.state_dict()


def test_several_choices_explore_together_and_never_where_it_is_forbidden() -> None:
    envs = 4000
    sampler = MultiEpsilonGreedySampler(
        (3, 4), (2, 1), np.full(envs, 0.4), np.random.default_rng(0)
    )
    q = np.array([3.0, 1.0, 2.0, 0.0, 5.0, 6.0, 1.0], np.float32)
    forbidden = np.zeros((7, envs), np.bool_)
    forbidden[[1, 5]] = True
    forbidden[:3, envs // 2 :] = True  # all of the first choice, so none of it
    sampler.outputs[:] = q[:, None]
    sampler.forbid(forbidden)
    actions = sampler.sample().reshape(envs, 2)
    some, none = actions[: envs // 2], actions[envs // 2 :]

    # The best are 0 and 1. Of two and three allowed ones, 0.4 of the environments draw both anew.
    def shares(numbers: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.float64]:
        return np.bincount(numbers, minlength=count) / len(numbers)

    best = 0.6 + 0.4 / np.array([2, 3, 3])
    np.testing.assert_allclose(shares(some[:, 0], 3), [best[0], 0, 0.2], atol=0.04)
    np.testing.assert_allclose(shares(none[:, 0], 3), [best[2], 0.4 / 3, 0.4 / 3], atol=0.04)
    np.testing.assert_allclose(shares(actions[:, 1], 4), [0.4 / 3, best[1], 0, 0.4 / 3], atol=0.03)
    neither = (some == [0, 1]).all(1).mean()
    assert neither == pytest.approx(0.6 + 0.4 / 6, abs=0.04), "both are drawn, or neither"

    values = (q[actions[:, 0]] + q[3 + actions[:, 1]]) / 2
    recorded = sampler.recorded
    np.testing.assert_allclose(recorded["q_taken"][: envs // 2], values[: envs // 2])
    np.testing.assert_allclose(recorded["q_max"][: envs // 2], (3 + 5) / 2)
    explanation = sampler.explain(sample=False)
    assert explanation.q_max is not None
    np.testing.assert_array_equal(explanation.q_max, recorded["q_max"])


def test_rates_of_a_ladder_are_powers_of_a_base_that_may_change() -> None:
    """Horgan et al. 2018: environment i of N explores at base ** (1 + i / (N - 1) * alpha)."""
    ladder = Ladder(base=0.4, alpha=7.0, first=2, count=3, total=8)
    expected = [0.4 ** (1 + i / 7 * 7) for i in (2, 3, 4)]
    np.testing.assert_allclose(ladder.rates(0.4), expected)
    assert ladder.rates(1.0).tolist() == [1.0, 1.0, 1.0]
    assert not ladder.rates(0.0).any()
    flat = Ladder(base=0.4, alpha=0.0, first=2, count=3, total=8)
    np.testing.assert_allclose(flat.rates(0.25), 0.25)
    np.testing.assert_allclose(flat.seat_rates(0.25, np.arange(5)), 0.25)
    seats = ladder.seat_rates(0.4, np.arange(4))
    np.testing.assert_allclose(seats, [0.4 ** (1 + place * 7) for place in (0, 0.5, 0.25, 0.75)])
