"""A custom algorithm: A2C, the advantage actor-critic (Mnih et al. 2016, arXiv 1602.01783).

    penstock train own_algorithm.yaml        # in this folder: CartPole in seconds

A slot is an unroll of T steps of E environments. Row t is the step from obs[t] to obs[t+1]; the
last observation has no row. An episode ends at a row with `terminated` (no reward can follow) or
`truncated` (the episode was cut, so the value of the following states is V(obs[t+1])). The row
after an end only resets the environment: it is not `alive`, and must not count.

Actors import this file too, and do not need torch: it is imported where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Names of the sums that `loss` returns; metrics.jsonl has their means under these names.
STATISTICS = ("policy_loss", "value_loss", "entropy")


@dataclass
class Settings:
    """The options in `algo.settings`."""

    entropy_cost: float = 0.01
    value_cost: float = 0.5


def returns(batch: dict[str, Tensor], values: Tensor, discount: float) -> Tensor:
    """Discounted sums of rewards [T, E] from each row on, with V where the unroll is cut off.

    `values` are V(obs), [T+1, E].
    """
    import torch

    found = torch.empty_like(batch["reward"])
    following = values[-1]
    for t in reversed(range(len(found))):
        following = torch.where(batch["truncated"][t], values[t + 1], following)
        following = torch.where(batch["terminated"][t], 0.0, following)
        following = batch["reward"][t] + discount * following
        found[t] = following
    return found


def loss(
    net: Any, batch: dict[str, Tensor], cfg: Any, envs: slice | Tensor, add_others: Any
) -> tuple[Tensor, Tensor]:
    """The loss of some environments of a batch, and STATISTICS: sums over the rows that are alive.

    Penstock divides gradient and statistics by the number of those rows, of all micro-batches and
    all learners together; so return sums, not means.
    """
    import torch

    from penstock.algos.unrolled import unrolled
    from penstock.models.distributions import distribution

    # All T+1 rows in one pass, with recurrent state and action masks if the network has them.
    outputs, values, mask = unrolled(net, batch, envs)
    mine = {name: batch[name][:, envs] for name in ("reward", "terminated", "truncated", "alive")}
    steps, alive = mine["alive"].numel(), mine["alive"].flatten().float()
    policy = distribution(net.actions, outputs[:steps], None if mask is None else mask[:steps])
    logp = policy.logp(batch["action"][:, envs].flatten(0, 1))

    bootstrap = values.detach().view(-1, mine["alive"].shape[1])
    advantages = returns(mine, bootstrap, cfg.discount).flatten() - values[:steps]
    policy_loss = -(advantages.detach() * logp * alive).sum()
    value_loss = 0.5 * (advantages.square() * alive).sum()
    entropy = (policy.entropy() * alive).sum()

    settings: Settings = cfg.settings
    total = policy_loss + settings.value_cost * value_loss - settings.entropy_cost * entropy
    return total, torch.stack((policy_loss, value_loss, entropy)).detach()
