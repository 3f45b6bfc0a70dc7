"""The learner's half of R2D2: values of sequences, their targets, the loss and the priorities.

Sequences lie within one episode, are time-major, and end with it or before: `mask` says where. A
target bootstraps from the observation that the sequence reaches after `n_step` steps, or at its
end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.algos.core_inputs import unrolled_inputs
from penstock.algos.dqn.losses import (
    action_values,
    best_actions,
    over_choices,
    row_losses,
    sum_of_means,
)
from penstock.algos.dqn.update import DqnUpdate
from penstock.algos.r2d2.config import R2d2Config
from penstock.algos.replay_update import Batch, UpdateContext
from penstock.models.torch_heads import HeadNet

ETA = 0.9
"""Weight of the largest error of a sequence in its priority; the rest is that of the mean."""
RESCALING = 1e-3
"""The linear part of `rescale`, which keeps it invertible with a bounded slope."""


def rescale(values: Tensor) -> Tensor:
    """Returns ``h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x``, by which large values are smaller.

    So rewards need not be clipped (Pohlen et al. 2018, arXiv 1805.11593).
    """
    return values.sign() * ((values.abs() + 1).sqrt() - 1) + RESCALING * values


def unscale(values: Tensor) -> Tensor:
    """Returns the inverse of `rescale`.

    With ``s = sqrt(|x| + 1)`` and ``y = |h(x)|``, s is the positive root of ``eps s^2 + s = y + 1 +
    eps``. It is written as a quotient, since a difference of roots would lose four digits.
    """
    constant = values.abs() + (1 + RESCALING)
    root = 2 * constant / (1 + (1 + 4 * RESCALING * constant).sqrt())
    return values.sign() * (root - 1) * (root + 1)


def trained_steps(mask: Tensor, state: Tensor, burn_in: int) -> Tensor:
    """Returns which steps of B sequences are trained on, bool ``[length, B]``.

    The first ``burn_in`` steps only bring the stored state up to date. They are trained on where
    that state is 0, as an episode begins there and the state is exact: else the first steps of an
    episode, or whole short episodes, would never be trained on.

    Args:
        mask: which steps belong to a sequence, bool ``[length, B]``.
        state: before the first step, float32 ``[B, size]``.
        burn_in: steps.
    """
    begins_episode = ~state.any(1)
    trained = mask.clone()
    trained[:burn_in] &= begins_episode
    return trained


def n_step_returns(
    reward: Tensor, discount: Tensor, next_value: Tensor, mask: Tensor, n_step: int
) -> Tensor:
    """Returns the returns of the steps of sequences, in the shape of ``next_value``.

    ``R[t] = r[t] + ... + g^(k-1) r[t+k-1] + g^k V``, where V is the value of the observation after
    step t + k - 1, and k is ``n_step``, or less where the sequence ends before.

    Args:
        reward: ``[length, B]``.
        discount: gamma, or 0 where the episode terminated, ``[length, B]``.
        next_value: the value of the observation after each step, ``[length, B]``, or its quantiles
            ``[length, B, N]``.
        mask: which steps belong to a sequence, bool ``[length, B]``.
        n_step: the most rewards of a return.
    """
    goes_on = mask[1:]
    if next_value.ndim == 3:  # Each quantile is discounted.
        reward = reward[..., None]
        discount = discount[..., None]
        goes_on = goes_on[..., None]

    returns = torch.addcmul(reward, discount, next_value)
    for _ in range(1, n_step):
        # A return of one more step is that of the next step, one step later.
        later = next_value.clone()
        later[:-1] = torch.where(goes_on, returns[1:], next_value[:-1])
        returns = torch.addcmul(reward, discount, later)
    return returns


class SequenceRows(NamedTuple):
    """What a network reads of B sequences, with the observation after the last step."""

    obs: Tensor
    """``[length + 1, B, *shape]``."""
    state: Tensor
    """Before the first step, float32 ``[B, state_size]``."""
    inputs: Tensor | None
    """What the core reads besides the features, float32 ``[length + 1, B, width]``."""
    trained: Tensor
    """What `trained_steps` returned."""

    @classmethod
    def of(cls, net: HeadNet, batch: Mapping[str, Tensor], burn_in: int) -> SequenceRows:
        """Returns the rows of a batch, for networks such as ``net``."""
        obs = torch.cat([batch["obs"], batch["next_obs"][-1:]])
        state = batch["state"]

        inputs = None
        if net.core_inputs is not None:
            inputs = unrolled_inputs(
                net.core_inputs,
                state,
                actions=batch["action"],
                rewards=batch["reward"],
                first=torch.zeros(obs.shape[:2], dtype=torch.bool, device=obs.device),
            )
        return cls(obs, state, inputs, trained_steps(batch["mask"], state, burn_in))

    def values(self, net: HeadNet, burn_in: int = 0) -> Tensor:
        """Returns the values of the observations, ``[length + 1, B, outputs]`` or with quantiles.

        No gradient passes from a sequence with a burn-in to the weights that warmed its state up.
        """
        rows, sequences = self.obs.shape[:2]
        if not burn_in:
            values, _ = net.unroll(self.obs, self.state, inputs=self.inputs)
            return values.view(rows, sequences, *values.shape[1:])

        warm_up_inputs = None if self.inputs is None else self.inputs[:burn_in]
        inputs = None if self.inputs is None else self.inputs[burn_in:]

        # Where the first step is trained on, so are those that follow it.
        has_no_burn_in = self.trained[0][:, None]
        warm_up_values, warm_state = net.unroll(
            self.obs[:burn_in], self.state, inputs=warm_up_inputs
        )
        state = torch.where(has_no_burn_in, warm_state, warm_state.detach())
        later_values, _ = net.unroll(self.obs[burn_in:], state, inputs=inputs)
        values = torch.cat([warm_up_values, later_values])
        return values.view(rows, sequences, *values.shape[1:])


def loss(
    net: HeadNet, target_net: HeadNet, batch: Mapping[str, Tensor], cfg: R2d2Config
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weighted loss, priorities and `dqn.update.STATISTICS` of sequences.

    With `double`, ``net`` chooses the next action and ``target_net`` evaluates it. Both begin from
    the stored state (Kapturowski et al. 2019, section 2.3).

    Args:
        net: the network that is trained.
        target_net: the same network that lags behind.
        batch: see `penstock.replay.sequences.SequenceGather`.
        cfg: the options.

    Returns:
        The loss ``[]``, a sum over the steps that are trained on; the priority of each sequence
        ``[B]``; and the sums of the statistics. Only the loss carries a gradient.
    """
    mask = batch["mask"]
    branches = net.head_shape.branches
    rows = SequenceRows.of(net, batch, cfg.burn_in)
    trained = rows.trained
    values = rows.values(net, cfg.burn_in)
    action = batch["action"].long().reshape(mask.numel(), -1)
    taken = action_values(values[:-1].flatten(0, 1), action, branches)

    with torch.no_grad():
        # Values of the observations after each step.
        next_values = rows.values(target_net)[1:].flatten(0, 1)
        chooser = values[1:].flatten(0, 1) if cfg.double else next_values
        best = best_actions(chooser, net.mask(batch["next_obs"]), branches)
        next_value = over_choices(action_values(unscale(next_values), best, branches))

        returns = n_step_returns(
            batch["reward"],
            batch["discount"],
            next_value=next_value.unflatten(0, mask.shape),
            mask=mask,
            n_step=cfg.n_step,
        )
        target = rescale(returns).flatten(0, 1)

    row_loss, difference = row_losses(taken, target, cfg.huber)
    losses = row_loss.view(mask.shape) * trained
    total = torch.dot(losses.sum(0), batch["weights"])

    errors = difference.view(mask.shape).abs() * trained
    counts = trained.sum(0).clamp_min(1)
    priorities = ETA * errors.amax(0) + (1 - ETA) * errors.sum(0) / counts
    trained_rows = trained.flatten()
    q_sum = sum_of_means(taken.detach()[trained_rows])
    target_sum = sum_of_means(target[trained_rows])
    return total, priorities, torch.stack((total.detach(), errors.sum(), q_sum, target_sum))


class R2d2Update(DqnUpdate):
    """The recurrent Q-network with its optimizer, and the target network."""

    _algo: R2d2Config

    def __init__(self, algo: R2d2Config, ctx: UpdateContext) -> None:
        super().__init__(algo, ctx)
        # A row is a sequence, which is as many observations, with the one after its last step.
        self._micro_batch = max(1, ctx.micro_batch // (algo.sequence_length + 1))

    def _rows(self, batch: Batch, rows: slice) -> Batch:
        return {
            name: column[rows] if name in ("state", "weights") else column[:, rows]
            for name, column in batch.items()
        }

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        return loss(self.net, self.target_net, batch, self._algo)
