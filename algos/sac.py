"""SAC: a squashed Gaussian actor and twin critics, learnt from replay.

Haarnoja et al. 2018, arXiv 1812.05905: soft actor-critic with a temperature that is tuned towards a
target entropy. Actions are from -1 to 1 in each value, as policies choose them.

What the actor records is `columns`, what happens to a filled slot `process`; the learner minimises
`critic_loss`, then `actor_loss`, then `temperature_loss`, each a sum over the batch. Only these
import torch, and only when called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.algos import slots
from penstock.algos.base import ReplayAlgorithm
from penstock.configs.algorithms import SacConfig
from penstock.configs.schema import Config
from penstock.core.observations import Spaces
from penstock.core.params import ParamLayout
from penstock.core.specs import Column
from penstock.models.acting.gaussian import SquashedGaussianSampler
from penstock.models.fitting import gaussian_shape
from penstock.models.layout import HeadShape

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models.torch_nets import HeadNet, TwinCritics

STATISTICS = ("critic_loss", "actor_loss", "td_error", "q_mean", "entropy", "alpha")
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
MOST_ACTION = 1 + 1e-6


def columns(observation_space: Any, action_space: Any) -> tuple[Column, ...]:
    """What one slot holds."""
    return slots.columns(observation_space, Column("action", "<f4", tuple(action_space.shape)))


def check(columns: dict[str, npt.NDArray[Any]], layout: ParamLayout) -> None:
    """Raise ValueError for values that no sound actor records."""
    slots.check(columns)
    most = np.abs(columns["action"]).max()
    if most > MOST_ACTION:
        raise ValueError(f"an action of {most}, which goes from -1 to 1")


def process(cfg: SacConfig, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Clip and scale the rewards of a filled slot, in place; `episode_return` stays raw."""
    slots.adjust_rewards(cfg, columns["reward"])


def squashed(outputs: Tensor, noise: Tensor, log_std: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Actions ``tanh(mean + std * noise)`` ``[B, D]`` and their log-densities ``[B]``.

    ``outputs`` ``[B, 2 D]``: means, then logarithms of standard deviations, to be kept within
    ``log_std``; ``noise`` ``[B, D]`` is standard normal. Appendix C of the paper, with
    ``log(1 - tanh(u)^2)`` as ``2 (log 2 - u - softplus(-2 u))``, which never is the log of 0.
    """
    import torch
    from torch.nn.functional import softplus

    mean, wide = outputs.chunk(2, 1)
    wide = wide.clamp(*log_std)
    before = torch.addcmul(mean, wide.exp(), noise)
    log_slope = 2 * (math.log(2) - before - softplus(-2 * before))
    log_density = -0.5 * noise.square() - HALF_LOG_2PI - wide - log_slope
    return before.tanh(), log_density.sum(1)


def critic_loss(
    critics: TwinCritics,
    target_weights: list[Tensor],
    batch: Mapping[str, Tensor],
    next_action: Tensor,
    next_logp: Tensor,
    alpha: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Half the squared error of both critics, weighted: equations 5 and 6.

    ``batch`` as for `penstock.algos.dqn.loss` with ``action`` ``[B, *shape]``; ``next_action``
    ``[B, D]`` and ``next_logp`` ``[B]`` are the actor's for ``next_obs``. Returns the loss ``[]``,
    the absolute temporal differences ``[B]``, a mean of both critics', and the sum of the values
    ``[]``; the latter two carry no gradient.
    """
    import torch

    with torch.no_grad():
        next_q = critics.values(batch["next_obs"], next_action, target_weights).amin(0)
        soft = next_q - alpha * next_logp
        target = torch.addcmul(batch["reward"], batch["discount"], soft)
    values = critics(batch["obs"], batch["action"])
    errors = target - values
    loss = 0.5 * torch.mv(errors.square(), batch["weights"]).sum()
    return loss, errors.detach().abs().mean(0), values.detach().mean(0).sum()


def actor_loss(
    critics: TwinCritics, obs: Tensor, action: Tensor, logp: Tensor, alpha: Tensor
) -> Tensor:
    """``alpha * logp - Q``, equation 9: its gradient reaches the actor only, through ``action``
    ``[B, D]`` and ``logp`` ``[B]``."""
    fixed = [weight.detach() for weight in critics.weights()]
    return (alpha * logp - critics.values(obs, action, fixed).amin(0)).sum()


def temperature_loss(log_alpha: Tensor, logp: Tensor, target_entropy: float) -> Tensor:
    """Equation 18, by the logarithm of alpha: too little entropy makes it grow.

    As in the authors' code the factor is ``log_alpha``, not alpha: same sign of the gradient, and a
    small alpha is not slow to grow again.
    """
    return -(log_alpha * (logp.detach() + target_entropy)).sum()


def target_entropy(cfg: SacConfig, action_size: int) -> float:
    """In nats; by default minus the number of values in an action."""
    return -float(action_size) if cfg.target_entropy is None else cfg.target_entropy


def policy_sample(
    actor: HeadNet, obs: Tensor, cfg: SacConfig, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """`squashed` of the actor's outputs for observations ``[B, *shape]``."""
    return squashed(actor(obs), noise, (cfg.log_std_min, cfg.log_std_max))


def network(config: Config, spaces: Spaces) -> HeadShape:
    """Means and logarithms of standard deviations."""
    return gaussian_shape(config.model, spaces)


def action_sampler(
    config: Config, spaces: Spaces, seed: int, actor: int
) -> SquashedGaussianSampler:
    """Numbers between -1 and 1, drawn by the policy's own deviations."""
    cfg = config.algo
    assert isinstance(cfg, SacConfig), cfg
    bounds, rng = (cfg.log_std_min, cfg.log_std_max), np.random.default_rng(seed)
    return SquashedGaussianSampler(spaces.action_space.shape, config.actors.envs, bounds, rng)


SAC = ReplayAlgorithm[SacConfig](
    columns, check, process, network, action_sampler, update="penstock.algos.sac_update:SacUpdate"
)
