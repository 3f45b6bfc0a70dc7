"""An explicit stream into a buffer of this process, for steps that do not follow a thread's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.replay.steps import StepWriter

if TYPE_CHECKING:
    from penstock.replay.buffer import Replay


class StreamWriter:
    """`Replay.add` for one explicit stream; `close` ends it, and `with` does."""

    def __init__(self, replay: Replay, writer: StepWriter) -> None:
        self._replay, self._writer = replay, writer

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
        **extra: Any,
    ) -> None:
        """As `Replay.add`."""
        given = (obs, action, reward, terminated, truncated, next_obs, info, priority, extra)
        replay = self._replay
        if replay.flow is not None:
            replay.flow.before_insert(replay.table.spec.envs)
        with replay.lock:
            replay.write(self._writer, *given)

    def close(self) -> None:
        """Its rows stay."""
        with self._replay.lock:
            self._writer.close()

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
