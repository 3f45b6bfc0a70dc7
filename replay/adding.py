"""`add` as writers of every kind offer it: in this process, in another, on another host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

PATIENCE_S = 60.0  # of writers that are not in the replay's process
Given = tuple[Any, Any, Any, Any, Any, Any, Mapping[str, Any] | None, Any, dict[str, Any]]


class Adds(ABC):
    """A stream that steps can be added to."""

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
        """Add one step of every environment; the arguments are those of `Replay.add`.

        Args:
            timeout_s: longest wait for room, in seconds; None: the timeout of the replay, or 60 in
                another process.

        Raises:
            ReplayError: a value does not fit; in the replay's process also: no room in time.
            TimeoutError: no room in time, in another process.
            ConnectionError: the owner has ended.
        """
        given = (obs, action, reward, terminated, truncated, next_obs, info, priority, extra)
        self._take(given, timeout_s)

    @abstractmethod
    def _take(self, given: Given, timeout_s: float | None) -> None:
        """Store a step; ``given`` holds the arguments of `StepWriter.add`."""
