"""Actions are drawn with exactly the probabilities of the logits."""

from __future__ import annotations

import json
import math

import numpy as np
import numpy.typing as npt
import pytest

from penstock.models.acting.categorical import CategoricalSampler

ENVS = 500


def sampler(
    row: list[float], seed: int = 0, envs: int = ENVS
) -> tuple[CategoricalSampler, npt.NDArray[np.float32]]:
    logits = np.repeat(np.array(row, np.float32)[:, None], envs, axis=1)
    return CategoricalSampler(len(row), envs, np.random.default_rng(seed)), logits


def log_softmax(row: list[float]) -> npt.NDArray[np.float64]:
    logits = np.array(row, np.float32).astype(np.float64)
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


@pytest.mark.parametrize(
    "row",
    [
        [0.3, -0.2],
        [1.0, 0.0, -1.0],
        [0.0] * 6,
        [5.0, -2.0, 0.0, 3.0, 4.9, -1.0],
        [1000.0, 999.0, 998.0],
        [-0.1 * i for i in range(18)],
    ],
)
def test_drawn_actions_pass_a_chi_square_test(row: list[float]) -> None:
    drawn, logits = sampler(row)
    counts = np.zeros(len(row))
    rounds = 400
    for _ in range(rounds):
        drawn.outputs[:] = logits
        counts += np.bincount(drawn.sample(), minlength=len(row))
    expected = np.exp(log_softmax(row)) * rounds * ENVS
    freedom = len(row) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)  # about one seed in ten thousand fails


def test_environments_are_drawn_independently() -> None:
    drawn, logits = sampler([0.0, 0.0], envs=2)
    pairs = np.zeros((2, 2))
    for _ in range(40_000):
        drawn.outputs[:] = logits
        a, b = drawn.sample()
        pairs[a, b] += 1
    assert float(((pairs - 10_000) ** 2 / 10_000).sum()) < 3 + 4 * math.sqrt(6)


@pytest.mark.parametrize("row", [[0.3, -0.2], [1e4, 0.0, 9999.0], [-3.0, 2.0, 0.5, 0.1]])
def test_log_probability_belongs_to_the_drawn_action(row: list[float]) -> None:
    drawn, logits = sampler(row)
    drawn.outputs[:] = logits
    actions, logp = drawn.sample(), drawn.recorded["behaviour_logp"]
    assert (actions.dtype.str, logp.dtype.str) == ("<i4", "<f4")
    np.testing.assert_allclose(logp, log_softmax(row)[actions], rtol=1e-5, atol=1e-6)


class Largest(np.random.Generator):
    """Always draws the largest number that random() can give."""

    def random(self, *_: object, out: npt.NDArray[np.float32], **__: object) -> None:  # type: ignore[override]
        out.fill(1 - 2**-24)


@pytest.mark.parametrize("row", [[0.0, -200.0], [0.0, 0.5, -200.0], [0.1, 0.2, 0.3, 0.4, -200.0]])
def test_an_action_of_probability_zero_is_never_taken(row: list[float]) -> None:
    assert np.exp(np.float32(row[-1])) == 0
    drawn = CategoricalSampler(len(row), 3, Largest(np.random.PCG64()))
    drawn.outputs[:] = np.array(row, np.float32)[:, None]
    actions, logp = drawn.sample(), drawn.recorded["behaviour_logp"]
    assert (actions == len(row) - 2).all()
    assert np.isfinite(logp).all()


def test_greedy_takes_the_likeliest() -> None:
    drawn, _ = sampler([0.0, 0.0, 0.0], envs=3)
    drawn.outputs[:] = np.array([[1, 0, -1], [0, 5, -3], [0, 2, -0.5]], np.float32)
    assert drawn.greedy().tolist() == [0, 1, 2]


def test_the_random_state_survives_json() -> None:
    drawn, logits = sampler([0.0, 0.3, 0.1])
    state = json.loads(json.dumps(drawn.state_dict()))
    drawn.outputs[:] = logits
    first = drawn.sample().copy()
    other, _ = sampler([0.0, 0.0, 0.0], seed=9)
    other.load_state_dict(state)
    other.outputs[:] = logits
    assert (other.sample() == first).all()
