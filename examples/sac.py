"""SAC on `penstock.replay`: twin critics, learnt temperature. Pendulum in two minutes.

python examples/sac.py [seed]
"""

import copy
import sys

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from penstock.replay import Replay

STEPS, START, BATCH, LR, TORQUE = 20_000, 1_000, 256, 1e-3, 2.0
SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(SEED)
torch.set_num_threads(1)
env = gym.make("Pendulum-v1")
env.action_space.seed(SEED)
replay = Replay.from_env(env, STEPS, discount=0.99, seed=SEED)


def network(inputs: int, outputs: int) -> nn.Module:
    hidden = [nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(128, outputs))


actor, critics = network(3, 2), nn.ModuleList([network(4, 1), network(4, 1)])
targets = copy.deepcopy(critics)
log_alpha = torch.zeros((), requires_grad=True)
actor_optimizer = torch.optim.Adam([*actor.parameters(), log_alpha], LR)
critic_optimizer = torch.optim.Adam(critics.parameters(), LR)


def act(obs: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_std = actor(obs).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
    raw = normal.rsample()
    squash = 2 * (np.log(2) - raw - nn.functional.softplus(-2 * raw))  # log of tanh's derivative
    return TORQUE * raw.tanh(), (normal.log_prob(raw) - squash).sum(-1)


def values(nets: nn.ModuleList, obs: Tensor, action: Tensor) -> Tensor:
    return torch.stack([net(torch.cat([obs, action], -1))[:, 0] for net in nets])


def step_of(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def learn() -> None:
    drawn = replay.sample(BATCH)
    names = ("obs", "action", "reward", "next_obs", "discount")
    obs, action, reward, next_obs, discount = (torch.from_numpy(drawn[name]) for name in names)
    with torch.no_grad():
        ahead, logp = act(next_obs)
        soft = values(targets, next_obs, ahead).amin(0) - log_alpha.exp() * logp
        goal = 0.1 * reward + discount * soft
    step_of(critic_optimizer, (values(critics, obs, action) - goal).square().mean())
    fresh, logp = act(obs)
    loss = (log_alpha.exp().detach() * logp - values(critics, obs, fresh).amin(0)).mean()
    step_of(actor_optimizer, loss - (log_alpha * (logp.detach() - 1)).mean())  # entropy of -1
    for old, new in zip(targets.parameters(), critics.parameters(), strict=True):
        old.data.lerp_(new.data, 0.005)


(obs, info), score, scores = env.reset(seed=SEED), 0.0, [-1600.0]
for step in range(STEPS):
    guess = env.action_space.sample() if step < START else act(torch.from_numpy(obs))[0]
    action = np.asarray(torch.as_tensor(guess).detach())
    next_obs, reward, ended, cut, info = env.step(action)
    replay.add(obs=obs, action=action, reward=reward, terminated=ended, truncated=cut,
               next_obs=next_obs)  # fmt: skip
    obs, score = next_obs, score + float(reward)
    if ended or cut:
        scores.append(score)
        score, (obs, info) = 0.0, env.reset()
    if len(replay) >= START:
        learn()
    if step % 1_000 == 0:
        print(f"step {step:6}  return {np.mean(scores[-10:]):.1f}")
print(f"mean return of the last 10 episodes: {np.mean(scores[-10:]):.1f}")
