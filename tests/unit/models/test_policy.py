"""The network and the precision with which an actor's policy computes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.algos.acting import make_policy
from penstock.algos.samples import network_shape
from penstock.autotune import forms as form_tuner
from penstock.autotune.forms import with_acting_form
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.configs.sections import ActorsConfig
from penstock.core.machine import BF16_FLAGS, Processor
from penstock.models.acting.numpy_mlp import NumpyMlp
from penstock.models.acting.policy import Policy
from penstock.models.acting.torch_network import TorchNetwork
from penstock.models.compute_form import ComputeForm


class Vector:
    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)


class Frames:
    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)


class Torques:
    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Box(-2, 2, (2, 3), np.float32)


def config(algo: str = "impala", **actors: Any) -> Config:
    found = Config.model_validate({"env": {"id": "x"}, "algo": {"name": algo}})
    section = ActorsConfig.model_validate({"envs": 3} | actors)
    return found.model_copy(update={"actors": section})


def made(game: Any, **actors: Any) -> Policy:
    return make_policy(config(**actors), game, seed=0)


def test_a_policy_acts_at_random_by_weights_before_the_first_update_only() -> None:
    epsilon = {"epsilon": 1e-9, "epsilon_alpha": 0.0}
    settings = Config.model_validate({"env": {"id": "x"}, "algo": {"name": "dqn"} | epsilon})
    actors = ActorsConfig.model_validate({"envs": 1000})
    settings = settings.model_copy(update={"actors": actors})
    policy = make_policy(settings, Vector(), seed=0)
    weights = np.zeros(network_shape(settings, Vector()).layout.size, np.float32)
    obs = np.zeros((1000, 4), np.float32)
    for untrained, action_counts in ((True, (500, 500)), (False, (1000, 0))):
        policy.load(weights, untrained=untrained)
        counts = np.bincount(policy.act(obs), minlength=2)
        np.testing.assert_allclose(counts, action_counts, atol=90)


@pytest.mark.parametrize(
    ("game", "actors", "expected"),
    [
        (Vector(), {}, (NumpyMlp, None)),
        (Vector(), {"inference": "torch"}, (TorchNetwork, torch.float32)),
        (Vector(), {"precision": "bf16"}, (TorchNetwork, torch.bfloat16)),
        (Frames(), {}, (TorchNetwork, torch.float32)),
        (Frames(), {"precision": "bf16"}, (TorchNetwork, torch.bfloat16)),
    ],
)
def test_network_and_precision_follow_the_options(
    game: Any, actors: dict[str, Any], expected: Any
) -> None:
    policy = made(game, **actors)
    network = policy.network
    dtype = network.dtype if isinstance(network, TorchNetwork) else None
    assert (type(network), dtype) == expected


@pytest.mark.parametrize(("game", "actors"), [(Frames(), {}), (Vector(), {"precision": "bf16"})])
def test_numpy_inference_is_refused_for_unsupported_networks(
    game: Any, actors: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=r"actors\.inference numpy .* set actors\.inference=auto"):
        made(game, inference="numpy", **actors)


@pytest.mark.parametrize("inference", ["numpy", "torch"])
@pytest.mark.parametrize(("algo", "game"), [("impala", Vector()), ("sac", Torques())])
def test_equal_seeds_act_equally(inference: Any, algo: str, game: Any) -> None:
    obs = np.zeros((3, 4), np.float32)
    cfg = config(algo, inference=inference)
    size = network_shape(cfg, game).layout.size
    runs = []
    for seed in (5, 5, 6):
        policy = make_policy(cfg, game, seed)
        policy.load(np.zeros(size, np.float32))
        runs.append([policy.act(obs).tolist() for _ in range(20)])
        state = policy.state_dict()
        after = policy.act(obs).tolist()
        policy.load_state_dict(state)
        assert policy.act(obs).tolist() == after
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_each_environment_of_each_actor_explores_at_its_own_rate(inference: Any) -> None:
    cfg = config("dqn", inference=inference, count=2)
    flat = np.zeros(network_shape(cfg, Vector()).layout.size, np.float32)
    network_shape(cfg, Vector()).layout.views(flat)["head.bias"][:] = (0.0, 1.0)
    obs, rounds = np.zeros((3, 4), np.float32), 4000
    rates = []
    for actor in range(2):
        policy = make_policy(cfg, Vector(), actor, actor)
        policy.load(flat)
        assert policy.greedy(obs).tolist() == [1, 1, 1]
        worse = np.zeros(3)
        for _ in range(rounds):
            worse += policy.act(obs) == 0
            np.testing.assert_allclose(policy.recorded["q_max"], 0.5)  # 1 less the mean
        rates += (2 * worse / rounds).tolist()
    expected = [0.4 ** (1 + i / 5 * 7) for i in range(6)]
    np.testing.assert_allclose(rates, expected, atol=0.04)


@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_a_gaussian_policy_acts_within_the_bounds(inference: Any) -> None:
    cfg, game = config("sac", inference=inference), Torques()
    shape = network_shape(cfg, game)
    flat = np.zeros(shape.layout.size, np.float32)
    shape.layout.views(flat)["head.bias"][:] = [0.1, -0.2, 0.3, 5.0, 0, 0, *[-20.0] * 4, 9, 0]
    policy = make_policy(cfg, game, 0)
    policy.load(flat)
    obs = np.zeros((3, 4), np.float32)
    mean = np.tanh([[[0.1, -0.2, 0.3], [5.0, 0.0, 0.0]]] * 3)
    np.testing.assert_allclose(policy.greedy(obs), mean, rtol=1e-6)
    drawn = np.stack([policy.act(obs).copy() for _ in range(2000)])
    assert (drawn.dtype, drawn.shape) == (np.dtype(np.float32), (2000, 3, 2, 3))
    assert policy.recorded == {}
    assert np.abs(drawn).max() <= 1
    assert np.abs(drawn[..., 0, :] - mean[:, 0]).max() < 1e-5
    # Deviation e^2, the upper bound, before tanh: beyond +-0.99 lies where |n| > atanh(0.99) / e^2.
    beyond = (np.abs(drawn[..., 1, 1]) > 0.99).mean()
    assert beyond == pytest.approx(math.erfc(math.atanh(0.99) / math.exp(2) / 2**0.5), abs=0.03)


TIMES = {"fp32": 2.0, "bf16": 1.0, "contiguous": 1.0, "channels_last": 2.0}


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A processor with bf16, on which a pass takes as long as `TIMES` says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(form_tuner, "processor", lambda: Processor("fast", BF16_FLAGS))

    def time_pass(form: ComputeForm) -> float:
        return 1e-6 * (TIMES[form.precision] + TIMES[form.memory_format])

    monkeypatch.setattr(form_tuner, "passes", lambda task: time_pass)


@pytest.mark.parametrize(
    ("actors", "expected"),
    [
        ({}, ("bf16", "contiguous")),
        ({"precision": "fp32"}, ("fp32", "contiguous")),
        ({"memory_format": "channels_last"}, ("bf16", "channels_last")),
    ],
)
@pytest.mark.usefixtures("times")
def test_actor_infers_in_the_fastest_form(
    actors: dict[str, Any], expected: tuple[str, str]
) -> None:
    found, note = with_acting_form(config(**actors), Frames())
    assert (found.actors.precision, found.actors.memory_format) == expected
    assert note.startswith(f"actors infer in {', '.join(expected)}, 3 observations a pass: ")


@pytest.mark.parametrize(
    ("game", "actors"),
    [
        (Vector(), {}),
        (Vector(), {"inference": "torch"}),
        (Frames(), {"precision": "bf16", "memory_format": "contiguous"}),
    ],
)
@pytest.mark.usefixtures("times")
def test_no_form_is_timed_when_the_options_fix_all(game: Any, actors: dict[str, Any]) -> None:
    before = config(**actors)
    assert with_acting_form(before, game) == (before, "")


def test_all_forms_of_inference_give_equal_outputs() -> None:
    size = network_shape(config(), Frames()).layout.size
    weights = np.random.default_rng(0).normal(0, 0.02, size).astype(np.float32)
    obs = np.random.default_rng(1).integers(0, 255, (3, 4, 84, 84)).astype(np.uint8)
    found = []
    for memory_format in ("auto", "contiguous", "channels_last"):
        policy = made(Frames(), memory_format=memory_format)
        policy.load(weights)
        found.append(policy.outputs(obs).copy())
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], found[2], rtol=1e-4, atol=1e-5)
