"""Layer normalisation: each network against torch's own layers, and numpy against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from net_weights import flat_of, shake
from penstock.models.acting.critic import make_critic
from penstock.models.acting.numpy_mlp import NumpyMlp
from penstock.models.acting.torch_network import TorchNetwork
from penstock.models.actions import discrete
from penstock.models.layout import CnnShape, DenseShape, MlpShape, QCnnShape, SingleHead
from penstock.models.torch_nets import QCnn, TwinCritics, build_net

ROWS = 7
EPSILON = 1e-6  # flax.linen.LayerNorm
MLP = MlpShape(6, discrete(3), (16, 8), "tanh", 1 / 255, layer_norm=True)
DENSE = DenseShape(6, SingleHead(3), (16, 8), "relu", 1.0, layer_norm=True)
CNN = CnnShape(4, 36, 36, discrete(3), 1 / 255, layer_norm=True)


def layers_of_tower(net: Any, tower: int, activation: type[nn.Module]) -> nn.Sequential:
    """Returns the hidden layers of one tower, made of torch's own modules."""
    modules: list[nn.Module] = []
    for layer in net.hidden:
        fan_in, fan_out = layer.weight[tower].shape
        linear = nn.Linear(fan_in, fan_out)
        norm = nn.LayerNorm(fan_out, EPSILON)
        linear.weight.data = layer.weight[tower].t().detach().clone()
        linear.bias.data = layer.bias[tower].detach().clone()
        norm.weight.data = layer.norm.weight[tower].detach().clone()
        norm.bias.data = layer.norm.bias[tower].detach().clone()
        modules += [linear, norm, activation()]
    return nn.Sequential(*modules)


def torch_numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_towers_and_their_gradients_equal_torchs_own_layers() -> None:
    net: Any = build_net(MLP)
    shake(net)
    obs = 255 * torch_numbers(ROWS, 6)
    policy_tower, value_tower = (layers_of_tower(net, t, nn.Tanh) for t in (0, 1))
    expected_logits = net.policy(policy_tower(obs / 255))
    expected_values = net.value(value_tower(obs / 255))[:, 0]

    logits, values = net(obs)
    torch.testing.assert_close(logits, expected_logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=1e-5)

    weights = torch_numbers(ROWS, 3)
    ((logits * weights).sum() + values.square().sum()).backward()
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    ((expected_logits * weights).sum() + expected_values.square().sum()).backward()
    for tower, layers in enumerate((policy_tower, value_tower)):
        for number in (0, 1):
            linear: Any = layers[3 * number]
            norm: Any = layers[3 * number + 1]
            expected_gradients = {
                "weight": linear.weight.grad.t(),
                "bias": linear.bias.grad,
                "norm.weight": norm.weight.grad,
                "norm.bias": norm.bias.grad,
            }
            for name, expected in expected_gradients.items():
                gradient = gradients[f"hidden.{number}.{name}"][tower]
                torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_a_convolution_is_normalised_over_channels_and_pixels() -> None:
    net: Any = build_net(CNN)
    shake(net)
    frames = torch.randint(0, 256, (ROWS, 4, 36, 36), dtype=torch.uint8)

    hidden = frames / 255
    for conv, stride in zip(net.convs, (4, 2, 1), strict=True):
        hidden = nn.functional.conv2d(hidden, conv.weight, conv.bias, stride)
        hidden = nn.functional.layer_norm(hidden, hidden.shape[1:], eps=EPSILON)
        gain, bias = (p[:, None, None] for p in (conv.norm.weight, conv.norm.bias))
        hidden = (hidden * gain + bias).relu()
    features = nn.functional.linear(hidden.flatten(1), net.linear.weight, net.linear.bias)
    norm = net.linear.norm
    features = nn.functional.layer_norm(features, (512,), norm.weight, norm.bias, EPSILON).relu()

    logits, values = net(frames)
    torch.testing.assert_close(logits, net.policy(features), rtol=0, atol=1e-5)
    torch.testing.assert_close(values, net.value(features)[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "shape", [MLP, DENSE, DenseShape(6, SingleHead(3, True), (8,), "tanh", 1.0, layer_norm=True)]
)
def test_numpy_and_torch_actors_equal_the_learner(shape: MlpShape | DenseShape) -> None:
    net = build_net(shape)
    shake(net)
    obs = 3 * torch_numbers(ROWS, 6)
    result = net(obs)
    expected = (result[0] if isinstance(shape, MlpShape) else result).detach()
    for kind in (NumpyMlp, TorchNetwork):
        outputs = np.empty((3, ROWS), np.float32)
        network = kind(shape, outputs)
        network.load(flat_of(net))
        network.forward(obs.numpy())
        np.testing.assert_allclose(outputs.T, expected, rtol=0, atol=1e-5)


def test_the_value_for_displays_equals_the_learners() -> None:
    net = build_net(MLP)
    shake(net)
    critic = make_critic(MLP, flat_of(net))
    assert critic is not None
    obs = torch_numbers(ROWS, 6)
    values = critic(obs.numpy(), np.zeros((ROWS, 0), np.float32))
    np.testing.assert_allclose(values, net(obs)[1].detach(), rtol=0, atol=1e-5)


def test_hidden_layers_of_twin_critics_are_normalised_and_values_are_not() -> None:
    critics = TwinCritics(
        DenseShape(3, SingleHead(4), (16, 8), "relu", 1.0, layer_norm=True), action_size=2
    )
    shake(critics)
    obs = torch_numbers(ROWS, 3)
    action = torch_numbers(ROWS, 2)
    layers: list[Any] = list(critics.layers)
    *hidden_layers, head = layers
    for twin, values in enumerate(critics(obs, action)):
        rows = torch.cat([obs, action], 1)
        for layer in hidden_layers:
            rows = rows @ layer.weight[twin] + layer.bias[twin]
            norm = layer.norm
            rows = nn.functional.layer_norm(
                rows, rows.shape[1:], norm.weight[twin], norm.bias[twin], EPSILON
            ).relu()
        expected = (rows @ head.weight[twin] + head.bias[twin])[:, 0]
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
    assert head.norm is None


@pytest.mark.parametrize("shape", [MLP, DENSE, CNN])
def test_bf16_is_close_to_fp32(shape: Any) -> None:
    torch.manual_seed(0)
    net = build_net(shape)
    obs = torch.randint(0, 256, (ROWS, 4, 36, 36) if shape is CNN else (ROWS, 6))
    half = build_net(shape, torch.bfloat16)
    half.load_state_dict(net.state_dict())
    outputs, of_half = (n(obs) if shape is DENSE else n(obs)[0] for n in (net, half))
    assert of_half.dtype == torch.float32
    torch.testing.assert_close(
        of_half, outputs, rtol=0, atol=0.02 * float(outputs.detach().abs().max())
    )


def test_outputs_do_not_depend_on_the_scale_of_the_observations() -> None:
    net = build_net(QCnnShape(4, 36, 36, SingleHead(3), 1.0, layer_norm=True))
    assert isinstance(net, QCnn)
    frames = torch.randint(0, 256, (ROWS, 4, 36, 36)).float()
    torch.testing.assert_close(net(10 * frames), net(frames), rtol=0, atol=1e-5)
