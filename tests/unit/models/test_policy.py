"""What computes an actor's policy, and in which precision."""

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
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.configs.sections import ActorsConfig
from penstock.models import precision
from penstock.models.acting import policy as policies
from penstock.models.acting.numpy_mlp import NumpyMlp
from penstock.models.acting.policy import Policy
from penstock.models.acting.torch_network import TorchNetwork
from penstock.models.precision import bf16_is_faster, cpu_gains_by_bf16, has_bf16


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


@pytest.mark.parametrize(
    ("game", "actors", "gains", "expected"),
    [
        (Vector(), {}, True, (NumpyMlp, None)),
        (Vector(), {"inference": "torch"}, True, (TorchNetwork, torch.float32)),
        (Vector(), {"precision": "bf16"}, False, (TorchNetwork, torch.bfloat16)),
        (Frames(), {}, True, (TorchNetwork, torch.bfloat16)),
        (Frames(), {}, False, (TorchNetwork, torch.float32)),
        (Frames(), {"precision": "fp32"}, True, (TorchNetwork, torch.float32)),
    ],
)
def test_choice(
    game: Any,
    actors: dict[str, Any],
    gains: bool,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "cpu_gains_by_bf16", lambda: gains)
    policy = made(game, **actors)
    network = policy.network
    dtype = network.dtype if isinstance(network, TorchNetwork) else None
    assert (type(network), dtype) == expected


@pytest.mark.parametrize(("game", "actors"), [(Frames(), {}), (Vector(), {"precision": "bf16"})])
def test_numpy_is_refused_where_it_cannot_compute(game: Any, actors: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"actors\.inference numpy .* set actors\.inference=auto"):
        made(game, inference="numpy", **actors)


@pytest.mark.parametrize("inference", ["numpy", "torch"])
@pytest.mark.parametrize(("algo", "game"), [("impala", Vector()), ("sac", Torques())])
def test_the_same_seed_plays_the_same(inference: Any, algo: str, game: Any) -> None:
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


@pytest.mark.parametrize(
    ("flags", "gains"),
    [("fpu avx2", False), ("avx512f avx512_bf16 avx", True), ("fpu amx_bf16", True)],
)
def test_flags_of_the_processor(flags: str, gains: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n")
    assert has_bf16(cpuinfo) is gains
    assert not has_bf16(tmp_path / "absent")


@pytest.mark.parametrize(
    ("has", "in_bfloat16_s", "gains"), [(True, 0.8, True), (True, 1.5, False), (False, 0.8, False)]
)
def test_bfloat16_must_be_there_and_faster(
    has: bool, in_bfloat16_s: float, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {torch.float32: 1.0, torch.bfloat16: in_bfloat16_s}
    monkeypatch.setattr(precision, "has_bf16", lambda cpuinfo: has)
    monkeypatch.setattr(precision, "_convolution_s", seconds.__getitem__)
    bf16_is_faster.cache_clear()
    try:
        assert cpu_gains_by_bf16() is gains
    finally:
        bf16_is_faster.cache_clear()


def test_timing_the_formats_takes_no_random_numbers() -> None:
    before = torch.get_rng_state()
    bf16_is_faster.cache_clear()
    assert bf16_is_faster() in (True, False)
    assert torch.equal(torch.get_rng_state(), before)
