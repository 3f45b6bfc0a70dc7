"""PPO's loss, its columns of a batch and its early stop, against numpy row by row."""

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
from penstock.models.torch_heads import ActorCritic
from random_unrolls import ACTIONS, make_batch, make_net

Arrays = dict[str, np.ndarray[Any, Any]]


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


def expected_columns(before: ActorCritic, batch: dict[str, Tensor], cfg: PpoConfig) -> Arrays:
    """Columns of a batch by the definitions, as sums forwards from each row to its episode's end.

    Weights are min(rho_clip, pi_proximal / pi_behaviour). GAE is equation 16 of Schulman et al.
    2015. V-trace is equation 1 of Espeholt et al. 2018 with c = lambda * rho; its advantage is
    r + discount * (lambda * target' + (1 - lambda) * V') - V, without the factor rho.
    """
    logp, values = said(before, batch["obs"])
    arrays: Arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    terminated, truncated = arrays["terminated"], arrays["truncated"]
    names = ("proximal_logp", "weight", "advantage", "value", "target")
    shape = arrays["alive"].shape
    found = {name: np.zeros(shape) for name in names}
    for t, e in np.ndindex(shape):
        proximal = logp[t, e, arrays["action"][t, e]]
        ratio = math.exp(proximal - float(arrays["behaviour_logp"][t, e]))
        found["proximal_logp"][t, e] = proximal
        found["weight"][t, e] = min(cfg.rho_clip, ratio)
    found["value"] = values[:-1]
    found["target"] = values[:-1].copy()
    decay = cfg.discount * cfg.gae_lambda
    for t, e in np.argwhere(arrays["alive"]).tolist():
        after = 0.0 if terminated[t, e] else values[t + 1, e]
        corrected = after  # lambda * V-trace's target of the next row + (1 - lambda) * its value
        product = 1.0
        for k in range(t, shape[0]):
            following = 0.0 if terminated[k, e] else values[k + 1, e]
            delta = arrays["reward"][k, e] + cfg.discount * following - values[k, e]
            weight = found["weight"][k, e]
            if cfg.advantages == "gae":
                found["advantage"][t, e] += decay ** (k - t) * delta
            else:
                found["target"][t, e] += decay ** (k - t) * product * weight * delta
                if k > t:
                    through = product / found["weight"][t, e]
                    discount = cfg.discount ** (k - t - 1) * cfg.gae_lambda ** (k - t)
                    corrected += discount * through * weight * delta
            product *= weight
            if terminated[k, e] or truncated[k, e]:
                break
        if cfg.advantages == "gae":
            found["target"][t, e] += found["advantage"][t, e]
        else:
            reward = arrays["reward"][t, e]
            found["advantage"][t, e] = reward + cfg.discount * corrected - values[t, e]
    return found


def standardised(advantages: Any, alive: Any) -> Any:
    """Advantages shifted and scaled over alive rows; 0 elsewhere."""
    some = advantages[alive]
    return np.where(alive, (advantages - some.mean()) / some.std(), 0.0)


def expected_sums(net: ActorCritic, batch: Arrays, cfg: PpoConfig) -> list[float]:
    """Loss, then statistics, one row after the other; ``batch`` has the prepared columns."""
    logp, values = said(net, torch.as_tensor(batch["obs"]))
    advantages = batch["advantage"].astype(np.float64)
    if cfg.normalize_advantages != "none":
        advantages = standardised(advantages, batch["alive"])
    clip, entropy_cost = constant(cfg.clip), constant(cfg.entropy_cost)
    sums = np.zeros(6)
    for t, e in np.argwhere(batch["alive"]).tolist():
        log_ratio = logp[t, e, batch["action"][t, e]] - float(batch["proximal_logp"][t, e])
        ratio, advantage = math.exp(log_ratio), advantages[t, e]
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        value, target, old = values[t, e], batch["target"][t, e], batch["value"][t, e]
        error = (value - target) ** 2
        if cfg.value_clip is not None:
            near = old + min(max(value - old, -cfg.value_clip), cfg.value_clip)
            error = max(error, (near - target) ** 2)
        sums += (
            -batch["weight"][t, e] * min(ratio * advantage, bounded * advantage),
            0.5 * error,
            -(np.exp(logp[t, e]) * logp[t, e]).sum(),
            ratio - 1 - log_ratio,
            ratio,
            abs(ratio - 1) > clip,
        )
    total = sums[0] + cfg.value_cost * sums[1] - entropy_cost * sums[2]
    return [total, *sums]


def expected_moments(batch: dict[str, Tensor], columns: Arrays) -> dict[str, float]:
    """Sums over alive rows of `expected_columns`, with the importance weights before truncation."""
    alive = batch["alive"].numpy()
    log_rho = (columns["proximal_logp"] - batch["behaviour_logp"].numpy())[alive]
    rows = {
        "weight": columns["weight"][alive],
        "advantage": columns["advantage"][alive],
        "value_error": (columns["target"] - columns["value"])[alive],
        "value_target": columns["target"][alive],
    }
    squares = {f"{name}_square": (column**2).sum() for name, column in rows.items()}
    sums = {name: column.sum() for name, column in rows.items()}
    rho = np.exp(log_rho)
    lag = {"kl_lag": (rho - 1 - log_rho).sum(), "rho": rho.sum()}
    return {"samples": alive.sum()} | sums | squares | lag


CONFIGS = [
    PpoConfig(normalize_advantages="none"),
    PpoConfig(normalize_advantages="minibatch", clip=0.1, entropy_cost=0.1, rho_clip=1.3),
    PpoConfig(normalize_advantages="batch", value_clip=0.05, value_cost=0.3, gae_lambda=0.8),
    PpoConfig(normalize_advantages="none", advantages="vtrace", gae_lambda=0.9, rho_clip=1.2),
    PpoConfig(normalize_advantages="minibatch", advantages="vtrace", discount=0.9),
    PpoConfig(normalize_advantages="batch", advantages="vtrace", value_clip=0.05),
]


@pytest.mark.parametrize("cfg", CONFIGS)
def test_columns_are_those_of_the_definitions(cfg: PpoConfig) -> None:
    before, batch = make_net(seed=1), make_batch(steps=12)
    expected, alive = expected_columns(before, batch, cfg), batch["alive"].numpy()
    weights = expected["weight"][alive]
    assert (weights == cfg.rho_clip).any(), "some are truncated"
    assert weights.min() < 0.7, "others are small"
    sums = expected_moments(batch, expected)
    if cfg.normalize_advantages == "batch":
        expected["advantage"] = standardised(expected["advantage"], alive)
    found = prepared(before, batch, cfg)
    for name, column in expected.items():
        rows = found[name].numpy()
        np.testing.assert_allclose(rows[alive], column[alive], rtol=1e-5, atol=2e-6, err_msg=name)
    moments = dict(zip(ppo.MOMENTS, found["moments"].tolist(), strict=True))
    del moments["rho_clipped"]
    assert moments == pytest.approx(sums, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("cfg", CONFIGS)
def test_loss_and_statistics_are_those_of_the_sum_over_alive_rows(cfg: PpoConfig) -> None:
    before, net, raw = make_net(seed=1), make_net(), make_batch()
    total, sums = ppo.loss(net, prepared(before, raw, cfg), cfg)
    arrays: Arrays = {name: tensor.numpy() for name, tensor in raw.items()}
    wanted = expected_sums(net, arrays | expected_columns(before, raw, cfg), cfg)
    np.testing.assert_allclose([total.item(), *sums.tolist()], wanted, rtol=1e-5, atol=1e-5)
    assert wanted[-1] > 0, "some ratios are clipped"
    assert not sums.requires_grad


def classical(net: Any, batch: dict[str, Tensor], cfg: PpoConfig) -> float:
    """The loss of PPO without lag: ratios to the policy that acted, equation 7 of Schulman et al.
    2017, and GAE by the behaviour policy's values, which are those of seed 1."""
    _, old = said(make_net(seed=1), batch["obs"])
    logp, values = said(net, batch["obs"])
    arrays: Arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    alive = arrays["alive"]
    advantage = np.zeros(alive.shape)
    for e in range(alive.shape[1]):
        carried = 0.0
        for t in reversed(range(len(alive))):
            following = 0.0 if arrays["terminated"][t, e] else old[t + 1, e]
            ended = arrays["terminated"][t, e] or arrays["truncated"][t, e]
            delta = arrays["reward"][t, e] + cfg.discount * following - old[t, e]
            carried = delta + (not ended) * cfg.discount * cfg.gae_lambda * carried
            carried *= alive[t, e]
            advantage[t, e] = carried
    targets, total = advantage + old[:-1], 0.0
    clip, entropy_cost = constant(cfg.clip), constant(cfg.entropy_cost)
    if cfg.normalize_advantages != "none":
        advantage = standardised(advantage, alive)
    for t, e in np.argwhere(alive).tolist():
        chosen = logp[t, e, arrays["action"][t, e]]
        ratio = math.exp(chosen - float(arrays["behaviour_logp"][t, e]))
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        total -= min(ratio * advantage[t, e], bounded * advantage[t, e])
        total += cfg.value_cost * 0.5 * (values[t, e] - targets[t, e]) ** 2
        total += entropy_cost * (np.exp(logp[t, e]) * logp[t, e]).sum()
    return float(total / alive.sum())


@pytest.mark.parametrize("normalize", ["none", "minibatch", "batch"])
@pytest.mark.parametrize("advantages", ["gae", "vtrace"])
@pytest.mark.parametrize("rho_clip", [1.0, 3.0])
def test_without_lag_the_loss_equals_classical_ppo(
    advantages: Any, normalize: Any, rho_clip: float
) -> None:
    """To 1e-6 a sample; the gradient by central differences of the classical loss."""
    cfg = PpoConfig(advantages=advantages, normalize_advantages=normalize, rho_clip=rho_clip)
    behaviour, batch = make_net(seed=1), make_batch(steps=10)
    logp = said(behaviour, batch["obs"])[0][:-1]
    actions = batch["action"].numpy()[..., None].astype(np.int64)
    chosen = np.take_along_axis(logp, actions, 2)[..., 0].astype(np.float32)
    batch["behaviour_logp"] = torch.from_numpy(chosen)
    rows = prepared(behaviour, batch, cfg)
    count = int(batch["alive"].sum())
    for net in (behaviour, make_net(seed=2)):
        assert ppo.loss(net, rows, cfg)[0].item() / count == pytest.approx(
            classical(net, batch, cfg), abs=1e-6
        )
    torch.manual_seed(2)
    table: Any = Table(11 * 4)
    rows = {k: v.double() if v.is_floating_point() else v for k, v in rows.items()}
    (ppo.loss(table, rows, cfg)[0] / count).backward()
    for parameter in table.parameters():
        flat, gradient = parameter.data.flatten(), parameter.grad.flatten()
        for i in range(0, len(flat), 7):
            losses = []
            for shift in (1e-6, -1e-6):
                flat[i] += shift
                losses.append(classical(table, batch, cfg))
                flat[i] -= shift
            assert gradient[i] == pytest.approx((losses[0] - losses[1]) / 2e-6, abs=1e-6)


def test_policy_lag_does_not_narrow_the_clip_range() -> None:
    """Before the first update no ratio is clipped, however far the behaviour policy is."""
    net, batch = make_net(), make_batch()
    for advantages in ("gae", "vtrace"):
        cfg = PpoConfig(clip=0.01, advantages=advantages)
        rows = prepared(net, batch, cfg)
        figures = dict(zip(ppo.MOMENTS, rows["moments"].tolist(), strict=True))
        assert figures["kl_lag"] > 0.03 * figures["samples"]
        assert figures["rho_clipped"] > 0
        sums = dict(zip(ppo.STATISTICS, ppo.loss(net, rows, cfg)[1].tolist(), strict=True))
        assert sums["ratio_clipped"] == 0
        assert abs(sums["kl"]) < 1e-6


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
    arrays: Arrays = {name: tensor.numpy() for name, tensor in batch.items()}
    table: Any = Table(7 * 4)
    ppo.loss(table, batch, cfg)[0].backward()
    for parameter in table.parameters():
        flat, gradient = parameter.data.flatten(), parameter.grad.flatten()
        assert gradient.count_nonzero() > 5
        for i in range(0, len(flat), 5):
            losses = []
            for shift in (1e-6, -1e-6):
                flat[i] += shift
                losses.append(expected_sums(table, arrays, cfg)[0])
                flat[i] -= shift
            assert gradient[i] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4, abs=1e-5)


def test_preparing_by_parts_equals_preparing_the_whole_batch() -> None:
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


def test_rows_that_are_not_alive_do_not_change_the_gradients() -> None:
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


@pytest.mark.parametrize("shift", [200.0, -200.0])
def test_a_ratio_beyond_all_bounds_leaves_loss_and_gradient_finite(shift: float) -> None:
    """As exp(200) is infinite in float32."""
    net, cfg = make_net(), PpoConfig(normalize_advantages="none")
    batch = prepared(net, make_batch(), cfg)
    assert (batch["advantage"] > 0).any()
    assert (batch["advantage"] < 0).any()
    batch["proximal_logp"] -= shift
    total, sums = ppo.loss(net, batch, cfg)
    total.backward()
    assert sums.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


def test_micro_batches_and_dealt_environments_add_up_to_the_whole() -> None:
    net, cfg = make_net(), PpoConfig(normalize_advantages="batch")
    batch = prepared(net, make_batch(), cfg)
    wholly = ppo.loss(net, batch, cfg)
    for parts in ((slice(0, 1), slice(1, 4)), (torch.tensor([3, 1]), torch.tensor([0, 2]))):
        losses, sums = zip(*(ppo.loss(net, batch, cfg, part) for part in parts), strict=True)
        torch.testing.assert_close(sum(losses), wholly[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sum(sums), wholly[1], rtol=1e-5, atol=1e-5)


def test_epochs_of_a_batch_stop_beyond_target_kl() -> None:
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


def test_target_kl_is_compared_with_the_mean_of_all_learners() -> None:
    net = make_net()
    batch = prepared(net, make_batch(), PpoConfig(target_kl=1.0))

    def others_are_far(sums: Tensor) -> None:
        sums += torch.tensor([500.0, 10.0], dtype=torch.float64)

    assert ppo.going_on(net, batch, PpoConfig(target_kl=0.01), (slice(0, 4),))
    assert not ppo.going_on(net, batch, PpoConfig(target_kl=0.01), (slice(0, 4),), others_are_far)


def test_loss_is_finite_for_continuous_and_multi_discrete_actions() -> None:
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
        own = batch | {"action": torch.from_numpy(action)}
        own["behaviour_logp"] = prepared(net, own, cfg)["proximal_logp"]
        rows = prepared(net, own, cfg, slice(0, 3), slice(3, 4))
        torch.testing.assert_close(rows["weight"], torch.ones(6, 4), rtol=1e-5, atol=1e-5)
        total, sums = ppo.loss(net, rows, cfg)
        total.backward()
        assert sums.isfinite().all()
        assert rows["outputs"].shape == (6, 4, actions.outputs)
        assert ppo.going_on(net, rows, cfg, (slice(0, 4),))
