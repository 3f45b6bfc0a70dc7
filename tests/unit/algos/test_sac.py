"""SAC against numeric integrals and numbers by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from fake_inference import given
from penstock.algos.acting import make_inference
from penstock.algos.ops.twin_critics import critic_loss
from penstock.algos.sac import algorithm as sac
from penstock.algos.sac import update
from penstock.algos.sac.config import SacConfig
from penstock.algos.samples import make_receive, network_shape, process, slot_spec
from penstock.configs.load import resolve
from penstock.core.params import Stamp
from penstock.core.specs import SlotSpec
from penstock.models.acting.gaussian import SquashedGaussianSampler

BOUNDS = (-20.0, 2.0)


def density(action: Any, mean: Any, std: Any) -> Any:
    """Of tanh of a normal number, by the change of variables, in float64."""
    before = np.arctanh(action)
    normal = np.exp(-0.5 * ((before - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
    return normal / (1 - action**2)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.2, 0.3), (0.1, -3.0)])
def test_log_density_is_that_of_a_distribution_which_adds_up_to_1(
    mean: float, log_std: float
) -> None:
    edges = np.tanh(np.linspace(mean - 8 * math.exp(log_std), mean + 8 * math.exp(log_std), 20_001))
    middles = (edges[1:] + edges[:-1]) / 2
    noise = (np.arctanh(middles) - mean) / math.exp(log_std)
    outputs = torch.tensor([[mean, log_std]], dtype=torch.float64).expand(len(noise), 2)
    actions, logp = update.squashed(outputs, torch.from_numpy(noise)[:, None], BOUNDS)
    np.testing.assert_allclose(actions[:, 0], middles, atol=1e-9)
    assert float((logp.exp().numpy() * np.diff(edges)).sum()) == pytest.approx(1, abs=1e-4)
    expected = np.log(density(middles, mean, math.exp(log_std)))
    np.testing.assert_allclose(logp, expected, rtol=1e-6, atol=1e-6)


def test_densities_of_several_values_multiply() -> None:
    outputs = torch.tensor([[0.3, -0.5, -1.0, 0.2]])
    noise = torch.tensor([[0.4, -1.3]])
    action, logp = update.squashed(outputs, noise, BOUNDS)
    before = np.array([0.3 + math.exp(-1.0) * 0.4, -0.5 + math.exp(0.2) * -1.3])
    np.testing.assert_allclose(action[0], np.tanh(before), rtol=1e-6)
    parts = density(np.tanh(before), np.array([0.3, -0.5]), np.exp([-1.0, 0.2]))
    assert logp.item() == pytest.approx(math.log(parts.prod()), rel=1e-5)


def test_log_density_is_finite_where_tanh_rounds_to_1() -> None:
    outputs = torch.tensor([[40.0, 0.0], [-40.0, 0.0]], requires_grad=True)
    action, logp = update.squashed(outputs, torch.zeros(2, 1), BOUNDS)
    assert action.abs().eq(1).all()
    # log N(0) + 2 |u| - 2 log 2, as 1 - tanh(u)^2 is 4 exp(-2 |u|) far out
    expected = -0.5 * math.log(2 * math.pi) + 80 - 2 * math.log(2)
    torch.testing.assert_close(logp, torch.full((2,), expected))
    logp.sum().backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()


def test_deviations_are_kept_within_bounds_and_numpy_draws_the_same_distribution() -> None:
    cut, _ = update.squashed(torch.tensor([[0.0, 9.0]]), torch.ones(1, 1), (-1.0, 0.5))
    assert cut.item() == pytest.approx(math.tanh(math.exp(0.5)))
    decider = SquashedGaussianSampler((1,), 50_000, (-1.0, 0.5), np.random.default_rng(0))
    decider.outputs[:] = [[0.3], [9.0]]
    drawn = np.arctanh(decider.sample().astype(np.float64))
    assert drawn.mean() == pytest.approx(0.3, abs=0.03)
    assert drawn.std() == pytest.approx(math.exp(0.5), rel=0.02)


def test_actions_are_uniform_until_the_first_update() -> None:
    config = resolve("Acrobot-v1", ["algo.name=sac", "actors.envs=5000"])
    shape = network_shape(config, Game())
    inference = make_inference(config, Game(), seed=0)
    weights = np.full(shape.layout.size, 0.5, np.float32)
    obs = np.ones((5000, 3))
    drawn: list[npt.NDArray[np.float32]] = []
    for version in (0, 1):
        inference.refresh(given(weights, Stamp(0, version)))
        drawn.append(inference.decide(obs)[0].astype(np.float32))
    quantiles = np.quantile(drawn[0], [0.0, 0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(quantiles, [-1, -0.5, 0, 0.5, 1], atol=0.03)
    assert np.median(drawn[1]) > 0.9, "the network's means are large"


class Planes:
    """Q_i = a_i * action + b_i * obs, as `TwinCritics` is used."""

    def __init__(self, *planes: tuple[float, float]) -> None:
        self.planes = torch.tensor(planes, requires_grad=True)

    def __call__(self, obs: Tensor, action: Tensor) -> Tensor:
        return self._values(obs, action, self.planes)

    def of_action(self, obs: Tensor, action: Tensor, count: int = 2) -> Tensor:
        return self._values(obs, action, self.planes.detach()[:count])

    def _values(self, obs: Tensor, action: Tensor, planes: Tensor) -> Tensor:
        return planes[:, :1] * action[:, 0] + planes[:, 1:] * obs[:, 0]


def test_critic_targets_use_the_smaller_critic_and_the_entropy_term() -> None:
    critics = Planes((1.0, 2.0), (3.0, 4.0))
    targets = Planes((10.0, 0.0), (0.0, 5.0))
    batch = {
        "obs": torch.tensor([[1.0], [2.0]]),
        "action": torch.tensor([[0.5], [-1.0]]),
        "reward": torch.tensor([1.0, -2.0]),
        "next_obs": torch.tensor([[1.0], [7.0]]),
        "discount": torch.tensor([0.9, 0.0]),
        "weights": torch.tensor([1.0, 0.5]),
    }
    next_action, next_logp = torch.tensor([[0.8], [0.1]]), torch.tensor([-1.5, 3.0])
    target = update.soft_target(targets, batch, next_action, next_logp, torch.tensor([0.2]))
    loss, errors, values = critic_loss(critics, batch, target)
    first = 1.0 + 0.9 * (min(10 * 0.8, 5 * 1.0) - 0.2 * -1.5)
    q = [[0.5 + 2, -1 + 4], [1.5 + 4, -3 + 8]]  # of each critic
    differences = np.array([[first - q[i][0], -2 - q[i][1]] for i in range(2)])
    assert loss.item() == pytest.approx(0.5 * (differences**2 * [1.0, 0.5]).sum(), rel=1e-5)
    np.testing.assert_allclose(errors, np.abs(differences).mean(0), rtol=1e-5)
    assert values.item() == pytest.approx((2.5 + 3 + 5.5 + 5) / 2)
    loss.backward()
    row = -(differences * [1.0, 0.5])  # of the loss, by the value
    expected = np.stack([row @ [0.5, -1.0], row @ [1.0, 2.0]], 1)
    assert critics.planes.grad is not None
    np.testing.assert_allclose(critics.planes.grad, expected, rtol=1e-5)


def test_actor_loss_uses_the_smaller_critic_and_gives_critics_no_gradient() -> None:
    critics = Planes((1.0, 0.0), (-2.0, 0.0))
    obs = torch.zeros(2, 1)
    action = torch.tensor([[0.5], [-0.25]], requires_grad=True)
    logp = torch.tensor([0.1, -0.2], requires_grad=True)
    loss = update.actor_loss(critics, obs, action, logp, torch.tensor([0.3]))
    assert loss.item() == pytest.approx(0.3 * (0.1 - 0.2) - (-1.0) - (-0.25))
    loss.backward()
    torch.testing.assert_close(action.grad, torch.tensor([[2.0], [-1.0]]))
    torch.testing.assert_close(logp.grad, torch.tensor([0.3, 0.3]))
    assert critics.planes.grad is None


@pytest.mark.parametrize(("logp", "grows"), [(2.0, True), (0.5, False)])
def test_the_temperature_grows_where_entropy_is_below_its_target(logp: float, grows: bool) -> None:
    log_alpha = torch.tensor([0.0], requires_grad=True)
    target = update.target_entropy(SacConfig(), 1)
    assert target == -1.0
    update.temperature_loss(log_alpha, torch.full((4,), logp), target).backward()
    assert log_alpha.grad is not None
    assert log_alpha.grad.item() == pytest.approx(-4 * (logp - 1))
    assert (log_alpha.grad.item() < 0) == grows
    assert update.target_entropy(SacConfig(target_entropy=-0.5), 6) == -0.5


class Game:
    observation_space = spaces.Box(-1, 1, (3,), np.float64)
    action_space = spaces.Box(-2, 2, (2,), np.float32)


def sound() -> dict[str, np.ndarray[Any, Any]]:
    spec = SlotSpec(2, 2, sac.columns(Game.observation_space, Game.action_space))
    return spec.views(spec.zeros())


def test_slot_has_the_columns_of_sac() -> None:
    config = resolve("Acrobot-v1", ["algo.name=sac", "actors.envs=2", "actors.unroll=4"])
    spec = slot_spec(config, Game())
    views = spec.views(spec.zeros())
    assert (views["action"].dtype.str, views["action"].shape) == ("<f4", (4, 2, 2))
    assert (views["obs"].dtype.str, views["obs"].shape) == ("<f4", (5, 2, 3))
    assert "behaviour_logp" not in views


def test_process_scales_only_rewards() -> None:
    columns = sound()
    columns["reward"][:] = [[-7.0, 0.5], [2.0, 0.0]]
    columns["episode_return"][:] = 7.0
    process(SacConfig(reward_clip=1.0, reward_scale=0.1), columns)
    np.testing.assert_allclose(columns["reward"], [[-0.1, 0.05], [0.1, 0.0]])
    assert (columns["episode_return"] == 7.0).all()


@pytest.mark.parametrize(
    ("value", "sentence"), [(1.5, "an action of 1.5"), (-2.0, "an action of 2"), (np.nan, "action")]
)
def test_received_slot_with_invalid_values_is_refused(value: float, sentence: str) -> None:
    columns = sound()
    columns["action"][0, 0] = [1.0, -1.0]
    make_receive(SacConfig(), Game())(columns)
    columns["action"][1, 1, 0] = value
    with pytest.raises(ValueError, match=sentence):
        make_receive(SacConfig(), Game())(columns)
