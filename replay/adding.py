"""One step as writers of every kind take it: in this process, in another, on another host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

PATIENCE_S = 60.0  # of writers that are not in the replay's process
Given = tuple[Any, Any, Any, Any, Any, Any, Mapping[str, Any] | None, Any, dict[str, Any]]


class Adds(ABC):
    """A stream that steps are added to."""

    def add(
        self,
        *,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        next_obs: Any,
        info: Mapping[str, Any] | None = None,
        priority: Any = None,
        timeout_s: float | None = None,
        **extra: Any,
    ) -> None:
        """One step of every environment, as `Replay.add`.

        ``timeout_s`` bounds the wait for room; None: what the replay was made with, or here 60.
        Raises ReplayError for what does not fit; without room in time ReplayError in the replay's
        process and TimeoutError in others; ConnectionError when the owner has ended.
        """
        given = (obs, action, reward, terminated, truncated, next_obs, info, priority, extra)
        self._take(given, timeout_s)

    @abstractmethod
    def _take(self, given: Given, timeout_s: float | None) -> None:
        """Store a step: what `StepWriter.add` takes."""
