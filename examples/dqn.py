"""DQN on `penstock.replay`: double, prioritised, three-step. CartPole in under a minute.

python examples/dqn.py [seed]
"""

import copy
import sys

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from penstock.replay import Linear, Prioritized, Replay

STEPS, START, ENVS, BATCH, LR = 120_000, 1_000, 8, 128, 2e-3
SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(SEED)
torch.set_num_threads(1)
rng = np.random.default_rng(SEED)
env = gym.make_vec("CartPole-v1", num_envs=ENVS)
sampler = Prioritized(alpha=0.6, beta=Linear(0.4, 1.0, STEPS // ENVS * BATCH))
replay = Replay.from_env(env, 50_000, n_step=3, discount=0.99, sampler=sampler, seed=SEED)

layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)]
online = nn.Sequential(*layers)
target = copy.deepcopy(online)
optimizer = torch.optim.Adam(online.parameters(), LR)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.05, STEPS // ENVS)


def learn() -> None:
    batch = replay.sample(BATCH)
    obs, next_obs = torch.from_numpy(batch.obs), torch.from_numpy(batch.next_obs)
    with torch.no_grad():
        best = online(next_obs).argmax(1, keepdim=True)
        value = target(next_obs).gather(1, best)[:, 0]
    goal = 0.1 * torch.from_numpy(batch.reward) + torch.from_numpy(batch.discount) * value
    taken = online(obs).gather(1, torch.from_numpy(batch.action)[:, None])[:, 0]
    losses = nn.functional.huber_loss(taken, goal, reduction="none")
    optimizer.zero_grad()
    (torch.from_numpy(batch.weights) * losses).mean().backward()
    optimizer.step()
    schedule.step()
    replay.update_priorities(batch.keys, (goal - taken).detach().abs().numpy())
    for old, new in zip(target.parameters(), online.parameters(), strict=True):
        old.data.lerp_(new.data, 0.02)


(obs, info), score, scores = env.reset(seed=SEED), np.zeros(ENVS), [0.0]
for step in range(0, STEPS, ENVS):
    with torch.no_grad():
        action = online(torch.from_numpy(obs)).argmax(1).numpy()
    curious = rng.random(ENVS) < max(0.01, 1 - step / 10_000)
    action = np.where(curious, rng.integers(2, size=ENVS), action)
    next_obs, reward, ended, cut, info = env.step(action)
    replay.add(obs=obs, action=action, reward=reward, terminated=ended, truncated=cut,
               next_obs=next_obs, info=info)  # fmt: skip
    obs, score = next_obs, score + reward
    scores += score[ended | cut].tolist()
    score[ended | cut] = 0
    if len(replay) >= START:
        learn()
    if step % 4_000 == 0:
        print(f"step {step:6}  return {np.mean(scores[-100:]):.1f}")
print(f"mean return of the last 100 episodes: {np.mean(scores[-100:]):.1f}")
