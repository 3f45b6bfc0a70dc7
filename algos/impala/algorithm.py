"""IMPALA: an actor-critic whose lag V-trace corrects (Espeholt et al. 2018, arXiv 1802.01561).

`columns` are what the actor records, `process` prepares a filled slot, and `loss` is what the
learner minimises. Only `loss` imports torch, and only when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from penstock.algos import slots
from penstock.algos.base import UnrollAlgorithm
from penstock.algos.diagnostics import LAG, MOMENTS, batch_sums
from penstock.algos.impala.config import ImpalaConfig
from penstock.algos.slots import process
from penstock.configs.schedules import constant
from penstock.core.observations import Spaces
from penstock.core.specs import Column
from penstock.envs.vector_env import counts_of
from penstock.models.actions import action_column

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models.torch_heads import ActorCritic

WHOLE = slice(None)
LEAST_LOGP = -100.0  # of a sound actor's choice or number
MOST_DENSITY = 1e3  # the same of a number, whose log-density may well be above 0
STATISTICS = ("policy_loss", "value_loss", "entropy", *MOMENTS, *LAG)


def columns(observation_space: Any, action_space: Any) -> tuple[Column, ...]:
    """Returns the columns of a slot; ``behaviour_logp`` is the actor's log-probability."""
    logp = Column("behaviour_logp", "<f4")
    return slots.columns(observation_space, action_column(action_space), logp)


def check(columns: dict[str, npt.NDArray[Any]], spaces: Spaces) -> None:
    """Raise ValueError for values that no sound actor records."""
    slots.check(columns)
    slots.check_numbers(columns["obs"], spaces)
    size = columns["action"][0, 0].size
    most = MOST_DENSITY * size
    if columns["action"].dtype.kind == "i":
        slots.check_choices(columns["action"], counts_of(spaces.action_space))
        most = 1e-3
    logp = columns["behaviour_logp"]
    if logp.min() < LEAST_LOGP * size or logp.max() > most:
        raise ValueError(f"log-probabilities from {logp.min()} to {logp.max()}")


def whole(cfg: ImpalaConfig) -> bool:
    """Returns whether `loss` must see all environments of an update at once."""
    return cfg.normalize_advantages


def loss(
    net: ActorCritic,
    batch: dict[str, Tensor],
    cfg: ImpalaConfig,
    envs: slice = WHOLE,
    add_others: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss and `STATISTICS` of some environments of a batch, summed over alive rows.

    They are sums, so that those of micro-batches add up: divide gradient and statistics by the
    alive rows of the whole update.

    Args:
        net: the network that is trained.
        batch: `columns` as tensors ``[T, E, ...]``; observations are ``[T + 1, E, ...]``.
        cfg: the options.
        envs: which environments. With ``normalize_advantages`` these must be the whole update,
            since what an update learns must not depend on how it is cut to fit a cache.
        add_others: adds to a tensor, in place, those of the learners that share the update.

    Returns:
        The loss ``[]``, and ``[len(STATISTICS)]`` without a gradient. The statistics after the
        entropy are `penstock.algos.diagnostics.batch_sums`.
    """
    import torch

    from penstock.algos.ops.normalized import normalized
    from penstock.algos.ops.vtrace import vtrace
    from penstock.algos.unrolled import unrolled
    from penstock.models.distributions import distribution

    action, reward, behaviour_logp, terminated, truncated, alive = (
        batch[name][:, envs]
        for name in ("action", "reward", "behaviour_logp", "terminated", "truncated", "alive")
    )
    steps = alive.numel()
    outputs, values, mask = unrolled(net, batch, envs)
    policy = distribution(net.actions, outputs[:steps], None if mask is None else mask[:steps])
    action_logp = policy.logp(action.flatten(0, 1))
    log_rhos = action_logp.detach().view(alive.shape) - behaviour_logp
    v_tm1, bootstrapped = values[:steps], values.detach().view(-1, alive.shape[1])
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
    living = alive.flatten().float()
    advantages = trace.advantages.flatten()
    if cfg.normalize_advantages:
        advantages = normalized(advantages, living, add_others)
    # Advantages and errors are 0 on rows that are not alive, and so are their terms of the sums.
    targets = (trace.errors + bootstrapped[:-1]).flatten()
    differences = v_tm1 - targets
    policy_loss = -torch.dot(advantages, action_logp)
    value_loss = 0.5 * torch.dot(differences, differences)
    entropy = torch.dot(policy.entropy(), living)
    total = policy_loss + cfg.value_cost * value_loss - constant(cfg.entropy_cost) * entropy
    losses = torch.stack((policy_loss.detach(), value_loss.detach(), entropy.detach()))
    sums = batch_sums(
        living,
        log_rhos.flatten(),
        trace.advantages.flatten(),
        trace.errors.flatten(),
        targets,
        rho_clip=cfg.rho_clip,
    )
    return total, torch.cat((losses, sums))


IMPALA = UnrollAlgorithm[ImpalaConfig](
    STATISTICS, columns, check, process, loss, whole=whole, by_epoch=("kl",)
)
