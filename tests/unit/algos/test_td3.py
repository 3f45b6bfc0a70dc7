"""TD3 against loops over single transitions, and against plain torch with its own optimizers."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from penstock.algos.samples import network_shape, slot_spec
from penstock.algos.td3 import update
from penstock.algos.td3.config import Td3Config
from penstock.algos.td3.update import Td3Update
from penstock.configs.load import resolve
from penstock.envs.vector_env import EnvInfo
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.models.acting.gaussian import NoisySampler

GAME = EnvInfo(spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-2, 2, (2,), np.float32), 1, "")


class Bowls:
    """Two Q-functions ``q = c - |action - centre|^2 + b * obs``, as `TwinCritics` is used."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.centres = rng.uniform(-1, 1, (2, 2))
        self.constants = rng.normal(size=2)
        self.slope = rng.normal(size=2)

    def one(self, i: int, obs: list[float], action: list[float]) -> float:
        square = sum((a - c) ** 2 for a, c in zip(action, self.centres[i], strict=True))
        return float(self.constants[i] - square + self.slope[i] * obs[0])

    def __call__(self, obs: Tensor, action: Tensor) -> Tensor:
        centres, constants, slope = map(
            torch.from_numpy, (self.centres, self.constants, self.slope)
        )
        squares = (action[None] - centres[:, None]).square().sum(2)
        return constants[:, None] - squares + slope[:, None] * obs[:, 0]

    def of_action(self, obs: Tensor, action: Tensor, count: int = 2) -> Tensor:
        return self(obs, action)[:count]


def numbers_of(obs: Tensor) -> Tensor:
    """An actor's outputs ``[B, 2]``, some of whose actions are near the bounds."""
    return torch.stack([2 * obs[:, 0] - 0.3, obs[:, 1] * obs[:, 2] + 0.5], 1)


def test_targets_are_those_of_a_loop_over_transitions() -> None:
    rng = np.random.default_rng(0)
    critics = Bowls(1)
    batch = {
        "next_obs": torch.from_numpy(rng.normal(size=(64, 3))),
        "reward": torch.from_numpy(rng.normal(size=64)),
        "discount": torch.from_numpy(np.where(rng.random(64) < 0.3, 0, 0.97)),
    }
    noise = torch.from_numpy(rng.normal(size=(64, 2)) * 0.4)
    found = update.smoothed_target(critics, numbers_of, batch, noise=noise, noise_clip=0.5)
    clipped_noise, clipped_actions = 0, 0
    for i in range(64):
        obs = batch["next_obs"][i].tolist()
        action = []
        for number, shift in zip(numbers_of(batch["next_obs"])[i], noise[i].tolist(), strict=True):
            clipped_noise += abs(shift) > 0.5
            moved = math.tanh(number) + max(-0.5, min(0.5, shift))
            clipped_actions += abs(moved) > 1
            action.append(max(-1.0, min(1.0, moved)))
        value = min(critics.one(0, obs, action), critics.one(1, obs, action))
        expected = batch["reward"][i].item() + batch["discount"][i].item() * value
        assert found[i].item() == pytest.approx(expected, abs=1e-9)
    assert clipped_noise > 10
    assert clipped_actions > 10


def test_the_actor_climbs_the_first_critic_alone() -> None:
    critics = Bowls(2)
    obs = torch.from_numpy(np.random.default_rng(3).normal(size=(16, 3)))
    numbers = numbers_of(obs).requires_grad_()
    loss = update.actor_loss(critics, lambda _: numbers, obs)
    loss.backward()
    total = 0.0
    for i in range(16):
        action = [math.tanh(number) for number in numbers[i].tolist()]
        total -= critics.one(0, obs[i].tolist(), action)
        for j in range(2):
            slope = 2 * (action[j] - critics.centres[0, j]) * (1 - action[j] ** 2)
            assert numbers.grad is not None
            assert numbers.grad[i, j].item() == pytest.approx(slope, abs=1e-9)
    assert loss.item() == pytest.approx(total, abs=1e-9)


class PlainTd3:
    """TD3 as it is written down: a module for each network, torch's own Adam, means."""

    actor: Any  # a Sequential, whose items are typed as any module
    critics: list[Any]

    def __init__(self, theirs: Td3Update, cfg: Td3Config, lr: float) -> None:
        self.cfg = cfg
        self.actor = mlp(3, 2)
        self.critics = [mlp(5, 1), mlp(5, 1)]
        with torch.no_grad():
            named = dict(theirs.actor.named_parameters())
            for i in range(2):
                self.actor[2 * i].weight.copy_(named[f"hidden.{i}.weight"][0].t())
                self.actor[2 * i].bias.copy_(named[f"hidden.{i}.bias"][0])
            self.actor[4].weight.copy_(named["head.weight"])
            self.actor[4].bias.copy_(named["head.bias"])
            named = dict(theirs.critics.net.named_parameters())
            for tower, critic in enumerate(self.critics):
                for i in range(3):
                    critic[2 * i].weight.copy_(named[f"layers.{i}.weight"][tower].t())
                    critic[2 * i].bias.copy_(named[f"layers.{i}.bias"][tower])
        self.targets: list[nn.Sequential] = copy.deepcopy([self.actor, *self.critics])
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr, eps=1e-8)
        parameters = [p for critic in self.critics for p in critic.parameters()]
        self.critic_optimizer = torch.optim.Adam(parameters, lr, eps=1e-8)

    def step(self, batch: dict[str, Tensor], noise: Tensor, number: int) -> None:
        target_actor, *target_critics = self.targets
        with torch.no_grad():
            shift = (noise * self.cfg.target_noise).clamp(-0.5, 0.5)
            action = (target_actor(batch["next_obs"]).tanh() + shift).clamp(-1, 1)
            q = [critic(torch.cat([batch["next_obs"], action], 1)) for critic in target_critics]
            target = batch["reward"] + batch["discount"] * torch.min(*q)[:, 0]
        self.critic_optimizer.zero_grad()
        for critic in self.critics:
            q_taken = critic(torch.cat([batch["obs"], batch["action"]], 1))[:, 0]
            (0.5 * (target - q_taken) ** 2).mean().backward()
        self.critic_optimizer.step()
        if number % self.cfg.policy_delay:
            return
        self.actor_optimizer.zero_grad()
        action = self.actor(batch["obs"]).tanh()
        (-self.critics[0](torch.cat([batch["obs"], action], 1)).mean()).backward()
        self.actor_optimizer.step()
        with torch.no_grad():
            for net, lagging in zip([self.actor, *self.critics], self.targets, strict=True):
                for new, old in zip(net.parameters(), lagging.parameters(), strict=True):
                    old.copy_((1 - self.cfg.tau) * old + self.cfg.tau * new)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, outputs)
    )


def test_updates_are_those_of_plain_torch() -> None:
    options = ("model.hidden=[32,24]", "model.activation=relu", "learner.precision=fp32")
    config = resolve("x:f", [
        "algo.name=td3", "env.kind=continuous", "learner.device=cpu", "algo.tau=0.1",
        "learner.lr=1e-3", "algo.policy_delay=3", *options,
    ])  # fmt: skip
    trainer = OffPolicyTrainer(config, GAME)
    theirs, cfg = trainer._update, config.algo
    assert isinstance(theirs, Td3Update)
    assert isinstance(cfg, Td3Config)
    plain, rng = PlainTd3(theirs, cfg, lr=1e-3), np.random.default_rng(0)
    probe = torch.from_numpy(rng.normal(size=(50, 3)).astype(np.float32))
    start = theirs.actor(probe).detach()
    for number in range(1, 13):
        arrays = {
            "obs": rng.normal(size=(40, 3)),
            "action": rng.uniform(-1, 1, (40, 2)),
            "reward": rng.normal(size=40),
            "next_obs": rng.normal(size=(40, 3)),
            "discount": np.where(rng.random(40) < 0.2, 0, 0.9),
        }
        batch = {name: torch.from_numpy(array.astype(np.float32)) for name, array in arrays.items()}
        torch.manual_seed(number)
        trainer.update(batch)
        torch.manual_seed(number)
        plain.step(batch, torch.randn(40, 2), number)
    with torch.no_grad():
        action = torch.from_numpy(rng.uniform(-1, 1, (50, 2)).astype(np.float32))
        inputs = torch.cat([probe, action], 1)
        assert (theirs.actor(probe) - start).abs().max() > 0.01
        for found, expected in (
            (theirs.actor(probe), plain.actor(probe)),
            (theirs.target_actor(probe), plain.targets[0](probe)),
            (theirs.critics.net(probe, action)[1], plain.critics[1](inputs)[:, 0]),
            (theirs.critics.target_net(probe, action)[0], plain.targets[1](inputs)[:, 0]),
        ):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_noise_is_added_to_the_action_which_stays_within_its_bounds() -> None:
    sampler = NoisySampler((2,), 20_000, 0.2, np.random.default_rng(0))
    sampler.outputs[:] = [[math.atanh(0.3)], [math.atanh(0.99)]]
    actions = sampler.sample().astype(np.float64)
    assert actions[:, 0].mean() == pytest.approx(0.3, abs=0.01)
    assert actions[:, 0].std() == pytest.approx(0.2, rel=0.03)
    assert (np.abs(actions) <= 1).all()
    assert (actions[:, 1] == 1).mean() == pytest.approx(0.48, abs=0.02)  # noise above 0.01
    np.testing.assert_allclose(sampler.greedy(), [[0.3, 0.99]] * 20_000, rtol=1e-6)


def test_actions_are_uniform_until_the_first_update() -> None:
    sampler = NoisySampler((1,), 20_000, 0.1, np.random.default_rng(0))
    sampler.outputs[:] = 3
    sampler.on_new_weights(untrained=True)
    quantiles = np.quantile(sampler.sample(), [0.0, 0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(quantiles, [-1, -0.5, 0, 0.5, 1], atol=0.03)
    sampler.on_new_weights(untrained=False)
    assert sampler.sample().min() > 0.5


def test_an_actor_has_one_output_for_each_number_and_slots_are_those_of_sac() -> None:
    td3, sac = (resolve("x:f", [f"algo.name={name}"]) for name in ("td3", "sac"))
    assert network_shape(td3, GAME).outputs == 2
    assert slot_spec(td3, GAME) == slot_spec(sac, GAME)
