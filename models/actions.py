"""The actions of a policy, and how many outputs of a network decide one. Imports no torch.

Policies decide choices that are counted from 0, and numbers from -1 to 1, whatever the
environment's own actions are (`penstock.envs.BatchedEnv` maps them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gymnasium.spaces import Box, Discrete, MultiDiscrete

from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.observations import Spaces
from penstock.core.specs import Column


@dataclass(frozen=True)
class Choices:
    """Entry i of an action is one of ``counts[i]`` choices.

    A Discrete action has one count and the shape ``()``.
    """

    counts: tuple[int, ...]
    shape: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """Logits of a network, those of the first choice first."""
        return sum(self.counts)

    @property
    def head(self) -> int:
        """Outputs that are computed from the observation: all."""
        return self.outputs


@dataclass(frozen=True)
class Numbers:
    """An action is an array ``shape`` of normally distributed numbers.

    The environment clips them to -1 ... 1, or they are ``squashed`` by tanh. Slots record the
    numbers before either.
    """

    shape: tuple[int, ...]
    squashed: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def outputs(self) -> int:
        """Outputs of a network: the means, then logarithms of standard deviations."""
        return 2 * self.size

    @property
    def head(self) -> int:
        """Outputs that are computed from the observation: the means."""
        return self.size


ActionSpec = Choices | Numbers


def discrete(count: int) -> Choices:
    """Returns the spec of a Discrete action, one of ``count`` choices."""
    return Choices((count,))


def action_spec(config: Config, spaces: Spaces) -> ActionSpec:
    """Returns what an actor-critic decides in an environment.

    Raises:
        UserError: for an action space that an actor-critic cannot play.
    """
    match spaces.action_space:
        case Discrete(n=n):
            return discrete(int(n))
        case MultiDiscrete(nvec=nvec):
            return Choices(tuple(int(n) for n in nvec.flat), nvec.shape)
        case Box(shape=shape):
            return Numbers(shape, squashed=config.model.gaussian == "squashed")

    raise UserError(
        f"action space {spaces.action_space} is none of Discrete, MultiDiscrete and Box, which "
        f"algo.name {config.algo.name} plays; set env.wrappers to a wrapper of yours that offers "
        "one of them"
    )


def action_column(space: Any) -> Column:
    """Returns the column in which a slot records the actions of a space."""
    dtype = "<f4" if isinstance(space, Box) else "<i4"
    return Column("action", dtype, tuple(space.shape))
