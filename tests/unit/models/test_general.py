"""Actor-critics of any structure: their inputs, layouts and outputs."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from net_weights import flat_of, layout_of
from penstock.algos.acting import make_policy
from penstock.algos.impala import algorithm as impala
from penstock.algos.samples import slot_spec
from penstock.configs.errors import UserError
from penstock.configs.model import ModelConfig
from penstock.configs.schema import Config
from penstock.core.observations import laid_out, row_nbytes, views
from penstock.core.specs import SlotSpec
from penstock.envs import EnvInfo
from penstock.envs.packing import Packer
from penstock.models.acting.numpy_mlp import NumpyMlp
from penstock.models.acting.torch_network import GeneralNetwork
from penstock.models.fitting import actor_critic_shape
from penstock.models.general import GeneralShape
from penstock.models.layout import CnnShape, MlpShape
from penstock.models.torch_encoders import ImpalaEncoder
from penstock.models.torch_general import recorded_arrays, scaled_arrays
from penstock.models.torch_nets import build_net

TWO = spaces.Discrete(2)
MIXED = {
    "screen": ((40, 44, 3), "|u1"),
    "speed": ((2, 2), "<f4"),
    "held": ((3,), "|u1"),
    "action_mask": ((2,), "|u1"),
}


def config(**model: Any) -> Config:
    actors = {"envs": 3, "precision": "fp32"}
    return Config.model_validate({"env": {"id": "x"}, "model": model, "actors": actors})


def vector(size: int = 4, action_space: Any = TWO) -> Any:
    space = spaces.Box(-1, 1, (size,), np.float32)
    return SimpleNamespace(observation_space=space, action_space=action_space)


def frames(*shape: int) -> Any:
    space = spaces.Box(0, 255, shape, np.uint8)
    return SimpleNamespace(observation_space=space, action_space=TWO)


def mixed(arrays: dict[str, Any] = MIXED, action_space: Any = TWO) -> Any:
    parts = laid_out([(name, *about) for name, about in arrays.items()])
    space = spaces.Box(0, 255, (row_nbytes(parts),), np.uint8)
    return SimpleNamespace(observation_space=space, action_space=action_space, parts=parts)


def observations(game: Any, *lead: int, seed: int = 0) -> Tensor:
    space, rng = game.observation_space, np.random.default_rng(seed)
    if not hasattr(game, "parts"):
        return torch.from_numpy(rng.integers(0, 256, (*lead, *space.shape)).astype(space.dtype))
    packed = np.zeros((*lead, *space.shape), np.uint8)
    for name, array in views(game.parts, packed).items():
        most = 2 if name == "action_mask" else 256
        array[...] = rng.integers(0, most, array.shape)
    return torch.from_numpy(packed)


# Of one array of numbers, beside which there may be an action mask.
HAND = {"action_mask": ((2,), "|u1"), "hand": ((3, 2), "<f4")}
PLAIN = [
    (mixed(HAND), {}),
    (mixed(HAND), {"normalize_observations": True, "hidden": [8], "activation": "relu"}),
    (mixed(HAND), {"critic": "shared"}),
    (mixed(HAND), {"layer_norm": True}),
    (mixed({"held": ((5,), "|u1"), "action_mask": ((2,), "|u1")}), {}),
    (mixed(HAND | {"action_mask": ((5,), "|u1")}, spaces.MultiDiscrete([2, 3])), {}),
    (mixed({"hand": ((3,), "<f4")}, spaces.Box(-1, 1, (2,))), {"log_std_init": -0.5}),
]
CASES = [
    *PLAIN,
    (vector(), {"core": "lstm"}),
    (vector(), {"core": "gru", "critic": "separate", "normalize_observations": True}),
    (vector(), {"critic": "shared"}),
    (vector(action_space=spaces.MultiDiscrete([2, 3])), {"core": "gru"}),
    (vector(action_space=spaces.Box(-1, 1, (2, 3))), {"core": "gru"}),
    (frames(4, 40, 44), {"kind": "impala_cnn"}),
    (frames(4, 40, 44), {"critic": "separate"}),
    (frames(4, 40, 44), {"core": "lstm"}),
    (frames(40, 44, 3), {}),
    (frames(40, 44), {"kind": "impala_cnn", "core": "gru"}),
    (mixed({"screen": ((40, 44), "|u1"), "speed": ((2,), "<f4")}), {}),
    (frames(10, 10, 4), {"kind": "impala_cnn"}),
    (frames(9, 9, 4), {}),
    (frames(4, 9, 9), {"filters": [8], "core": "gru", "normalize_observations": True}),
    (frames(4, 40, 44), {"kind": "small_cnn", "critic": "separate"}),
    (mixed({"board": ((9, 9), "|u1"), "speed": ((2,), "<f4")}), {"normalize_observations": True}),
    (mixed({"board": ((9, 9, 4), "|u1"), "speed": ((2,), "<f4"), "screen": ((40, 44), "|u1")}), {}),
    (frames(40, 44, 3), {"normalize_observations": True}),
    (frames(4, 40, 44), {"core": "lstm", "normalize_observations": True}),
    (mixed(), {}),
    (mixed(), {"kind": "mlp", "normalize_observations": True}),
    (mixed(), {"kind": "impala_cnn", "core": "gru", "critic": "separate"}),
    (mixed(), {"layer_norm": True}),
    (frames(9, 9, 4), {"layer_norm": True, "core": "gru"}),
    (frames(4, 40, 44), {"layer_norm": True, "kind": "impala_cnn"}),
]


@pytest.mark.parametrize(("game", "model"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_and_outputs_match_the_network(
    game: Any, model: dict[str, Any], dtype: torch.dtype
) -> None:
    shape = actor_critic_shape(config(**model), game)
    assert isinstance(shape, GeneralShape)
    net = build_net(shape, dtype)
    assert shape.layout == layout_of(net)
    outputs, values = net(observations(game, 3, 2))
    assert outputs.shape == (6, shape.outputs)
    assert values.shape == (6,)
    assert outputs.dtype == values.dtype == torch.float32
    (outputs.sum() + values.sum()).backward()
    heads = {name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()}
    # The convolution biases of dead units and a forgotten state may have no gradient, layers do.
    assert not {name for name in heads if "weight" in name and "recurrent" not in name}


@pytest.mark.parametrize(("game", "model"), CASES)
def test_numpy_actor_equals_the_learners_actor_critic(game: Any, model: dict[str, Any]) -> None:
    cfg = config(**model)
    shape = actor_critic_shape(cfg, game)
    net = build_net(shape)
    policy = make_policy(cfg, game, 0)
    policy.load(flat_of(net))
    obs = observations(game, 1, 3)
    with torch.no_grad():
        outputs, _ = net(obs)
        mask = net.mask(obs)
    if mask is not None:
        outputs = outputs.masked_fill(mask == 0, -1e9)
    np.testing.assert_allclose(policy.outputs(obs[0].numpy()), outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("game", "model"), PLAIN)
def test_numpy_infers_one_array_with_a_mask_as_torch_does(game: Any, model: dict[str, Any]) -> None:
    obs = observations(game, 5)
    for name, array in views(game.parts, obs.numpy()).items():
        if name == "hand":
            array[...] = np.random.default_rng(1).normal(size=array.shape)
    found = []
    for inference, kind in (("auto", NumpyMlp), ("torch", GeneralNetwork)):
        cfg = config(**model)
        actors = cfg.actors.model_copy(update={"inference": inference, "envs": 5})
        policy = make_policy(cfg.model_copy(update={"actors": actors}), game, 0)
        assert type(policy.network) is kind
        size = actor_critic_shape(cfg, game).layout.size
        policy.load(np.random.default_rng(2).normal(0.2, 0.3, size).astype(np.float32) ** 2)
        found.append(policy.outputs(obs.numpy()).copy())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6, atol=1e-6)


def test_an_actor_of_a_masked_game_needs_no_torch() -> None:
    program = (
        "import sys, numpy as np\n"
        "from penstock.algos.acting import make_inference\n"
        "from penstock.configs.load import resolve\n"
        "from penstock.envs import make\n"
        "cfg = resolve('penstock/SyntheticGames-v0', ['algo.name=ppo', 'env.kwargs.turns=true'])\n"
        "make_inference(cfg, make(cfg.env, 8).info, 0)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("low", "high", "shape", "kind", "middle"),
    [
        (0, 10, (4,), np.uint8, 0.5),
        (0, 255, (2, 40, 44), np.float32, 0.5),
        (0, 60000, (40, 44, 3), np.uint16, 0.5),
        (-100, 100, (40, 44, 3), np.int8, 0.0),
        (1000, 1010, (2, 40, 44), np.float32, 0.5),
        (-510, -500, (5, 4, 3), np.float64, 0.5),
    ],
)
def test_bytes_and_frames_are_read_within_their_bounds(
    low: int, high: int, shape: tuple[int, ...], kind: type, middle: float, dtype: torch.dtype
) -> None:
    """As an observation of its own, and as a part of one."""
    box = spaces.Box(low, high, shape, kind)
    seen: Any = np.full((1, *shape), (low + high) // 2, kind)
    for space, numbers in ((box, seen), (spaces.Dict(obs=box), {"obs": seen})):
        packer = Packer("x", space)
        row = np.zeros((1, *packer.space.shape), packer.space.dtype)
        packer.write(numbers, row)
        game = EnvInfo(packer.space, TWO, 1, "how", packer.parts)
        net = actor_critic_shape(config(core="lstm"), game)
        assert isinstance(net, GeneralShape)
        recorded = recorded_arrays(net, torch.from_numpy(row))
        found = scaled_arrays(net, recorded, None, dtype)["obs"].float()
        torch.testing.assert_close(found, torch.full((1, *shape), middle), rtol=0.01, atol=0)


def test_simple_observations_keep_the_fast_networks() -> None:
    """Networks of one array without memory, also with normalised observations and any actions."""
    spaces_of = (TWO, spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (3,)))
    for action_space in spaces_of:
        fast = actor_critic_shape(config(normalize_observations=True), vector(4, action_space))
        assert isinstance(fast, MlpShape)
    assert isinstance(actor_critic_shape(config(), frames(4, 84, 84)), CnnShape)


def test_an_impala_cnn_has_as_many_parameters_as_in_the_paper() -> None:
    """By hand for 4 frames of 84x84: convolutions of 3x3 with bias, then 11x11x32 to 256."""
    sections = 0
    for entering, channels in ((4, 16), (16, 32), (32, 32)):
        sections += (9 * entering + 1) * channels + 4 * (9 * channels + 1) * channels
    linear = (11 * 11 * 32 + 1) * 256
    net = ImpalaEncoder(4, 84, 84)
    assert sum(p.numel() for p in net.parameters()) == sections + linear
    convs = [module for module in net.modules() if isinstance(module, torch.nn.Conv2d)]
    assert len(convs) == 15


def test_numeric_inputs_condition_the_small_image_network() -> None:
    """Side by side behind the layers they could only be added to what the image says."""
    game = mixed({"board": ((4, 9, 9), "|u1"), "key": ((1,), "<f4")})
    net = build_net(actor_critic_shape(config(), game))
    arrays = torch.zeros(2, 2, *game.observation_space.shape, dtype=torch.uint8)
    arrays[1, :, 5] = 255  # another image
    arrays[:, 1, -8:-4] = torch.tensor([0, 0, 0, 65], dtype=torch.uint8)  # the number 8
    outputs = net(arrays)[1].view(2, 2)
    assert (outputs[1] - outputs[0]).diff().abs() > 1e-4


def test_observation_parts_are_read_at_their_offsets() -> None:
    game = mixed()
    shape = actor_critic_shape(config(), game)
    assert isinstance(shape, GeneralShape)
    net = build_net(shape)
    obs = observations(game, 2, 3)[:, 1:]  # strided, as some environments of a batch are
    arrays = scaled_arrays(shape, recorded_arrays(shape, obs), None, torch.float32)
    named = views(game.parts, obs.numpy())
    assert set(arrays) == {"screen", "speed", "held"}  # a network does not see the mask
    for name, scale in (("screen", 255), ("held", 255), ("speed", 1)):
        expected = named[name].reshape(4, *named[name].shape[2:]).astype(np.float32) / scale
        np.testing.assert_allclose(arrays[name], expected, rtol=1e-6)
    mask = net.mask(obs)
    assert mask is not None
    np.testing.assert_array_equal(mask, named["action_mask"].reshape(4, 2))


def test_a_masked_action_is_never_taken() -> None:
    game = mixed(
        {"speed": ((2,), "<f4"), "action_mask": ((5,), "|u1")}, spaces.MultiDiscrete([3, 2])
    )
    cfg = config()
    policy = make_policy(cfg, game, 0)
    flat = np.random.default_rng(0).normal(size=actor_critic_shape(cfg, game).layout.size)
    policy.load(flat.astype(np.float32))
    packed = np.zeros((3, *game.observation_space.shape), np.uint8)
    views(game.parts, packed)["action_mask"][:] = [[1, 0, 1, 1, 0], [0, 0, 1, 1, 1], [1] * 5]
    drawn = np.stack([policy.act(packed).copy() for _ in range(500)])
    assert set(drawn[:, 0, 0]) <= {0, 2}
    assert set(drawn[:, 0, 1]) == {0}
    assert set(drawn[:, 1, 0]) == {2}
    assert set(drawn[:, 2, 0]) | set(drawn[:, 2, 1]) == {0, 1, 2}
    assert policy.greedy(packed)[1, 0] == 2


def test_received_slot_is_checked_by_choice_and_by_part() -> None:
    game = mixed({"pixels": ((8,), "|u1"), "speed": ((2,), "<f4")}, spaces.MultiDiscrete([3, 2]))
    cfg = config(core="gru")
    spec: SlotSpec = slot_spec(cfg, game)
    columns = spec.views(spec.zeros())
    columns["action"][0, 0] = [2, 1]
    columns["obs"][0, 0, :8] = 255  # a NaN, were these numbers
    impala.check(columns, game)
    columns["action"][0, 0] = [1, 2]
    with pytest.raises(ValueError, match="actions from 0 to 2, there are 3, 2"):
        impala.check(columns, game)
    columns["action"][0, 0] = 0
    columns["obs"][1, 2, 8:12] = 255
    with pytest.raises(ValueError, match="column obs holds numbers that are not finite"):
        impala.check(columns, game)
    columns["obs"][1, 2, 8:12] = 0
    columns["core_state"][1, 3] = np.inf
    with pytest.raises(ValueError, match="column core_state"):
        impala.check(columns, game)


@pytest.mark.parametrize(
    ("game", "model", "words"),
    [
        (vector(), {"kind": "impala_cnn"}, ["obs [4]", "impala_cnn", "model.kind=mlp"]),
        (mixed({"a": ((2,), "<f4"), "b": ((2, 40, 44, 3), "|u1")}), {}, ["[2, 40, 44, 3]"]),
        (mixed({"action_mask": ((2,), "|u1")}), {}, ["nothing but action_mask"]),
    ],
)
def test_spaces_that_fit_no_network_are_refused(
    game: Any, model: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        actor_critic_shape(config(**model), game)
    assert all(word in str(refused.value) for word in words)


def test_unsupported_network_is_refused_for_numpy() -> None:
    cfg = config()
    actors = cfg.actors.model_copy(update={"inference": "numpy"})
    with pytest.raises(UserError, match=r"numpy .* a nature_cnn and a shared critic over 3 arrays"):
        make_policy(cfg.model_copy(update={"actors": actors}), mixed(), 0)


def test_short_names_of_recurrent_cores_are_accepted() -> None:
    for core in ("lstm", "gru"):
        model = ModelConfig.model_validate({"kind": core})
        assert (model.kind, model.core) == ("auto", core)
