"""Decisions for any number of observations with one copy of the weights."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces

from penstock.algos import batch_policy
from penstock.algos.batch_policy import BatchPolicy
from penstock.algos.samples import network_shape
from penstock.configs.load import resolve
from penstock.core.observations import views
from penstock.envs import EnvInfo

NUMBERS = spaces.Box(-1, 1, (3,), np.float32)
FRAMES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
MASKED = spaces.Dict({"speed": NUMBERS, "action_mask": spaces.MultiBinary(5)})
CHOICES = spaces.Discrete(5)

NETWORKS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "mlp": (NUMBERS, CHOICES, ()),
    "normalized": (NUMBERS, CHOICES, ("model.normalize_observations=true",)),
    "torch": (NUMBERS, CHOICES, ("actors.inference=torch",)),
    "cnn": (FRAMES, CHOICES, ("actors.precision=fp32",)),
    "q": (NUMBERS, CHOICES, ("algo.name=dqn",)),
    "torques": (NUMBERS, spaces.Box(-2, 2, (2,), np.float32), ("algo.name=sac",)),
    "masked": (MASKED, CHOICES, ()),
    "lstm": (MASKED, spaces.MultiDiscrete([3, 2]), ("model.core=lstm", "model.core_size=8")),
}


def made(name: str) -> tuple[BatchPolicy, EnvInfo]:
    observation, action, options = NETWORKS[name]
    config = resolve("cartpole", ["algo.name=ppo", *options])
    info = EnvInfo.of_spaces("it", (observation, action), 1, "")
    layout = network_shape(config, info).layout
    weights = 0.1 * np.random.default_rng(0).standard_normal(layout.size, np.float32)
    if any(entry == "normalizer.var" for entry, _ in layout.entries):
        layout.views(weights)["normalizer.var"][:] = 2.0
    return BatchPolicy(config, info, weights), info


def observations(info: EnvInfo, count: int, seed: int = 0) -> npt.NDArray[Any]:
    rng = np.random.default_rng(seed)
    space = info.observation_space
    if not info.parts:
        scale = 255 if space.dtype == np.uint8 else 1
        return (scale * rng.random((count, *space.shape))).astype(space.dtype)
    packed = np.zeros((count, *space.shape), np.uint8)
    arrays = views(info.parts, packed)
    arrays["speed"][:] = rng.standard_normal((count, 3))
    arrays["action_mask"][:] = rng.random((count, 5)) < 0.6
    return packed


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_a_batch_of_any_size_is_decided_as_its_rows_one_by_one(name: str, count: int) -> None:
    policy, info = made(name)
    state = np.zeros((count, policy.state_size), np.float32)
    for step in range(3):
        seen = observations(info, count, step)
        alone = [
            policy.decide(seen[row : row + 1], state[row : row + 1], sample=False)
            for row in range(count)
        ]
        policy.decide(
            observations(info, 9, 7), np.ones((9, policy.state_size), np.float32), sample=True
        )
        actions, state = policy.decide(seen, state, sample=False)
        one_by_one: list[Any] = [np.concatenate(arrays) for arrays in zip(*alone, strict=True)]
        np.testing.assert_allclose(np.asarray(actions, float), one_by_one[0], atol=1e-5)
        np.testing.assert_allclose(state, one_by_one[1], atol=1e-5)
    if name == "lstm":
        assert np.abs(state).min(axis=1).all()


@pytest.mark.parametrize("sample", [False, True])
def test_rows_beyond_the_largest_batch_are_decided_in_turn(
    monkeypatch: pytest.MonkeyPatch, sample: bool
) -> None:
    monkeypatch.setattr(batch_policy, "MOST_ROWS", 4)
    policy, info = made("lstm")
    seen = observations(info, 11)
    state = np.random.default_rng(1).standard_normal((11, policy.state_size)).astype(np.float32)
    actions, next_state = policy.decide(seen, state, sample=sample)
    explained = policy.explain(seen, state, sample=sample)
    assert actions.shape == (11, 2)
    np.testing.assert_array_equal(next_state, explained.next_state)
    assert explained.values is not None
    assert len(set(explained.values.tolist())) == 11
    assert explained.explanation.log_prob is not None
    assert explained.explanation.log_prob.shape == (11,)
    assert explained.explanation.q is None


def test_a_masked_choice_is_never_drawn_in_a_batch_that_is_padded() -> None:
    policy, info = made("masked")
    seen = observations(info, 33)
    views(info.parts, seen)["action_mask"][:, 0] = 1
    allowed = views(info.parts, seen)["action_mask"].astype(bool)
    drawn = np.zeros_like(allowed)
    for _ in range(200):
        actions, _ = policy.decide(seen, np.zeros((33, 0), np.float32), sample=True)
        drawn[np.arange(33), actions] = True
    np.testing.assert_array_equal(drawn, allowed)


def test_what_a_call_returned_is_not_changed_by_the_next() -> None:
    policy, info = made("lstm")
    zeros = np.zeros((4, policy.state_size), np.float32)
    actions, state = policy.decide(observations(info, 4), zeros, sample=True)
    copies = actions.copy(), state.copy()
    for seed in range(5):
        policy.decide(observations(info, 4, seed), state, sample=True)
    np.testing.assert_array_equal(actions, copies[0])
    np.testing.assert_array_equal(state, copies[1])
    assert not zeros.any()


MEASURE_MEMORY = """
import numpy as np, psutil
from penstock.algos.batch_policy import BatchPolicy
from penstock.algos.samples import network_shape
from penstock.configs.load import resolve
from penstock.envs import EnvInfo
from gymnasium import spaces
seen = spaces.Box(0, 255, (3, 1200), np.uint8)
config = resolve("cartpole", ["model.kind=mlp", "model.hidden=[1024, 1024]", "{inference}"])
info = EnvInfo.of_spaces("it", (seen, spaces.Discrete(2)), 1, "")
weights = np.zeros(network_shape(config, info).layout.size, np.float32)
policy = BatchPolicy(config, info, weights)
def decide(count):
    rows = np.zeros((count, 3, 1200), np.uint8)
    policy.decide(rows, np.zeros((count, 0), np.float32), sample=False)
decide(1)
before = psutil.Process().memory_info().rss
for count in (2, 4, 8, 16):
    decide(count)
print(psutil.Process().memory_info().rss - before, weights.nbytes)
"""


@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_weights_are_in_memory_once_for_all_sizes(inference: str) -> None:
    script = MEASURE_MEMORY.replace("{inference}", f"actors.inference={inference}")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    growth, weights_nbytes = map(int, done.stdout.split())
    assert weights_nbytes > 30e6
    assert growth < 0.2 * weights_nbytes


def test_loaded_weights_decide_as_a_policy_that_was_made_of_them() -> None:
    policy, info = made("lstm")
    seen = observations(info, 6)
    state = np.ones((6, policy.state_size), np.float32)
    policy.decide(seen, state, sample=False)  # makes a workspace by the first weights
    config = resolve("cartpole", ["algo.name=ppo", *NETWORKS["lstm"][2]])
    size = network_shape(config, info).layout.size
    weights = 0.3 * np.random.default_rng(1).standard_normal(size, np.float32)
    expected = BatchPolicy(config, info, weights.copy()).explain(seen, state, sample=False)
    policy.load(weights, untrained=False)
    weights[:] = 0  # they were copied
    explained = policy.explain(seen, state, sample=False)
    assert explained.explanation.logits is not None
    np.testing.assert_array_equal(explained.explanation.logits, expected.explanation.logits)
    np.testing.assert_array_equal(explained.next_state, expected.next_state)
    np.testing.assert_array_equal(explained.values, expected.values)


def test_recorded_decisions_beyond_the_largest_batch_are_those_of_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_policy, "MOST_ROWS", 4)
    policy, info = made("q")
    policy.load(policy._weights, untrained=False)
    seen = observations(info, 11)
    batch = policy.act(seen, np.zeros((11, 0), np.float32), np.arange(11))
    q = policy.explain(seen, np.zeros((11, 0), np.float32), sample=False).explanation.q
    assert q is not None
    taken = q[np.arange(11), np.asarray(batch.actions, np.int64)]
    np.testing.assert_array_equal(batch.recorded["q_taken"], taken)
    np.testing.assert_array_equal(batch.recorded["q_max"], q.max(axis=1))


def test_a_seat_explores_by_its_number_and_with_certainty_before_the_first_update() -> None:
    config = resolve("cartpole", ["algo.name=dqn", "algo.epsilon=0.5", "algo.epsilon_alpha=3"])
    _, info = made("q")
    size = network_shape(config, info).layout.size
    weights = np.random.default_rng(0).standard_normal(size, np.float32)
    policy = BatchPolicy(config, info, weights)
    seen = observations(info, 512)
    state = np.zeros((512, 0), np.float32)
    greedy, _ = policy.decide(seen, state, sample=False)

    def explored(number: int) -> float:
        """The share of actions that were not the best; a random one is the best in a fifth."""
        numbers = np.full(512, number)
        drawn = [policy.act(seen, state, numbers).actions != greedy for _ in range(20)]
        return float(np.mean(drawn))

    for number, place in {0: 0.0, 1: 0.5, 2: 0.25, 3: 0.75, 65_536 + 4: 0.125}.items():
        epsilon = 0.5 ** (1 + 3 * place)
        assert explored(number) == pytest.approx(0.8 * epsilon, abs=0.02)
    policy.load(weights, untrained=True)
    assert explored(3) == pytest.approx(0.8, abs=0.02)
    policy.load(weights, untrained=False)
    assert explored(3) < 0.1
