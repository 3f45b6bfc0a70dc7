"""What all actor-critics in torch have in common: heads, buffers, and how they are called."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from penstock.models.actions import ActionSpec, Numbers
from penstock.models.layout import choices_entries
from penstock.models.normalizer import Normalizer
from penstock.models.torch_policy_network import PolicyNetwork
from penstock.models.torch_trunks import orthogonal


class ActorCritic(PolicyNetwork):
    """What learners train of an actor-critic, whatever it is made of."""

    actions: ActionSpec
    state_size: int = 0
    """Float32 numbers that it remembers of one environment; 0: it has no memory."""

    @abstractmethod
    def forward(
        self, obs: Tensor, state: Tensor | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs ``[B, outputs]`` and values ``[B]`` of observations ``[..., *shape]``.

        With memory observations are ``[T, E, *shape]``; ``state`` float32 ``[E, state_size]`` is
        that before the first row, and forgotten before each row where ``first`` (bool ``[T, E]``).
        """

    def _make_heads(self, width: int, log_std_init: float) -> None:
        actions = self.actions
        if isinstance(actions, Numbers):
            self.log_std = nn.Parameter(torch.full((actions.size,), float(log_std_init)))
        self.policy = orthogonal(nn.Linear(width, actions.head), 0.01)
        self.value = orthogonal(nn.Linear(width, 1), 1.0)

    def _make_buffers(self, normalized: int, has_head: bool = True) -> None:
        """After all parameters, as in `penstock.models.layout`."""
        self.choices = Marks(shape for _, shape in choices_entries(self.actions, has_head))
        self.normalizer = Normalizer(normalized) if normalized else None

    def logits(self, features: Tensor) -> Tensor:
        """Outputs ``[B, outputs]`` of features ``[B, width]``; contiguous along B.

        In this order both the log-softmax over few actions and the weight's gradient are several
        times faster.
        """
        rows = torch.addmm(self.policy.bias[:, None], self.policy.weight, features.t())
        if isinstance(self.actions, Numbers):
            rows = torch.cat([rows, self.log_std[:, None].expand_as(rows)])
        return rows.t()


class Marks(nn.Module):
    """Buffers without values: their shapes tell, in the layout, what a connector has to know."""

    def __init__(self, shapes: Iterable[tuple[int, ...]]) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_buffer(str(i), torch.empty(shape))
