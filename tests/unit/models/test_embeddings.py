"""Choices that are too many to be one-hot: they are stored as numbers, and networks embed them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium import spaces

from net_weights import flat_of, layout_of
from penstock.algos.acting import make_policy
from penstock.algos.registry import algorithm
from penstock.algos.samples import network_shape, slot_spec
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.observations import views
from penstock.envs import EnvInfo
from penstock.envs.packing import Packer
from penstock.models.acting.numpy_mlp import NumpyMlp
from penstock.models.torch_nets import build_critics, build_net

Array = npt.NDArray[Any]
ROWS = 5
FOUR = spaces.Discrete(4)
TORQUES = spaces.Box(-1, 1, (2,), np.float32)
ITEM = spaces.Discrete(10_000, start=7)
HAND = spaces.Dict(item=ITEM, action_mask=spaces.MultiBinary(4))
THINGS = spaces.Dict(
    item=ITEM,
    pair=spaces.MultiDiscrete([1200, 3], start=[0, 5]),
    speed=spaces.Box(-1, 1, (2,), np.float32),
)
SCREEN = spaces.Dict(item=ITEM, screen=spaces.Box(0, 255, (40, 44), np.uint8))


def config(algo: str = "ppo", **model: Any) -> Config:
    sections = {
        "env": {"id": "x"},
        "algo": {"name": algo},
        "model": {"hidden": [16, 8]} | model,
        "actors": {"envs": ROWS, "precision": "fp32", "unroll": 3},
    }
    return Config.model_validate(sections)


def game(observation: spaces.Space[Any], action: Any = FOUR, above: int = 1000) -> EnvInfo:
    return EnvInfo.of_spaces("x", (observation, action), 1, "of a test", above)


def observations(info: EnvInfo, seed: int = 0) -> tuple[list[Any], Array]:
    """As the environment shows them, and packed."""
    space = info.spaces[0]
    space.seed(seed)
    seen = [space.sample() for _ in range(ROWS)]
    for each in seen:
        if isinstance(each, dict) and "action_mask" in each:
            each["action_mask"][0] = 1
    batch: Any = np.array(seen)
    if isinstance(space, spaces.Dict):
        batch = {key: np.array([each[key] for each in seen]) for key in space.spaces}
    packed = np.zeros((ROWS, *info.observation_space.shape), info.observation_space.dtype)
    Packer("x", space, info.embed_above).write(batch, packed)
    return seen, packed


def test_a_choice_of_ten_thousand_takes_four_bytes() -> None:
    seen, packed = observations(game(THINGS))
    arrays = views(game(THINGS).parts, packed)
    assert arrays["item"][:, 0].tolist() == [each["item"] - 7 for each in seen]
    assert arrays["pair"].tolist() == [(each["pair"] - [0, 5]).tolist() for each in seen]
    assert packed.shape[1] == 24

    spec = slot_spec(config(), game(ITEM))
    obs = next(column for column in spec.columns if column.name == "obs")
    assert obs.cell_nbytes == 8  # one number, and bytes up to a multiple of 8
    one_hot = game(ITEM, above=10_000)
    assert one_hot.observation_space.shape == (10_000,)
    assert one_hot.parts == ()


@pytest.mark.parametrize("choice", [6, 10_007, 8.5, np.nan])
def test_a_choice_outside_of_its_space_is_refused(choice: float) -> None:
    packer = Packer("shop", spaces.Dict(item=ITEM), 1000)
    with pytest.raises(UserError, match=r"observations in item with .*, which is not in Discrete"):
        packer.write({"item": np.array([9, choice])}, np.zeros((2, 8), np.uint8))


def test_a_first_layer_of_embedded_choices_reads_rows_of_the_table() -> None:
    """The layers in numpy, of the network's named tensors."""
    info = game(THINGS)
    net: Any = build_net(network_shape(config(critic="shared"), info))
    seen, packed = observations(info)
    named = {name: tensor.detach().numpy() for name, tensor in net.named_parameters()}
    tables = {name: array for name, array in named.items() if ".tables." in name}
    # 1.6 times the 0.56th power of 3 is 3; the others would be above the width of the layer.
    assert sorted(array.shape for array in tables.values()) == [(3, 3), (1200, 16), (10_000, 16)]

    item, first_of_pair, second_of_pair = tables.values()
    rows = np.stack(
        [
            np.concatenate(
                [
                    each["speed"],
                    item[each["item"] - 7],
                    first_of_pair[each["pair"][0]],
                    second_of_pair[each["pair"][1] - 5],
                ]
            )
            for each in seen
        ]
    )
    for i in range(2):
        layer = f"bodies.0.layers.linears.{i}"
        rows = np.tanh(rows @ named[f"{layer}.weight"].T + named[f"{layer}.bias"])
    expected = rows @ named["policy.weight"].T + named["policy.bias"]
    outputs, _ = net(torch.from_numpy(packed))
    np.testing.assert_allclose(outputs.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


CASES = [
    ("ppo", ITEM, FOUR, {}),
    ("ppo", HAND, FOUR, {}),
    ("ppo", HAND, FOUR, {"critic": "shared", "activation": "relu"}),
    ("ppo", THINGS, TORQUES, {"normalize_observations": True}),
    ("impala", THINGS, FOUR, {"core": "lstm", "core_size": 8, "normalize_observations": True}),
    ("ppo", SCREEN, FOUR, {"normalize_observations": True}),
    ("ppo", ITEM, FOUR, {"normalize_observations": True}),
    ("dqn", ITEM, FOUR, {}),
    ("dqn", THINGS, FOUR, {"normalize_observations": True}),
    ("sac", THINGS, TORQUES, {"normalize_observations": True}),
]


@pytest.mark.parametrize(("algo", "observation", "action", "model"), CASES)
def test_actors_compute_what_the_learner_does(
    algo: str, observation: Any, action: Any, model: dict[str, Any]
) -> None:
    cfg = config(algo, **model)
    info = game(observation, action)
    shape = network_shape(cfg, info)
    net: Any = build_net(shape)
    assert shape.layout == layout_of(net)

    _, packed = observations(info)
    rows = torch.from_numpy(packed)
    net.observe(rows, torch.ones(ROWS, dtype=torch.bool))
    policy = make_policy(cfg, info, 0)
    policy.load(flat_of(net))
    is_numpy = algo == "ppo" and observation in (ITEM, HAND)
    assert isinstance(policy.network, NumpyMlp) is is_numpy

    results = net(rows[None] if cfg.model.core != "none" else rows)
    outputs = results[0] if isinstance(results, tuple) else results
    expected = outputs.detach().numpy()
    found = policy.outputs(packed)
    mask = net.mask(rows)
    allowed = np.ones_like(expected) if mask is None else mask.numpy()
    np.testing.assert_allclose(
        np.where(allowed, found, 0), np.where(allowed, expected, 0), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("observation", [ITEM, THINGS, SCREEN])
def test_critics_of_actions_tell_choices_apart(observation: Any) -> None:
    info = game(observation, TORQUES)
    shape: Any = network_shape(config("sac"), info)
    net: Any = build_net(shape)
    critics = build_critics(shape, net.normalizer, action_size=2)
    _, packed = observations(info)
    action = torch.zeros(ROWS, 2)
    values = critics(torch.from_numpy(packed), action)
    views(info.parts, packed)["obs" if observation is ITEM else "item"][0] += 1
    others = critics(torch.from_numpy(packed), action)
    assert (values[:, 0] != others[:, 0]).all()
    torch.testing.assert_close(values[:, 1:], others[:, 1:])


@pytest.mark.parametrize("number", [-1.0, 10_000.0])
def test_a_received_choice_that_there_is_not_is_refused(number: float) -> None:
    info = game(THINGS)
    cfg = config()
    spec = slot_spec(cfg, info)
    columns = spec.views(spec.zeros())
    algorithm(cfg.algo).check(columns, info)
    views(info.parts, columns["obs"])["item"][1, 2] = number
    with pytest.raises(ValueError, match="choices of item that there are not"):
        algorithm(cfg.algo).check(columns, info)
