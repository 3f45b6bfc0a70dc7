"""The distributions of actions, by a network's outputs: log-probability, entropy, divergence.

    Categoricals   choices, independent of each other, perhaps some of them forbidden by a mask
    Gaussian       numbers with a mean and a standard deviation each, clipped by the environment
    Squashed       tanh of such numbers; actions are given as the numbers before it

`penstock.models.acting.categorical` draws from the same on the actors, in numpy.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus

from penstock.models.actions import ActionSpec, Choices, Numbers

FORBIDDEN = -1e9  # the logit of a masked choice: finite, so that 0 times it is 0
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
# The entropy of `Squashed` is summed at `NODES` points, from `REACH` standard deviations below the
# mean to `REACH` above it.
NODES = 128
REACH = 6.5


class Distribution(Protocol):
    """The distributions of one action for each of B rows.

    All results are ``[B]``, float32 and differentiable.
    """

    def logp(self, action: Tensor) -> Tensor:
        """Returns the log-probability, or log-density, of actions ``[B, *shape]`` as recorded."""

    def entropy(self) -> Tensor:
        """Returns the entropy in nats."""

    def kl(self, other: Distribution) -> Tensor:
        """Returns KL(self | other) in nats; the other has the same kind and the same masks."""


def distribution(actions: ActionSpec, outputs: Tensor, mask: Tensor | None = None) -> Distribution:
    """Returns the distribution of actions by a network's outputs.

    Args:
        actions: what the outputs decide.
        outputs: float32 ``[B, outputs]``.
        mask: ``[B, outputs]``, not 0 where a choice is allowed. In a row that allows none, all
            choices are equally likely.
    """
    if isinstance(actions, Choices):
        return Categoricals(actions, outputs, mask)

    assert mask is None, "numbers have no masks"
    return Squashed(actions, outputs) if actions.squashed else Gaussian(actions, outputs)


class Categoricals:
    """Independent choices, each by its own logits."""

    def __init__(self, actions: Choices, outputs: Tensor, mask: Tensor | None) -> None:
        # Outputs lie contiguous along B: sums over few choices are several times faster.
        logits = outputs.t()
        if mask is not None:
            logits = torch.where(mask.t() != 0, logits, FORBIDDEN)

        self._counts = actions.counts
        if len(self._counts) == 1:
            self.all_logp = torch.log_softmax(logits, 0)
            """Log-probability of each choice, ``[outputs, B]``."""
        else:
            parts = logits.split(self._counts)
            self.all_logp = torch.cat([torch.log_softmax(part, 0) for part in parts])

    def logp(self, action: Tensor) -> Tensor:
        index = action.long()
        if len(self._counts) == 1:
            return self.all_logp.gather(0, index.view(1, -1))[0]

        # One row of indices for each entry of an action, which is looked up among its own choices.
        rows = index.reshape(-1, len(self._counts)).t()
        parts = self.all_logp.split(self._counts)
        logps = [part.gather(0, row[None]) for part, row in zip(parts, rows, strict=True)]
        return torch.cat(logps).sum(0)

    def entropy(self) -> Tensor:
        return -(self.all_logp.exp() * self.all_logp).sum(0)

    def kl(self, other: Distribution) -> Tensor:
        assert isinstance(other, Categoricals), other
        return (self.all_logp.exp() * (self.all_logp - other.all_logp)).sum(0)


class Gaussian:
    """Independent normal numbers; outputs are means, then logarithms of standard deviations."""

    def __init__(self, actions: Numbers, outputs: Tensor) -> None:
        self.mean, self.log_std = outputs.chunk(2, 1)
        assert self.mean.shape[1] == actions.size, (tuple(outputs.shape), actions)

    def logp(self, action: Tensor) -> Tensor:
        noise = (action.reshape(self.mean.shape) - self.mean) * (-self.log_std).exp()
        return (-0.5 * noise.square() - self.log_std - HALF_LOG_2PI).sum(1)

    def entropy(self) -> Tensor:
        return (self.log_std + 0.5 + HALF_LOG_2PI).sum(1)

    def kl(self, other: Distribution) -> Tensor:
        assert isinstance(other, Gaussian), other
        log_ratio = other.log_std - self.log_std
        shift = (self.mean - other.mean) * (-other.log_std).exp()
        return (log_ratio + 0.5 * ((-2 * log_ratio).exp() + shift.square()) - 0.5).sum(1)


class Squashed(Gaussian):
    """The tanh of normal numbers.

    Divergences are those before tanh, which can be undone.

    The entropy has no closed form. Its integral is summed at `NODES` evenly spaced points: exact
    to 2e-6 up to a deviation of 5, where Gauss-Hermite quadrature of 64 has 2e-4 at 3 (the
    integrand has poles beside the real axis, nearer to it for a larger deviation).
    """

    def logp(self, action: Tensor) -> Tensor:
        unsquashed = action.reshape(self.mean.shape)
        return super().logp(unsquashed) - log_slope(unsquashed).sum(1)

    def entropy(self) -> Tensor:
        nodes = torch.linspace(-REACH, REACH, NODES, device=self.mean.device)
        weights = (-0.5 * nodes.square()).softmax(0)
        unsquashed = torch.addcmul(self.mean[..., None], self.log_std.exp()[..., None], nodes)
        return super().entropy() + (log_slope(unsquashed) @ weights).sum(1)


def log_slope(unsquashed: Tensor) -> Tensor:
    """Returns ``log(1 - tanh(x)^2)``, never the log of 0 (Haarnoja et al. 2018, appendix C)."""
    return 2 * (math.log(2) - unsquashed - softplus(-2 * unsquashed))
