"""An explicit stream into a buffer of this process, for steps that do not follow a thread's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.replay.adding import Adds, Given
from penstock.replay.steps import StepWriter

if TYPE_CHECKING:
    from penstock.replay.buffer import Replay


class StreamWriter(Adds):
    """`Replay.add` for one explicit stream; `close` ends it, and `with` does."""

    def __init__(self, replay: Replay, writer: StepWriter) -> None:
        self._replay, self._writer = replay, writer

    def _take(self, given: Given, timeout_s: float | None) -> None:
        replay = self._replay
        if replay.flow is not None:
            replay.flow.before_insert(replay.table.spec.envs, timeout_s)
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
