"""Actions computed on an actor's own CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.interfaces import ReadWeights
from penstock.core.params import Array, Float32, Stamp
from penstock.models.acting.policy import Policy


class LocalInference:
    """An `Inference` in the actor's own process: a policy and its weights.

    `core.interfaces.Inference` says what its methods do, and in which order they are called.
    """

    def __init__(self, policy: Policy, size: int) -> None:
        """``size`` is the length of the policy's flat vector of weights."""
        self._policy = policy
        self._columns = tuple(policy.recorded.values())  # written anew by each `decide`
        self._weights = np.empty(size, np.float32)
        self.recorded = tuple(policy.recorded)
        self.stamp: Stamp | None = None

    def refresh(self, read: ReadWeights) -> Stamp | None:
        stamp = read(self._weights, self.stamp)
        if stamp is not None:
            self._policy.load(self._weights, untrained=stamp.version == 0, number=stamp.version)
            self.stamp = stamp
        return self.stamp

    def decide(self, observations: Array) -> tuple[Array, tuple[Array, ...]]:
        if self.stamp is None:
            raise RuntimeError("there are no weights")
        return self._policy.act(observations), self._columns

    def state(self) -> Float32:
        return self._policy.state

    def take_rewards(self, rewards: npt.NDArray[Any]) -> None:
        self._policy.take_rewards(rewards)

    def reset(self, first: npt.NDArray[np.bool_]) -> None:
        self._policy.reset(first)

    def forget(self) -> None:
        self.stamp = None

    def state_dict(self) -> dict[str, Any]:
        # Lists of one element, as in the files of version 0.1.
        return {"states": [self._policy.state.copy()], "deciders": [self._policy.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        [recurrent_state] = state["states"]
        [decider_state] = state["deciders"]
        self._policy.state[...] = recurrent_state
        self._policy.load_state_dict(decider_state)

    def close(self) -> None:
        """It holds nothing but memory."""
