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


SCREEN = (4, 84, 84)
BOARD = (4, 9, 9)
LSTM = {"core": "lstm", "core_size": 256}


@pytest.mark.parametrize(
    ("algo", "shape", "model", "text"),
    [
        ("impala", SCREEN, {}, "nature_cnn"),
        ("impala", SCREEN, {"kind": "mlp"}, "mlp 64-64 tanh"),
        ("impala", SCREEN, LSTM, "nature_cnn, lstm 256, shared critic"),
        ("impala", SCREEN, {"kind": "impala_cnn"}, "impala_cnn, shared critic"),
        ("impala", SCREEN, {"critic": "separate"}, "nature_cnn, separate critic"),
        (
            "impala",
            SCREEN,
            {"entry": "nets:Mine", "core": "gru"},
            "nets:Mine, gru 128, shared critic",
        ),
        (
            "impala",
            BOARD,
            {"filters": [8, 8]},
            "small_cnn 8-8 and mlp 64-64 tanh, shared critic",
        ),
        ("dqn", SCREEN, {}, "nature_cnn"),
        ("dqn", SCREEN, {"kind": "impala_cnn"}, "impala_cnn"),
        ("dqn", SCREEN, {"entry": "nets:Mine"}, "nets:Mine"),
        ("r2d2", SCREEN, LSTM, "nature_cnn, lstm 256"),
    ],
)
def test_network_is_described_in_words(
    algo: str, shape: tuple[int, ...], model: dict[str, Any], text: str
) -> None:
    sections = {"env": {"id": "x"}, "algo": {"name": algo}, "model": model}
    config = Config.model_validate(sections)
    said = in_words(network_shape(config, frames(*shape)), config.model, 1234567)
    assert said == f"network: {text}, 1,234,567 parameters"


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
