"""Inferences that stand in for the real ones, behind `penstock.core.interfaces.Inference`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.params import Array, Float32, Stamp
from penstock.models.acting.inference import LocalInference
from penstock.models.acting.policy import Policy


class ScriptedInference:
    """Answers with what ``decide`` returns for the observations, and with the arrays ``columns`` as
    they are by then. Has neither weights nor state."""

    def __init__(self, decide: Callable[[Array], Array], **columns: Array) -> None:
        self._decide, self._columns = decide, columns
        self.recorded = tuple(columns)
        self.stamp: Stamp | None = Stamp(0, 0)

    def begin(self, group: int, observations: Array) -> None:
        self._actions = self._decide(observations)

    def finish(self, group: int) -> tuple[Array, tuple[Array, ...]]:
        return self._actions, tuple(self._columns.values())

    def state(self, group: int) -> Float32:
        return np.zeros((0, 0), np.float32)

    def reset(self, group: int, first: npt.NDArray[np.bool_]) -> None:
        pass

    def refresh(self, weights: Float32, stamp: Stamp) -> None:
        self.stamp = stamp

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class LateInference(LocalInference):
    """Computes nothing before `finish`, as where answers come from elsewhere. ``calls`` are those
    of `begin` and `finish`, with their group."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        super().__init__(policies)
        self._begun: dict[int, Array] = {}
        self.calls: list[tuple[str, int]] = []

    def begin(self, group: int, observations: Array) -> None:
        self._check_finished(group)
        if self.stamp is None:
            raise RuntimeError("no weights")
        self._begun[group] = observations
        self.calls.append(("begin", group))

    def finish(self, group: int) -> tuple[Array, tuple[Array, ...]]:
        if group in self._begun:
            super().begin(group, self._begun.pop(group))
        self.calls.append(("finish", group))
        return super().finish(group)

    def _check_finished(self, group: int) -> None:
        if group in self._begun:
            raise RuntimeError("the group's last begin is not finished")
