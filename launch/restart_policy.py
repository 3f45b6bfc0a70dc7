"""Restart policy: how many consecutive crashes of a role are tolerated before the run fails.

The delay before a restart is `SupervisedRole.next_delay_s` in `worker.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.role_spec import Stage
from penstock.launch.supervisor_messages import Failure
from penstock.launch.worker import SupervisedRole


@dataclass
class Row:
    """Crashes of one actor at the same place, with the same exception, while no episode ended."""

    first: Failure
    episodes: int  # that the run had finished when the row began
    crashes: int = 0
    last_s: float = 0.0

    def goes_on(self, failure: Failure, episodes: int) -> bool:
        same = _kind(self.first) == _kind(failure)
        return same and episodes == self.episodes


class RestartPolicy:
    """Counts consecutive crashes: of a role that produced no sample in between, and of an actor
    that produces samples but never finishes an episode."""

    def __init__(self, max_restarts: int) -> None:
        self._most = max_restarts
        self._rows: dict[str, Row] = {}
        self._episodes = 0
        self._counted_s = 0.0

    def episodes(self, count: int | None, now_s: float) -> None:
        """Record the number of finished episodes; None if the learner does not count them."""
        if count is not None:
            self._episodes, self._counted_s = count, now_s

    def crashed(
        self, worker: SupervisedRole, failure: Failure, healthy: bool, produced: bool, now_s: float
    ) -> Failure | None:
        """The failure to end the run with, if this crash exceeds the limit; otherwise None.

        Args:
            healthy: whether the role had worked for long.
            produced: whether it had produced samples.
        """
        if healthy:
            worker.attempts = 0
        if healthy or produced:
            worker.failures_without_progress, worker.first_failure = 0, None
        worker.first_failure = worker.first_failure or failure
        worker.failures_without_progress += 1
        same = self._same_again(worker, failure, now_s)
        if worker.failures_without_progress > self._most or failure.user:
            return worker.first_failure
        return same

    def _same_again(self, worker: SupervisedRole, failure: Failure, now_s: float) -> Failure | None:
        if worker.spec.stage is not Stage.ACTORS or not failure.place:
            self._rows.pop(worker.name, None)
            return None
        row = self._rows.get(worker.name)
        if row is None or not row.goes_on(failure, self._episodes):
            row = self._rows[worker.name] = Row(failure, self._episodes)
        counted = self._counted_s >= row.last_s  # or an episode may have ended that nobody knows of
        row.crashes, row.last_s = row.crashes + 1, now_s
        return row.first if row.crashes > self._most and counted else None


def _kind(failure: Failure) -> tuple[str, str]:
    return failure.message.partition(":")[0], failure.place
