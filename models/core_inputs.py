"""What a core reads besides the features: the last action and the last reward of an environment.

They are the tail of its recurrent state: first the encoding of the action, then the reward. So they
are kept, reset and shipped as the rest of the state is, and are 0 where an episode begins. Here
actors write them; a learner computes those of a batch of unrolls (`penstock.algos.core_inputs`).
No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.configs.schema import Config
from penstock.core.params import Float32
from penstock.core.rewards import adjust_rewards
from penstock.models.actions import ActionSpec, Choices


@dataclass(frozen=True)
class CoreInputs:
    """The inputs that `model.core_inputs` names, and their place in a state."""

    actions: ActionSpec | None
    """What an action is, if it is an input. Choices are one-hot, one after another; numbers are
    from -1 to 1."""
    reads_reward: bool
    reward_clip: float | None = None
    reward_scale: float = 1.0
    """As in the section `algo`."""

    @classmethod
    def of(cls, config: Config, actions: ActionSpec) -> CoreInputs | None:
        """Returns the inputs of a config, whose policy decides ``actions``; None without any."""
        names = config.model.core_inputs
        if not names:
            return None
        return cls(
            actions=actions if "action" in names else None,
            reads_reward="reward" in names,
            reward_clip=config.algo.reward_clip,
            reward_scale=config.algo.reward_scale,
        )

    @property
    def action_width(self) -> int:
        """Number of values that encode an action; 0 if it is no input."""
        if self.actions is None:
            return 0
        return self.actions.outputs if isinstance(self.actions, Choices) else self.actions.size

    @property
    def width(self) -> int:
        """Number of values of all inputs."""
        return self.action_width + self.reads_reward

    def put_actions(self, state: Float32, actions: npt.NDArray[Any]) -> None:
        """Write what was decided into the states ``[B, size]`` after the decision.

        ``actions`` are ``[B, *shape]``, as `ActionSampler.sample` returns them.
        """
        if self.actions is None:
            return
        rows = len(state)
        first = state.shape[1] - self.width
        encoded = state[:, first : first + self.action_width]
        values = actions.reshape(rows, -1)

        if not isinstance(self.actions, Choices):
            np.clip(values, -1, 1, out=encoded)
            return
        first_choices = np.cumsum((0, *self.actions.counts[:-1]))
        encoded[:] = 0
        encoded[np.arange(rows)[:, None], values + first_choices] = 1

    def put_rewards(self, state: Float32, rewards: npt.NDArray[Any]) -> None:
        """Write what the last decisions were paid, raw ``[B]``, into the states ``[B, size]``."""
        if self.reads_reward:
            state[:, -1] = self.adjusted(rewards)

    def adjusted(self, rewards: npt.NDArray[Any]) -> Float32:
        """Returns raw rewards ``[B]`` as they stand in a state: a copy."""
        adjusted = np.array(rewards, np.float32)
        adjust_rewards(self, adjusted)
        return adjusted
