"""Networks in numpy and torch give equal outputs, and their gradients are correct."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, linear

from net_weights import flat_of, shake
from penstock.models.acting.categorical import CategoricalSampler
from penstock.models.acting.numpy_mlp import NumpyMlp
from penstock.models.acting.policy import Policy
from penstock.models.acting.torch_network import TorchNetwork
from penstock.models.actions import Numbers, discrete
from penstock.models.layout import (
    POLICY,
    VALUE,
    CnnShape,
    DenseShape,
    FusedActorCriticShape,
    MlpShape,
    NetShape,
    QCnnShape,
    SingleHead,
)
from penstock.models.torch_nets import Dense, Mlp, NatureCnn, Net, QCnn, TwinCritics, build_net
from penstock.models.torch_trunks import activate, climb, tanh, towers_in_turn

MLP = MlpShape(6, discrete(3), (64, 64), "tanh", 1.0)
CNN = CnnShape(4, 84, 84, discrete(6), 1 / 255)
ENVS = 16


def shaken(net: nn.Module) -> Any:
    """Returns the net's flat vector, after noise has made nothing in it special."""
    shake(net, 0.05)
    return flat_of(net)


def random_net(shape: FusedActorCriticShape, dtype: torch.dtype = torch.float32) -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = build_net(shape, dtype)
    return net, shaken(net)


def policy_of(kind: Any, shape: Any, *dtype: torch.dtype) -> Policy:
    decider = CategoricalSampler(shape.outputs, ENVS, np.random.default_rng(0))
    return Policy(kind(shape, decider.outputs, *dtype), decider)


def observations(shape: NetShape, *lead: int) -> Any:
    rng = np.random.default_rng(0)
    if isinstance(shape, CnnShape | QCnnShape):
        size = (*lead, shape.channels, shape.height, shape.width)
        return rng.integers(0, 256, size).astype(np.uint8)
    if shape.obs_scale != 1:
        return rng.integers(0, 256, (*lead, shape.inputs)).astype(np.uint8)
    return rng.normal(size=(*lead, shape.inputs)).astype(np.float32)


@pytest.mark.parametrize(
    "shape",
    [
        MLP,
        MlpShape(6, discrete(3), (16,), "relu", 1.0),
        MlpShape(4, discrete(2), (8, 32, 16), "tanh", 1.0),
        MlpShape(100, discrete(4), (32,), "tanh", 1 / 255),
    ],
)
def test_numpy_and_torch_policies_equal_the_modules_logits(shape: MlpShape) -> None:
    net, flat = random_net(shape)
    obs = observations(shape, ENVS)
    expected = net(torch.from_numpy(obs))[0].detach().numpy()
    for kind in (NumpyMlp, TorchNetwork):
        policy = policy_of(kind, shape)
        policy.load(flat)
        np.testing.assert_allclose(policy.outputs(obs), expected, rtol=0, atol=1e-5)
        assert (policy.greedy(obs) == expected.argmax(1)).all()
        actions, logp = policy.act(obs), policy.recorded["behaviour_logp"]
        chosen = net(torch.from_numpy(obs))[0].log_softmax(1).detach().numpy()
        np.testing.assert_allclose(logp, chosen[np.arange(ENVS), actions], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [NumpyMlp, TorchNetwork])
def test_load_copies_the_weights(kind: Any) -> None:
    _, flat = random_net(MLP)
    policy, obs = policy_of(kind, MLP), observations(MLP, ENVS)
    policy.load(flat)
    before = policy.outputs(obs).copy()
    flat[:] = 0
    assert (policy.outputs(obs) == before).all()
    policy.load(flat)
    assert not policy.outputs(obs).any()
    with pytest.raises(ValueError, match="this layout needs"):
        policy.load(flat[:-1])


def test_observations_of_an_environment_in_float64_are_read() -> None:
    _, flat = random_net(MLP)
    obs = observations(MLP, ENVS).astype(np.float64)
    policies = policy_of(NumpyMlp, MLP), policy_of(TorchNetwork, MLP)
    for policy in policies:
        policy.load(flat)
    np.testing.assert_allclose(policies[0].outputs(obs), policies[1].outputs(obs), atol=1e-5)


def test_mlp_is_two_separate_towers_of_linear_layers() -> None:
    net, _ = random_net(MLP)
    assert isinstance(net, Mlp)
    obs = torch.from_numpy(observations(MLP, ENVS))
    outputs = []
    for tower, head in ((POLICY, net.policy), (VALUE, net.value)):
        hidden = obs
        for layer in net.hidden:
            hidden = torch.tanh(linear(hidden, layer.weight[tower].t(), layer.bias[tower]))  # type: ignore[index]
        outputs.append(head(hidden))
    logits, values = net(obs)
    torch.testing.assert_close(logits, outputs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(values, outputs[1][:, 0], rtol=0, atol=1e-5)
    assert values.shape == (ENVS,)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("rows", [1, 2112])
def test_towers_in_turn_give_the_numbers_and_gradients_of_batched_products(
    activation: Any, rows: int
) -> None:
    net, _ = random_net(replace(MLP, activation=activation, hidden=(64, 64, 32)))
    obs = torch.randn(rows, 6)
    factors = torch.randn(2, rows, 32)  # so that each number has a gradient of its own
    batched = climb(obs.expand(2, -1, -1), net.weights(), activate(activation))
    wanted = torch.autograd.grad((batched * factors).sum(), net.weights())
    towers = towers_in_turn(obs, net.weights(), activation)
    found = torch.autograd.grad((torch.stack(towers) * factors).sum(), net.weights())
    torch.testing.assert_close(torch.stack(towers), batched, rtol=1e-6, atol=1e-6)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("actions", [discrete(3), discrete(1), Numbers((2,))])
def test_a_net_computed_in_turn_is_the_trunk_with_its_heads(actions: Any, normalize: bool) -> None:
    net, _ = random_net(replace(MLP, actions=actions, normalize=normalize))
    obs = torch.randn(4, ENVS, 6)
    found, wanted = net(obs), Net.forward(net, obs)
    parameters = list(net.parameters())
    factors = [torch.randn_like(each) for each in wanted]
    for one, other in zip(
        (*found, *torch.autograd.grad(found, parameters, factors)),
        (*wanted, *torch.autograd.grad(wanted, parameters, factors)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_net_has_derivatives_by_its_observations() -> None:
    net, _ = random_net(MLP)
    obs = torch.randn(ENVS, 6, requires_grad=True)
    logits, _ = net(obs)
    (slope,) = torch.autograd.grad(logits.square().sum(), obs, create_graph=True)
    assert slope.any()
    slope.square().sum().backward()
    weight = net.get_parameter("hidden.0.weight").grad
    assert weight is not None
    assert weight[POLICY].any()


def test_tower_without_a_loss_gets_no_gradient() -> None:
    net, _ = random_net(MLP)
    logits, _ = net(torch.randn(ENVS, 6))
    logits.square().sum().backward()
    weight = net.get_parameter("hidden.0.weight").grad
    assert weight is not None
    assert weight[POLICY].any()
    assert not weight[VALUE].any()


def test_cnn_has_the_layers_of_the_paper() -> None:
    net, _ = random_net(CNN)
    assert isinstance(net, NatureCnn)
    frames = torch.from_numpy(observations(CNN, 4))
    hidden = frames.float() / 255
    for conv, stride in zip(net.convs, (4, 2, 1), strict=True):
        hidden = conv2d(hidden, conv.weight, conv.bias, stride).relu()  # type: ignore[arg-type]
    hidden = net.linear(hidden.flatten(1)).relu()
    logits, values = net(frames)
    torch.testing.assert_close(logits, net.policy(hidden), rtol=0, atol=1e-5)
    torch.testing.assert_close(values, net.value(hidden)[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [CNN, MLP, replace(MLP, activation="relu", obs_scale=1 / 255)])
def test_in_bfloat16_a_net_is_near_and_its_outputs_and_gradients_are_float32(
    shape: FusedActorCriticShape,
) -> None:
    (net, _), (half, flat) = random_net(shape), random_net(shape, torch.bfloat16)
    obs = observations(shape, 4)
    expected, (logits, values) = net(torch.from_numpy(obs)), half(torch.from_numpy(obs))
    assert logits.dtype == values.dtype == torch.float32
    torch.testing.assert_close(logits, expected[0], rtol=0, atol=0.05)
    torch.testing.assert_close(values, expected[1], rtol=0, atol=0.05)
    (logits.sum() + values.sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    for a, b in zip(half.parameters(), net.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.dtype == torch.float32
        assert torch.cosine_similarity(a.grad.flatten(), b.grad.flatten(), 0) > 0.99
    outputs = np.empty((shape.outputs, 4), np.float32)
    network = TorchNetwork(shape, outputs, torch.bfloat16)
    network.load(flat)
    network.forward(obs)
    np.testing.assert_allclose(outputs.T, logits.detach().numpy(), atol=1e-2)


@pytest.mark.parametrize("shape", [MLP, CNN])
def test_leading_axes_and_slices_make_up_the_batch(shape: FusedActorCriticShape) -> None:
    net, _ = random_net(shape)
    obs = torch.from_numpy(observations(shape, 3, 4))[:, 1:3]
    for a, b in zip(net(obs), net(obs.flatten(0, 1)), strict=True):
        assert torch.equal(a, b)


def plain_tower(net: Any, obs: torch.Tensor, activation: Any) -> torch.Tensor:
    hidden = obs.float().flatten(1)
    for layer in net.hidden:
        hidden = activation(linear(hidden, layer.weight[0].t(), layer.bias[0]))
    return hidden


@pytest.mark.parametrize("duelling", [False, True])
@pytest.mark.parametrize(
    ("hidden", "activation", "scale"), [((16,), "relu", 1.0), ((8, 12), "tanh", 1 / 255)]
)
def test_q_values_of_an_mlp_are_value_plus_advantage_over_the_mean(
    hidden: tuple[int, ...], activation: Any, scale: float, duelling: bool
) -> None:
    shape = DenseShape(6, SingleHead(3, duelling), hidden, activation, scale)
    net = build_net(shape)
    assert isinstance(net, Dense)
    flat, obs = shaken(net), observations(shape, ENVS)
    features = plain_tower(net, torch.from_numpy(obs) * scale, getattr(torch, activation))
    if duelling:
        assert net.value is not None
        advantages = net.head(features[:, hidden[-1] :])
        value = net.value(features[:, : hidden[-1]])
        expected = value + advantages - advantages.mean(1, keepdim=True)
    else:
        expected = net.head(features)
    torch.testing.assert_close(net(torch.from_numpy(obs)), expected, rtol=0, atol=1e-5)
    for kind in (NumpyMlp, TorchNetwork):
        policy = policy_of(kind, shape)
        policy.load(flat)
        np.testing.assert_allclose(policy.outputs(obs), expected.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("duelling", [False, True])
def test_q_values_of_frames_have_streams_of_their_own(duelling: bool) -> None:
    shape = QCnnShape(4, 84, 84, SingleHead(6, duelling), 1 / 255)
    net = build_net(shape)
    assert isinstance(net, QCnn)
    flat, frames = shaken(net), observations(shape, 4)
    hidden = torch.from_numpy(frames).float() / 255
    for conv, stride in zip(net.convs, (4, 2, 1), strict=True):
        hidden = conv2d(hidden, conv.weight, conv.bias, stride).relu()  # type: ignore[arg-type]
    features = net.linear(hidden.flatten(1)).relu()
    assert features.shape == (4, 1024 if duelling else 512)
    expected = net.head(features[:, -512:])
    if duelling:
        assert net.value is not None
        expected = expected - expected.mean(1, keepdim=True) + net.value(features[:, :512])
    torch.testing.assert_close(net(torch.from_numpy(frames)), expected, rtol=0, atol=1e-5)
    outputs = np.empty((6, 4), np.float32)
    network = TorchNetwork(shape, outputs)
    network.load(flat)
    network.forward(frames)
    np.testing.assert_allclose(outputs.T, expected.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_twin_critics_are_two_networks_over_observation_and_action(activation: Any) -> None:
    critics = TwinCritics(DenseShape(3, SingleHead(4), (8, 12), activation, 1 / 255), action_size=2)
    shaken(critics)
    rng = np.random.default_rng(0)
    obs = torch.from_numpy(rng.integers(0, 256, (ENVS, 3)).astype(np.uint8))
    action = torch.from_numpy(rng.uniform(-1, 1, (ENVS, 2)).astype(np.float32)).requires_grad_()
    found = critics(obs, action)
    assert found.shape == (2, ENVS)
    rows = torch.cat([obs / 255, action], 1)
    for twin in range(2):
        hidden = rows
        for i, layer in enumerate(critics.layers):
            hidden = linear(hidden, layer.weight[twin].t(), layer.bias[twin])  # type: ignore[index]
            hidden = getattr(torch, activation)(hidden) if i < 2 else hidden
        torch.testing.assert_close(found[twin], hidden[:, 0], rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(found[0].sum(), action, retain_graph=True)
    (other,) = torch.autograd.grad(found[1].sum(), action)
    assert not torch.allclose(gradient, other)


def test_initialisation_is_orthogonal() -> None:
    torch.manual_seed(0)
    mlp, cnn = build_net(MLP), build_net(CNN)
    assert isinstance(mlp, Mlp)
    assert isinstance(cnn, NatureCnn)
    weights = [(w, math.sqrt(2)) for layer in mlp.hidden for w in layer.weight]  # type: ignore[union-attr]
    weights += [(conv.weight.flatten(1), math.sqrt(2)) for conv in cnn.convs]  # type: ignore[operator]
    weights.append((cnn.linear.weight, math.sqrt(2)))
    for net in (mlp, cnn):
        weights += [(net.policy.weight, 0.01), (net.value.weight, 1.0)]
    for weight, gain in weights:
        short = weight if weight.shape[0] <= weight.shape[1] else weight.t()
        torch.testing.assert_close(
            short @ short.t(), gain**2 * torch.eye(len(short)), rtol=1e-4, atol=1e-4
        )
    for net in (mlp, cnn):
        assert all(not p.any() for name, p in net.named_parameters() if name.endswith("bias"))


def test_tanh_and_its_gradient_match_torch() -> None:
    values = torch.linspace(-12, 12, 1001, requires_grad=True)
    other = values.detach().clone().requires_grad_()
    tanh(values).square().sum().backward()
    torch.tanh(other).square().sum().backward()
    torch.testing.assert_close(tanh(values), torch.tanh(other), rtol=0, atol=1e-6)
    torch.testing.assert_close(values.grad, other.grad, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [MLP, CNN])
def test_gpu_outputs_equal_cpu_outputs(shape: FusedActorCriticShape) -> None:
    net, _ = random_net(shape)
    obs = torch.from_numpy(observations(shape, ENVS))
    expected = net(obs)
    found = net.cuda()(obs.cuda())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1e-2)


def test_a_network_with_tanh_is_exported_by_the_strict_and_the_plain_way() -> None:
    """numpy, which computes it on a CPU, cannot be part of an exported graph."""
    net = build_net(MlpShape(4, discrete(2), (8, 8), "tanh", 1.0))
    obs = torch.randn(3, 4)
    for strict in (False, True):
        outputs, _ = torch.export.export(net, (obs,), strict=strict).module()(obs)
        torch.testing.assert_close(outputs, net(obs)[0], rtol=1e-5, atol=1e-5)
