"""IMPALA's columns and checks of slots, and its loss against one written in float64."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from penstock.algos.impala import algorithm as impala
from penstock.algos.impala.config import ImpalaConfig
from penstock.algos.ops.vtrace import vtrace
from penstock.algos.samples import process, slot_spec
from penstock.algos.slots import RETURN
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.specs import Column, SlotSpec
from penstock.envs import EnvInfo
from penstock.models.acting.categorical import CategoricalSampler
from penstock.models.acting.numpy_mlp import NumpyMlp
from penstock.models.acting.policy import Policy
from penstock.models.acting.torch_network import TorchNetwork
from penstock.models.actions import discrete
from penstock.models.layout import CnnShape, MlpShape
from penstock.models.torch_nets import Net, build_net
from random_unrolls import ACTIONS, make_batch, make_net

SHAPE = MlpShape(4, discrete(ACTIONS), (16, 16), "tanh", 1.0)


class Game:
    observation_space = spaces.Box(-1.0, 1.0, (5,), np.float64)
    action_space: spaces.Space[Any] = spaces.Discrete(ACTIONS)


def gradients(net: Net, batch: dict[str, Tensor], cfg: ImpalaConfig, *parts: slice) -> list[Tensor]:
    net.zero_grad()
    for part in parts or (slice(None),):
        impala.loss(net, batch, cfg, part)[0].backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def plain_loss(net: Net, batch: dict[str, Tensor], cfg: ImpalaConfig) -> tuple[Tensor, list[float]]:
    """The sum over alive rows, one row at a time."""
    steps, envs = batch["action"].shape
    logits, values = net(batch["obs"].flatten(0, 1))
    logits, values = logits.reshape(steps + 1, envs, -1), values.view(steps + 1, envs)
    logp = logits.log_softmax(-1)
    chosen = torch.stack(
        [logp[t, e, batch["action"][t, e]] for t in range(steps) for e in range(envs)]
    ).view(steps, envs)
    flags = {name: batch[name] for name in ("terminated", "truncated", "alive")}
    trace = vtrace(
        values.detach(),
        batch["reward"],
        chosen.detach() - batch["behaviour_logp"],
        discount=cfg.discount,
        trace_lambda=cfg.trace_lambda,
        rho_clip=cfg.rho_clip,
        c_clip=cfg.c_clip,
        **flags,
    )
    alive = batch["alive"]
    advantages = trace.advantages
    if cfg.normalize_advantages:
        some = advantages[alive]
        advantages = (advantages - some.mean()) / some.std(correction=0)
    total = torch.zeros(())
    sums = [0.0] * len(impala.STATISTICS)
    for t, e in alive.nonzero().tolist():
        target = (trace.errors + values[:-1])[t, e].detach()
        policy = -advantages[t, e] * chosen[t, e]
        value = 0.5 * (target - values[t, e]) ** 2
        entropy = -(logp[t, e].exp() * logp[t, e]).sum()
        total = total + policy + cfg.value_cost * value - cfg.entropy_cost * entropy
        log_rho = (chosen.detach() - batch["behaviour_logp"])[t, e].item()
        rho = math.exp(log_rho)
        losses = [term.item() for term in (policy, value, entropy)]
        errors = [x[t, e].item() for x in (trace.advantages, trace.errors)]
        moments = (min(rho, cfg.rho_clip), *errors, target.item())
        squares = [moment**2 for moment in moments]
        lag = (rho - 1 - log_rho, rho, rho > 1.001 * cfg.rho_clip)
        terms = (*losses, 1, *moments, *squares, *lag)
        sums = [a + b for a, b in zip(sums, terms, strict=True)]
    return total, sums


@pytest.mark.parametrize(
    "cfg",
    [
        ImpalaConfig(),
        ImpalaConfig(trace_lambda=0.9, rho_clip=0.8, c_clip=1.2, entropy_cost=0.1, discount=0.9),
        ImpalaConfig(normalize_advantages=True, value_cost=0.25),
    ],
)
def test_loss_statistics_and_gradient_are_those_of_the_sum_over_alive_rows(
    cfg: ImpalaConfig,
) -> None:
    net, batch = make_net(), make_batch()
    assert not batch["alive"].all()
    total, sums = impala.loss(net, batch, cfg)
    found = gradients(net, batch, cfg)
    net.zero_grad()
    expected, expected_sums = plain_loss(net, batch, cfg)
    expected.backward()
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(sums.numpy(), expected_sums, rtol=1e-4, atol=1e-4)
    for gradient, parameter in zip(found, net.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-4)
    assert not sums.requires_grad


def test_rows_that_are_not_alive_do_not_change_the_gradients() -> None:
    net, batch, cfg = make_net(), make_batch(), ImpalaConfig(normalize_advantages=True)
    other = {name: tensor.clone() for name, tensor in batch.items()}
    dead = ~batch["alive"]
    other["reward"][dead] = 99.0
    other["behaviour_logp"][dead] = -9.0
    other["action"][dead] = 0
    for a, b in zip(gradients(net, batch, cfg), gradients(net, other, cfg), strict=True):
        assert torch.equal(a, b)


def test_micro_batches_add_up_to_the_whole() -> None:
    net, batch, cfg = make_net(), make_batch(), ImpalaConfig()
    parts = (slice(0, 1), slice(1, 4))
    whole, cut = gradients(net, batch, cfg), gradients(net, batch, cfg, *parts)
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    _, sums = impala.loss(net, batch, cfg)
    added = torch.stack([impala.loss(net, batch, cfg, part)[1] for part in parts]).sum(0)
    torch.testing.assert_close(sums, added, rtol=1e-4, atol=1e-5)


def test_a_batch_without_alive_rows_gives_a_gradient_of_zero() -> None:
    net, batch = make_net(), make_batch()
    batch["alive"].zero_()
    for normalize in (False, True):
        cfg = ImpalaConfig(normalize_advantages=normalize)
        assert all(not g.any() for g in gradients(net, batch, cfg))


@pytest.mark.parametrize(
    ("shape", "dtype", "tolerance"),
    [
        (SHAPE, None, 1e-5),
        (SHAPE, torch.float32, 1e-5),
        (CnnShape(4, 84, 84, discrete(ACTIONS), 1 / 255), torch.float32, 1e-5),
        (CnnShape(4, 84, 84, discrete(ACTIONS), 1 / 255), torch.bfloat16, 2e-2),
    ],
)
def test_at_equal_weights_the_learner_reproduces_the_actors_log_probabilities(
    shape: Any, dtype: torch.dtype | None, tolerance: float
) -> None:
    """Tolerance on the log-probability: 1e-5 in float32, 0.02 in bfloat16."""
    torch.manual_seed(1)
    net = build_net(shape, dtype or torch.float32)
    torch.nn.init.normal_(net.policy.weight, std=0.3)
    flat = torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy()
    steps, envs = 3, 8
    rng = np.random.default_rng(2)
    if isinstance(shape, MlpShape):
        obs = rng.normal(size=(steps + 1, envs, 4)).astype(np.float32)
    else:
        obs = rng.integers(0, 256, (steps + 1, envs, 4, 84, 84)).astype(np.uint8)
    decider = CategoricalSampler(shape.outputs, envs, np.random.default_rng(3))
    network = (
        NumpyMlp(shape, decider.outputs)
        if dtype is None
        else TorchNetwork(shape, decider.outputs, dtype)
    )
    policy = Policy(network, decider)
    policy.load(flat)
    batch = make_batch(steps, envs) | {"obs": torch.from_numpy(obs)}
    batch["alive"].fill_(True)
    for t in range(steps):
        batch["action"][t] = torch.from_numpy(policy.act(obs[t]))
        batch["behaviour_logp"][t] = torch.from_numpy(policy.recorded["behaviour_logp"])
    logits, _ = net(batch["obs"])
    logp_of_all = logits[: steps * envs].log_softmax(1)
    chosen = logp_of_all.gather(1, batch["action"].flatten().long()[:, None])[:, 0]
    error = (chosen.detach() - batch["behaviour_logp"].flatten()).abs().max()
    assert error <= tolerance
    sums = dict(zip(impala.STATISTICS, impala.loss(net, batch, ImpalaConfig())[1], strict=True))
    assert sums["kl"] / (steps * envs) <= max(tolerance**2, 1e-8)  # of float32 rounding alone
    assert sums["rho"] / (steps * envs) == pytest.approx(1, abs=tolerance)
    if tolerance <= 1e-5:
        assert sums["rho_clipped"] == 0


def test_slot_has_the_columns_of_impala() -> None:
    config = resolve("cartpole", ["actors.envs=8", "actors.unroll=4"])
    spec = slot_spec(config, Game())
    shapes = {
        name: (array.dtype.str, array.shape) for name, array in spec.views(spec.zeros()).items()
    }
    assert shapes == {
        "obs": ("<f4", (5, 8, 5)),  # float64 of the environment is kept as float32
        "action": ("<i4", (4, 8)),
        "reward": ("<f4", (4, 8)),
        "behaviour_logp": ("<f4", (4, 8)),
        "terminated": ("|b1", (4, 8)),
        "truncated": ("|b1", (4, 8)),
        "alive": ("|b1", (4, 8)),
        "policy_version": ("<u4", (4, 8)),
        "episode_return": ("<f4", (4, 8)),
        "episode_length": ("<i4", (4, 8)),
        "seat": ("|u1", (8,)),
        "policy_id": ("<u2", (8,)),
    }


def test_environment_without_a_fitting_network_has_no_slot_spec() -> None:
    class Words(Game):
        action_space = spaces.Text(3)

    with pytest.raises(UserError, match="none of Discrete, MultiDiscrete and Box"):
        slot_spec(resolve("cartpole", []), Words())


def test_frames_are_kept_as_bytes() -> None:
    frames = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    obs = impala.columns(frames, spaces.Discrete(6))[0]
    assert (obs.dtype, obs.shape, obs.rows) == ("|u1", (4, 84, 84), "unroll+1")


def test_process_clips_then_scales_in_place_and_leaves_shown_returns_raw() -> None:
    spec = SlotSpec(2, 2, impala.columns(Game.observation_space, Game.action_space))
    views = spec.views(spec.zeros())
    views["reward"][:] = [[-7.0, 0.5], [2.0, 0.0]]
    views["episode_return"][:] = 7.0
    process(ImpalaConfig(reward_clip=1.0, reward_scale=0.1), views)
    np.testing.assert_allclose(views["reward"], [[-0.1, 0.05], [0.1, 0.0]])
    assert (views["episode_return"] == 7.0).all()
    process(ImpalaConfig(), views)
    np.testing.assert_allclose(views["reward"], [[-0.1, 0.05], [0.1, 0.0]])


def test_importing_algorithms_for_actors_imports_no_torch() -> None:
    code = (
        "import sys, penstock.algos, penstock.models.acting.policy; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


TWO_ACTIONS = EnvInfo(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), 1, "")


def _sound() -> dict[str, np.ndarray[Any, Any]]:
    columns = impala.columns(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    spec = SlotSpec(2, 2, columns)
    return spec.views(spec.zeros())


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("action", 2, "actions from 0 to 2, there are 2"),
        ("action", -1, "actions from -1 to 0"),
        ("obs", np.nan, "column obs holds numbers that are not finite"),
        ("reward", np.inf, "a reward of inf"),
        ("behaviour_logp", np.nan, "column behaviour_logp"),
    ],
)
def test_received_slot_with_invalid_values_is_refused(
    column: str, value: float, sentence: str
) -> None:
    columns = _sound()
    impala.check(columns, TWO_ACTIONS)
    columns[column][1, 1] = value
    with pytest.raises(ValueError, match=sentence):
        impala.check(columns, TWO_ACTIONS)


@pytest.mark.parametrize("value", [2e12, -2e12])
def test_a_discounted_return_is_bounded_as_a_reward_is(value: float) -> None:
    columns = impala.columns(spaces.Box(-1, 1, (3,)), spaces.Discrete(2))
    spec = SlotSpec(2, 2, (*columns, Column(RETURN, "<f4")))
    sent = spec.views(spec.zeros())
    sent[RETURN][1, 1] = value / 2
    impala.check(sent, TWO_ACTIONS)
    sent[RETURN][1, 1] = value
    with pytest.raises(ValueError, match=r"a discounted return beyond 1e\+12"):
        impala.check(sent, TWO_ACTIONS)


@pytest.mark.parametrize(("sound", "value"), [(0.0, 0.01), (-99.0, -101.0)])
def test_log_probabilities_of_choices_are_bounded(sound: float, value: float) -> None:
    columns = _sound()
    columns["behaviour_logp"][:] = sound
    impala.check(columns, TWO_ACTIONS)
    columns["behaviour_logp"][1, 1] = value
    with pytest.raises(ValueError, match="log-probabilities"):
        impala.check(columns, TWO_ACTIONS)


@pytest.mark.parametrize(("size", "sound"), [(1, 999.0), (60, 59_999.0)])
def test_log_densities_are_bounded_by_the_numbers_of_an_action(size: int, sound: float) -> None:
    """Deviations of e^-20 have log-densities of 19 each: 1140 of 60."""
    info = EnvInfo(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (size,)), 1, "")
    columns = impala.columns(*info.spaces)
    spec = SlotSpec(2, 2, columns)
    sent = spec.views(spec.zeros())
    sent["behaviour_logp"][:] = sound
    impala.check(sent, info)
    sent["behaviour_logp"][1, 1] = sound + 2
    with pytest.raises(ValueError, match="log-probabilities"):
        impala.check(sent, info)


@pytest.mark.parametrize("name", ["terminated", "truncated", "alive"])
@pytest.mark.parametrize("value", [2, 255])
def test_a_flag_is_0_or_1(name: str, value: int) -> None:
    columns = _sound()
    columns[name].view(np.uint8)[0, 0] = 1
    impala.check(columns, TWO_ACTIONS)
    columns[name].view(np.uint8)[0, 0] = value
    with pytest.raises(ValueError, match=f"column {name} holds bytes other than 0 and 1"):
        impala.check(columns, TWO_ACTIONS)
