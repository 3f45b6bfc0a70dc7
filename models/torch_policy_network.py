"""What all networks in torch that actors get have in common: how they read observations."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable

from torch import Tensor, nn

from penstock.models.normalizer import Normalizer


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
