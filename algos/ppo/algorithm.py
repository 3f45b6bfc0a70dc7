"""PPO: an actor-critic that trains on each batch several times, within bounds (Schulman et al.
2017, arXiv 1707.06347), corrected for the lag of the policy that acted (Hilton et al. 2021, arXiv
2110.00641).

There are three policies: the *behaviour* policy acted, the *proximal* policy is the network at the
start of a batch, and the *current* one is trained. Ratios are those of the current policy to the
proximal one, so that the clip bounds how far an update changes the policy, whatever the lag. The
importance weight of a row, proximal to behaviour, truncated, corrects for lag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.algos.base import WHOLE, AddOthers, UnrollAlgorithm
from penstock.algos.diagnostics import MOMENTS as SHARED_MOMENTS
from penstock.algos.diagnostics import batch_sums
from penstock.algos.impala.algorithm import check, columns
from penstock.algos.ppo.config import PpoConfig
from penstock.algos.slots import process
from penstock.configs.schedules import constant

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models.torch_heads import ActorCritic

STATISTICS = ("policy_loss", "value_loss", "entropy", "kl", "ratio", "ratio_clipped")
MOMENTS = (*SHARED_MOMENTS, "kl_lag", "rho", "rho_clipped")
MOST_LOG_RATIO = 20.0  # the ratio is clipped far below; beyond it the sums would overflow


def whole(cfg: PpoConfig) -> bool:
    """Returns whether `loss` must see all environments of an update at once."""
    return cfg.normalize_advantages == "minibatch"


def prepare(
    net: ActorCritic,
    batch: Mapping[str, Tensor],
    cfg: PpoConfig,
    parts: Sequence[slice],
    add_others: AddOthers | None = None,
) -> dict[str, Tensor]:
    """Returns what `loss` and `going_on` need besides `columns`, by the network before its first
    update.

    The arguments are those of `UnrollAlgorithm`.

    Returns:
        Float32 ``[T, E]``: ``proximal_logp`` of the actions, ``weight`` (proximal to behaviour, at
        most ``rho_clip``), ``advantage`` (not weighted), ``value``, and ``target`` of the value.
        ``outputs`` ``[T, E, outputs]`` where `going_on` needs them. ``moments``, the sums `MOMENTS`
        over alive rows.
    """
    import torch

    from penstock.algos.ops.gae import gae
    from penstock.algos.ops.normalized import normalized
    from penstock.algos.unrolled import unrolled

    rows = len(batch["obs"])
    alive = batch["alive"]
    mask = alive.flatten().float()
    prepared = {}

    with torch.no_grad():
        # The proximal policy and its values. Parts are joined along the environments.
        unrolls = [unrolled(net, batch, envs) for envs in parts]
        logps = []
        for envs, part in zip(parts, unrolls, strict=True):
            action = batch["action"][:, envs].flatten(0, 1)
            logp = part.policy(net.actions, len(action)).logp(action)
            logps.append(logp.view(rows - 1, -1))
        proximal_logp = torch.cat(logps, 1)
        values = torch.cat([part.values.view(rows, -1) for part in unrolls], 1)
        if cfg.target_kl is not None:
            outputs = [part.outputs.unflatten(0, (rows, -1))[:-1] for part in unrolls]
            prepared["outputs"] = torch.cat(outputs, 1)

        # Advantages and value targets. Only V-trace weighs them.
        log_rho = proximal_logp - batch["behaviour_logp"]
        weight = log_rho.exp().clamp_(max=cfg.rho_clip)
        is_vtrace = cfg.advantages == "vtrace"
        advantage = gae(
            values=values,
            rewards=batch["reward"],
            terminated=batch["terminated"],
            truncated=batch["truncated"],
            alive=alive,
            discount=cfg.discount,
            gae_lambda=cfg.gae_lambda,
            weights=weight if is_vtrace else None,
        )
        errors = advantage * weight if is_vtrace else advantage
        target = errors + values[:-1]

        # Metrics are of the advantages before they are normalised.
        prepared["moments"] = batch_sums(
            mask=mask,
            log_rhos=log_rho.flatten(),
            advantages=advantage.flatten(),
            errors=errors.flatten(),
            targets=target.flatten(),
            rho_clip=cfg.rho_clip,
        )
        if cfg.normalize_advantages == "batch":
            advantage = normalized(advantage.flatten(), mask, add_others).view(alive.shape)

    return {
        **prepared,
        "proximal_logp": proximal_logp,
        "weight": weight,
        "value": values[:-1],
        "target": target,
        "advantage": advantage,
    }


def going_on(
    net: ActorCritic,
    batch: Mapping[str, Tensor],
    cfg: PpoConfig,
    parts: Sequence[slice],
    add_others: AddOthers | None = None,
) -> bool:
    """Returns whether to train on a batch once more.

    That is so while KL(proximal | current), the mean over the alive rows of all learners, is at
    most ``target_kl``. The arguments are those of `UnrollAlgorithm`; ``batch`` also has what
    `prepare` returned.
    """
    if cfg.target_kl is None:
        return True
    import torch

    from penstock.algos.unrolled import unrolled

    # The sum of the divergences, and the number of rows.
    sums = torch.zeros(2, dtype=torch.float64, device=batch["alive"].device)
    with torch.no_grad():
        for envs in parts:
            mask = batch["alive"][:, envs].flatten().double()
            current_part = unrolled(net, batch, envs)
            proximal_outputs = batch["outputs"][:, envs].flatten(0, 1)
            proximal_part = current_part._replace(outputs=proximal_outputs)

            current = current_part.policy(net.actions, len(mask))
            proximal = proximal_part.policy(net.actions, len(mask))
            divergence = proximal.kl(current).double().dot(mask)
            sums += torch.stack((divergence, mask.sum()))

    if add_others is not None:
        add_others(sums)
    divergence_sum, count = sums.tolist()
    return bool(divergence_sum <= cfg.target_kl * count)


def loss(
    net: ActorCritic,
    batch: Mapping[str, Tensor],
    cfg: PpoConfig,
    envs: slice | Tensor = WHOLE,
    add_others: AddOthers | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss and `STATISTICS` of some environments of a batch: `UnrollAlgorithm.loss`.

    "kl" is an estimate of KL(proximal | current), "ratio_clipped" counts the ratios beyond the
    bounds. The sum `TEACHER_KL` follows where there is a teacher.
    """
    import torch

    from penstock.algos.ops.normalized import normalized
    from penstock.algos.ops.teaching import teacher_kl
    from penstock.algos.unrolled import unrolled

    proximal_logp = batch["proximal_logp"][:, envs].flatten()
    weight = batch["weight"][:, envs].flatten()
    advantage = batch["advantage"][:, envs].flatten()
    old_value = batch["value"][:, envs].flatten()
    target = batch["target"][:, envs].flatten()
    alive = batch["alive"][:, envs].flatten()
    mask = alive.to(advantage.dtype)
    steps = len(alive)

    # The ratio of the current policy to the proximal one, and the ratio within the clip.
    part = unrolled(net, batch, envs)
    policy = part.policy(net.actions, steps)
    logp = policy.logp(batch["action"][:, envs].flatten(0, 1))
    log_ratio = ((logp - proximal_logp) * mask).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    ratio = log_ratio.exp()
    clip = constant(cfg.clip)
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)

    # The weight comes after the normalisation, whose mean is that of rows of equal weight.
    # Advantages are 0 on rows that are not alive, and so are their terms of the sum.
    if whole(cfg):
        advantage = normalized(advantage, mask, add_others)
    advantage = advantage * weight
    policy_loss = -torch.minimum(ratio * advantage, clipped_ratio * advantage).sum()

    errors = _squared_errors(part.values[:steps], target, old_value, clip=cfg.value_clip)
    value_loss = 0.5 * torch.dot(errors, mask)
    entropy = torch.dot(policy.entropy(), mask)
    total = policy_loss + cfg.value_cost * value_loss - constant(cfg.entropy_cost) * entropy

    with torch.no_grad():
        kl = (ratio - 1 - log_ratio).dot(mask)
        clipped_count = (ratio != clipped_ratio).to(mask.dtype).dot(mask)
        sums = torch.stack((policy_loss, value_loss, entropy, kl, ratio.dot(mask), clipped_count))
    if cfg.teacher is not None:
        divergence = teacher_kl(cfg, net.actions, batch, envs, policy).dot(mask)
        total = total + constant(cfg.teacher_cost) * divergence
        sums = torch.cat((sums, divergence.detach()[None]))
    return total, sums


def _squared_errors(
    values: Tensor, target: Tensor, old_values: Tensor, *, clip: float | None
) -> Tensor:
    """Returns squared errors of values ``[B]``.

    With ``clip`` a value is also moved to within ``clip`` of its old value, and the larger error of
    the two counts.
    """
    import torch

    errors = (values - target).square()
    if clip is None:
        return errors
    clipped_values = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(errors, (clipped_values - target).square())


PPO = UnrollAlgorithm[PpoConfig](
    statistics=STATISTICS,
    columns=columns,
    check=check,
    process=process,
    loss=loss,
    prepare=prepare,
    going_on=going_on,
    whole=whole,
    moments=MOMENTS,
    by_epoch=("kl", "ratio_clipped"),
)
