"""The layers of every built-in network, as codecs and layerwise optimizers treat them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from penstock.configs.schema import Config
from penstock.core.interfaces import GradientPart
from penstock.learner.codecs.buckets import parts_of
from penstock.models.actions import Numbers, discrete
from penstock.models.fitting import actor_critic_shape, q_shape
from penstock.models.layout import CnnShape, DenseShape, MlpShape, QCnnShape, SingleHead
from penstock.models.torch_nets import build_critics, build_net

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
FRAMES = spaces.Box(0, 255, (4, 40, 44), np.uint8)


def general(space: spaces.Box, **model: Any) -> nn.Module:
    config = Config.model_validate({"env": {"id": "x"}, "model": {"hidden": [8], **model}})
    game: Any = SimpleNamespace(observation_space=space, action_space=spaces.Discrete(2))
    return build_net(actor_critic_shape(config, game))


def general_q(space: spaces.Box, **model: Any) -> nn.Module:
    config = Config.model_validate({"env": {"id": "x"}, "model": {"hidden": [8], **model}})
    game: Any = SimpleNamespace(observation_space=space, action_space=spaces.Discrete(2))
    return build_net(q_shape(config, game, duelling=True))


def listed(net: nn.Module) -> str:
    """Name, tower where there are several, and shape: of a weight a matrix, of a bias a vector."""
    parts = parts_of(net.named_parameters())
    towers = {part.name for part in parts if part.tower}
    return "\n".join(
        f"{part.name}{f'[{part.tower}]' if part.name in towers else ''} {shape(part)}"
        for part in parts
    )


def shape(part: GradientPart) -> str:
    return f"{part.size}" if part.is_bias else f"{part.rows}x{part.size // part.rows}"


def layers(text: str) -> str:
    """One layer a line: its name, the shape of its weight, the size of its bias."""
    lines = []
    for line in text.split("\n"):
        name, weight, bias = line.split()
        module, _, tower = name.partition("[")
        tower = tower and f"[{tower}"
        lines += [f"{module}.weight{tower} {weight}", f"{module}.bias{tower} {bias}"]
    return "\n".join(lines)


TOWERS = """\
hidden.0.weight[0] 3x8
hidden.0.weight[1] 3x8
hidden.0.bias[0] 8
hidden.0.bias[1] 8
hidden.1.weight[0] 8x6
hidden.1.weight[1] 8x6
hidden.1.bias[0] 6
hidden.1.bias[1] 6
"""
CONVS = """\
convs.0 32x256 32
convs.1 64x512 64
convs.2 64x576 64
"""
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "two towers": (
        lambda: build_net(MlpShape(3, discrete(2), (8, 6), "tanh", 1.0)),
        TOWERS + layers("policy 2x6 2\nvalue 1x6 1"),
    ),
    "two towers and a deviation of actions": (
        lambda: build_net(MlpShape(3, Numbers((2,)), (8, 6), "tanh", 1.0)),
        "log_std 2\n" + TOWERS + layers("policy 2x6 2\nvalue 1x6 1"),
    ),
    "one tower": (
        lambda: build_net(DenseShape(3, SingleHead(2), (8, 6), "relu", 1.0)),
        layers("hidden.0 3x8 8\nhidden.1 8x6 6\nhead 2x6 2"),
    ),
    "one tower, duelling": (
        lambda: build_net(DenseShape(3, SingleHead(2, True), (8, 6), "relu", 1.0)),
        layers("hidden.0 3x8 8\nhidden.1 8x12 12\nhead 2x6 2\nvalue 1x6 1"),
    ),
    "twin critics": (
        lambda: build_critics(DenseShape(3, SingleHead(4), (8,), "relu", 1.0), None, action_size=2),
        """\
layers.0.weight[0] 5x8
layers.0.weight[1] 5x8
layers.0.bias[0] 8
layers.0.bias[1] 8
layers.1.weight[0] 8x1
layers.1.weight[1] 8x1
layers.1.bias[0] 1
layers.1.bias[1] 1""",
    ),
    "Nature CNN": (
        lambda: build_net(CnnShape(4, 84, 84, discrete(2), 1 / 255)),
        layers(CONVS + "linear 512x3136 512\npolicy 2x512 2\nvalue 1x512 1"),
    ),
    "Nature CNN, duelling": (
        lambda: build_net(QCnnShape(4, 84, 84, SingleHead(2, True), 1 / 255)),
        layers(CONVS + "linear 1024x3136 1024\nhead 2x512 2\nvalue 1x512 1"),
    ),
    "LSTM": (
        lambda: general(VECTOR, core="lstm", core_size=5),
        layers(
            "bodies.0.layers.linears.0 8x3 8\ncores.0.input 20x8 20\ncores.0.recurrent 20x5 20\n"
            "policy 2x5 2\nvalue 1x5 1"
        ),
    ),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_gradient_parts_are_the_layers_of_each_network(network: str) -> None:
    make, expected = NETWORKS[network]
    assert listed(make()) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: general(VECTOR, core="gru", critic="separate"),
        lambda: general(FRAMES, kind="impala_cnn"),
        lambda: general(FRAMES, kind="impala_cnn", core="lstm", critic="separate"),
        lambda: general_q(FRAMES, kind="impala_cnn"),
        lambda: build_critics(
            DenseShape(3, SingleHead(4), (8, 6), "relu", 1.0), None, action_size=2
        ),
    ],
)
def test_weights_are_matrices_and_biases_vectors_that_fill_the_flat_vector(
    make: Callable[[], nn.Module],
) -> None:
    named = list(make().named_parameters())
    parts = parts_of(named)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == sum(parameter.numel() for _, parameter in named)
    for part in parts:
        assert part.is_bias == part.name.endswith("bias"), part
        assert part.rows == 1 if part.is_bias else part.size % part.rows == 0, part


def test_only_weights_and_biases_of_towers_are_split() -> None:
    """A convolution over one dimension has three, too, and some biases are no vectors."""
    named = [
        ("conv.weight", torch.empty(4, 3, 5)),
        ("conv.bias", torch.empty(4)),
        ("attention.bias", torch.empty(2, 7)),
        ("scale", torch.empty(3, 2)),
        ("weight", torch.empty(2, 3, 4)),
        ("bias", torch.empty(2, 4)),
    ]
    assert parts_of(named) == (
        GradientPart("conv.weight", 0, 60, False, 4),
        GradientPart("conv.bias", 60, 64, True),
        GradientPart("attention.bias", 64, 78, True),
        GradientPart("scale", 78, 84, False, 3),
        GradientPart("weight", 84, 96, False, 3, 0),
        GradientPart("weight", 96, 108, False, 3, 1),
        GradientPart("bias", 108, 112, True, 1, 0),
        GradientPart("bias", 112, 116, True, 1, 1),
    )
