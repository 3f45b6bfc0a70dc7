"""IMPALA: an actor-critic whose lag V-trace corrects (Espeholt et al. 2018, arXiv 1802.01561)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from penstock.algos import slots
from penstock.algos.base import WHOLE, AddOthers, UnrollAlgorithm
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

LEAST_LOGP = -100.0  # smallest log-probability of a choice or a number that a sound actor records
MOST_DENSITY = 1e3  # largest log-density of a number, which may well be above 0
MOST_CHOICE_LOGP = 1e-3  # largest log-probability of a choice, which is 0 apart from rounding
STATISTICS = ("policy_loss", "value_loss", "entropy", *MOMENTS, *LAG)


def columns(observation_space: Any, action_space: Any) -> tuple[Column, ...]:
    """Returns the columns of a slot; ``behaviour_logp`` is the actor's log-probability."""
    logp = Column("behaviour_logp", "<f4")
    return slots.columns(observation_space, action_column(action_space), logp)


def check(columns: dict[str, npt.NDArray[Any]], spaces: Spaces) -> None:
    """Raise ValueError for values that no sound actor records."""
    slots.check(columns)
    slots.check_numbers(columns["obs"], spaces)

    action_size = columns["action"][0, 0].size
    largest_logp = MOST_DENSITY * action_size
    if columns["action"].dtype.kind == "i":
        slots.check_choices(columns["action"], counts_of(spaces.action_space))
        largest_logp = MOST_CHOICE_LOGP

    logp = columns["behaviour_logp"]
    if logp.min() < LEAST_LOGP * action_size or logp.max() > largest_logp:
        raise ValueError(f"log-probabilities from {logp.min()} to {logp.max()}")


def whole(cfg: ImpalaConfig) -> bool:
    """Returns whether `loss` must see all environments of an update at once."""
    return cfg.normalize_advantages


def loss(
    net: ActorCritic,
    batch: Mapping[str, Tensor],
    cfg: ImpalaConfig,
    envs: slice | Tensor = WHOLE,
    add_others: AddOthers | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss and `STATISTICS` of some environments of a batch: `UnrollAlgorithm.loss`.

    The statistics after the entropy are `penstock.algos.diagnostics.batch_sums`. The sum
    `TEACHER_KL` follows where there is a teacher.
    """
    import torch

    from penstock.algos.ops.normalized import normalized
    from penstock.algos.ops.teaching import teacher_kl
    from penstock.algos.ops.vtrace import vtrace
    from penstock.algos.unrolled import unrolled

    action = batch["action"][:, envs]
    behaviour_logp = batch["behaviour_logp"][:, envs]
    alive = batch["alive"][:, envs]
    mask = alive.flatten().float()
    steps = alive.numel()

    # The current policy in the first T rows, and the values of all T + 1.
    part = unrolled(net, batch, envs)
    policy = part.policy(net.actions, steps)
    logp = policy.logp(action.flatten(0, 1))
    log_rhos = logp.detach().view(alive.shape) - behaviour_logp
    values = part.values.detach().view(-1, alive.shape[1])

    # Advantages and errors are 0 on rows that are not alive, and so are their terms of the sums.
    trace = vtrace(
        values=values,
        rewards=batch["reward"][:, envs],
        log_rhos=log_rhos,
        terminated=batch["terminated"][:, envs],
        truncated=batch["truncated"][:, envs],
        alive=alive,
        discount=cfg.discount,
        trace_lambda=cfg.trace_lambda,
        rho_clip=cfg.rho_clip,
        c_clip=cfg.c_clip,
    )
    advantages = trace.advantages.flatten()
    if cfg.normalize_advantages:
        advantages = normalized(advantages, mask, add_others)
    targets = (trace.errors + values[:-1]).flatten()
    differences = part.values[:steps] - targets

    policy_loss = -torch.dot(advantages, logp)
    value_loss = 0.5 * torch.dot(differences, differences)
    entropy = torch.dot(policy.entropy(), mask)
    total = policy_loss + cfg.value_cost * value_loss - constant(cfg.entropy_cost) * entropy

    losses = torch.stack((policy_loss.detach(), value_loss.detach(), entropy.detach()))
    sums = batch_sums(
        mask=mask,
        log_rhos=log_rhos.flatten(),
        advantages=trace.advantages.flatten(),
        errors=trace.errors.flatten(),
        targets=targets,
        rho_clip=cfg.rho_clip,
    )
    statistics = torch.cat((losses, sums))
    if cfg.teacher is not None:
        divergence = teacher_kl(cfg, net.actions, batch, envs, policy).dot(mask)
        total = total + constant(cfg.teacher_cost) * divergence
        statistics = torch.cat((statistics, divergence.detach()[None]))
    return total, statistics


IMPALA = UnrollAlgorithm[ImpalaConfig](
    statistics=STATISTICS,
    columns=columns,
    check=check,
    process=process,
    loss=loss,
    whole=whole,
    by_epoch=("kl",),
)
