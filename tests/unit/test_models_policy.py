"""What computes an actor's policy, and in which precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from penstock.configs.errors import UserError
from penstock.configs.schema import ActorsConfig, ModelConfig
from penstock.models import policy as policies
from penstock.models.layout import param_layout
from penstock.models.numpy_mlp import NumpyMlp
from penstock.models.policy import make_policy
from penstock.models.precision import cpu_gains_by_bf16
from penstock.models.torch_policy import TorchPolicy


class Vector:
    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)


class Frames:
    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)


def made(game: Any, **actors: Any) -> Any:
    return make_policy(ModelConfig(), ActorsConfig(envs=3, **actors), game, seed=0)


@pytest.mark.parametrize(
    ("game", "actors", "gains", "expected"),
    [
        (Vector(), {}, True, (NumpyMlp, None)),
        (Vector(), {"inference": "torch"}, True, (TorchPolicy, torch.float32)),
        (Vector(), {"precision": "bf16"}, False, (TorchPolicy, torch.bfloat16)),
        (Frames(), {}, True, (TorchPolicy, torch.bfloat16)),
        (Frames(), {}, False, (TorchPolicy, torch.float32)),
        (Frames(), {"precision": "fp32"}, True, (TorchPolicy, torch.float32)),
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
    dtype = policy.dtype if isinstance(policy, TorchPolicy) else None
    assert (type(policy), dtype) == expected


@pytest.mark.parametrize(("game", "actors"), [(Frames(), {}), (Vector(), {"precision": "bf16"})])
def test_numpy_is_refused_where_it_cannot_compute(game: Any, actors: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"actors\.inference numpy .* set actors\.inference=auto"):
        made(game, inference="numpy", **actors)


@pytest.mark.parametrize("inference", ["numpy", "torch"])
def test_the_same_seed_plays_the_same(inference: Any) -> None:
    obs = np.zeros((3, 4), np.float32)
    size = param_layout(ModelConfig(), Vector.observation_space, Vector.action_space).size
    runs = []
    for seed in (5, 5, 6):
        policy = make_policy(
            ModelConfig(), ActorsConfig(envs=3, inference=inference), Vector(), seed
        )
        policy.load(np.zeros(size, np.float32))
        runs.append([policy.act(obs)[0].tolist() for _ in range(20)])
        state = policy.state_dict()
        after = policy.act(obs)[0].tolist()
        policy.load_state_dict(state)
        assert policy.act(obs)[0].tolist() == after
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("flags", "gains"),
    [("fpu avx2", False), ("avx512f avx512_bf16 avx", True), ("fpu amx_bf16", True)],
)
def test_flags_of_the_processor(flags: str, gains: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: none\n")
    assert cpu_gains_by_bf16(cpuinfo) is gains
    assert not cpu_gains_by_bf16(tmp_path / "absent")
