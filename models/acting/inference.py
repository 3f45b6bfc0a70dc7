"""Actions computed on an actor's own CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.params import Array, Float32, Stamp
from penstock.models.acting.policy import Policy


class LocalInference:
    """Computes on the actor's own CPU, within `begin`. Each group has a `Policy`."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = policies
        self._columns = [tuple(policy.recorded.values()) for policy in policies]
        self._actions: list[Array | None] = [None] * len(policies)  # since `begin`
        self.recorded = tuple(policies[0].recorded)
        self.stamp: Stamp | None = None

    def begin(self, group: int, observations: Array) -> None:
        if self._actions[group] is not None or self.stamp is None:
            raise RuntimeError("begin needs weights, and the group's last begin to be finished")
        self._actions[group] = self._policies[group].act(observations)

    def finish(self, group: int) -> tuple[Array, tuple[Array, ...]]:
        actions = self._actions[group]
        if actions is None:
            raise RuntimeError("finish without begin")
        self._actions[group] = None
        return actions, self._columns[group]

    def state(self, group: int) -> Float32:
        self._check_finished(group)
        return self._policies[group].state

    def reset(self, group: int, first: npt.NDArray[np.bool_]) -> None:
        self._check_finished(group)
        self._policies[group].reset(first)

    def refresh(self, weights: Float32, stamp: Stamp) -> None:
        for group, policy in enumerate(self._policies):
            self._check_finished(group)
            policy.load(weights)
            policy.decider.untrained = stamp.version == 0
        self.stamp = stamp

    def state_dict(self) -> dict[str, Any]:
        return {
            "states": [policy.state.copy() for policy in self._policies],
            "deciders": [policy.state_dict() for policy in self._policies],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        given = zip(self._policies, state["states"], state["deciders"], strict=True)
        for policy, memory, decider in given:
            policy.state[...] = memory
            policy.load_state_dict(decider)

    def close(self) -> None:
        """It holds nothing but memory."""

    def _check_finished(self, group: int) -> None:
        if self._actions[group] is not None:
            raise RuntimeError("the group's last begin is not finished")
