"""Heads of Q-values: quantiles, several choices, noise, and a rate that travels with weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from net_weights import flat_of, layout_of, shake
from penstock.algos.acting import make_policy
from penstock.algos.batch_policy import BatchPolicy
from penstock.algos.samples import network_shape
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.envs import EnvInfo
from penstock.models.fitting import HeadShape
from penstock.models.torch_heads import HeadNet
from penstock.models.torch_nets import build_net
from penstock.models.torch_noise import NoisyLinear

VECTOR = spaces.Box(-1, 1, (4,), np.float32)
FRAMES = spaces.Box(0, 255, (2, 40, 40), np.uint8)
BOARD = spaces.Box(0, 1, (3, 9, 9), np.uint8)
PARTS = spaces.Dict({"speed": VECTOR, "action_mask": spaces.Box(0, 1, (5,), np.int8)})
FIVE, PAIR = spaces.Discrete(5), spaces.MultiDiscrete([3, 2])
CELLS: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
    "vector": (VECTOR, FIVE),
    "frames": (FRAMES, FIVE),
    "board": (BOARD, PAIR),
    "masked": (PARTS, FIVE),
    "pair": (VECTOR, PAIR),
    "masked pair": (PARTS, PAIR),
}
ALL_PARTS = ("algo.quantiles=3", "algo.noisy=true", "algo.epsilon={from: 1, to: 0.1, steps: 100}")
ROWS = 8


def case(cell: str, *options: str) -> tuple[Config, EnvInfo, HeadShape]:
    info = EnvInfo.of_spaces("x", CELLS[cell], 1, "of a test")
    fixed = ("algo.name=dqn", f"actors.envs={ROWS}", "model.hidden=[16, 8]")
    config = resolve("CartPole-v1", [*fixed, *options])
    shape: Any = network_shape(config, info)
    return config, info, shape


def net_of(shape: HeadShape, seed: int = 0) -> HeadNet:
    torch.manual_seed(seed)
    net = build_net(shape)
    shake(net)
    return net


def observations(info: EnvInfo, seed: int = 0) -> Any:
    space = info.observation_space
    rng = np.random.default_rng(seed)
    if info.parts:  # bytes of a row; no number among them may be infinite
        rows = np.zeros((ROWS, *space.shape), np.uint8)
        for part in info.parts:
            place = slice(part.offset, part.offset + part.nbytes)
            if part.dtype == "<f4":
                numbers = rng.uniform(-1, 1, (ROWS, *part.shape)).astype(np.float32)
                rows[:, place] = numbers.reshape(ROWS, -1).view(np.uint8)
            else:
                rows[:, place] = rng.integers(0, 2, (ROWS, part.nbytes))
        return rows
    if space.dtype == np.uint8:
        return rng.integers(0, 2, (ROWS, *space.shape)).astype(np.uint8)
    return rng.uniform(-1, 1, (ROWS, *space.shape)).astype(np.float32)


@pytest.mark.parametrize("duelling", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_layout_of_all_parts_equals_that_of_the_torch_module(cell: str, duelling: bool) -> None:
    _, _, shape = case(cell, *ALL_PARTS, f"algo.duelling={str(duelling).lower()}")
    assert shape.layout == layout_of(build_net(shape))
    assert ("epsilon", (1,)) in shape.layout.entries
    sigmas = [name for name, _ in shape.layout.entries if name.endswith("weight_sigma")]
    assert len(sigmas) >= (3 if duelling else 2)


@pytest.mark.parametrize("duelling", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_actors_decide_by_the_mean_of_the_learners_quantiles(cell: str, duelling: bool) -> None:
    config, info, shape = case(cell, *ALL_PARTS, f"algo.duelling={str(duelling).lower()}")
    net = net_of(shape)
    obs = observations(info)
    with torch.no_grad():
        quantiles = net.values(torch.from_numpy(obs), net.training_weights())
        outputs = net(torch.from_numpy(obs))
    assert quantiles.shape == (ROWS, 5, 3)
    torch.testing.assert_close(outputs, quantiles.mean(2), rtol=0, atol=1e-5)
    policy = make_policy(config, info, 0)
    policy.load(flat_of(net))
    found = policy.outputs(obs).copy()
    allowed = found > -1e8
    np.testing.assert_allclose(found[allowed], outputs.numpy()[allowed], rtol=0, atol=1e-5)


def test_duelling_heads_have_a_value_for_each_quantile_and_means_for_each_choice() -> None:
    """Wang et al. 2016, equation 9, quantile by quantile, for each choice (Tavakoli et al.)."""
    _, info, shape = case("pair", "algo.quantiles=2", "model.activation=relu")
    net: Any = net_of(shape)
    obs = torch.from_numpy(observations(info))
    features = obs
    for layer in net.hidden:
        features = torch.relu(features @ layer.weight[0] + layer.bias[0])
    value = net.value(features[:, :8])[:, None]
    advantages = net.head(features[:, 8:]).view(ROWS, 5, 2)
    expected = torch.cat(
        [value + part - part.mean(1, keepdim=True) for part in advantages.split((3, 2), 1)], 1
    )
    torch.testing.assert_close(net.values(obs, net.training_weights()), expected, rtol=0, atol=1e-5)


def test_noise_of_a_layer_is_that_of_its_inputs_times_that_of_its_outputs() -> None:
    torch.manual_seed(0)
    layer = NoisyLinear(300, 200)
    assert layer.weight_sigma[0, 0].item() == pytest.approx(0.5 / math.sqrt(300))
    rows = torch.randn(4, 300)
    torch.testing.assert_close(
        layer(rows), torch.nn.functional.linear(rows, layer.weight, layer.bias)
    )

    layer.draw_noise()
    weight, bias = layer.weights()
    noise = ((weight - layer.weight) / layer.weight_sigma).detach().double()
    of_outputs = ((bias - layer.bias) / layer.bias_sigma).detach().double()
    of_inputs = noise[0] / of_outputs[0]
    torch.testing.assert_close(noise, torch.outer(of_outputs, of_inputs), rtol=0, atol=2e-3)

    # A factor is the signed root of a normal number, whose square is 1 on average.
    for factors in (of_inputs, of_outputs):
        squares = factors.sign() * factors.square()
        assert abs(squares.mean().item()) < 0.25
        assert squares.std().item() == pytest.approx(1, abs=0.15)

    layer(rows).sum().backward()
    expected = torch.outer(of_outputs, of_inputs * rows.sum(0)).float()
    torch.testing.assert_close(layer.weight_sigma.grad, expected, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("cell", ["vector", "frames", "board"])
def test_noise_on_actors_has_the_deviation_that_it_has_on_the_learner(cell: str) -> None:
    config, info, shape = case(cell, "algo.noisy=true", "algo.epsilon=0", "algo.duelling=true")
    net = net_of(shape)
    obs = observations(info)
    policy = make_policy(config, info, 0)
    flat = flat_of(net)
    on_actors, on_learner = [], []
    for number in range(1, 200):
        policy.load(flat, number=number)
        policy.act(obs)
        on_actors.append(policy.decider.outputs.T.copy())
        net.draw_noise()
        with torch.no_grad():
            on_learner.append(net(torch.from_numpy(obs)).numpy())
    spread = np.std(on_learner, axis=0)
    assert spread.min() > 0
    np.testing.assert_allclose(np.std(on_actors, axis=0).mean(), spread.mean(), rtol=0.15)
    difference = np.mean(on_actors, axis=0) - np.mean(on_learner, axis=0)
    assert abs(difference).max() < 5 * spread.max() * math.sqrt(2 / 200)


def test_greedy_actions_have_no_noise_and_each_weights_have_their_own() -> None:
    config, info, shape = case("vector", "algo.noisy=true", "algo.epsilon=0")
    flat, obs = flat_of(net_of(shape)), observations(info)
    policy = make_policy(config, info, 0)

    def acted(number: int) -> Any:
        policy.load(flat, number=number)
        policy.act(obs)
        return policy.decider.outputs.copy()

    first = acted(1)
    means = policy.outputs(obs).T.copy()
    assert not np.array_equal(first, means)
    policy.act(obs)
    np.testing.assert_array_equal(policy.decider.outputs, first)
    assert not np.array_equal(acted(2), first)
    np.testing.assert_array_equal(acted(1), first)
    policy.greedy(obs)
    np.testing.assert_array_equal(policy.decider.outputs, means)

    # A policy of another seed has other noise, until it takes over the state.
    other = make_policy(config, info, 9)
    other.load(flat, number=1)
    other.act(obs)
    assert not np.array_equal(other.decider.outputs, first)
    other.load_state_dict(policy.state_dict())
    other.act(obs)
    np.testing.assert_array_equal(other.decider.outputs, first)


def test_batch_policy_explores_with_noise_in_training_alone() -> None:
    config, info, shape = case("vector", "algo.noisy=true", "algo.epsilon=0")
    flat, obs = flat_of(net_of(shape)), observations(info)
    policy = BatchPolicy(config, info, flat)
    state = np.zeros((ROWS, 0), np.float32)
    means = policy.explain(obs, state, sample=False).explanation.q
    seats = np.arange(ROWS)
    policy.load(flat, untrained=False, number=3)
    recorded = policy.act(obs, state, seats).recorded["q_max"]
    assert means is not None
    assert not np.allclose(recorded, means.max(1))
    np.testing.assert_array_equal(policy.explain(obs, state, sample=False).explanation.q, means)


@pytest.mark.parametrize("cell", ["vector", "frames", "pair"])
def test_rate_of_exploration_comes_with_the_weights(cell: str) -> None:
    options = ("algo.epsilon={from: 1, to: 0.1, steps: 100}", "algo.epsilon_alpha=0")
    config, info, shape = case(cell, *options)
    net = net_of(shape)
    obs = observations(info)
    policy = make_policy(config, info, 0)
    greedy = None
    for epsilon, expected in ((1.0, 1.0), (0.25, 0.25), (0.0, 0.0)):
        net.get_buffer("epsilon").fill_(epsilon)
        policy.load(flat_of(net))
        greedy = policy.greedy(obs).copy() if greedy is None else greedy
        other = [(policy.act(obs) != greedy).reshape(ROWS, -1).any(1).mean() for _ in range(400)]
        count = 6 if cell == "pair" else 5
        assert np.mean(other) == pytest.approx(expected * (1 - 1 / count), abs=0.03)


def test_without_the_options_the_layout_is_as_ever() -> None:
    _, _, shape = case("vector", "algo.duelling=true")
    names = [name for name, _ in shape.layout.entries]
    assert names == [
        *(f"hidden.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")),
        *(f"{head}.{kind}" for head in ("head", "value") for kind in ("weight", "bias")),
    ]
