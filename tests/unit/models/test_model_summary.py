"""How a run describes the network that it trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from penstock.algos.samples import network_shape
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.envs import probe
from penstock.learner.factory import make_trainer, network_of
from penstock.models.summary import in_words


def frames(*shape: int) -> Any:
    space = spaces.Box(0, 255, shape, np.uint8)
    return SimpleNamespace(observation_space=space, action_space=spaces.Discrete(2))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({}, "nature_cnn"),
        ({"kind": "mlp"}, "mlp 64-64 tanh"),
        ({"core": "lstm", "core_size": 256}, "nature_cnn, lstm 256, shared critic"),
        ({"kind": "impala_cnn"}, "impala_cnn, shared critic"),
        ({"critic": "separate"}, "nature_cnn, separate critic"),
        ({"entry": "nets:Mine", "core": "gru"}, "nets:Mine, gru 128, shared critic"),
    ],
)
def test_network_for_frames_is_described_in_words(model: dict[str, Any], text: str) -> None:
    config = Config.model_validate({"env": {"id": "x"}, "model": model})
    said = in_words(network_shape(config, frames(4, 84, 84)), config.model, 1234567)
    assert said == f"network: {text}, 1,234,567 parameters"


def test_network_for_a_small_image_is_described_in_words() -> None:
    config = Config.model_validate({"env": {"id": "x"}, "model": {"filters": [8, 8]}})
    said = in_words(network_shape(config, frames(4, 9, 9)), config.model, 1)
    assert said == "network: small_cnn 8-8 and mlp 64-64 tanh, shared critic, 1 parameters"


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({}, "nature_cnn"),
        ({"kind": "impala_cnn"}, "impala_cnn"),
        ({"entry": "nets:Mine"}, "nets:Mine"),
    ],
)
def test_a_network_with_one_head_has_no_critic(model: dict[str, Any], text: str) -> None:
    sections = {"env": {"id": "x"}, "algo": {"name": "dqn"}, "model": model}
    config = Config.model_validate(sections)
    said = in_words(network_shape(config, frames(4, 84, 84)), config.model, 1234567)
    assert said == f"network: {text}, 1,234,567 parameters"


def test_a_network_with_one_head_and_memory_names_its_core() -> None:
    config = resolve("ALE/Pong-v5", ["algo.name=r2d2"])
    said = in_words(network_shape(config, frames(4, 84, 84)), config.model, 1)
    assert said == "network: nature_cnn, lstm 512, 1 parameters"


# CartPole: 4 numbers, 2 actions. A layer of n to m has n m + m parameters.
POLICY, VALUE = 4 * 32 + 32 + 32 * 16 + 16 + 16 * 2 + 2, 4 * 32 + 32 + 32 * 16 + 16 + 16 + 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["algo.name=ppo"], f"network: mlp 32-16 relu, {POLICY + VALUE:,} parameters"),
        (["algo.name=dqn", "algo.duelling=false"], f"network: mlp 32-16 relu, {POLICY:,} param"),
        (["learner.precision=bf16"], f"{POLICY + VALUE:,} parameters, trained in bf16 on cpu"),
    ],
)
def test_number_of_parameters_counts_trained_ones_only(options: list[str], text: str) -> None:
    network = ["model.kind=mlp", "model.hidden=[32,16]", "model.activation=relu"]
    config = resolve("CartPole-v1", [*options, *network])
    info = probe(config.env)
    assert text in network_of(config, info, make_trainer(config, info))
