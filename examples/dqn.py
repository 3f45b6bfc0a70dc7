"""DQN in 60 lines on `penstock.replay`: double, prioritised, three-step. CartPole in half a minute.

python examples/dqn.py [seed]
"""

import sys

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from penstock.replay import Linear, Prioritized, Replay

STEPS, START, ENVS, BATCH, LR = 100_000, 1_000, 8, 128, 2e-3
seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(seed)
torch.set_num_threads(1)
rng = np.random.default_rng(seed)
env = gym.make_vec("CartPole-v1", num_envs=ENVS)
replay = Replay.from_env(
    env, 50_000, n_step=3, discount=0.99, seed=seed, sampler=Prioritized(0.6, Linear(0.4, 1, STEPS))
)


def q_network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


online, target = q_network(), q_network()
target.load_state_dict(online.state_dict())
optimizer = torch.optim.Adam(online.parameters(), LR)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.05, STEPS // ENVS)
obs, info = env.reset(seed=seed)
score, scores = np.zeros(ENVS), []
for step in range(STEPS // ENVS):
    with torch.no_grad():
        action = online(torch.from_numpy(obs)).argmax(1).numpy()
    epsilon = max(0.01, 1 - step * ENVS / 10_000)
    action = np.where(rng.random(ENVS) < epsilon, rng.integers(2, size=ENVS), action)
    next_obs, reward, terminated, truncated, info = env.step(action)
    replay.add(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated,
               next_obs=next_obs, info=info)  # fmt: skip
    score += reward
    for i in np.flatnonzero(terminated | truncated):
        scores.append(score[i])
        score[i] = 0
    obs = next_obs
    if len(replay) < START:
        continue
    batch = replay.sample(BATCH)
    b = {k: torch.from_numpy(batch[k]) for k in ("obs", "next_obs", "action", "reward", "discount", "weights")}
    with torch.no_grad():
        best = online(b["next_obs"]).argmax(1, keepdim=True)
        goal = 0.1 * b["reward"] + b["discount"] * target(b["next_obs"]).gather(1, best)[:, 0]
    error = online(b["obs"]).gather(1, b["action"].long()[:, None])[:, 0] - goal
    optimizer.zero_grad()
    (b["weights"] * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")).mean().backward()
    optimizer.step()
    schedule.step()
    replay.update_priorities(batch.keys, error.detach().abs().numpy())
    for old, new in zip(target.parameters(), online.parameters(), strict=True):
        old.data.lerp_(new.data, 0.02)
    if step % 500 == 0:
        print(f"step {step * ENVS:6}  return {np.mean(scores[-100:]):.1f}")
print(f"mean return of the last 100 episodes: {np.mean(scores[-100:]):.1f}")
