"""Pendulum-v1 with steps of a given duration, which need no processor: it stands for a simulator on
another host."""

from __future__ import annotations

import time
from typing import Any

import gymnasium


class SlowPendulum(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Sleeps in each step, for ``step_time_s`` seconds."""

    def __init__(self, step_time_s: float = 0.0) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))
        self._step_time_s = step_time_s

    def step(self, action: Any) -> Any:
        time.sleep(self._step_time_s)
        return super().step(action)
