"""The twin critics of SAC and TD3: two Q-functions, whose smaller value is a target's.

Fujimoto et al. 2018, arXiv 1802.09477, section 4.2 (clipped double Q-learning).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.algos.ops.backward import backward
from penstock.algos.replay_update import Batch, UpdateContext
from penstock.models.flat_parameters import flatten
from penstock.models.layout import QCnnShape
from penstock.models.normalizer import Normalizer
from penstock.models.torch_nets import build_critics
from penstock.profiling.ledger import Part


class Critics(Protocol):
    """Two Q-functions, which give ``[2, B]`` of observations and actions, both ``[B, *shape]``."""

    def __call__(self, obs: Tensor, action: Tensor, /) -> Tensor: ...

    def of_action(self, obs: Tensor, action: Tensor, /, count: int = 2) -> Tensor:
        """Returns the values of the first ``count`` Q-functions, ``[count, B]``.

        Their gradient reaches the action alone.
        """


class CriticLoss(NamedTuple):
    """The loss of both critics on a batch."""

    loss: Tensor
    """Sum over the batch, ``[]``."""
    errors: Tensor
    """Absolute temporal differences ``[B]``, a mean of both critics', without a gradient."""
    value_sum: Tensor
    """Sum of the values, each a mean of both critics', ``[]``, without a gradient."""


def critic_loss(critics: Critics, batch: Mapping[str, Tensor], target: Tensor) -> CriticLoss:
    """Returns half the weighted squared error of both critics.

    Args:
        critics: the critics that are trained.
        batch: as for `penstock.algos.dqn.update.loss`, with ``action`` ``[B, *shape]``.
        target: of both, ``[B]``, without a gradient.
    """
    values = critics(batch["obs"], batch["action"])
    errors = target - values
    loss = 0.5 * torch.mv(errors.square(), batch["weights"]).sum()
    return CriticLoss(
        loss=loss,
        errors=errors.detach().abs().mean(0),
        value_sum=values.detach().mean(0).sum(),
    )


class TrainedCritics:
    """Twin critics, the optimizer that trains them, and the target critics that follow them."""

    def __init__(
        self, ctx: UpdateContext, normalizer: Normalizer | None, action_size: int, tau: float
    ) -> None:
        """Make the critics of the actions of the policy ``ctx.shape``.

        Args:
            ctx: of the update.
            normalizer: that of the policy, by which they normalise observations too.
            action_size: number of values in an action.
            tau: step of the targets in `follow`.
        """
        shape = ctx.shape
        assert not isinstance(shape, QCnnShape), shape
        self._ledger = ctx.ledger
        self._tau = tau

        self.net = build_critics(shape, normalizer, ctx.dtype, action_size=action_size)
        self.net.to(ctx.device)
        self.target_net = copy.deepcopy(self.net).requires_grad_(False)
        self.target_net.normalizer = normalizer

        self.optimizer = ctx.optimizer("critics", self.net.named_parameters())
        self._target = flatten(self.target_net.parameters())

    def add_gradients(self, batch: Batch, target: Tensor, total: float) -> CriticLoss:
        """Add the gradients of `critic_loss` on a batch; the result carries none.

        ``total`` is the number of samples in the batches of all learners.
        """
        result = critic_loss(self.net, batch, target)

        self.optimizer.prepare_backward(total)
        self._ledger.switch(Part.BACKWARD)
        backward(result.loss)
        return result._replace(loss=result.loss.detach())

    def follow(self) -> None:
        """Move the target critics towards the critics."""
        self._target.lerp_(self.optimizer.values, self._tau)

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors of a checkpoint beside the optimizer's."""
        return {"critics": self.optimizer.values, "target": self._target}
