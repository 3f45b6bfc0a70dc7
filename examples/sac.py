"""SAC in 60 lines on `penstock.replay`: twin critics, tuned temperature. Pendulum in two minutes.

python examples/sac.py [seed]
"""

import sys

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from penstock.replay import Replay

STEPS, START, BATCH, SCALE = 20_000, 1_000, 256, 2.0  # Pendulum's torques go from -2 to 2
seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
torch.manual_seed(seed)
torch.set_num_threads(1)
env = gym.make("Pendulum-v1")
env.action_space.seed(seed)
replay = Replay.from_env(env, STEPS, discount=0.99, seed=seed)


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


actor, critics, targets = network(3, 2), [network(4, 1), network(4, 1)], [network(4, 1), network(4, 1)]
for critic, target in zip(critics, targets, strict=True):
    target.load_state_dict(critic.state_dict())
log_alpha = torch.zeros((), requires_grad=True)
actor_optimizer = torch.optim.Adam([*actor.parameters(), log_alpha], 1e-3)
critic_optimizer = torch.optim.Adam([p for critic in critics for p in critic.parameters()], 1e-3)


def act(obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean, log_std = actor(obs).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
    raw = normal.rsample()
    squash = 2 * (np.log(2) - raw - nn.functional.softplus(-2 * raw))  # log of tanh's derivative
    return SCALE * raw.tanh(), (normal.log_prob(raw) - squash).sum(-1)


def values(nets: list[nn.Module], obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    return torch.stack([net(torch.cat([obs, action], -1))[:, 0] for net in nets])


obs, info = env.reset(seed=seed)
score, scores = 0.0, []
for step in range(STEPS):
    action = env.action_space.sample() if step < START else act(torch.from_numpy(obs))[0].detach().numpy()
    next_obs, reward, terminated, truncated, info = env.step(action)
    replay.add(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated, next_obs=next_obs)
    obs, score = next_obs, score + reward
    if terminated or truncated:
        scores.append(score)
        score, (obs, info) = 0.0, env.reset()
    if len(replay) < START:
        continue
    b = {k: torch.from_numpy(v) for k, v in replay.sample(BATCH).items() if k != "keys"}
    with torch.no_grad():
        next_action, logp = act(b["next_obs"])
        soft = values(targets, b["next_obs"], next_action).amin(0) - log_alpha.exp() * logp
        goal = b["reward"] / 10 + b["discount"] * soft
    critic_loss = (values(critics, b["obs"], b["action"]) - goal).square().mean()
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    new_action, logp = act(b["obs"])
    actor_loss = (log_alpha.exp().detach() * logp - values(critics, b["obs"], new_action).amin(0)).mean()
    alpha_loss = -(log_alpha * (logp.detach() - 1)).mean()  # target entropy: minus one per action
    actor_optimizer.zero_grad()
    (actor_loss + alpha_loss).backward()
    actor_optimizer.step()
    for critic, target in zip(critics, targets, strict=True):
        for old, new in zip(target.parameters(), critic.parameters(), strict=True):
            old.data.lerp_(new.data, 0.005)
    if step % 1000 == 0 and scores:
        print(f"step {step:6}  return {np.mean(scores[-10:]):.1f}")
print(f"mean return of the last 10 episodes: {np.mean(scores[-10:]):.1f}")
