"""An action mask that an environment gives in `info`, put where policies see it.

A network needs the mask of each stored step, so it travels as a part of the observation
(`core.observations.MASK`). gymnasium's Taxi and others give it in `info` instead. Which key an
environment will put there is known only after a reset, too late for the layout of slots, so the
wrapper below is named in the config: ``env.wrappers=[penstock.envs.masks:MaskFromInfo]``.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.configs.errors import UserError
from penstock.core.observations import MASK
from penstock.envs.vector_env import counts_of

# The key of the environment's own observation, if that is no Dict.
OBSERVATION = "observation"


class MaskFromInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds the ``action_mask`` of `info` to the observation, which becomes a Dict if it is none.

    Raises:
        UserError: of the constructor, for actions without choices; of `reset` and `step`, if `info`
            has no mask and the episode has not ended.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        # Choices of all components of an action, of each of which a mask has a value.
        self._choices = sum(counts_of(env.action_space))
        if not self._choices:
            raise UserError(
                f"MaskFromInfo goes around actions to choose from, not {env.action_space}; leave "
                "it out of env.wrappers"
            )

        env_space = env.observation_space
        parts = env_space.spaces if isinstance(env_space, spaces.Dict) else {OBSERVATION: env_space}
        self.observation_space = spaces.Dict({**parts, MASK: spaces.MultiBinary(self._choices)})

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return self._joined(observation, self._mask(info, over=False)), info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        mask = self._mask(info, over=bool(terminated or truncated))
        masked_observation = self._joined(observation, mask)
        return masked_observation, reward, terminated, truncated, info

    def _mask(self, info: dict[str, Any], *, over: bool) -> npt.NDArray[np.int8]:
        """Returns the mask in an info, int8 ``[choices]``, 1 where a choice is allowed.

        The masks of several choices come one after another. No action follows an episode's end, so
        a mask that is missing there allows everything.

        Args:
            info: of a reset or step.
            over: whether the step ended the episode.
        """
        mask = info.get(MASK)
        if mask is None and over:
            return np.ones(self._choices, np.int8)
        if mask is None:
            raise UserError(
                f"env.wrappers has MaskFromInfo, and the environment's info has no {MASK}, but "
                f"{sorted(map(str, info))}; give it in each reset and step, or leave the wrapper "
                "out"
            )

        component_masks = mask if isinstance(mask, list | tuple) else [mask]
        joined = np.concatenate([np.ravel(each) for each in component_masks])
        return np.asarray(joined != 0, np.int8)

    @staticmethod
    def _joined(observation: Any, mask: npt.NDArray[np.int8]) -> dict[str, Any]:
        parts = observation if isinstance(observation, dict) else {OBSERVATION: observation}
        return {**parts, MASK: mask}
