"""An update of SAC and of TD3 beside that of a plain loop, on one thread, in turns.

The plain loop is SAC as it is usually written in one file: a module for each critic, torch's Adam,
torch.distributions. Networks and batch have the size of `halfcheetah_sac`. Times are those of the
thread, so that what else the machine does counts as little as possible.

    python benchmarks/control_update.py [--turns 40] [--save]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn.functional import mse_loss

from common import finish, parser
from penstock.configs.load import resolve
from penstock.envs.vector_env import EnvInfo
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.models.torch_setup import set_up_torch

INPUTS, ACTIONS, WIDTH, BATCH = 17, 6, 256, 256
UPDATES = 5  # in a turn
SETTINGS = ("env.kind=continuous", "learner.device=cpu", "learner.precision=fp32")


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--turns", type=int, default=40)
    options = args.parse_args()
    set_up_torch(1)
    torch.manual_seed(0)

    batch = random_batch()
    updates: dict[str, Callable[[], object]] = {
        "plain loop": PlainSac(batch).step,
        "sac": penstock_update("sac", batch),
        "td3": penstock_update("td3", batch),
    }
    times_ms: dict[str, list[float]] = {name: [] for name in updates}
    for turn in range(-2, options.turns):
        for name, update in updates.items():
            taken_ms = thread_ms(update)
            if turn >= 0:  # the first ones warm up
                times_ms[name].append(taken_ms)

    medians = {name: statistics.median(times) for name, times in times_ms.items()}
    plain_ms = medians["plain loop"]
    table = [
        ("update", "ms", "of the plain loop"),
        *((name, f"{ms:.2f}", f"{ms / plain_ms:.2f}") for name, ms in medians.items()),
    ]
    finish("control_update", {"thread_ms": medians, "turns": options.turns}, table, options)


def thread_ms(update: Callable[[], object]) -> float:
    """Returns the time of the thread for one update."""
    began_s = time.thread_time()
    for _ in range(UPDATES):
        update()
    return (time.thread_time() - began_s) / UPDATES * 1e3


def random_batch() -> dict[str, Tensor]:
    return {
        "obs": torch.randn(BATCH, INPUTS),
        "action": torch.rand(BATCH, ACTIONS) * 2 - 1,
        "reward": torch.randn(BATCH),
        "next_obs": torch.randn(BATCH, INPUTS),
        "discount": torch.full((BATCH,), 0.99),
    }


def penstock_update(algo: str, batch: dict[str, Tensor]) -> Callable[[], object]:
    """Returns what a learner does with a batch, from its tensors on."""
    observations = spaces.Box(-10, 10, (INPUTS,))
    info = EnvInfo(observations, spaces.Box(-1, 1, (ACTIONS,)), 1, "")
    trainer = OffPolicyTrainer(resolve("x:f", [f"algo.name={algo}", *SETTINGS]), info)
    return lambda: trainer.update(batch)


def critic() -> nn.Sequential:
    return nn.Sequential(*body(INPUTS + ACTIONS), nn.Linear(WIDTH, 1))


def body(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())


class PlainSac:
    """SAC in one file."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch
        self.critics = nn.ModuleList([critic(), critic()])
        self.targets = nn.ModuleList([critic(), critic()])
        self.body = body(INPUTS)
        self.mean = nn.Linear(WIDTH, ACTIONS)
        self.log_std = nn.Linear(WIDTH, ACTIONS)
        self.log_alpha = torch.zeros(1, requires_grad=True)

        actor = nn.ModuleList([self.body, self.mean, self.log_std])
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=3e-4)
        self.actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=3e-4)

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(obs)
        log_std = torch.tanh(self.log_std(features))
        normal = Normal(self.mean(features), (-5 + 3.5 * (log_std + 1)).exp())
        number = normal.rsample()
        action = number.tanh()
        logp = normal.log_prob(number) - torch.log(1 - action.square() + 1e-6)
        return action, logp.sum(1)

    def values(self, critics: nn.ModuleList, obs: Tensor, action: Tensor) -> list[Tensor]:
        return [net(torch.cat([obs, action], 1)).view(-1) for net in critics]

    def step(self) -> None:
        batch = self.batch
        alpha = self.log_alpha.exp().item()
        with torch.no_grad():
            action, logp = self.act(batch["next_obs"])
            q = self.values(self.targets, batch["next_obs"], action)
            target = batch["reward"] + batch["discount"] * (torch.min(*q) - alpha * logp)
        q = self.values(self.critics, batch["obs"], batch["action"])
        self.minimize(sum(mse_loss(value, target) for value in q), self.critic_optimizer)

        action, logp = self.act(batch["obs"])
        q = self.values(self.critics, batch["obs"], action)
        self.minimize((alpha * logp - torch.min(*q)).mean(), self.actor_optimizer)

        loss = -(self.log_alpha.exp() * (logp.detach() - ACTIONS)).mean()
        self.minimize(loss, self.alpha_optimizer)
        with torch.no_grad():
            for new, old in zip(self.critics.parameters(), self.targets.parameters(), strict=True):
                old.lerp_(new, 0.005)

    def minimize(self, loss: Tensor | int, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
