"""Contract of all inferences, against the learner's networks and textbook sampling."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical, Normal, TanhTransform

from fake_inference import given
from penstock.algos.acting import make_policy
from penstock.algos.dqn.config import DqnConfig
from penstock.algos.sac.config import SacConfig
from penstock.algos.samples import network_shape
from penstock.algos.td3.config import Td3Config
from penstock.configs.schedules import value_at
from penstock.configs.schema import Config
from penstock.core.interfaces import Inference, ReadWeights
from penstock.core.params import Float32, Stamp
from penstock.core.state_bytes import from_bytes, to_bytes
from penstock.models.acting.inference import LocalInference
from penstock.models.torch_general import GeneralActorCritic
from penstock.models.torch_nets import build_net

ENVS, UNROLL, ACTIONS = 5, 6, 6
VECTOR, FRAMES = spaces.Box(-1, 1, (4,), np.float32), spaces.Box(0, 255, (4, 84, 84), np.uint8)
CHOICE, TORQUES = spaces.Discrete(ACTIONS), spaces.Box(-1, 1, (2, 3), np.float32)
Array = npt.NDArray[Any]
Make = Callable[[Config, Any, int], Inference]


@pytest.fixture(params=[LocalInference])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes an inference, for a seed of its random generator."""
    return lambda config, game, seed: request.param(
        make_policy(config, game, seed), network_shape(config, game).layout.size
    )


class Case:
    """An algorithm's policy in a game, with weights of its own."""

    def __init__(
        self, algo: str, obs: Any = VECTOR, action: Any = CHOICE, by: str = "auto", **model: Any
    ) -> None:
        actors = {"envs": ENVS, "count": 1, "precision": "fp32", "inference": by}
        sections = {"env": {"id": "x"}, "algo": {"name": algo}, "actors": actors, "model": model}
        self.config = Config.model_validate(sections)
        self.game: Any = SimpleNamespace(observation_space=obs, action_space=action)
        self.net: Any = build_net(network_shape(self.config, self.game)).requires_grad_(False)

    def weights(self, seed: int) -> Float32:
        """Random ones, which the network computes by from now on."""
        torch.manual_seed(seed)
        for tensor in self.net.parameters():
            tensor += 0.1 * torch.randn_like(tensor)
        tensors = [tensor.flatten() for tensor in (*self.net.parameters(), *self.net.buffers())]
        return torch.cat(tensors).numpy()

    def observations(self, seed: int) -> Array:
        rng, space = np.random.default_rng(seed), self.game.observation_space
        return rng.uniform(space.low, space.high, (UNROLL, ENVS, *space.shape)).astype(space.dtype)

    def outputs(self, obs: Array, state: Float32, first: Array) -> tuple[Float32, Float32]:
        """What the learner computes of an unroll ``[T, E, ...]``, and the state after it."""
        rows = torch.from_numpy(obs)
        if isinstance(self.net, GeneralActorCritic):
            before, begins = torch.from_numpy(state), torch.from_numpy(first)
            found, _, after = self.net.step(rows, before, begins)
            assert after is not None
            return found.view(UNROLL, ENVS, -1).numpy(), after.numpy()
        found = self.net(rows)
        found = found[0] if isinstance(found, tuple) else found
        return found.view(UNROLL, ENVS, -1).numpy(), state

    def sample(self, outputs: Float32, rng: np.random.Generator) -> tuple[Array, dict[str, Array]]:
        """Actions drawn by the outputs ``[E, outputs]``, and what is recorded."""
        algo, envs = self.config.algo, np.arange(ENVS)
        if isinstance(algo, DqnConfig):
            epsilon = value_at(algo.epsilon, 0) ** (1 + envs / (ENVS - 1) * algo.epsilon_alpha)
            u = rng.random(ENVS)
            choice = np.where(u < epsilon, (u / epsilon * ACTIONS).astype(int), outputs.argmax(1))
            return choice, {"q_taken": outputs[envs, choice], "q_max": outputs.max(1)}
        if self.game.action_space is CHOICE:
            policy = Categorical(logits=torch.from_numpy(outputs))
            below = policy.probs.cumsum(1)[:, :-1].numpy() <= rng.random((ENVS, 1), np.float32)
            choice = below.sum(1)
            return choice, {"behaviour_logp": policy.log_prob(torch.from_numpy(choice)).numpy()}
        if isinstance(algo, Td3Config):
            shift = algo.exploration_noise * rng.standard_normal(
                (outputs.shape[1], ENVS), np.float32
            )
            actions = np.clip(np.tanh(outputs) + shift.T, -1, 1)
            return actions.reshape(ENVS, *self.game.action_space.shape), {}
        mean, log_std = torch.from_numpy(outputs).double().chunk(2, 1)
        if isinstance(algo, SacConfig):
            log_std = log_std.clip(algo.log_std_min, algo.log_std_max)
        noise = torch.from_numpy(rng.standard_normal((mean.shape[1], ENVS), np.float32).T)
        number = mean + noise * log_std.exp()
        logp = Normal(mean, log_std.exp()).log_prob(number)
        action = number
        if isinstance(algo, SacConfig) or self.config.model.gaussian == "squashed":
            action = number.tanh()
            logp = logp - TanhTransform().log_abs_det_jacobian(number, action)
        shape = ENVS, *self.game.action_space.shape
        recorded = {"behaviour_logp": logp.sum(1).numpy(), "action": number.view(shape).numpy()}
        return action.view(shape).numpy(), {} if isinstance(algo, SacConfig) else recorded


CASES = {
    "numpy": lambda: Case("impala"),
    "torch": lambda: Case("impala", by="torch"),
    "cnn": lambda: Case("impala", FRAMES),
    "lstm": lambda: Case("impala", core="lstm", core_size=8),
    "epsilon-greedy": lambda: Case("dqn"),
    "gaussian": lambda: Case("ppo", action=TORQUES),
    "squashed": lambda: Case("ppo", action=TORQUES, gaussian="squashed"),
    "sac": lambda: Case("sac", action=TORQUES),
    "td3": lambda: Case("td3", action=TORQUES),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def assert_near(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def begins(seed: int) -> Array:
    """Where episodes begin, ``[T, E]``; some do at row 0."""
    first: Array = np.random.default_rng(seed).random((UNROLL, ENVS)) < 0.3
    assert first[0].any()
    assert not first[0].all()
    return first


def test_actions_columns_and_state_are_those_of_the_network(make: Make, case: Case) -> None:
    """Over unrolls with other weights each, in which episodes begin."""
    inference, rng = make(case.config, case.game, 3), np.random.default_rng(3)
    assert inference.stamp is None
    state = np.zeros_like(inference.state())
    assert len(state) == ENVS
    for version in (1, 2, 3):
        found = inference.refresh(given(case.weights(version), Stamp(1, version)))
        assert inference.stamp == found == Stamp(1, version)
        obs, first = case.observations(version), begins(version)
        outputs, after = case.outputs(obs, state, first)
        for t in range(UNROLL):
            inference.reset(first[t])
            if t == 0:
                state[first[0]] = 0
                assert_near(inference.state(), state)
            actions, columns = inference.decide(obs[t])
            expected, recorded = case.sample(outputs[t], rng)
            assert actions.dtype == (np.int32 if case.game.action_space is CHOICE else np.float32)
            assert_near(actions, expected)
            assert set(inference.recorded) == recorded.keys()
            for name, column in zip(inference.recorded, columns, strict=True):
                assert_near(column, recorded[name])
        state = after
        assert state.any() == (case.config.model.core == "lstm")
    inference.close()


def test_inference_with_loaded_state_continues_as_the_saved_one(make: Make, case: Case) -> None:
    """Between two unrolls, with the same weights; whatever it did before."""
    weights, obs = case.weights(0), case.observations(0)

    def played(inference: Inference) -> list[Array]:
        found: list[Array] = [inference.state().copy()]
        for t in range(UNROLL):
            actions, columns = inference.decide(obs[t])
            found += [actions.copy(), *(column.copy() for column in columns)]
        return found

    one, other = (make(case.config, case.game, seed) for seed in (5, 6))
    for inference in (one, other):
        inference.refresh(given(weights, Stamp(0, 1)))
    played(one)
    state = one.state_dict()
    wanted, differs = played(one), played(other)
    assert any((a != b).any() for a, b in zip(wanted, differs, strict=True))
    other.load_state_dict(from_bytes(to_bytes(state)))
    for a, b in zip(wanted, played(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_only_a_refresh_changes_the_weights(make: Make, case: Case) -> None:
    obs, old, new = case.observations(0)[0], case.weights(0), case.weights(1)

    def decided(change: Callable[[Inference, Float32], object]) -> list[Array]:
        inference, weights = make(case.config, case.game, 0), old.copy()
        inference.refresh(given(weights, Stamp(0, 1)))
        change(inference, weights)
        actions, columns = inference.decide(obs)
        return [actions.copy(), *(column.copy() for column in columns)]

    before = decided(lambda inference, weights: None)
    overwritten = decided(lambda inference, weights: weights.fill(0))
    refreshed = decided(lambda inference, weights: inference.refresh(given(new, Stamp(0, 2))))
    assert all((a == b).all() for a, b in zip(before, overwritten, strict=True))
    assert any((a != b).any() for a, b in zip(before, refreshed, strict=True))


def test_deciding_before_the_first_weights_is_an_error(make: Make) -> None:
    case = CASES["lstm"]()
    inference, obs = make(case.config, case.game, 0), case.observations(0)[0]
    weights, stamp = case.weights(0), Stamp(0, 1)
    with pytest.raises(RuntimeError):
        inference.decide(obs)
    assert inference.refresh(lambda out, newer_than: None) is None
    with pytest.raises(RuntimeError):
        inference.decide(obs)
    with pytest.raises(ValueError, match="broadcast"):
        inference.refresh(given(weights[:-1], stamp))
    assert inference.stamp is None
    assert inference.refresh(given(weights, stamp)) == stamp
    inference.decide(obs)
    inference.close()


def test_weights_of_another_learner_with_an_equal_stamp_are_read(make: Make) -> None:
    """Memory goes on with them, as the environments do."""
    case = CASES["lstm"]()
    inference, obs = make(case.config, case.game, 0), case.observations(0)[0]
    stamp, asked = Stamp(0, 1), list[Stamp | None]()
    for seed in (0, 1):
        learner = given(case.weights(seed), stamp)

        def read(out: Float32, newer_than: Stamp | None, learner: ReadWeights = learner) -> Any:
            asked.append(newer_than)
            return learner(out, newer_than)

        assert inference.refresh(read) == stamp
        assert inference.refresh(read) == stamp
        inference.decide(obs)
        state = inference.state().copy()
        inference.forget()
        assert inference.stamp is None
        np.testing.assert_array_equal(inference.state(), state)
        assert state.any()
    assert asked == [None, stamp] * 2
