"""PPO: an actor-critic that trains on each batch several times, within bounds (Schulman et al.
2017, arXiv 1707.06347), corrected for the lag of the policy that acted (Hilton et al. 2021, arXiv
2110.00641).

There are three policies: the *behaviour* policy acted, the *proximal* policy is the network at the
start of a batch, and the *current* one is trained. Ratios are those of the current policy to the
proximal one, so that the clip bounds how far an update changes the policy, whatever the lag. The
importance weight of a row, proximal to behaviour, truncated, corrects for lag.

`columns` are what the actor records. `prepare` comes before the epochs of a batch, `going_on`
between them, and `loss` is what the learner minimises. Only these import torch, and only when they
are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.algos.base import UnrollAlgorithm
from penstock.algos.diagnostics import MOMENTS as SHARED_MOMENTS
from penstock.algos.diagnostics import batch_sums
from penstock.algos.impala.algorithm import check, columns
from penstock.algos.ppo.config import PpoConfig
from penstock.algos.slots import process
from penstock.configs.schedules import constant

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.algos.unrolled import Unrolled
    from penstock.models.distributions import Distribution
    from penstock.models.torch_heads import ActorCritic

    AddOthers = Callable[[Tensor], None]

STATISTICS = ("policy_loss", "value_loss", "entropy", "kl", "ratio", "ratio_clipped")
MOMENTS = (*SHARED_MOMENTS, "kl_lag", "rho", "rho_clipped")
WHOLE = slice(None)
MOST_LOG_RATIO = 20.0  # clipped far below; beyond it sums would overflow


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

    Args:
        net: the network, whose policy is the proximal one.
        batch: `columns` as tensors ``[T, E, ...]``; observations are ``[T + 1, E, ...]``.
        cfg: the options.
        parts: the environments, divided into as many as are to be computed at once.
        add_others: adds to a tensor, in place, those of the learners that share the batch.

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

    rows, alive = len(batch["obs"]), batch["alive"]
    mask = alive.flatten().float()
    with torch.no_grad():
        unrolls = [unrolled(net, batch, envs) for envs in parts]
        values = torch.cat([part.values.view(rows, -1) for part in unrolls], 1)
        actions = [batch["action"][:, envs].flatten(0, 1) for envs in parts]
        logps = [
            _policy(net, part, len(action)).logp(action)
            for part, action in zip(unrolls, actions, strict=True)
        ]
        proximal_logp = torch.cat([logp.view(rows - 1, -1) for logp in logps], 1)
        log_rho = proximal_logp - batch["behaviour_logp"]
        weight = log_rho.exp().clamp_(max=cfg.rho_clip)
        advantage = gae(
            values,
            batch["reward"],
            *(batch[name] for name in ("terminated", "truncated", "alive")),
            discount=cfg.discount,
            gae_lambda=cfg.gae_lambda,
            weights=weight if cfg.advantages == "vtrace" else None,
        )
        errors = advantage * weight if cfg.advantages == "vtrace" else advantage
        found = {
            "proximal_logp": proximal_logp,
            "weight": weight,
            "value": values[:-1],
            "target": errors + values[:-1],
        }
        rows_of = (log_rho, advantage, errors, found["target"])
        flat = (tensor.flatten() for tensor in rows_of)
        found["moments"] = batch_sums(mask, *flat, rho_clip=cfg.rho_clip)
        if cfg.normalize_advantages == "batch":
            advantage = normalized(advantage.flatten(), mask, add_others).view(alive.shape)
        if cfg.target_kl is not None:
            outputs = [part.outputs.unflatten(0, (rows, -1))[:-1] for part in unrolls]
            found["outputs"] = torch.cat(outputs, 1)
    return {**found, "advantage": advantage}


def going_on(
    net: ActorCritic,
    batch: Mapping[str, Tensor],
    cfg: PpoConfig,
    parts: Sequence[slice],
    add_others: AddOthers | None = None,
) -> bool:
    """Returns whether to train on a batch once more.

    That is so while KL(proximal | current), the mean over the alive rows of all learners, is at
    most ``target_kl``. The arguments are those of `prepare`; ``batch`` also has what that returned.
    """
    if cfg.target_kl is None:
        return True
    import torch

    from penstock.algos.unrolled import unrolled

    sums = torch.zeros(2, dtype=torch.float64, device=batch["alive"].device)
    with torch.no_grad():
        for envs in parts:
            mask = batch["alive"][:, envs].flatten().double()
            part = unrolled(net, batch, envs)
            proximal = part._replace(outputs=batch["outputs"][:, envs].flatten(0, 1))
            before, now = (_policy(net, policy, len(mask)) for policy in (proximal, part))
            sums += torch.stack((before.kl(now).double().dot(mask), mask.sum()))
    if add_others is not None:
        add_others(sums)
    total, count = sums.tolist()
    return bool(total <= cfg.target_kl * count)


def loss(
    net: ActorCritic,
    batch: Mapping[str, Tensor],
    cfg: PpoConfig,
    envs: slice | Tensor = WHOLE,
    add_others: AddOthers | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss and `STATISTICS` of some environments of a batch, summed over alive rows.

    They are sums, so that those of micro-batches add up: divide gradient and statistics by the
    alive rows of the whole update.

    Args:
        net: the network that is trained, whose policy is the current one.
        batch: `columns` as tensors ``[T, E, ...]``, observations ``[T + 1, E, ...]``, and what
            `prepare` made of them.
        cfg: the options.
        envs: which environments. Where `whole` says so, these must be the whole update.
        add_others: adds to a tensor, in place, those of the learners that share the update.

    Returns:
        The loss ``[]``, and float32 ``[len(STATISTICS)]`` without a gradient. "kl" is an estimate
        of KL(proximal | current), "ratio_clipped" counts the ratios beyond the bounds.
    """
    import torch

    from penstock.algos.ops.normalized import normalized
    from penstock.algos.unrolled import unrolled

    proximal_logp, weight, advantage, old_value, target, alive = (
        batch[name][:, envs].flatten()
        for name in ("proximal_logp", "weight", "advantage", "value", "target", "alive")
    )
    mask, steps = alive.to(advantage.dtype), len(alive)
    part = unrolled(net, batch, envs)
    policy = _policy(net, part, steps)
    logp = policy.logp(batch["action"][:, envs].flatten(0, 1))
    log_ratio = ((logp - proximal_logp) * mask).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    ratio = log_ratio.exp()
    clip = constant(cfg.clip)
    bounded = ratio.clamp(1 - clip, 1 + clip)
    if whole(cfg):
        advantage = normalized(advantage, mask, add_others)
    advantage = advantage * weight  # after it was normalised: the mean is that of equal rows
    # Advantages are 0 on rows that are not alive, and so are their terms of the sum.
    policy_loss = -torch.minimum(ratio * advantage, bounded * advantage).sum()
    errors = _errors(part.values[:steps], target, old_value, cfg.value_clip)
    value_loss = 0.5 * torch.dot(errors, mask)
    entropy = torch.dot(policy.entropy(), mask)
    total = policy_loss + cfg.value_cost * value_loss - constant(cfg.entropy_cost) * entropy
    with torch.no_grad():
        kl = (ratio - 1 - log_ratio).dot(mask)
        beyond = (ratio != bounded).to(mask.dtype).dot(mask)
        sums = torch.stack((policy_loss, value_loss, entropy, kl, ratio.dot(mask), beyond))
    return total, sums


def _policy(net: ActorCritic, part: Unrolled, steps: int) -> Distribution:
    """Returns the policy in the first ``steps`` rows of an unrolled network."""
    from penstock.models.distributions import distribution

    mask = None if part.mask is None else part.mask[:steps]
    return distribution(net.actions, part.outputs[:steps], mask)


def _errors(values: Tensor, target: Tensor, old: Tensor, clip: float | None) -> Tensor:
    """Squared errors of values; bounded by ``clip``, those of whichever is farther from its target:
    the value, or the one within ``clip`` of its old value."""
    import torch

    errors = (values - target).square()
    if clip is None:
        return errors
    near = old + (values - old).clamp(-clip, clip)
    return torch.maximum(errors, (near - target).square())


PPO = UnrollAlgorithm[PpoConfig](
    STATISTICS,
    columns,
    check,
    process,
    loss,
    prepare=prepare,
    going_on=going_on,
    whole=whole,
    moments=MOMENTS,
    by_epoch=("kl", "ratio_clipped"),
)
