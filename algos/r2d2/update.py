"""The learner's half of R2D2: values of sequences, their targets, the loss and the priorities.

Sequences lie within one episode, are time-major, and end with it or before: `mask` says where. A
target bootstraps from the observation that the sequence reaches after `n_step` steps, or at its
end.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.algos.dqn.update import DqnUpdate, MicroBatchResult
from penstock.algos.ops.backward import backward
from penstock.algos.r2d2.config import R2d2Config
from penstock.algos.replay_update import Batch, UpdateContext
from penstock.models.torch_heads import HeadNet, of_allowed
from penstock.profiling.ledger import Part

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
    """Returns the returns of the steps of sequences, ``[length, B]``.

    ``R[t] = r[t] + ... + g^(k-1) r[t+k-1] + g^k V``, where V is the value of the observation after
    step t + k - 1, and k is ``n_step``, or less where the sequence ends before.

    Args:
        reward: ``[length, B]``, as the following ones.
        discount: gamma, or 0 where the episode terminated.
        next_value: the value of the observation after each step.
        mask: which steps belong to a sequence.
        n_step: the most rewards of a return.
    """
    goes_on = mask[1:]
    returns = torch.addcmul(reward, discount, next_value)
    for _ in range(1, n_step):
        # A return of one more step is that of the next step, one step later.
        later = next_value.clone()
        later[:-1] = torch.where(goes_on, returns[1:], next_value[:-1])
        returns = torch.addcmul(reward, discount, later)
    return returns


def sequence_values(
    net: HeadNet, obs: Tensor, state: Tensor, trained: Tensor, burn_in: int
) -> Tensor:
    """Returns the Q-values of the observations of sequences, float32 ``[length + 1, B, actions]``.

    No gradient passes from a sequence with a burn-in to the weights that warmed its state up.

    Args:
        net: a network with memory.
        obs: ``[length + 1, B, *shape]``, also those after the last steps.
        state: before the first step, float32 ``[B, state_size]``.
        trained: what `trained_steps` returned.
        burn_in: steps.
    """
    rows, sequences = obs.shape[:2]
    if not burn_in:
        outputs, _ = net.unroll(obs, state)
        return outputs.view(rows, sequences, -1)

    # Where the first step is trained on, so are those that follow it.
    has_no_burn_in = trained[0][:, None]
    warm_up_outputs, warm_state = net.unroll(obs[:burn_in], state)
    state = torch.where(has_no_burn_in, warm_state, warm_state.detach())
    outputs, _ = net.unroll(obs[burn_in:], state)
    return torch.cat([warm_up_outputs, outputs]).view(rows, sequences, -1)


def loss(
    net: HeadNet, target_net: HeadNet, batch: Mapping[str, Tensor], cfg: R2d2Config
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weighted Huber loss, priorities and `dqn.update.STATISTICS` of sequences.

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
    state = batch["state"]
    trained = trained_steps(mask, state, cfg.burn_in)
    obs = torch.cat([batch["obs"], batch["next_obs"][-1:]])
    q = sequence_values(net, obs, state, trained, cfg.burn_in)
    action = batch["action"].long()[..., None]
    values = q[:-1].gather(2, action)[..., 0]

    with torch.no_grad():
        # Values of the observations after each step.
        target_outputs, _ = target_net.unroll(obs, state)
        next_q = target_outputs.view(q.shape)[1:].flatten(0, 1)
        next_mask = net.mask(batch["next_obs"])
        chooser = q[1:].flatten(0, 1) if cfg.double else next_q
        best = of_allowed(chooser, next_mask).argmax(1, keepdim=True)
        next_value = unscale(next_q.gather(1, best)).view(mask.shape)

        returns = n_step_returns(
            batch["reward"], batch["discount"], next_value, mask, n_step=cfg.n_step
        )
        target = rescale(returns)

    # Half the square within the bounds, linear beyond.
    difference = (target - values) * trained
    clipped = difference.clamp(-cfg.huber, cfg.huber)
    losses = clipped * (difference - 0.5 * clipped)
    total = torch.dot(losses.sum(0), batch["weights"])

    errors = difference.detach().abs()
    counts = trained.sum(0).clamp_min(1)
    priorities = ETA * errors.amax(0) + (1 - ETA) * errors.sum(0) / counts
    value_sum = (values.detach() * trained).sum()
    sums = (total.detach(), errors.sum(), value_sum, (target * trained).sum())
    return total, priorities, torch.stack(sums)


class R2d2Update(DqnUpdate):
    """The recurrent Q-network with its optimizer, and the target network."""

    _algo: R2d2Config

    def __init__(self, algo: R2d2Config, ctx: UpdateContext) -> None:
        super().__init__(algo, ctx)
        # A sequence is as many observations, with the one after its last step.
        self._sequences = max(1, ctx.micro_batch // (algo.sequence_length + 1))

    def _backward(self, batch: Batch, total: float) -> list[MicroBatchResult]:
        count = batch["reward"].shape[1]
        results = []
        for start in range(0, count, self._sequences):
            end = start + self._sequences
            part = {
                name: column[start:end] if name in ("state", "weights") else column[:, start:end]
                for name, column in batch.items()
            }

            self._ledger.switch(Part.FORWARD)
            total_loss, priorities, sums = loss(self.net, self.target_net, part, self._algo)

            # The last backward pass completes the gradients.
            if end >= count:
                self.optimizer.prepare_backward(total)
            self._ledger.switch(Part.BACKWARD)
            backward(total_loss)

            # This frees the activations before the next pass makes others.
            del total_loss
            results.append(MicroBatchResult(priorities, sums))
        return results
