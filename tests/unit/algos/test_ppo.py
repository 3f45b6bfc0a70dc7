"""PPO's loss, what is prepared for it and when a batch ends, against numpy row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.algos.ppo import algorithm as ppo
from penstock.algos.ppo.config import PpoConfig
from penstock.configs.schedules import constant
from penstock.models.actions import Choices, Numbers, discrete
from penstock.models.layout import MlpShape
from penstock.models.torch_heads import ActorCritic
from penstock.models.torch_nets import build_net
from random_unrolls import ACTIONS, make_batch

Arrays = dict[str, np.ndarray[Any, Any]]


def make_net(actions: Choices | Numbers | None = None, seed: int = 0) -> ActorCritic:
    torch.manual_seed(seed)
    net = build_net(MlpShape(4, actions or discrete(ACTIONS), (16, 16), "tanh", 1.0))
    with torch.no_grad():
        for parameter in net.parameters():  # the policy head starts near zero, which hides much
            parameter.add_(0.3 * torch.randn_like(parameter))
    return net


def prepared(
    net: ActorCritic, batch: dict[str, Tensor], cfg: PpoConfig, *parts: slice
) -> dict[str, Tensor]:
    whole = slice(0, batch["alive"].shape[1])
    return batch | ppo.prepare(net, batch, cfg, parts or (whole,))


def said(net: ActorCritic, obs: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Log-probabilities ``[T+1, E, actions]`` and values ``[T+1, E]``, float64."""
    with torch.no_grad():
        logits, values = net(obs)
    rows = logits.detach().double().numpy()
    logp = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    return logp.reshape(*obs.shape[:2], -1), values.detach().double().numpy().reshape(obs.shape[:2])


def expected_sums(net: ActorCritic, batch: dict[str, Tensor], cfg: PpoConfig) -> list[float]:
    """Loss, then statistics, one row after the other."""
    logp, values = said(net, batch["obs"])
    arrays: Arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    rows = np.argwhere(arrays["alive"]).tolist()
    advantages = arrays["advantage"].astype(np.float64)
    if cfg.normalize_advantages == "minibatch":
        some = [advantages[t, e] for t, e in rows]
        advantages = (advantages - np.mean(some)) / np.std(some)
    clip, entropy_cost = constant(cfg.clip), constant(cfg.entropy_cost)
    sums = np.zeros(6)
    for t, e in rows:
        log_ratio = logp[t, e, arrays["action"][t, e]] - float(arrays["behaviour_logp"][t, e])
        ratio, advantage = math.exp(log_ratio), advantages[t, e]
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        value, target, old = values[t, e], arrays["target"][t, e], arrays["value"][t, e]
        error = (value - target) ** 2
        if cfg.value_clip is not None:
            near = old + min(max(value - old, -cfg.value_clip), cfg.value_clip)
            error = max(error, (near - target) ** 2)
        sums += (
            -min(ratio * advantage, bounded * advantage),
            0.5 * error,
            -(np.exp(logp[t, e]) * logp[t, e]).sum(),
            ratio - 1 - log_ratio,
            ratio,
            abs(ratio - 1) > clip,
        )
    total = sums[0] + cfg.value_cost * sums[1] - entropy_cost * sums[2]
    return [total, *sums]


CONFIGS = [
    PpoConfig(normalize_advantages="none"),
    PpoConfig(normalize_advantages="minibatch", clip=0.1, entropy_cost=0.1),
    PpoConfig(normalize_advantages="batch", value_clip=0.05, value_cost=0.3, gae_lambda=0.8),
]


@pytest.mark.parametrize("cfg", CONFIGS)
def test_loss_and_statistics_are_those_of_the_sum_over_alive_rows(cfg: PpoConfig) -> None:
    before, net = make_net(seed=1), make_net()
    batch = prepared(before, make_batch(), cfg)
    total, sums = ppo.loss(net, batch, cfg)
    wanted = expected_sums(net, batch, cfg)
    np.testing.assert_allclose([total.item(), *sums.tolist()], wanted, rtol=1e-5, atol=1e-5)
    assert wanted[-1] > 0, "some ratios are clipped"
    assert not sums.requires_grad


class Table(nn.Module):
    """A policy whose outputs are its parameters, in float64."""

    actions, state_size = discrete(ACTIONS), 0

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(rows, ACTIONS, dtype=torch.float64))
        self.values = nn.Parameter(torch.randn(rows, dtype=torch.float64))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.logits, self.values

    def mask(self, obs: Tensor) -> None:
        return None


@pytest.mark.parametrize("cfg", CONFIGS)
def test_the_gradient_is_that_of_the_loss(cfg: PpoConfig) -> None:
    """By central differences of the loss written out in numpy."""
    torch.manual_seed(2)
    batch = prepared(make_net(seed=1), make_batch(), cfg)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    table: Any = Table(7 * 4)
    ppo.loss(table, batch, cfg)[0].backward()
    for parameter in table.parameters():
        flat, gradient = parameter.data.flatten(), parameter.grad.flatten()
        assert gradient.count_nonzero() > 5
        for i in range(0, len(flat), 5):
            losses = []
            for shift in (1e-6, -1e-6):
                flat[i] += shift
                losses.append(expected_sums(table, batch, cfg)[0])
                flat[i] -= shift
            assert gradient[i] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4, abs=1e-5)


def test_what_is_prepared_needs_no_more_than_some_environments_at_a_time() -> None:
    net, batch = make_net(), make_batch()
    for cfg in (*CONFIGS, PpoConfig(target_kl=0.1)):
        whole = prepared(net, batch, cfg)
        cut = prepared(net, batch, cfg, slice(0, 1), slice(1, 4))
        assert whole.keys() == cut.keys()
        for name in whole:
            torch.testing.assert_close(whole[name], cut[name], rtol=1e-5, atol=1e-6)


def test_targets_and_advantages_add_up_and_are_normalised_over_the_batch() -> None:
    net, batch = make_net(), make_batch()
    raw = prepared(net, batch, PpoConfig(normalize_advantages="minibatch"))
    alive = batch["alive"]
    torch.testing.assert_close(raw["target"], raw["value"] + raw["advantage"])
    np.testing.assert_allclose(raw["value"].numpy(), said(net, batch["obs"])[1][:-1], atol=1e-6)
    over = prepared(net, batch, PpoConfig(normalize_advantages="batch"))
    some = raw["advantage"][alive].double().numpy()
    found = over["advantage"][alive].numpy()
    np.testing.assert_allclose(found, (some - some.mean()) / some.std(), atol=1e-5)
    torch.testing.assert_close(over["target"], raw["target"])
    assert not over["advantage"][~alive].any()


def test_rows_that_nobody_decided_change_nothing() -> None:
    net, batch, cfg = make_net(), make_batch(), PpoConfig(value_clip=0.1)
    other = {name: tensor.clone() for name, tensor in batch.items()}
    dead = ~batch["alive"]
    other["reward"][dead] = 99.0
    other["behaviour_logp"][dead] = -90.0
    other["action"][dead] = 0
    results = []
    for rows in (batch, other):
        net.zero_grad()
        total, sums = ppo.loss(net, prepared(net, rows, cfg), cfg)
        total.backward()
        results.append([sums, *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_micro_batches_and_dealt_environments_add_up_to_the_whole() -> None:
    net, cfg = make_net(), PpoConfig(normalize_advantages="batch")
    batch = prepared(net, make_batch(), cfg)
    wholly = ppo.loss(net, batch, cfg)
    for parts in ((slice(0, 1), slice(1, 4)), (torch.tensor([3, 1]), torch.tensor([0, 2]))):
        losses, sums = zip(*(ppo.loss(net, batch, cfg, part) for part in parts), strict=True)
        torch.testing.assert_close(sum(losses), wholly[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sum(sums), wholly[1], rtol=1e-5, atol=1e-5)


def test_a_batch_is_left_where_the_policy_has_moved_too_far() -> None:
    before, net = make_net(seed=1), make_net()
    batch = prepared(before, make_batch(), PpoConfig(target_kl=1.0))
    old, now = said(before, batch["obs"])[0][:-1], said(net, batch["obs"])[0][:-1]
    rows = (np.exp(old) * (old - now)).sum(-1)
    kl = rows[batch["alive"].numpy()].mean()
    parts = (slice(0, 3), slice(3, 4))
    heard: list[list[float]] = []

    def add_others(sums: Tensor) -> None:
        heard.append(sums.tolist())

    for bound, goes_on in ((0.999 * kl, False), (1.001 * kl, True), (None, True)):
        assert ppo.going_on(net, batch, PpoConfig(target_kl=bound), parts, add_others) is goes_on
    alive = batch["alive"].sum().item()
    np.testing.assert_allclose(heard, [[kl * alive, alive]] * 2, rtol=1e-5)


def test_what_other_learners_say_decides_together() -> None:
    net = make_net()
    batch = prepared(net, make_batch(), PpoConfig(target_kl=1.0))

    def others_are_far(sums: Tensor) -> None:
        sums += torch.tensor([500.0, 10.0], dtype=torch.float64)

    assert ppo.going_on(net, batch, PpoConfig(target_kl=0.01), (slice(0, 4),))
    assert not ppo.going_on(net, batch, PpoConfig(target_kl=0.01), (slice(0, 4),), others_are_far)


def test_numbers_and_several_choices_are_learnt_alike() -> None:
    batch = make_batch()
    rng = np.random.default_rng(0)
    shapes: list[tuple[Choices | Numbers, np.ndarray[Any, Any]]] = [
        (Choices((3, 2), (2,)), rng.integers(0, 2, (6, 4, 2)).astype(np.int32)),
        (Numbers((2,)), rng.normal(size=(6, 4, 2)).astype(np.float32)),
        (Numbers((2,), squashed=True), rng.normal(size=(6, 4, 2)).astype(np.float32)),
    ]
    cfg = PpoConfig(target_kl=0.1)
    for actions, action in shapes:
        net = make_net(actions)
        rows = prepared(net, batch | {"action": torch.from_numpy(action)}, cfg)
        total, sums = ppo.loss(net, rows, cfg)
        total.backward()
        assert sums.isfinite().all()
        assert rows["outputs"].shape == (6, 4, actions.outputs)
        assert ppo.going_on(net, rows, cfg, (slice(0, 4),))
