"""Networks in torch by their heads: a policy and a value, or a single head.

PolicyNetwork   the network that actors get: how it reads observations, masks and normalisation
ActorCritic     heads for policy and value, buffers, memory
HeadNet         one head: Q-values (duelling or not, quantiles, noise), or a Gaussian policy
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from penstock.models.actions import ActionSpec, Numbers
from penstock.models.core_inputs import CoreInputs
from penstock.models.layout import EPSILON_RATE, SingleHead
from penstock.models.normalizer import Normalizer
from penstock.models.torch_noise import Noisy, make_linear, weights_of

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class PolicyNetwork(nn.Module, ABC):
    """A network whose outputs decide actions: of an actor-critic, or of one head alone."""

    normalizer: Normalizer | None
    """Normalises observations, if they are normalised. Every network sets it after its
    parameters."""
    state_size: int = 0
    """Number of float32 values that it remembers of one environment; 0: it has no memory."""
    core_inputs: CoreInputs | None = None
    """What its memory reads besides the features of an observation."""

    def mask(self, obs: Tensor) -> Tensor | None:
        """Returns the action mask in observations ``[..., *shape]``.

        The mask ``[B, outputs]`` is not 0 where a choice is allowed. It is None where observations
        have none, and all choices are allowed.
        """
        return None

    def observe(
        self, obs: Tensor, alive: Tensor, add_others: Callable[[Tensor], None] | None = None
    ) -> None:
        """Add observations to the statistics by which they are normalised, if they are.

        Args:
            obs: ``[T, E, *shape]`` or ``[T + 1, E, *shape]``, or ``[B, *shape]``.
            alive: which of them count, bool ``[T, E]`` or ``[B]``.
            add_others: adds to a tensor, in place, those of the other learners of the step. So
                every learner must call this method.
        """
        if self.normalizer is not None:
            # The observation after the last step of an unroll has no entry in `alive`.
            rows = self.numbers(obs[: len(alive)])
            self.normalizer.observe(rows, alive.flatten(), add_others)

    def numbers(self, obs: Tensor) -> Tensor:
        """Returns what of observations ``[..., *shape]`` is normalised, ``[B, inputs]``."""
        raise NotImplementedError


class ActorCritic(PolicyNetwork):
    """The network that learners train of an actor-critic, with any trunk or bodies."""

    actions: ActionSpec

    @abstractmethod
    def forward(
        self,
        obs: Tensor,
        state: Tensor | None = None,
        first: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns outputs ``[B, outputs]`` and values ``[B]``.

        Args:
            obs: observations ``[..., *shape]``; with memory ``[T, E, *shape]``.
            state: of the memory before the first row, float32 ``[E, state_size]``.
            first: bool ``[T, E]``; the state is forgotten before each row where it is true.
            inputs: what the memory reads besides the observations, float32 ``[T, E, width]``
                (`penstock.algos.core_inputs`). None takes the end of the state, of a single row.
        """

    def _make_heads(self, width: int, log_std_init: float) -> None:
        """Make the heads on features of a width."""
        actions = self.actions
        if isinstance(actions, Numbers):
            self.log_std = nn.Parameter(torch.full((actions.size,), float(log_std_init)))
        self.policy = orthogonal(nn.Linear(width, actions.head), 0.01)
        self.value = orthogonal(nn.Linear(width, 1), 1.0)

    def logits(self, features: Tensor) -> Tensor:
        """Returns outputs ``[B, outputs]`` of features ``[B, width]``; contiguous along B.

        In this order both the log-softmax over few actions and the weight's gradient are several
        times faster.
        """
        head_outputs = torch.addmm(self.policy.bias[:, None], self.policy.weight, features.t())
        return self.completed(head_outputs)

    def completed(self, head_outputs: Tensor) -> Tensor:
        """Returns outputs ``[B, outputs]``, given what the policy head computes, ``[head, B]``.

        Deviations of numbers, which do not depend on the observation, are added.
        """
        if isinstance(self.actions, Numbers):
            log_std = self.log_std[:, None].expand_as(head_outputs)
            head_outputs = torch.cat([head_outputs, log_std])
        return head_outputs.t()


class HeadNet(PolicyNetwork):
    """A network with one head: Q-values of actions to choose from, or means and logarithms of
    standard deviations.

    In a duelling network the value head reads the first half of the features, and the head of the
    advantages the second. Both are linear, so that ``Q = V + A - mean(A)`` (Wang et al. 2016, arXiv
    1511.06581, equation 9) is one product: weights are combined, not outputs. Where an action is
    several choices, the mean is over the actions of each (Tavakoli et al. 2018, arXiv 1711.08946).

    A head of quantiles has a row for each quantile of each output, and a duelling one a value for
    each quantile. What decides is their mean, which is one product again.

    It computes in two stages, so that weights that do not change are prepared once:
    `acting_weights` or `training_weights`, and then `acting_outputs` or `values`.
    """

    head_shape: SingleHead
    head: nn.Linear
    value: nn.Linear | None
    """The value head of a duelling network."""

    def forward(self, obs: Tensor) -> Tensor:
        """Returns outputs float32 ``[B, outputs]`` of observations ``[..., *shape]``."""
        return self.acting_outputs(obs, self.acting_weights())

    def acting_weights(self) -> list[Tensor]:
        """Returns what `acting_outputs` needs of the parameters, ready to use."""
        weight, bias = self._head_weights()
        quantiles = self.head_shape.quantiles
        if quantiles > 1:
            weight = weight.unflatten(0, (-1, quantiles)).mean(1)
            bias = bias.unflatten(0, (-1, quantiles)).mean(1)
        return [*self._body_weights(), weight, bias]

    def training_weights(self) -> list[Tensor]:
        """Returns what `values` needs of the parameters, ready to use."""
        return [*self._body_weights(), *self._head_weights()]

    @abstractmethod
    def acting_outputs(self, obs: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Returns what `forward` does, by weights that `acting_weights` has prepared."""

    def values(self, obs: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Returns what is learned of observations ``[..., *shape]``, by `training_weights`.

        The result is ``[B, outputs]``, or of a head of quantiles ``[B, outputs, quantiles]``.
        """
        return self.by_quantile(self.acting_outputs(obs, weights))

    def by_quantile(self, rows: Tensor) -> Tensor:
        """Returns ``[B, outputs * quantiles]`` as ``[B, outputs, quantiles]``; of a head without
        quantiles unchanged."""
        quantiles = self.head_shape.quantiles
        return rows if quantiles == 1 else rows.unflatten(1, (-1, quantiles))

    def unroll(
        self,
        obs: Tensor,
        state: Tensor,
        first: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns what `values` does of rows in their order, and the state after the last row.

        The arguments are those of `ActorCritic.forward`; without ``first`` no state is forgotten.
        """
        assert not self.state_size
        return self.values(obs, self.training_weights()), state

    def allowed_outputs(self, obs: Tensor, least: float = -torch.inf) -> Tensor:
        """Returns what `forward` does, with ``least`` for what the observations' action mask
        forbids."""
        return of_allowed(self(obs), self.mask(obs), least, self.head_shape.branches)

    def draw_noise(self) -> None:
        """Draw other noise for the weights of noisy layers, which then compute with it."""
        for layer in self.modules():
            if isinstance(layer, Noisy):
                layer.draw_noise()

    @abstractmethod
    def _body_weights(self) -> Sequence[Tensor]:
        """Returns the prepared weights of what comes before the head."""

    def _head_weights(self) -> tuple[Tensor, Tensor]:
        """Returns weight and bias of the head, which include the value head's if there is one.

        They have ``outputs * quantiles`` rows.
        """
        weight, bias = weights_of(self.head)
        if self.value is None:
            return weight, bias

        value_weight, value_bias = weights_of(self.value)
        combined_weight = torch.cat(
            [self._for_each_output(value_weight), weight - self._means(weight)], 1
        )
        combined_bias = self._for_each_output(value_bias) + bias - self._means(bias)
        return combined_weight, combined_bias

    def _for_each_output(self, rows: Tensor) -> Tensor:
        """Returns the rows of the value head, one for each quantile, as often as there are
        outputs."""
        outputs = self.head_shape.outputs
        if len(rows) == 1:
            return rows.expand(outputs, *rows.shape[1:])
        return rows.expand(outputs, *rows.shape).flatten(0, 1)

    def _means(self, rows: Tensor) -> Tensor:
        """Returns for each row of the head the mean over the actions of its choice, in ``rows``.

        Where it is the same for all of them, it is a single row.
        """
        head = self.head_shape
        if head.quantiles == 1 and len(head.branches) == 1:
            return rows.mean(0)

        by_output = rows.unflatten(0, (head.outputs, head.quantiles))
        means = [
            part.mean(0, keepdim=True).expand(part.shape) for part in by_output.split(head.branches)
        ]
        return torch.cat(means).flatten(0, 1)

    def _make_head(self, width: int, head: SingleHead) -> None:
        """Make the head on features of a width; if duelling, on each half of them."""
        self.head_shape = head
        rows = head.outputs * head.quantiles
        self.head = orthogonal(make_linear(width, rows, noisy=head.noisy), 0.01)
        self.value = None
        if head.duelling:
            value = make_linear(width, head.quantiles, noisy=head.noisy)
            self.value = orthogonal(value, 0.01)
        if head.shows_epsilon:
            self.register_buffer(EPSILON_RATE, torch.ones(1))


def of_allowed(
    values: Tensor,
    mask: Tensor | None,
    least: float = -torch.inf,
    branches: tuple[int, ...] = (),
) -> Tensor:
    """Returns values ``[B, outputs]`` with ``least`` where ``mask`` ``[B, outputs]`` is 0.

    A choice of which the mask allows nothing, as the last observation of an episode may have it,
    has nothing forbidden.

    Args:
        values: of all actions.
        mask: None forbids nothing.
        least: in place of what is forbidden.
        branches: number of actions of each choice; empty for a single choice.
    """
    if mask is None:
        return values
    allowed = mask != 0
    if len(branches) < 2:
        return values.masked_fill(~allowed & allowed.any(1, keepdim=True), least)

    forbidden = [~part & part.any(1, keepdim=True) for part in allowed.split(branches, 1)]
    return values.masked_fill(torch.cat(forbidden, 1), least)


def orthogonal(layer: Layer, gain: float) -> Layer:
    """Make the weight of a layer orthogonal and its bias 0; returns the layer."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
