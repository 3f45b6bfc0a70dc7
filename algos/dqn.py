"""DQN: Q-values learnt from replay; double, duelling, n-step, with initial priorities by the actor.

van Hasselt et al. 2016, arXiv 1509.06461 (double); Wang et al. 2016, arXiv 1511.06581 (duelling);
Horgan et al. 2018, arXiv 1803.00933 (n-step, exploration and priorities of many actors).

What the actor records is `columns`, what happens to a filled slot `process`, what the learner
minimises `loss`. Only `loss` imports torch, and only when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.algos import slots
from penstock.algos.base import ReplayAlgorithm
from penstock.configs.algorithms import DqnConfig
from penstock.configs.schema import Config
from penstock.core.observations import Spaces
from penstock.core.params import Float32, ParamLayout
from penstock.core.specs import Column
from penstock.models.acting.categorical import EpsilonGreedySampler, ladder
from penstock.models.fitting import q_shape
from penstock.models.layout import HeadShape

if TYPE_CHECKING:
    from torch import Tensor

Flags = npt.NDArray[np.bool_]

STATISTICS = ("q_loss", "td_error", "q_mean", "q_target_mean")


def columns(observation_space: Any, action_space: Any) -> tuple[Column, ...]:
    """What one slot holds; ``priority`` is written by `process`."""
    assert action_space.shape == (), action_space
    recorded = (Column(name, "<f4") for name in ("q_taken", "q_max", "priority"))
    return slots.columns(observation_space, Column("action", "<i4"), *recorded)


def check(columns: dict[str, npt.NDArray[Any]], layout: ParamLayout) -> None:
    """Raise ValueError for values that no sound actor of the network ``layout`` records."""
    slots.check_choices(columns["action"], dict(layout.entries)["head.bias"])
    slots.check(columns)


def process(cfg: DqnConfig, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Clip and scale the rewards of a filled slot, and write its initial priorities, in place."""
    slots.adjust_rewards(cfg, columns["reward"])
    names = ("reward", "q_taken", "q_max", "terminated", "truncated", "alive")
    columns["priority"][...] = initial_priorities(
        *(columns[name] for name in names), n_step=cfg.n_step, discount=cfg.discount
    )


def initial_priorities(
    reward: Float32,
    q_taken: Float32,
    q_max: Float32,
    terminated: Flags,
    truncated: Flags,
    alive: Flags,
    *,
    n_step: int,
    discount: float,
) -> Float32:
    """Absolute n-step temporal differences of a slot by the values its actor had; all ``[T, E]``.

    A row's rewards are summed up to the end of its episode, and never beyond the slot: its last row
    stands for its own value, ``q_max``. Truncation goes on with the value of the final observation,
    which is that of the next row. What so has no difference of its own, the last row unless it
    terminated, gets the largest of the slot. Rows that are not alive get 0.
    """
    value = np.float32(discount) * q_max[1:]
    reward = reward.copy()
    reward[:-1] += value * (truncated & ~terminated)[:-1]
    reward[-1] = np.where(terminated[-1], reward[-1], q_max[-1])
    going = ~(terminated | truncated)
    going[-1] = False
    ended = ~going
    total = reward.copy()
    steps = len(reward)
    for j in range(1, min(n_step, steps)):
        total[:-j] += np.float32(discount**j) * reward[j:] * going[:-j]
        going[:-j] &= ~ended[j:]
    if n_step < steps:
        total[:-n_step] += np.float32(discount**n_step) * q_max[n_step:] * going[:-n_step]
    found = np.abs(total - q_taken) * alive
    known = alive.copy()
    known[-1] &= terminated[-1]
    most = found[known].max() if known.any() else np.float32(1)
    return np.where(alive & ~known, most, found).astype(np.float32)


def loss(
    net: Callable[[Tensor], Tensor],
    target_net: Callable[[Tensor], Tensor],
    batch: Mapping[str, Tensor],
    cfg: DqnConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted Huber loss, temporal differences and `STATISTICS` of transitions from replay.

    The nets give Q-values ``[B, actions]``.

    ``batch``: ``obs`` and ``next_obs`` ``[B, *shape]``, ``action`` whole ``[B]``, ``reward`` (of n
    rows), ``discount`` (gamma^n, 0 where terminated) and ``weights`` float32 ``[B]``. Loss (``[]``)
    and statistics (``[len(STATISTICS)]``) are sums over B, so that those of micro-batches add up.
    The differences (``[B]``, target minus value) and the statistics carry no gradient.
    """
    import torch

    action = batch["action"].long()[:, None]
    taken = net(batch["obs"]).gather(1, action)[:, 0]
    with torch.no_grad():
        next_q = target_net(batch["next_obs"])
        if cfg.double:
            best = net(batch["next_obs"]).argmax(1, keepdim=True)
            next_value = next_q.gather(1, best)[:, 0]
        else:
            next_value = next_q.amax(1)
        target = torch.addcmul(batch["reward"], batch["discount"], next_value)
    difference = target - taken
    clipped = difference.clamp(-cfg.huber, cfg.huber)
    # Half the square within the bounds, linear beyond; its gradient is the clipped difference.
    losses = clipped * (difference - 0.5 * clipped)
    total = torch.dot(losses, batch["weights"])
    difference, taken = difference.detach(), taken.detach()
    sums = (total.detach(), difference.abs().sum(), taken.sum(), target.sum())
    return total, difference, torch.stack(sums)


def network(config: Config, spaces: Spaces) -> HeadShape:
    """Q-values of every action."""
    assert isinstance(config.algo, DqnConfig), config.algo
    return q_shape(config.model, config.algo, spaces)


def action_sampler(config: Config, spaces: Spaces, seed: int, actor: int) -> EpsilonGreedySampler:
    """Each environment of all actors explores at a rate of its own, as in Ape-X."""
    cfg, envs = config.algo, config.actors.envs
    assert isinstance(cfg, DqnConfig), cfg
    total = config.actors.count * envs
    epsilon = ladder(cfg.epsilon, cfg.epsilon_alpha, actor * envs, envs, total)
    return EpsilonGreedySampler(int(spaces.action_space.n), epsilon, np.random.default_rng(seed))


DQN = ReplayAlgorithm[DqnConfig](
    columns,
    check,
    process,
    network,
    action_sampler,
    update="penstock.algos.dqn_update:DqnUpdate",
    n_step=lambda cfg: cfg.n_step,
)
