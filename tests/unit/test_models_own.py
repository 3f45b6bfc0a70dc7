"""A network of one's own: what fits is as any other, what does not is said in a sentence."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.models.fitting import actor_critic_shape
from penstock.models.policy import make_policy
from penstock.models.torch_nets import build_net

GAME: Any = SimpleNamespace(
    observation_space=spaces.Box(0, 255, (4,), np.uint8), action_space=spaces.Discrete(3)
)


class Features(nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]], outputs: int, width: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(shapes["obs"][0], width)

    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        features: Tensor = self.linear(arrays["obs"])
        return features


class Whole(nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]], outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(shapes["obs"][0], outputs + 1)

    def forward(self, arrays: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        found = self.linear(arrays["obs"])
        return found[:, :-1], found[:, -1]


class Counting(Features):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        float(self.linear.weight.sum())  # a number, which a tensor without memory does not have


class Doubles(Features):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.linear.double()

    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        features: Tensor = self.linear(arrays["obs"].double())
        return features


class Flat(Features):
    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        return super().forward(arrays).flatten()


class ValuesOfOne(Whole):
    def forward(self, arrays: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        outputs, values = super().forward(arrays)
        return outputs, values[:, None]


class Other(Features):
    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        return arrays["pixels"]


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mine")
    for kind in (Features, Whole, Counting, Doubles, Flat, ValuesOfOne, Other):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "mine", module)


def config(name: str, **model: Any) -> Config:
    about = {"entry": f"mine:{name}", **model}
    return Config.model_validate({"env": {"id": "x"}, "model": about, "actors": {"envs": 2}})


@pytest.mark.parametrize(
    ("name", "model", "entries"),
    [
        ("Features", {}, {"bodies.0.linear.weight": (5, 4), "policy.weight": (3, 5)}),
        ("Features", {"settings": {"width": 7}}, {"policy.weight": (3, 7)}),
        ("Features", {"core": "lstm", "core_size": 6}, {"cores.0.input.weight": (24, 5)}),
        ("Features", {"critic": "separate"}, {"bodies.1.linear.bias": (5,)}),
        ("Whole", {}, {"bodies.0.linear.weight": (4, 4)}),
        ("Counting", {}, {"bodies.0.linear.weight": (5, 4)}),
    ],
)
def test_it_acts_as_it_is_trained(name: str, model: Any, entries: dict[str, Any]) -> None:
    cfg = config(name, **model)
    shape = actor_critic_shape(cfg, GAME)
    assert entries.items() <= dict(shape.layout.entries).items()
    if name == "Whole":
        assert not any(name.startswith("policy") for name, _ in shape.layout.entries)
    net = build_net(shape)
    obs = np.array([[0, 51, 255, 102], [255, 0, 0, 51]], np.uint8)
    policy = make_policy(cfg, GAME, 0)
    policy.load(torch.cat([p.detach().flatten() for p in net.parameters()]).numpy())
    with torch.no_grad():
        outputs, values = net(torch.from_numpy(obs)[None])
    np.testing.assert_allclose(policy.outputs(obs), outputs, rtol=1e-5, atol=1e-6)
    assert values.shape == (2,)
    if name == "Whole":  # it gets 0 ... 255 as 0 ... 1
        linear = net.get_submodule("bodies.0.linear")
        expected = linear(torch.from_numpy(obs / np.float32(255)))[:, -1]
        torch.testing.assert_close(values, expected)


@pytest.mark.parametrize(
    ("name", "model", "sentence"),
    [
        (
            "Flat",
            {},
            r"mine:Flat returned a tensor of shape \[15\] for 3 observations, and it must",
        ),
        (
            "ValuesOfOne",
            {},
            r"returned \[3, 3\] and \[3, 1\] for 3 .* of shapes \[3, 3\] and \[3\]",
        ),
        ("Other", {}, r"Other failed with KeyError: 'pixels', for observations of obs \[4\] and 3"),
        ("Features", {"settings": {"depth": 3}}, "Features failed with TypeError: .*depth"),
        ("Doubles", {}, r"Doubles has linear.weight in torch.float64, .* make it float32"),
        (
            "Whole",
            {"core": "gru"},
            r"returns outputs and values, and model.core gru needs features",
        ),
        ("Absent", {}, r"module mine has no class Absent"),
    ],
)
def test_what_does_not_fit_is_one_sentence(name: str, model: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        build_net(actor_critic_shape(config(name, **model), GAME))
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=sentence):
        _ = actor_critic_shape(config(name, **model), GAME).layout


def test_a_module_that_is_not_there_is_one_sentence() -> None:
    cfg = config("x")
    model = cfg.model.model_copy(update={"entry": "no_such_module:Net"})
    shape = actor_critic_shape(cfg.model_copy(update={"model": model}), GAME)
    with pytest.raises(UserError, match=r"importing no_such_module failed .* start in its folder"):
        build_net(shape)
