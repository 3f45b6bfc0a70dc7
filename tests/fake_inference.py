"""Stands in for a real inference, behind `penstock.core.interfaces.Inference`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.interfaces import ReadWeights
from penstock.core.params import Array, Float32, Stamp


def given(weights: Float32, stamp: Stamp) -> ReadWeights:
    """Returns what an inference refreshes from: a learner that has published these weights."""

    def read(out: Float32, newer_than: Stamp | None) -> Stamp | None:
        if newer_than == stamp:
            return None
        np.copyto(out, weights)
        return stamp

    return read


class ScriptedInference:
    """Answers with what ``decide`` returns for the observations, and with the arrays ``columns`` as
    they are by then. Has neither weights nor state."""

    def __init__(self, decide: Callable[[Array], Array], **columns: Array) -> None:
        self._decide, self._columns = decide, columns
        self.recorded = tuple(columns)
        self.stamp: Stamp | None = Stamp(0, 0)

    def decide(self, observations: Array) -> tuple[Array, tuple[Array, ...]]:
        return self._decide(observations), tuple(self._columns.values())

    def state(self) -> Float32:
        return np.zeros((0, 0), np.float32)

    def take_rewards(self, rewards: npt.NDArray[Any]) -> None:
        pass

    def reset(self, first: npt.NDArray[np.bool_]) -> None:
        pass

    def refresh(self, read: ReadWeights) -> Stamp | None:
        self.stamp = read(np.empty(0, np.float32), self.stamp) or self.stamp
        return self.stamp

    def forget(self) -> None:
        self.stamp = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
