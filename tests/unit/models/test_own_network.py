"""Custom networks: valid ones act as built-in ones, invalid ones are refused in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from net_weights import flat_of
from pages import code
from penstock.algos import samples
from penstock.algos.acting import make_policy
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.envs import probe
from penstock.models import torch_general
from penstock.models.fitting import actor_critic_shape
from penstock.models.torch_general import GeneralActorCritic
from penstock.models.torch_nets import build_net

EXAMPLES = Path(__file__).parents[3] / "examples"

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


class Dropping(Features):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.drop = nn.Dropout(0.5)
        self.memory = nn.LSTM(5, 5, num_layers=2, dropout=0.5)

    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        features: Tensor = self.memory(self.drop(super().forward(arrays))[None])[0][0]
        return features


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


class Rows(Features):
    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        rows = len(arrays["obs"])
        assert arrays["obs"].shape == (rows, 40, 52)
        return super().forward({"obs": arrays["obs"][:, :, 0]})


class Flat(Features):
    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        return super().forward(arrays).flatten()


class ValuesOfOne(Whole):
    def forward(self, arrays: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        outputs, values = super().forward(arrays)
        return outputs, values[:, None]


class Plain:
    def __init__(self, *given: Any) -> None:
        raise AssertionError("it is called")


class Other(Features):
    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        return arrays["pixels"]


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mine")
    for kind in (
        Features,
        Whole,
        Dropping,
        Counting,
        Doubles,
        Rows,
        Flat,
        ValuesOfOne,
        Plain,
        Other,
    ):
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
def test_custom_network_acts_as_it_is_trained(
    name: str, model: Any, entries: dict[str, Any]
) -> None:
    cfg = config(name, **model)
    shape = actor_critic_shape(cfg, GAME)
    assert entries.items() <= dict(shape.layout.entries).items()
    if name == "Whole":
        assert not any(name.startswith("policy") for name, _ in shape.layout.entries)
    net = build_net(shape)
    obs = np.array([[0, 51, 255, 102], [255, 0, 0, 51]], np.uint8)
    policy = make_policy(cfg, GAME, 0)
    policy.load(flat_of(net))
    with torch.no_grad():
        outputs, values = net(torch.from_numpy(obs)[None])
    np.testing.assert_allclose(policy.outputs(obs), outputs, rtol=1e-5, atol=1e-6)
    assert values.shape == (2,)
    if name == "Whole":  # it gets 0 ... 255 as 0 ... 1
        linear = net.get_submodule("bodies.0.linear")
        expected = linear(torch.from_numpy(obs / np.float32(255)))[:, -1]
        torch.testing.assert_close(values, expected)


def test_custom_network_gets_a_gray_frame_in_its_original_shape() -> None:
    space = spaces.Box(0, 255, (40, 52), np.uint8)
    gray: Any = SimpleNamespace(observation_space=space, action_space=spaces.Discrete(3))
    shape = actor_critic_shape(config("Rows"), gray)
    outputs, _ = build_net(shape)(torch.zeros(2, 3, 40, 52, dtype=torch.uint8))
    assert outputs.shape == (6, 3)


@pytest.mark.parametrize("name", ["Features", "Whole"])
@pytest.mark.parametrize(
    ("space", "known"),
    [
        (spaces.Discrete(3), "3"),
        (spaces.MultiDiscrete([3]), "3"),
        (spaces.MultiDiscrete([3, 2]), "3, 2"),
    ],
)
def test_slots_of_a_custom_network_are_accepted(name: str, space: Any, known: str) -> None:
    """What comes over the wire is checked against the choices that there are."""
    game: Any = SimpleNamespace(observation_space=GAME.observation_space, action_space=space)
    cfg = config(name)
    spec = samples.slot_spec(cfg, game)
    columns = spec.views(spec.zeros())
    columns["action"][:] = 1
    samples.make_receive(cfg.algo, game)(columns)
    columns["action"][:] = 3
    with pytest.raises(ValueError, match=f"actions from 3 to 3, there are {known}$"):
        samples.make_receive(cfg.algo, game)(columns)


def test_dropout_is_inactive_in_training_as_on_actors() -> None:
    """Or else the probability of an action would differ from the recorded one by chance alone."""
    cfg = config("Dropping")
    net = build_net(actor_critic_shape(cfg, GAME))
    with torch.no_grad():
        net.policy.weight.normal_()  # near zero at the start, which hides what differs
    obs = np.array([[0, 51, 255, 102], [255, 0, 0, 51]], np.uint8)
    policy = make_policy(cfg, GAME, 0)
    policy.load(flat_of(net))
    outputs, _ = net(torch.from_numpy(obs)[None])
    np.testing.assert_allclose(policy.outputs(obs), outputs.detach(), rtol=1e-5, atol=1e-6)
    outputs.sum().backward()
    assert isinstance(net, GeneralActorCritic)
    assert all(p.grad is not None for p in net.bodies.parameters())
    # cuDNN has gradients of those in training alone
    assert all(m.training == isinstance(m, nn.LSTM) for m in net.bodies[0].modules())


def test_normalisation_without_effect_is_refused() -> None:
    game: Any = SimpleNamespace(
        observation_space=spaces.Box(0, 255, (3, 40, 40), np.uint8), action_space=GAME.action_space
    )
    with pytest.raises(UserError, match=r"normalize_observations does nothing for .*obs \[3, 40"):
        actor_critic_shape(config("Whole", normalize_observations=True), game)


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
        ("Absent", {}, r"module mine has no class or function Absent"),
        ("Plain", {}, r"entry mine:Plain is no class of torch.nn.Module"),
    ],
)
def test_unfitting_custom_network_is_refused_in_one_sentence(
    name: str, model: Any, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as refused:
        build_net(actor_critic_shape(config(name, **model), GAME))
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=sentence):
        _ = actor_critic_shape(config(name, **model), GAME).layout


def test_missing_network_module_is_refused_in_one_sentence() -> None:
    cfg = config("x")
    model = cfg.model.model_copy(update={"entry": "no_such_module:Net"})
    shape = actor_critic_shape(cfg.model_copy(update={"model": model}), GAME)
    with pytest.raises(
        UserError, match=r"there is no module no_such_module in .* start in its folder"
    ):
        build_net(shape)


def test_only_a_custom_network_is_allocated_to_find_its_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A policy file could name layers that take hours to initialise, before one that fails."""
    devices: list[str] = []

    def fails(shape: object) -> None:
        devices.append(torch.empty(0).device.type)
        raise RuntimeError

    monkeypatch.setattr(torch_general, "general_net", fails)
    for model in ({"core": "lstm"}, {"entry": "mine:Features"}):
        cfg = Config.model_validate({"env": {"id": "x"}, "model": model})
        with pytest.raises(RuntimeError):
            torch_general.layout(actor_critic_shape(cfg, GAME))  # type: ignore[arg-type]
    assert devices == ["meta", "meta", "cpu"]


def assert_acts(cfg: Config, actions: int, parameters: int) -> None:
    """As on an actor: of the game that is named, by weights as they are published."""
    info = probe(cfg.env)
    net = build_net(actor_critic_shape(cfg, info))
    weights = flat_of(net)
    assert len(weights) == parameters
    policy, envs = make_policy(cfg, info, 0), cfg.actor_envs
    policy.load(weights)
    space = info.observation_space
    obs = np.random.default_rng(0).integers(0, 256, (envs, *space.shape)).astype(space.dtype)
    outputs, values = net(torch.from_numpy(obs)[None])
    assert (outputs.shape, values.shape) == ((envs, actions), (envs,))
    np.testing.assert_allclose(policy.outputs(obs), outputs.detach(), rtol=1e-5, atol=1e-6)
    assert policy.act(obs).shape == (envs,)


def test_network_example_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters by hand: 4 filters of 5x5, layers from 4x9x9 to 64 to 64, heads of 3 and 1."""
    monkeypatch.syspath_prepend(EXAMPLES)
    cfg = resolve(str(EXAMPLES / "own_network.yaml"), ["actors.precision=fp32"])
    convolution, layers = 4 * (25 + 1), 64 * (4 * 81 + 1) + 64 * (64 + 1)
    assert_acts(cfg, 3, convolution + layers + (3 + 1) * (64 + 1))


def test_network_of_the_tutorial_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CartPole, of 4 numbers and 2 actions."""
    (tmp_path / "shown_net.py").write_text(code("own-algorithm.md", "python", 0))
    monkeypatch.syspath_prepend(tmp_path)
    own = ["model.entry=shown_net:Net", "model.settings.width=32"]
    cfg = resolve("CartPole-v1", [*own, "algo.name=ppo", "actors.inference=auto"])
    assert_acts(cfg, 2, 32 * (4 + 1) + 32 * (32 + 1) + (2 + 1) * (32 + 1))
