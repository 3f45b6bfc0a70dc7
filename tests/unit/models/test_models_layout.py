"""Which network an environment gets, and that the torch-free layout equals the module's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from net_weights import layout_of
from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.configs.model import ModelConfig
from penstock.configs.schema import Config
from penstock.core.params import ParamLayout
from penstock.models.actions import discrete
from penstock.models.fitting import AnyShape, scales_of
from penstock.models.general import GeneralShape, channels_last
from penstock.models.layout import CnnShape, DenseShape, MlpShape, QCnnShape, SingleHead
from penstock.models.torch_nets import build_net

FRAMES = spaces.Box(0, 255, (4, 84, 84), np.uint8)
STACKS = spaces.Box(0, 255, (4, 84, 84, 3), np.uint8)
VECTOR = spaces.Box(-1, 1, (3, 2), np.float32)
TWO = spaces.Discrete(2)
TORQUES = spaces.Box(-2, 2, (3,), np.float32)


@pytest.mark.parametrize("extent", [-1, float("inf"), float("nan"), "x", None, []])
def test_invalid_layout_extent_raises_a_typed_error(extent: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        ParamLayout.from_list([["w", [3, extent]]])


class Game:
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space


def shape_of(
    model: ModelConfig, observation_space: Any, action_space: Any, algo: str = "impala"
) -> AnyShape:
    config = Config.model_validate({"env": {"id": "x"}, "algo": {"name": algo}})
    config = config.model_copy(update={"model": model})
    return network_shape(config, Game(observation_space, action_space))


@pytest.mark.parametrize(
    ("model", "observation_space", "actions"),
    [
        (ModelConfig(), VECTOR, 2),
        (ModelConfig(hidden=[8]), VECTOR, 5),
        (ModelConfig(hidden=[8, 16, 4], activation="relu"), VECTOR, 2),
        (ModelConfig(), FRAMES, 6),
        (ModelConfig(kind="nature_cnn"), spaces.Box(0, 255, (1, 40, 52), np.uint8), 3),
        (ModelConfig(layer_norm=True), VECTOR, 2),
        (ModelConfig(layer_norm=True), FRAMES, 2),
    ],
)
def test_layout_equals_that_of_the_torch_module(
    model: ModelConfig, observation_space: spaces.Box, actions: int
) -> None:
    for algo in ("impala", "dqn"):
        assert_layout(shape_of(model, observation_space, spaces.Discrete(actions), algo))


@pytest.mark.parametrize("model", [ModelConfig(), ModelConfig(hidden=[8, 16], activation="relu")])
def test_layout_of_a_gaussian_policy_equals_that_of_the_torch_module(model: ModelConfig) -> None:
    shape = shape_of(model, VECTOR, TORQUES, "sac")
    assert shape == DenseShape(6, SingleHead(2 * 3), tuple(model.hidden), model.activation, 1.0)
    assert_layout(shape)


@pytest.mark.parametrize("duelling", [True, False])
def test_layout_of_q_networks_equals_that_of_the_torch_module(duelling: bool) -> None:
    head = SingleHead(3, duelling)
    for layer_norm in (False, True):
        assert_layout(DenseShape(6, head, (16, 8), "tanh", 1.0, layer_norm=layer_norm))
        assert_layout(QCnnShape(1, 40, 52, head, 1.0, layer_norm=layer_norm))
    assert_layout(QCnnShape(1, 40, 52, head, 1.0, normalize=True))


def assert_layout(shape: AnyShape) -> None:
    assert shape.layout == layout_of(build_net(shape))


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        ("auto", (4, 84, 84), CnnShape(4, 84, 84, discrete(2), 1 / 255)),
        ("auto", (4, 36, 36), CnnShape(4, 36, 36, discrete(2), 1 / 255)),
        ("auto", (4, 35, 84), MlpShape(4 * 35 * 84, discrete(2), (64, 64), "tanh", 1 / 255)),
        ("auto", (84, 80), CnnShape(1, 84, 80, discrete(2), 1 / 255)),
        ("auto", (35, 84), MlpShape(35 * 84, discrete(2), (64, 64), "tanh", 1 / 255)),
        ("mlp", (84, 80), MlpShape(84 * 80, discrete(2), (64, 64), "tanh", 1 / 255)),
        ("mlp", (4, 84, 84, 3), MlpShape(4 * 84 * 84 * 3, discrete(2), (64, 64), "tanh", 1 / 255)),
        ("auto", (4, 4, 3), MlpShape(48, discrete(2), (64, 64), "tanh", 1 / 255)),
        ("mlp", (10, 10, 4), MlpShape(400, discrete(2), (64, 64), "tanh", 1 / 255)),
        ("mlp", (4, 84, 84), MlpShape(4 * 84 * 84, discrete(2), (64, 64), "tanh", 1 / 255)),
        ("mlp", (210, 160, 3), MlpShape(210 * 160 * 3, discrete(2), (64, 64), "tanh", 1 / 255)),
    ],
)
def test_network_follows_the_observation_space(
    kind: Any, shape: tuple[int, ...], expected: Any
) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    assert shape_of(ModelConfig(kind=kind), space, TWO) == expected


@pytest.mark.parametrize("algo", ["impala", "dqn"])
@pytest.mark.parametrize(
    ("shape", "dtype", "read"),
    [
        ((4, 9, 9), np.uint8, (4, 9, 9)),
        ((9, 9, 4), np.float32, (9, 9, 4)),
        ((20, 7, 7), np.uint8, (20, 7, 7)),  # more planes than cells in a row
        ((7, 7, 20), np.int64, (7, 7, 20)),
        ((9, 12), np.uint8, (1, 9, 12)),
        ((9, 9), np.int64, (1, 9, 9)),
        ((3, 35, 5), np.float32, (3, 35, 5)),
    ],
)
def test_small_images_go_through_small_convolutions(
    algo: str, shape: tuple[int, ...], dtype: Any, read: tuple[int, ...]
) -> None:
    space = spaces.Box(0, 3, shape, dtype)
    found = shape_of(ModelConfig(), space, TWO, algo)
    assert isinstance(found, GeneralShape)
    assert found.has_small_images
    assert (found.inputs[0].shape, found.inputs[0].span) == (read, 3)
    assert_layout(found)
    first = next(p for name, p in build_net(found).named_parameters() if "convs.0.weight" in name)
    planes = read[2] if channels_last(read) else read[0]
    assert first.shape == (16, planes, 3, 3)
    # Without filters, as in what earlier versions stored, they are numbers.
    assert isinstance(shape_of(ModelConfig(filters=[]), space, TWO, algo), MlpShape | DenseShape)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((9, 12), np.float32), ((4, 9), np.uint8), ((2, 2), np.float32)]
)
def test_arrays_that_are_no_board_are_not_small_images(shape: tuple[int, ...], dtype: Any) -> None:
    assert isinstance(shape_of(ModelConfig(), spaces.Box(0, 3, shape, dtype), TWO), MlpShape)


def test_q_networks_by_default_are_duelling() -> None:
    assert shape_of(ModelConfig(), VECTOR, TWO, "dqn") == DenseShape(
        6, SingleHead(2, duelling=True), (64, 64), "tanh", 1.0
    )
    assert shape_of(ModelConfig(), FRAMES, TWO, "dqn") == QCnnShape(
        4, 84, 84, SingleHead(2, duelling=True), 1 / 255
    )


def test_float_arrays_of_two_axes_are_no_gray_frame() -> None:
    floats = spaces.Box(0, 1, (84, 80), np.float32)
    assert shape_of(ModelConfig(), floats, TWO) == MlpShape(
        84 * 80, discrete(2), (64, 64), "tanh", 1.0
    )
    assert isinstance(shape_of(ModelConfig(), floats, TORQUES, "sac"), DenseShape)


@pytest.mark.parametrize("algo", ["impala", "dqn"])
def test_a_gray_frame_is_computed_as_one_channel(algo: str) -> None:
    """With steps and environments before it, as learners have it."""
    gray, framed = (spaces.Box(0, 255, shape, np.uint8) for shape in ((40, 52), (1, 40, 52)))
    shape = shape_of(ModelConfig(), gray, TWO, algo)
    assert shape == shape_of(ModelConfig(), framed, TWO, algo)
    net = build_net(shape)
    obs = torch.randint(0, 256, (2, 3, 40, 52), dtype=torch.uint8)
    torch.testing.assert_close(net(obs), net(obs[:, :, None]), rtol=0, atol=0)
    found = net(obs)
    assert len(found if algo == "dqn" else found[0]) == 6


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("observation_space", "factor"),
    [
        (VECTOR, 1),
        (spaces.Box(0, 1, (4, 84, 84), np.float32), 1),
        (spaces.Box(0, 255, (4, 84, 84), np.float32), 1 / 255),
        (spaces.Box(0, 255, (7, 7, 3), np.float64), 1 / 255),
        (spaces.Box(0, 255, (84, 80), np.float32), 1 / 255),
        (spaces.Box(0, 65535, (7, 7, 3), np.uint16), 1 / 65535),
        (spaces.Box(-128, 127, (7, 7, 3), np.int8), 1 / 128),
        (spaces.Box(0, 10, (7, 7, 3), np.uint8), 1 / 10),
        (spaces.Box(0, np.array([10, 5, 3], np.uint8), dtype=np.uint8), 1 / 10),
        (spaces.Box(0, 1, (5,), np.uint8), 1),
        (spaces.Box(0, 0, (5,), np.uint8), 1),
        (spaces.Box(0, np.inf, (7, 7, 3), np.float32), 1),
        (spaces.Box(-LARGEST, LARGEST, (7, 7, 3), np.float32), 1),
        (spaces.Box(0, 2**31 - 1, (7, 7, 3), np.int32), 1),
        (spaces.Box(-1000, 1000, (6,), np.float32), 1),
    ],
    ids=str,
)
def test_bytes_and_frames_are_scaled_by_their_bounds(
    observation_space: spaces.Box, factor: float
) -> None:
    for algo in ("impala", "dqn"):
        assert scales_of(shape_of(ModelConfig(), observation_space, TWO, algo)) == [[0, factor]]
        earlier = scales_of(shape_of(ModelConfig(scale="bytes"), observation_space, TWO, algo))
        assert earlier == [[0, 1 / 255 if observation_space.dtype == np.uint8 else 1]]


@pytest.mark.parametrize(
    ("algo", "kind", "observation_space", "action_space", "words"),
    [
        (
            "dqn",
            "auto",
            VECTOR,
            TORQUES,
            ["algo.name dqn", "neither Discrete", "set algo.name=sac"],
        ),
        ("sac", "auto", VECTOR, TWO, ["Discrete(2) is not a Box", "algo.name=dqn"]),
        ("sac", "auto", STACKS, TORQUES, ["[4, 84, 84, 3]", "look like frames"]),
        ("impala", "auto", STACKS, TWO, ["[4, 84, 84, 3]", "GrayscaleObs", "model.kind=mlp"]),
        ("ppo", "impala_cnn", STACKS, TWO, ["[4, 84, 84, 3]", "[channels, height, width]"]),
        ("dqn", "auto", STACKS, TWO, ["[4, 84, 84, 3]", "env.wrappers"]),
        ("sac", "auto", TWO, TORQUES, ["observation space", "FlattenObservation"]),
        ("impala", "nature_cnn", VECTOR, TWO, ["[3, 2]", "model.kind=mlp"]),
        ("ppo", "small_cnn", VECTOR, TWO, ["do not fit small_cnn", "at least 5 pixels"]),
        ("dqn", "nature_cnn", spaces.Box(0, 255, (4, 84, 35), np.uint8), TWO, ["[4, 84, 35]"]),
        ("impala", "auto", spaces.Discrete(5), TWO, ["Discrete(5)", "FlattenObservation"]),
        ("impala", "auto", VECTOR, spaces.Text(3), ["Text", "Discrete, MultiDiscrete and Box"]),
        ("dqn", "auto", VECTOR, spaces.Text(3), ["Text", "nor MultiDiscrete", "algo.name=ppo"]),
    ],
)
def test_spaces_that_fit_no_network_are_refused_in_one_sentence(
    algo: str, kind: Any, observation_space: Any, action_space: Any, words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        shape_of(ModelConfig(kind=kind), observation_space, action_space, algo)
    assert all(word in str(refused.value) for word in words)


def test_layout_imports_no_torch() -> None:
    code = "import sys, penstock.models.fitting; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
