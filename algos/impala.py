"""IMPALA: an actor-critic whose lag V-trace corrects (Espeholt et al. 2018, arXiv 1802.01561).

What the actor records is `columns`, what happens to a filled slot `process`, what the learner
minimises `loss`. Only `loss` imports torch, and only when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from penstock.algos import slots
from penstock.configs.algorithms import ImpalaConfig
from penstock.core.params import ParamLayout
from penstock.core.specs import Column

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models.torch_nets import Net

WHOLE = slice(None)
LEAST_LOGP = -100.0  # of a sound actor
MOST_LOG_RHO = 20.0  # V-trace clips far below; beyond it the statistics would overflow
ROUNDING = 1.001  # importance weights of the same policy differ from 1 by less
STATISTICS = ("policy_loss", "value_loss", "entropy", "kl", "rho", "rho_clipped")


def columns(observation_space: Any, action_space: Any) -> tuple[Column, ...]:
    """What one slot holds."""
    assert action_space.shape == (), action_space
    return slots.columns(
        observation_space, Column("action", "<i4"), Column("behaviour_logp", "<f4")
    )


def check(columns: dict[str, npt.NDArray[Any]], layout: ParamLayout) -> None:
    """Raise ValueError for values that no sound actor of the network ``layout`` records."""
    slots.check_choices(columns["action"], dict(layout.entries)["policy.bias"][0])
    slots.check(columns)
    logp = columns["behaviour_logp"]
    if logp.min() < LEAST_LOGP or logp.max() > 1e-3:
        raise ValueError(f"log-probabilities from {logp.min()} to {logp.max()}")


def process(cfg: ImpalaConfig, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Clip and scale the rewards of a filled slot, in place; `episode_return` stays raw."""
    slots.adjust_rewards(cfg, columns["reward"])


def loss(
    net: Net,
    batch: dict[str, Tensor],
    cfg: ImpalaConfig,
    envs: slice = WHOLE,
    add_others: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and `STATISTICS` of the environments ``envs`` of a batch, both summed over alive rows.

    ``batch`` holds `columns` as tensors, ``[T(+1), E, ...]``. Sums, so that those of micro-batches
    add up: divide gradient and statistics by the alive rows of the whole update. The statistics,
    float32 ``[len(STATISTICS)]``, carry no gradient; "kl" is an estimate of KL(actor | learner),
    "rho_clipped" counts the importance weights above ``rho_clip``, rounding apart.

    With ``normalize_advantages`` the ``envs`` must be the whole update: what an update learns must
    not depend on how it is cut to fit a cache. ``add_others`` adds to three sums, in place, those
    of the learners that share the update.
    """
    import torch

    from penstock.algos.vtrace import vtrace

    obs = batch["obs"][:, envs]
    action, reward, behaviour_logp, terminated, truncated, alive = (
        batch[name][:, envs]
        for name in ("action", "reward", "behaviour_logp", "terminated", "truncated", "alive")
    )
    steps = action.numel()
    logits, values = net(obs)
    logp = torch.log_softmax(logits.t(), 0)[:, :steps]
    action_logp = logp.gather(0, action.long().view(1, steps))[0]
    log_rhos = action_logp.detach().view(action.shape) - behaviour_logp
    v_tm1, bootstrapped = values[:steps], values.detach().view(obs.shape[:2])
    trace = vtrace(
        bootstrapped,
        reward,
        log_rhos,
        terminated,
        truncated,
        alive,
        discount=cfg.discount,
        trace_lambda=cfg.trace_lambda,
        rho_clip=cfg.rho_clip,
        c_clip=cfg.c_clip,
    )
    mask = alive.flatten().float()
    advantages = trace.advantages.flatten()
    if cfg.normalize_advantages:
        advantages = _normalized(advantages, mask, add_others)
    # Advantages and errors are 0 on rows that are not alive, and so are their terms of the sums.
    differences = v_tm1 - (trace.errors + bootstrapped[:-1]).flatten()
    policy_loss = -torch.dot(advantages, action_logp)
    value_loss = 0.5 * torch.dot(differences, differences)
    entropy = -torch.dot((logp.exp() * logp).sum(0), mask)
    total = policy_loss + cfg.value_cost * value_loss - cfg.entropy_cost * entropy
    losses = (policy_loss.detach(), value_loss.detach(), entropy.detach())
    return total, torch.stack((*losses, *_lag(log_rhos.flatten(), mask, cfg.rho_clip)))


def _lag(log_rhos: Tensor, mask: Tensor, rho_clip: float) -> tuple[Tensor, Tensor, Tensor]:
    """How far the actor's policy lies from the learner's: the last three of `STATISTICS`."""
    log_rhos = log_rhos.clamp(-MOST_LOG_RHO, MOST_LOG_RHO)
    rhos = log_rhos.exp()
    clipped = (rhos > ROUNDING * rho_clip).float()
    return (rhos - 1 - log_rhos).dot(mask), rhos.dot(mask), clipped.dot(mask)


def _normalized(
    advantages: Tensor, mask: Tensor, add_others: Callable[[Tensor], None] | None
) -> Tensor:
    """Shifted and scaled to mean 0 and deviation 1 where ``mask`` is 1; 0 elsewhere, as before."""
    import torch

    exact = advantages.double()  # so that one pass is enough
    sums = torch.stack((mask.sum().double(), exact.sum(), exact.dot(exact)))
    if add_others is not None:
        add_others(sums)
    count = sums[0].clamp(min=1)
    mean = sums[1] / count
    deviation = (sums[2] / count - mean.square()).clamp_(min=0).sqrt_()
    return (advantages - mean.float()) * mask / (deviation.float() + 1e-8)
