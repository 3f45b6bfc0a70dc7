"""What networks with one head have in common, in torch: how it is made and computed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.models.torch_policy_network import PolicyNetwork
from penstock.models.torch_trunks import orthogonal


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
