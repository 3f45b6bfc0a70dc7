"""bf16 on a pretended GPU: no product of two dtypes; memory and heads in float32.

See `pretended_gpu`, whose `torch.autocast` casts as that of CUDA does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from penstock.configs.schema import Config
from penstock.core.observations import laid_out, row_nbytes
from penstock.models.fitting import AnyShape, actor_critic_shape, gaussian_shape, q_shape
from penstock.models.torch_nets import build_critics, build_net
from pretended_gpu import GPU, MixedDtypesError, Waits, pretended

ROWS, ENVS, PARTS = 3, 2, {
    "screen": ((40, 44, 3), "|u1"),
    "map": ((4, 40, 40), "|u1"),
    "speed": ((2, 2), "<f4"),
    "held": ((3,), "|u1"),
}  # fmt: skip
FOUR = spaces.Discrete(4)
BOX = spaces.Box(-1, 1, (2,), np.float32)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    with pretended(monkeypatch) as made:
        yield made


class Attending(nn.Module):
    """A network of a user: tokens that attend to each other, normalised layers."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], outputs: int) -> None:
        super().__init__()
        self.token = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8 * math.prod(shapes["obs"]), 8)

    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        tokens = self.token(arrays["obs"].flatten(1)[..., None])
        found: Tensor = self.last(self.layer(tokens).flatten(1))
        return found


def several(actions: spaces.Space[Any] = FOUR) -> Any:
    """A game with images in either order, numbers and bytes."""
    parts = laid_out([(name, *about) for name, about in PARTS.items()])
    space = spaces.Box(0, 255, (row_nbytes(parts),), np.uint8)
    return SimpleNamespace(observation_space=space, action_space=actions, parts=parts)


def one(*shape: int, actions: spaces.Space[Any] = FOUR) -> Any:
    """A game with numbers, or with frames."""
    kind: Any = np.uint8 if len(shape) == 3 else np.float32
    space = spaces.Box(0, 255, shape, kind)
    return SimpleNamespace(observation_space=space, action_space=actions)


OWN = {"entry": f"{__name__.rpartition('.')[2]}:Attending"}
CRITICS: dict[str, tuple[Any, dict[str, Any]]] = {
    "several parts": (several(), {}),
    "several parts, residual": (several(), {"kind": "impala_cnn"}),
    "several parts, normalised": (several(), {"normalize_observations": True}),
    "several parts, continuous": (several(BOX), {}),
    "several parts, lstm": (several(), {"core": "lstm"}),
    "several parts, separate gru": (several(), {"core": "gru", "critic": "separate"}),
    "frames": (one(4, 84, 84), {}),
    "frames, normalised": (one(4, 84, 84), {"normalize_observations": True}),
    "frames, channels last": (one(84, 84, 3), {}),
    "frames, residual": (one(4, 84, 84), {"kind": "impala_cnn"}),
    "frames, residual, normalised lstm": (
        one(4, 84, 84),
        {"kind": "impala_cnn", "core": "lstm", "normalize_observations": True},
    ),
    "numbers": (one(300), {}),
    "numbers, relu": (one(300), {"activation": "relu"}),
    "numbers, one layer": (one(300), {"hidden": [8]}),
    "numbers, gru": (one(300), {"core": "gru"}),
    "numbers, shared": (one(300), {"critic": "shared"}),
    "own network": (one(5), OWN),
    "own network, lstm": (one(5), {**OWN, "core": "lstm"}),
}
HEADS: dict[str, tuple[Any, dict[str, Any], Callable[..., AnyShape]]] = {
    "several parts": (several(), {}, q_shape),
    "several parts, duelling": (several(), {}, lambda *given: q_shape(*given, duelling=True)),
    "frames, duelling": (one(4, 84, 84), {}, lambda *given: q_shape(*given, duelling=True)),
    "residual": (one(4, 84, 84), {"kind": "impala_cnn"}, q_shape),
    "numbers": (one(300), {}, q_shape),
    "own network": (one(5), OWN, q_shape),
    "gaussian": (several(BOX), {}, gaussian_shape),
}


def config(**model: Any) -> Config:
    return Config.model_validate({"env": {"id": "x"}, "model": model})


def observations(game: Any, *lead: int) -> Tensor:
    space = game.observation_space
    dtype = torch.uint8 if space.dtype == np.uint8 else torch.float32
    return torch.empty((*lead, *space.shape), dtype=dtype, device=GPU)


def made(waits: Waits, shape: AnyShape) -> Any:
    waits.allowed = True
    net = build_net(shape, BF16).to(GPU)
    waits.allowed = False
    waits.products.clear()
    return net


def assert_learns(waits: Waits, outputs: list[Tensor], net: nn.Module) -> list[torch.dtype]:
    """Outputs and gradients are float32. Returns the dtypes of the products that led there."""
    assert {tensor.dtype for tensor in outputs} == {FP32}
    forward = list(waits.products)
    torch.cat([tensor.flatten() for tensor in outputs]).sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    assert all(grad is not None and grad.dtype == FP32 for grad in gradients)
    assert BF16 in forward
    return forward


@pytest.mark.parametrize("name", CRITICS)
def test_actor_critic_computes_only_its_bodies_in_bf16(waits: Waits, name: str) -> None:
    game, model = CRITICS[name]
    with unset_fake_temporarily():
        shape = actor_critic_shape(config(**model), game)
    net = made(waits, shape)
    products = assert_learns(waits, list(net(observations(game, ROWS, ENVS))), net)
    rest = products[products.index(FP32) :]
    assert set(rest) == {FP32}, "memory and heads come last"
    assert len(rest) == 2 + bool(net.state_size) * (1 + ROWS) * len(getattr(net, "bodies", ()))


@pytest.mark.parametrize("name", HEADS)
def test_single_head_network_computes_only_its_body_in_bf16(waits: Waits, name: str) -> None:
    game, model, shape_of = HEADS[name]
    with unset_fake_temporarily():
        shape = shape_of(config(**model), game)
    net = made(waits, shape)
    products = assert_learns(waits, [net(observations(game, ENVS))], net)
    assert set(products[products.index(FP32) :]) == {FP32}


@pytest.mark.parametrize("game", [several(BOX), one(4, 84, 84, actions=BOX)])
def test_critics_of_actions_compute_only_images_in_bf16(waits: Waits, game: Any) -> None:
    with unset_fake_temporarily():
        shape = gaussian_shape(config(), game)
    waits.allowed = True
    net = build_critics(shape, None, BF16, action_size=2).to(GPU)
    waits.allowed = False
    waits.products.clear()
    values = net(observations(game, ENVS), torch.empty(ENVS, 2, device=GPU))
    assert_learns(waits, [values], net)


def test_product_of_two_dtypes_is_detected(waits: Waits) -> None:
    rows, weight = torch.empty(2, 3, device=GPU), torch.empty(3, 3, device=GPU)
    with torch.autocast(GPU.type, BF16):
        assert torch.mm(rows, weight).dtype == BF16
        assert torch.softmax(rows.bfloat16(), 0).dtype == FP32
    with pytest.raises(MixedDtypesError):
        torch.mm(rows, weight.bfloat16())
    with pytest.raises(MixedDtypesError):
        torch.addmm(rows[0], rows.bfloat16(), weight.bfloat16())
