"""PQN's targets, its loss against a loop over rows, and what its actors need."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from penstock.algos.ops.gae import lambda_returns
from penstock.algos.pqn import algorithm as pqn
from penstock.algos.pqn.config import PqnConfig
from penstock.algos.samples import slot_spec
from penstock.configs.schedules import LinearSchedule, with_values
from penstock.configs.schema import Config
from penstock.models.layout import DenseShape, SingleHead
from penstock.models.torch_heads import HeadNet
from penstock.models.torch_nets import build_net
from random_unrolls import ACTIONS, make_batch, with_random_heads

NUMBERS = spaces.Box(-1, 1, (4,), np.float32)


def make_net(counts: tuple[int, ...] = (), **options: Any) -> HeadNet:
    torch.manual_seed(0)
    head = SingleHead(sum(counts) or ACTIONS, counts=counts, **options)
    return with_random_heads(build_net(DenseShape(4, head, (16,), "relu", 1.0, layer_norm=True)))


def unrolls(seed: int = 0, counts: tuple[int, ...] = ()) -> dict[str, Tensor]:
    batch = make_batch(steps=9, envs=5, seed=seed)
    batch["q_taken"] = torch.randn(batch["alive"].shape)
    if counts:
        columns = [torch.randint(0, count, batch["alive"].shape) for count in counts]
        batch["action"] = torch.stack(columns, 2).int()
    return batch


def options(**changes: Any) -> PqnConfig:
    return with_values(PqnConfig.model_validate({"q_lambda": 0.65, **changes}), 0)


def q_values(net: HeadNet, obs: Tensor) -> Any:
    """Returns the values ``[T + 1, E, outputs]``, float64."""
    with torch.no_grad():
        return net(obs).double().numpy().reshape(*obs.shape[:2], -1)


def check_targets(
    net: HeadNet, batch: dict[str, Tensor], best: Any, parts: Sequence[slice] = (slice(0, 5),)
) -> None:
    """Targets are the lambda-returns of the values of the best actions ``[T + 1, E]``."""
    cfg = options()
    values = torch.from_numpy(best).float()
    expected = lambda_returns(values, batch, discount=cfg.discount, gae_lambda=cfg.q_lambda)
    found = pqn.prepare(net, batch, cfg, parts)["target"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parts", [[slice(0, 5)], [slice(0, 2), slice(2, 5)]])
def test_targets_are_the_lambda_returns_of_the_best_values(parts: list[slice]) -> None:
    net, batch = make_net(), unrolls()
    check_targets(net, batch, q_values(net, batch["obs"]).max(2), parts)


def test_a_forbidden_action_is_in_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    net, batch = make_net(), unrolls()
    mask = torch.randint(0, 2, (10, 5, ACTIONS))
    mask[..., 0] = 1
    monkeypatch.setattr(net, "mask", lambda obs: mask.flatten(0, 1))
    q = np.where(mask.numpy() != 0, q_values(net, batch["obs"]), -np.inf)
    check_targets(net, batch, q.max(2))


def test_several_choices_have_the_mean_of_their_best_values_as_target() -> None:
    counts = (2, 3)
    net, batch = make_net(counts), unrolls(counts=counts)
    q = q_values(net, batch["obs"])
    check_targets(net, batch, (q[..., :2].max(2) + q[..., 2:].max(2)) / 2)


@pytest.mark.parametrize("counts", [(), (2, 3)])
def test_loss_and_statistics_equal_a_loop_over_the_rows(counts: tuple[int, ...]) -> None:
    net = make_net(counts)
    batch = unrolls(counts=counts)
    batch |= pqn.prepare(net, batch, options(), [slice(0, 5)])
    with torch.no_grad():
        net.head.bias.add_(torch.linspace(-0.5, 0.5, len(net.head.bias)))

    q = q_values(net, batch["obs"])
    starts = (0, 2) if counts else (0,)
    expected = np.zeros(5)
    for t, e in np.argwhere(batch["alive"].numpy()).tolist():
        chosen = np.ravel(batch["action"][t, e].numpy())
        values = np.array([q[t, e, start + k] for start, k in zip(starts, chosen, strict=True)])
        target = float(batch["target"][t, e])
        expected += (
            0.5 * ((target - values) ** 2).mean(),
            np.abs(target - values).mean(),
            values.mean(),
            target,
            float(batch["q_lag"][t, e]),
        )

    total, sums = pqn.loss(net, batch, options())
    np.testing.assert_allclose(total.item(), expected[0], 1e-6)
    np.testing.assert_allclose(sums.numpy(), expected, 1e-6)
    parts = [
        pqn.loss(net, batch, options(), part) for part in (slice(0, 2), torch.tensor([4, 2, 3]))
    ]
    np.testing.assert_allclose(sum(part[1].numpy() for part in parts), expected, 1e-6)


def test_q_lag_is_how_far_the_values_are_from_those_of_the_actor() -> None:
    net = make_net()
    batch = unrolls()
    q = q_values(net, batch["obs"])[:-1]
    taken = np.take_along_axis(q, batch["action"].numpy()[..., None].astype(int), 2)[..., 0]
    batch["q_taken"] = torch.from_numpy(taken).float()
    lag = pqn.prepare(net, batch, options(), [slice(0, 5)])["q_lag"]
    np.testing.assert_allclose(lag, 0, atol=1e-6)


def test_weights_bring_the_rate_of_exploration_of_the_schedule() -> None:
    net = make_net(shows_epsilon=True)
    cfg = PqnConfig.model_validate({"epsilon": {"from": 1, "to": 0, "steps": 100}})
    pqn.prepare(net, unrolls(), with_values(cfg, 75), [slice(0, 5)])
    assert dict(net.named_buffers())["epsilon"].tolist() == [0.25]


def test_slots_record_what_the_sampler_does() -> None:
    config = Config.model_validate({"env": {"id": "x"}, "algo": {"name": "pqn"}})
    game: Any = SimpleNamespace(observation_space=NUMBERS, action_space=spaces.Discrete(3))
    assert isinstance(config.algo, PqnConfig)
    assert isinstance(config.algo.epsilon, LinearSchedule)
    sampler = pqn.action_sampler(config, game, 0, 0)
    names = {column.name for column in slot_spec(config, game).columns}
    assert set(sampler.recorded) <= names
