"""Networks with one head over any observations, and SAC's critics, against numpy."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from net_weights import flat_of, layout_of, shake
from penstock.algos.acting import make_policy
from penstock.algos.dqn import algorithm as dqn
from penstock.algos.samples import network_shape, slot_spec
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.observations import laid_out, row_nbytes, views
from penstock.models.acting.numpy_mlp import NumpyMlp
from penstock.models.acting.policy import Policy
from penstock.models.general import GeneralShape
from penstock.models.layout import CLIP, EPSILON, DenseShape, QCnnShape, SingleHead
from penstock.models.torch_general import GeneralCritics, GeneralHeadNet
from penstock.models.torch_heads import HeadNet, of_allowed
from penstock.models.torch_nets import TwinCritics, build_critics, build_net

Array = npt.NDArray[np.float64]

THREE, TORQUES = spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)
NUMBERS = {"speed": ((2, 2), "<f4"), "held": ((3,), "|u1")}
PARTS = {"screen": ((40, 44, 3), "|u1"), **NUMBERS}
MASK = {"action_mask": ((3,), "|u1")}


def config(
    algo: str, envs: int = 3, settings: dict[str, Any] | None = None, **model: Any
) -> Config:
    sections = {
        "env": {"id": "x"},
        "algo": {"name": algo, **(settings or {})},
        "model": {"hidden": [6, 5], **model},
        "actors": {"envs": envs, "precision": "fp32"},
    }
    return Config.model_validate(sections)


def game(algo: str, space: spaces.Box | dict[str, Any]) -> Any:
    """Of one array, or of several parts; DQN's may have a mask."""
    actions = THREE if algo == "dqn" else TORQUES
    if isinstance(space, spaces.Box):
        return SimpleNamespace(observation_space=space, action_space=actions)
    parts = laid_out([(name, *about) for name, about in space.items()])
    packed = spaces.Box(0, 255, (row_nbytes(parts),), np.uint8)
    return SimpleNamespace(observation_space=packed, action_space=actions, parts=parts)


def observations(made: Any, rows: int, seed: int = 0) -> npt.NDArray[Any]:
    rng, space = np.random.default_rng(seed), made.observation_space
    if not hasattr(made, "parts"):
        return rng.integers(0, 256, (rows, *space.shape)).astype(space.dtype)
    packed = np.zeros((rows, *space.shape), np.uint8)
    for array in views(made.parts, packed).values():
        array[...] = rng.integers(0, 256, array.shape)
    return packed


def shaken(net: nn.Module, seed: int = 1, scale: float = 0.3) -> None:
    """With weights at which every layer matters, and statistics as after some batches."""
    shake(net, scale, seed)
    normalizer = getattr(net, "normalizer", None)
    if normalizer is not None:
        rng = torch.Generator().manual_seed(seed)
        normalizer.mean.copy_(100 * torch.rand(normalizer.mean.shape, generator=rng))
        normalizer.var.copy_(1e4 * torch.rand(normalizer.var.shape, generator=rng))


def assert_near(found: npt.NDArray[np.float32], expected: Array) -> None:
    """Up to what float32 loses among numbers of that size."""
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def of(net: nn.Module) -> dict[str, Array]:
    named = (*net.named_parameters(), *net.named_buffers())
    return {name: tensor.detach().double().numpy() for name, tensor in named}


def numbers(
    made: Any, packed: npt.NDArray[Any], named: dict[str, Array], normalized: bool
) -> Array:
    """What a network reads of the numbers in an observation, side by side."""
    found = views(made.parts, packed)
    rows = [found[name].reshape(len(packed), -1).astype(np.float64) for name in NUMBERS]
    if not normalized:
        return np.concatenate([rows[0], rows[1] / 255], 1)
    scale = np.sqrt(named["normalizer.var"] + EPSILON)
    return np.clip((np.concatenate(rows, 1) - named["normalizer.mean"]) / scale, -CLIP, CLIP)


CASES = [
    ("dqn", {**NUMBERS, **MASK}, {}),
    ("dqn", NUMBERS, {"normalize_observations": True}),
    ("dqn", {**PARTS, **MASK}, {"normalize_observations": True}),
    ("dqn", PARTS, {"kind": "impala_cnn"}),
    ("dqn", PARTS, {"kind": "mlp"}),
    ("dqn", spaces.Box(0, 255, (40, 44, 3), np.uint8), {}),
    ("dqn", spaces.Box(0, 255, (3, 40, 44), np.uint8), {"kind": "impala_cnn"}),
    ("dqn", spaces.Box(-1, 1, (4,), np.float32), {"entry": "mine:Features"}),
    ("sac", NUMBERS, {"normalize_observations": True}),
    ("sac", PARTS, {}),
    ("sac", spaces.Box(0, 255, (3, 40, 44), np.uint8), {}),
    ("sac", spaces.Box(0, 255, (40, 44), np.uint8), {"kind": "impala_cnn"}),
    ("sac", spaces.Box(-1, 1, (4,), np.float32), {"entry": "mine:Features"}),
]


class Features(nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]], outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(shapes["obs"][0], 5)
        self.memory = nn.LSTM(5, 5)

    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        features: Tensor = self.memory(self.linear(arrays["obs"])[None])[0][0]
        return features


class Whole(Features):
    def forward(self, arrays: dict[str, Tensor]) -> Any:
        return super().forward(arrays)[:, :3], arrays["obs"][:, 0]


@pytest.fixture(autouse=True)
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mine")
    for kind in (Features, Whole):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "mine", module)


@pytest.mark.parametrize(("algo", "space", "model"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_and_outputs_match_the_network(
    algo: str, space: Any, model: Any, dtype: torch.dtype
) -> None:
    made = game(algo, space)
    shape: Any = network_shape(config(algo, **model), made)
    assert isinstance(shape, GeneralShape)
    net = build_net(shape, dtype)
    assert isinstance(net, GeneralHeadNet)
    assert shape.layout == layout_of(net)
    outputs = net(torch.from_numpy(observations(made, 6)))
    assert outputs.shape == (6, shape.outputs)
    assert outputs.dtype == torch.float32
    outputs.square().sum().backward()
    assert all(p.grad is not None for name, p in net.named_parameters())


@pytest.mark.parametrize(("algo", "space", "model"), CASES)
def test_actor_equals_the_learners_head_network(algo: str, space: Any, model: Any) -> None:
    cfg, made = config(algo, **model), game(algo, space)
    shape: Any = network_shape(cfg, made)
    net: HeadNet = build_net(shape)
    shaken(net)
    policy = make_policy(cfg, made, 0)
    policy.load(flat_of(net))
    obs = observations(made, 3)
    with torch.no_grad():
        expected = net.allowed_outputs(torch.from_numpy(obs), -1e9)
    np.testing.assert_allclose(policy.outputs(obs), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("duelling", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
def test_values_of_several_arrays_by_numpy(duelling: bool, normalized: bool) -> None:
    model: dict[str, Any] = {"activation": "relu", "normalize_observations": normalized}
    cfg = config("dqn", settings={"duelling": duelling}, **model)
    made = game("dqn", {**NUMBERS, **MASK})
    shape: Any = network_shape(cfg, made)
    net = build_net(shape)
    shaken(net)
    packed, named = observations(made, 4), of(net)
    rows = numbers(made, packed, named, normalized)
    for i in range(2):
        layer = f"bodies.0.layers.linears.{i}."
        rows = np.maximum(rows @ named[layer + "weight"].T + named[layer + "bias"], 0)
    if duelling:
        halves = np.maximum(rows @ named["halves.weight"].T + named["halves.bias"], 0)
        advantages = halves[:, 5:] @ named["head.weight"].T + named["head.bias"]
        value = halves[:, :5] @ named["value.weight"].T + named["value.bias"]
        expected = value + advantages - advantages.mean(1, keepdims=True)
    else:
        expected = rows @ named["head.weight"].T + named["head.bias"]
    found = net(torch.from_numpy(packed)).detach().numpy()
    assert_near(found, expected)


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("arrays", [NUMBERS, PARTS])
def test_critics_of_several_arrays_by_numpy(arrays: dict[str, Any], normalized: bool) -> None:
    """An image goes through convolutions of each critic; what they give, and the rest, beside the
    action through its layers."""
    made = game("sac", arrays)
    cfg = config("sac", activation="relu", normalize_observations=normalized)
    shape: Any = network_shape(cfg, made)
    net = build_net(shape)
    shaken(net)
    critics = build_critics(shape, net.normalizer, action_size=2)
    assert isinstance(critics, GeneralCritics)
    shaken(critics, 2, 0.03)
    packed, named = observations(made, 4), of(critics)
    action = np.random.default_rng(0).uniform(-1, 1, (4, 2)).astype(np.float32)
    found = critics(torch.from_numpy(packed), torch.from_numpy(action))
    assert found.shape == (2, 4)
    for i, critic in enumerate(critics.critics):
        rows: list[Any] = [numbers(made, packed, named, normalized), action]
        if "screen" in arrays:
            screen = torch.from_numpy(views(made.parts, packed)["screen"]) / 255
            assert isinstance(critic.body, nn.Module)
            rows.insert(0, critic.body({"screen": screen}).detach().double().numpy())
        hidden: Array = np.concatenate(rows, 1)
        for j in range(2):
            layer = f"critics.{i}.layers.linears.{j}."
            hidden = np.maximum(hidden @ named[layer + "weight"].T + named[layer + "bias"], 0)
        value, bias = named[f"critics.{i}.value.weight"], named[f"critics.{i}.value.bias"]
        expected = hidden @ value[0] + bias
        assert_near(found[i].detach().numpy(), expected)


@pytest.mark.parametrize("actions", [(), (1,), (2, 3)])
@pytest.mark.parametrize("space", [NUMBERS, spaces.Box(-1, 1, (4,), np.float32)])
def test_critics_take_actions_of_any_shape(space: Any, actions: tuple[int, ...]) -> None:
    made = game("sac", space)
    made.action_space = spaces.Box(-1, 1, actions, np.float32)
    shape: Any = network_shape(config("sac"), made)
    critics = build_critics(shape, None, action_size=math.prod(actions))
    obs, action = torch.from_numpy(observations(made, 4)), torch.rand(4, *actions)
    torch.testing.assert_close(critics(obs, action), critics(obs, action.view(4, -1)))


@pytest.mark.parametrize("space", [PARTS, spaces.Box(-1, 1, (4,), np.float32)])
@pytest.mark.parametrize("entry", [None, "mine:Features"])
def test_only_the_action_gets_a_gradient_where_the_actor_is_trained(space: Any, entry: Any) -> None:
    if entry and space is PARTS:
        space = spaces.Box(0, 255, (4,), np.uint8)
    made = game("sac", space)
    shape: Any = network_shape(config("sac", entry=entry), made)
    critics = build_critics(shape, None, action_size=2)
    shaken(critics)
    obs = torch.from_numpy(observations(made, 5))
    actions = [torch.full((5, 2), 0.5, requires_grad=True) for _ in range(2)]
    critics.of_action(obs, actions[0]).sum().backward()
    assert all(parameter.grad is None for parameter in critics.parameters())
    critics(obs, actions[1]).sum().backward()
    torch.testing.assert_close(actions[0].grad, actions[1].grad)
    assert all(parameter.grad is not None for parameter in critics.parameters())


def test_critics_use_the_normaliser_of_the_policy() -> None:
    made = game("sac", spaces.Box(-1, 1, (3,), np.float32))
    shape: Any = network_shape(config("sac", normalize_observations=True), made)
    assert isinstance(shape, DenseShape)
    net = build_net(shape)
    critics = build_critics(shape, net.normalizer, action_size=2)
    plain = TwinCritics(shape, action_size=2)
    plain.load_state_dict(critics.state_dict(), strict=False)
    obs, action = torch.randn(6, 3) * 3 + 5, torch.zeros(6, 2)
    assert net.normalizer is not None
    net.observe(obs, torch.ones(6, dtype=torch.bool))
    rows = obs.double().numpy()
    scaled = (rows - rows.mean(0)) / rows.std(0)
    expected = plain(torch.from_numpy(scaled.astype(np.float32)), action)
    torch.testing.assert_close(critics(obs, action), expected, rtol=1e-4, atol=1e-4)
    assert not any(name.startswith("normalizer") for name, _ in critics.named_parameters())


@pytest.mark.parametrize("duelling", [False, True])
def test_numpy_normalises_as_torch_does(duelling: bool) -> None:
    shape = DenseShape(4, SingleHead(3, duelling), (6, 5), "tanh", 1.0, normalize=True)
    net = build_net(shape)
    shaken(net)
    assert shape.layout == layout_of(net)
    outputs = np.empty((3, 7), np.float32)
    network = NumpyMlp(shape, outputs)
    network.load(flat_of(net))
    obs = np.random.default_rng(0).normal(50, 300, (7, 4)).astype(np.float32)
    network.forward(obs)
    np.testing.assert_allclose(outputs.T, net(torch.from_numpy(obs)).detach(), atol=1e-5)


def test_simple_observations_keep_the_fast_networks() -> None:
    """One array without a network of one's own."""
    vector, frames = spaces.Box(-1, 1, (4,), np.float32), spaces.Box(0, 255, (3, 40, 44), np.uint8)
    flat = {"kind": "mlp"}
    for algo, space, model, kind in (
        ("dqn", vector, {}, DenseShape),
        ("dqn", vector, {"normalize_observations": True}, DenseShape),
        ("dqn", frames, {}, QCnnShape),
        ("dqn", frames, flat, DenseShape),
        ("sac", vector, {"normalize_observations": True}, DenseShape),
        ("sac", frames, flat, DenseShape),
    ):
        shape = network_shape(config(algo, **model), game(algo, space))
        assert isinstance(shape, kind), (algo, space, model)


@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_custom_network_gives_features_to_the_head(algo: str) -> None:
    made = game(algo, spaces.Box(-1, 1, (4,), np.float32))
    with pytest.raises(UserError) as refused:
        network_shape(config(algo, entry="mine:Whole"), made).layout.to_list()
    words = ("mine:Whole returned [3, 3] and [3]", "features of shape [3, width]", "algo.name=ppo")
    assert all(word in str(refused.value) for word in words)


def test_mask_without_allowed_actions_is_ignored() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0]] * 3)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 0]], dtype=torch.uint8)
    found = of_allowed(values, mask, -5.0)
    assert found.tolist() == [[1, 2, -5], [1, 2, 3], [-5, 2, -5]]
    assert of_allowed(values, mask).amax(1).tolist() == [2, 3, 2]
    assert of_allowed(values, None) is values


def masked_policy(epsilon: float, envs: int) -> tuple[Policy, Any]:
    """With values 0, 1 and 2 of the three actions, whatever the observation."""
    made = game("dqn", {"speed": ((2,), "<f4"), **MASK})
    settings = {"epsilon": epsilon, "epsilon_alpha": 0, "duelling": False}
    cfg = config("dqn", envs, settings)
    shape: Any = network_shape(cfg, made)
    policy = make_policy(cfg, made, 0)
    flat = np.zeros(shape.layout.size, np.float32)
    shape.layout.views(flat)["head.bias"][:] = [0, 1, 2]
    policy.load(flat)
    return policy, made


def with_masks(made: Any, masks: list[list[int]]) -> npt.NDArray[np.uint8]:
    packed = np.zeros((len(masks), *made.observation_space.shape), np.uint8)
    views(made.parts, packed)["action_mask"][:] = masks
    return packed


MASKS = [[1, 1, 1], [1, 1, 0], [0, 1, 0], [1, 0, 1], [0, 0, 0]]


def test_a_forbidden_action_is_never_the_best() -> None:
    policy, made = masked_policy(0.0, 5)
    packed = with_masks(made, MASKS)
    assert policy.greedy(packed).tolist() == [2, 1, 1, 2, 2]
    assert policy.act(packed).tolist() == [2, 1, 1, 2, 2]
    assert policy.recorded["q_max"].tolist() == policy.recorded["q_taken"].tolist()
    assert policy.recorded["q_max"].tolist() == [2, 1, 1, 2, 2]


def test_a_random_action_is_any_of_those_allowed() -> None:
    """All of them equally often, of 4,000: within five standard errors."""
    policy, made = masked_policy(1.0, 5)
    packed, draws = with_masks(made, MASKS), 4000
    counts, taken = np.zeros((5, 3)), []
    for _ in range(draws):
        action = policy.act(packed)
        counts[np.arange(5), action] += 1
        taken.append((policy.recorded["q_taken"] == action).all())
    assert all(taken)
    allowed = np.array([[1, 1, 1], [1, 1, 0], [0, 1, 0], [1, 0, 1], [1, 1, 1]])
    expected = allowed / allowed.sum(1, keepdims=True)
    error = 5 * np.sqrt(expected * (1 - expected) / draws)
    assert (np.abs(counts / draws - expected) <= error).all()


def test_mask_applies_to_one_decision_only() -> None:
    policy, made = masked_policy(0.0, 1)
    assert policy.act(with_masks(made, [[1, 0, 0]])).tolist() == [0]
    assert policy.act(with_masks(made, [[1, 1, 1]])).tolist() == [2]


def test_received_slot_with_invalid_values_is_refused() -> None:
    cfg, made = config("dqn"), game("dqn", {**NUMBERS, **MASK})
    spec = slot_spec(cfg, made)
    columns = spec.views(spec.zeros())
    dqn.check(columns, made)
    columns["obs"][0, 0, :4] = 255  # a NaN of `speed`
    with pytest.raises(ValueError, match="column obs holds numbers that are not finite"):
        dqn.check(columns, made)
    columns["obs"][0, 0, :4] = 0
    columns["action"][0, 0] = 3
    with pytest.raises(ValueError, match="actions from 0 to 3, there are 3"):
        dqn.check(columns, made)
