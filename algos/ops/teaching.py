"""What teachers would do, as outputs of the student's network, and how far the student is from it.

All outputs are float32 ``[B, outputs]`` as `penstock.models.distributions` reads them: logits of
choices, or means and logarithms of deviations of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.algos.action_rule import ActionRule
from penstock.configs.algorithms import AlgoConfig
from penstock.models.actions import ActionSpec, Numbers
from penstock.models.distributions import FORBIDDEN, Categoricals, Distribution, distribution

OUTPUTS = "teacher_outputs"
"""Column ``[T, E, outputs]`` of a batch: what the teachers would do."""
VALUE = "teacher_value"
"""Column ``[T, E]``: the values that the teachers give the states."""


def policy_outputs(
    rule: ActionRule, outputs: Tensor, mask: Tensor | None, q_temperature: float
) -> Tensor:
    """Returns the outputs of a teacher's network as those of a policy.

    Q-values become logits (Rusu et al. 2015, arXiv 1511.06295, equation 3), deviations are brought
    within the bounds of the teacher's algorithm, and choices that ``mask`` ``[B, outputs]`` forbids
    become unlikely.
    """
    if rule.log_std is not None:
        mean, log_std = outputs.chunk(2, 1)
        return torch.cat([mean, log_std.clamp(*rule.log_std)], 1)

    logits = outputs / q_temperature if rule.has_values else outputs
    return logits if mask is None else torch.where(mask != 0, logits, FORBIDDEN)


def mean_outputs(actions: ActionSpec, outputs: Sequence[Tensor]) -> Tensor:
    """Returns the outputs of the policy that stands for several teachers at once.

    Of choices its probabilities are the means of theirs. Of numbers it is the normal distribution
    with the mean and the variance of their mixture: the divergence of the mixture from a student
    differs from that of this distribution by a constant.
    """
    if isinstance(actions, Numbers):
        means, log_stds = torch.stack([*outputs]).chunk(2, 2)
        mean = means.mean(0)
        variance = (2 * log_stds).exp().mean(0) + means.var(0, correction=0)
        return torch.cat([mean, 0.5 * variance.log()], 1)

    logps = [Categoricals(actions, logits, mask=None).all_logp for logits in outputs]
    return torch.stack(logps).logsumexp(0).t()


def teacher_kl(
    cfg: AlgoConfig,
    actions: ActionSpec,
    batch: Mapping[str, Tensor],
    envs: slice | Tensor,
    policy: Distribution,
) -> Tensor:
    """Returns KL(teacher | student) in nats, ``[B]``, differentiable in the student.

    It is 0 while nobody teaches (`AlgoConfig.teaching`).

    Args:
        cfg: the present options.
        actions: what the outputs decide.
        batch: the columns, with `OUTPUTS`. What a mask forbids is unlikely in these already.
        envs: the environments of the batch whose T rows the B rows are.
        policy: of the student in these rows.
    """
    if cfg.teaching is None:
        return torch.zeros(batch["alive"][:, envs].numel(), device=batch["alive"].device)
    outputs = batch[OUTPUTS][:, envs].flatten(0, 1)
    return distribution(actions, outputs).kl(policy)
