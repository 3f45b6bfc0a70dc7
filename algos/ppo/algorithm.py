"""PPO: an actor-critic that trains on each batch several times, within bounds (Schulman et al.
2017, arXiv 1707.06347).

Asynchronous: ratios are against the probability by which the actor took the action, so that the
lag of its policy counts as a move like any other. What the actor records is `columns`; before the
epochs of a batch comes `prepare`, between them `going_on`, and `loss` is what the learner
minimises. Only these import torch, and only when called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.algos.base import UnrollAlgorithm
from penstock.algos.impala.algorithm import check, columns
from penstock.algos.ppo.config import PpoConfig
from penstock.algos.slots import process
from penstock.configs.schedules import constant

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models.torch_heads import ActorCritic

    AddOthers = Callable[[Tensor], None]

STATISTICS = ("policy_loss", "value_loss", "entropy", "kl", "ratio", "ratio_clipped")
WHOLE = slice(None)
MOST_LOG_RATIO = 20.0  # clipped far below; beyond it sums would overflow


def whole(cfg: PpoConfig) -> bool:
    """Whether `loss` must see all environments of an update at once."""
    return cfg.normalize_advantages == "minibatch"


def prepare(
    net: ActorCritic,
    batch: Mapping[str, Tensor],
    cfg: PpoConfig,
    parts: Sequence[slice],
    add_others: AddOthers | None = None,
) -> dict[str, Tensor]:
    """What `loss` and `going_on` need besides `columns`, by the network before its first update.

    ``parts`` are the environments, as many at a time as are to be computed at once. Returns
    ``value``, ``advantage`` and ``target`` (of the value), float32 ``[T, E]``, and ``outputs``
    ``[T, E, outputs]`` where `going_on` needs them.
    """
    import torch

    from penstock.algos.ops.gae import gae
    from penstock.algos.ops.normalized import normalized
    from penstock.algos.unrolled import unrolled

    rows, alive = len(batch["obs"]), batch["alive"]
    with torch.no_grad():
        unrolls = [unrolled(net, batch, envs) for envs in parts]
        values = torch.cat([part.values.view(rows, -1) for part in unrolls], 1)
        advantage = gae(
            values,
            batch["reward"],
            *(batch[name] for name in ("terminated", "truncated", "alive")),
            discount=cfg.discount,
            gae_lambda=cfg.gae_lambda,
        )
        found = {"value": values[:-1], "target": advantage + values[:-1]}
        if cfg.normalize_advantages == "batch":
            flat = normalized(advantage.flatten(), alive.flatten().float(), add_others)
            advantage = flat.view(alive.shape)
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
    """Whether to train on a batch once more: the policy that `prepare` saw and the current one are
    no farther apart, by the mean over alive rows of all learners, than ``target_kl``."""
    if cfg.target_kl is None:
        return True
    import torch

    from penstock.algos.unrolled import unrolled
    from penstock.models.distributions import distribution

    sums = torch.zeros(2, dtype=torch.float64, device=batch["alive"].device)
    with torch.no_grad():
        for envs in parts:
            mask = batch["alive"][:, envs].flatten().double()
            steps = len(mask)
            unrolled_net = unrolled(net, batch, envs)
            allowed = None if unrolled_net.mask is None else unrolled_net.mask[:steps]
            before, now = (
                distribution(net.actions, outputs, allowed)
                for outputs in (
                    batch["outputs"][:, envs].flatten(0, 1),
                    unrolled_net.outputs[:steps],
                )
            )
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
    """Loss and `STATISTICS` of the environments ``envs`` of a batch, both summed over alive rows.

    ``batch`` holds `columns` as tensors ``[T(+1), E, ...]`` and what `prepare` made of them. Sums,
    so that those of micro-batches add up: divide gradient and statistics by the alive rows of the
    whole update. The statistics, float32 ``[len(STATISTICS)]``, carry no gradient: "kl" is an
    estimate of KL(actor | learner), "ratio_clipped" counts the ratios beyond the bounds.
    """
    import torch

    from penstock.algos.ops.normalized import normalized
    from penstock.algos.unrolled import unrolled
    from penstock.models.distributions import distribution

    behaviour_logp, advantage, old_value, target, alive = (
        batch[name][:, envs].flatten()
        for name in ("behaviour_logp", "advantage", "value", "target", "alive")
    )
    mask, steps = alive.to(advantage.dtype), len(alive)
    outputs, values, allowed = unrolled(net, batch, envs)
    allowed = None if allowed is None else allowed[:steps]
    policy = distribution(net.actions, outputs[:steps], allowed)
    logp = policy.logp(batch["action"][:, envs].flatten(0, 1))
    log_ratio = ((logp - behaviour_logp) * mask).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    ratio = log_ratio.exp()
    clip = constant(cfg.clip)
    bounded = ratio.clamp(1 - clip, 1 + clip)
    if whole(cfg):
        advantage = normalized(advantage, mask, add_others)
    # Advantages are 0 on rows that are not alive, and so are their terms of the sum.
    policy_loss = -torch.minimum(ratio * advantage, bounded * advantage).sum()
    value_loss = 0.5 * torch.dot(_errors(values[:steps], target, old_value, cfg.value_clip), mask)
    entropy = torch.dot(policy.entropy(), mask)
    total = policy_loss + cfg.value_cost * value_loss - constant(cfg.entropy_cost) * entropy
    with torch.no_grad():
        kl = (ratio - 1 - log_ratio).dot(mask)
        beyond = (ratio != bounded).to(mask.dtype).dot(mask)
        sums = torch.stack((policy_loss, value_loss, entropy, kl, ratio.dot(mask), beyond))
    return total, sums


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
    STATISTICS, columns, check, process, loss, prepare=prepare, going_on=going_on, whole=whole
)
