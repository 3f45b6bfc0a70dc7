"""Distillation: a student learns to decide as trained policies do, on what it plays itself (Rusu et
al. 2015, arXiv 1511.06295; Czarnecki et al. 2019, arXiv 1902.02186).

The loss is KL(teacher | student) in the states that the student visits, without a term for rewards,
and the error of its values. `penstock.learner.teachers` adds to a batch what the teachers would do;
slots are those of IMPALA. The policy that acted is of no importance: whatever its lag, the states
are ones that a student visits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.algos.base import TEACHER_KL, WHOLE, AddOthers, UnrollAlgorithm
from penstock.algos.distill.config import DistillConfig
from penstock.algos.impala.algorithm import check, columns
from penstock.algos.slots import process

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models.torch_heads import ActorCritic

STATISTICS = (TEACHER_KL, "value_loss", "entropy")
# Lambda of the returns that values learn by, where a teacher estimates no values.
RETURNS_LAMBDA = 0.95


def prepare(
    net: ActorCritic,
    batch: Mapping[str, Tensor],
    cfg: DistillConfig,
    parts: Sequence[slice],
    add_others: AddOthers | None = None,
) -> dict[str, Tensor]:
    """Returns the targets of the values, float32 ``[T, E]``, as ``target``.

    They are the teachers' values, or where a teacher estimates none the lambda-returns of the
    student. The arguments are those of `UnrollAlgorithm`.
    """
    import torch

    from penstock.algos.ops.gae import lambda_returns
    from penstock.algos.ops.teaching import VALUE
    from penstock.algos.unrolled import unrolled

    if VALUE in batch:
        return {"target": batch[VALUE]}

    rows = len(batch["obs"])
    with torch.no_grad():
        values = torch.cat([unrolled(net, batch, envs).values.view(rows, -1) for envs in parts], 1)
    target = lambda_returns(values, batch, discount=cfg.discount, gae_lambda=RETURNS_LAMBDA)
    return {"target": target}


def loss(
    net: ActorCritic,
    batch: Mapping[str, Tensor],
    cfg: DistillConfig,
    envs: slice | Tensor = WHOLE,
    add_others: AddOthers | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss and `STATISTICS` of some environments of a batch: `UnrollAlgorithm.loss`.

    The batch also has what the teachers would do.
    """
    import torch

    from penstock.algos.ops.teaching import teacher_kl
    from penstock.algos.unrolled import unrolled

    target = batch["target"][:, envs].flatten()
    living = batch["alive"][:, envs].flatten().float()
    steps = len(living)

    part = unrolled(net, batch, envs)
    policy = part.policy(net.actions, steps)
    divergence = teacher_kl(cfg, net.actions, batch, envs, policy).dot(living)
    value_loss = 0.5 * (part.values[:steps] - target).square().dot(living)
    total = divergence + cfg.value_cost * value_loss

    with torch.no_grad():
        sums = torch.stack((divergence, value_loss, policy.entropy().dot(living)))
    return total, sums


DISTILL = UnrollAlgorithm[DistillConfig](
    statistics=STATISTICS,
    columns=columns,
    check=check,
    process=process,
    loss=loss,
    prepare=prepare,
)
