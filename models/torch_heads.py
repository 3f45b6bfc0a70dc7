"""Networks in torch by their heads: a policy and a value, or a single head.

PolicyNetwork   what actors get: how it reads observations, masks and normalisation
ActorCritic     heads for policy and value, buffers, memory
HeadNet         one head: Q-values (duelling or not), or a Gaussian policy
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from penstock.models.actions import ActionSpec, Numbers
from penstock.models.normalizer import Normalizer

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class PolicyNetwork(nn.Module, ABC):
    """A network whose outputs decide actions: of an actor-critic, or of one head alone."""

    normalizer: Normalizer | None
    """Of the observations, if they are normalised; set by every network after its parameters."""

    def mask(self, obs: Tensor) -> Tensor | None:
        """Not 0 where a choice is allowed, ``[B, outputs]``, by the action mask in observations
        ``[..., *shape]``; None where there is none, and all choices are allowed."""
        return None

    def observe(
        self, obs: Tensor, alive: Tensor, add_others: Callable[[Tensor], None] | None = None
    ) -> None:
        """Take the rows ``alive`` of ``obs`` ``[T(+1), E, *shape]`` or ``[B, *shape]`` into the
        statistics that observations are normalised by, if they are.

        ``alive`` is bool ``[T, E]`` or ``[B]``. ``add_others`` adds to a tensor, in place, those of
        the other learners of the step: every learner must come here.
        """
        if self.normalizer is not None:
            rows = self.numbers(obs[: len(alive)])
            self.normalizer.observe(rows, alive.flatten(), add_others)

    def numbers(self, obs: Tensor) -> Tensor:
        """What of observations ``[..., *shape]`` is normalised, ``[B, inputs]``."""
        raise NotImplementedError


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

    def logits(self, features: Tensor) -> Tensor:
        """Outputs ``[B, outputs]`` of features ``[B, width]``; contiguous along B.

        In this order both the log-softmax over few actions and the weight's gradient are several
        times faster.
        """
        rows = torch.addmm(self.policy.bias[:, None], self.policy.weight, features.t())
        return self.completed(rows)

    def completed(self, rows: Tensor) -> Tensor:
        """Outputs ``[B, outputs]`` of what the policy head computes, ``[head, B]``."""
        if isinstance(self.actions, Numbers):
            rows = torch.cat([rows, self.log_std[:, None].expand_as(rows)])
        return rows.t()


class HeadNet(PolicyNetwork):
    """A network with one head: Q-values of actions to choose from, or means and logarithms of
    standard deviations.

    Duelling, a value head on the first half of the features is added to the head on the second.
    Both are linear, so that ``Q = V + A - mean(A)`` (Wang et al. 2016, arXiv 1511.06581,
    equation 9) is one product: weights are combined, not outputs. It computes in two stages, so
    that weights that do not change are prepared once.
    """

    head: nn.Linear
    value: nn.Linear | None

    def forward(self, obs: Tensor) -> Tensor:
        """Outputs float32 ``[B, outputs]`` of observations ``[..., *shape]``."""
        return self.acting_outputs(obs, self.acting_weights())

    @abstractmethod
    def acting_weights(self) -> list[Tensor]:
        """What `acting_outputs` needs of the parameters, ready to use."""

    @abstractmethod
    def acting_outputs(self, obs: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """`forward` by prepared weights."""

    def allowed_outputs(self, obs: Tensor, least: float = -torch.inf) -> Tensor:
        """`forward`, and `of_allowed` by the action mask in the observations, if they have one."""
        return of_allowed(self(obs), self.mask(obs), least)

    def _head_weights(self) -> tuple[Tensor, Tensor]:
        weight, bias = self.head.weight, self.head.bias
        if self.value is None:
            return weight, bias
        value = self.value.weight.expand(weight.shape)
        combined = torch.cat([value, weight - weight.mean(0)], 1)
        return combined, self.value.bias + bias - bias.mean()

    def _make_head(self, width: int, outputs: int, duelling: bool) -> None:
        self.head = orthogonal(nn.Linear(width, outputs), 0.01)
        self.value = orthogonal(nn.Linear(width, 1), 0.01) if duelling else None


def of_allowed(values: Tensor, mask: Tensor | None, least: float = -torch.inf) -> Tensor:
    """Values ``[B, choices]``, ``least`` where ``mask`` ``[B, choices]`` is 0. A row of the mask
    that allows nothing, as the last observation of an episode may have it, forbids nothing."""
    if mask is None:
        return values
    allowed = mask != 0
    return values.masked_fill(~allowed & allowed.any(1, keepdim=True), least)


def orthogonal(layer: Layer, gain: float) -> Layer:
    """The layer, its weight made orthogonal and its bias 0."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
