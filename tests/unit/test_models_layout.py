"""Which network a game gets, and that the torch-free layout is the torch module's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock.configs.errors import UserError
from penstock.configs.schema import ModelConfig
from penstock.core.params import ParamLayout
from penstock.models.layout import CnnShape, MlpShape, net_shape, param_layout
from penstock.models.torch_nets import build

FRAMES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
VECTOR = spaces.Box(-1, 1, (3, 2), np.float32)
TWO = spaces.Discrete(2)


@pytest.mark.parametrize(
    ("model", "observation_space", "actions"),
    [
        (ModelConfig(), VECTOR, 2),
        (ModelConfig(hidden=[8]), VECTOR, 5),
        (ModelConfig(hidden=[8, 16, 4], activation="relu"), VECTOR, 2),
        (ModelConfig(), FRAMES, 6),
        (ModelConfig(kind="nature_cnn"), spaces.Box(0, 255, (1, 40, 52), np.uint8), 3),
    ],
)
def test_layout_is_that_of_the_torch_module(
    model: ModelConfig, observation_space: spaces.Box, actions: int
) -> None:
    net = build(model, observation_space, spaces.Discrete(actions))
    tensors = (*net.named_parameters(), *net.named_buffers())
    expected = ParamLayout(tuple((name, tuple(tensor.shape)) for name, tensor in tensors))
    assert param_layout(model, observation_space, spaces.Discrete(actions)) == expected


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        ("auto", (4, 84, 84), CnnShape(4, 84, 84, 2, 1 / 255)),
        ("auto", (4, 36, 36), CnnShape(4, 36, 36, 2, 1 / 255)),
        ("auto", (4, 35, 84), MlpShape(4 * 35 * 84, 2, (64, 64), "tanh", 1 / 255)),
        ("auto", (10, 10, 4), MlpShape(400, 2, (64, 64), "tanh", 1 / 255)),
        ("mlp", (4, 84, 84), MlpShape(4 * 84 * 84, 2, (64, 64), "tanh", 1 / 255)),
        ("mlp", (210, 160, 3), MlpShape(210 * 160 * 3, 2, (64, 64), "tanh", 1 / 255)),
    ],
)
def test_the_network_that_fits(kind: Any, shape: tuple[int, ...], expected: Any) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    assert net_shape(ModelConfig(kind=kind), space, TWO) == expected


def test_only_bytes_are_scaled() -> None:
    assert net_shape(ModelConfig(), VECTOR, TWO).obs_scale == 1.0
    floats = spaces.Box(0, 1, (4, 84, 84), np.float32)
    assert net_shape(ModelConfig(), floats, TWO).obs_scale == 1.0


@pytest.mark.parametrize(
    ("kind", "observation_space", "action_space", "words"),
    [
        ("nature_cnn", VECTOR, TWO, ["[3, 2]", "model.kind=mlp"]),
        ("nature_cnn", spaces.Box(0, 255, (4, 84, 35), np.uint8), TWO, ["[4, 84, 35]"]),
        ("auto", spaces.Box(0, 255, (210, 160, 3), np.uint8), TWO, ["[210, 160, 3]", "wrappers"]),
        ("auto", spaces.Discrete(5), TWO, ["Discrete(5)", "FlattenObservation"]),
        ("auto", VECTOR, VECTOR, ["Box", "not Discrete"]),
        ("auto", VECTOR, spaces.MultiDiscrete([2, 2]), ["MultiDiscrete", "not Discrete"]),
    ],
)
def test_what_no_network_fits_is_refused_in_a_sentence(
    kind: Any, observation_space: Any, action_space: Any, words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        net_shape(ModelConfig(kind=kind), observation_space, action_space)
    assert all(word in str(refused.value) for word in words)


def test_layout_imports_no_torch() -> None:
    code = "import sys, penstock.models.layout; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
