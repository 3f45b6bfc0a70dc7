"""A buffer under a rate limiter: what came and went is counted, and who is ahead waits.

The table counts rows for itself; here its counts are passed on, whoever wrote the rows. Adding and
sampling wait outside the buffer's lock, so that the other side can go on.
"""

from __future__ import annotations

from typing import Any

from penstock.replay.errors import ReplayError
from penstock.replay.limiter import RateLimiter, why_not_insert, why_not_sample
from penstock.replay.table import Table


class RateLimitedTable:
    """Between one ``table`` and its ``limiter``; ``timeout_s`` bounds every wait."""

    def __init__(self, limiter: RateLimiter, table: Table, capacity: int, timeout_s: float) -> None:
        limiter.expect(insert=table.spec.envs, capacity=capacity)
        self.limiter = limiter
        self._table = table
        self._timeout_s = timeout_s
        self._inserted = self._gone = 0

    def before_insert(self, rows: int, timeout_s: float | None = None) -> None:
        """Wait until ``rows`` may be added, and count them. Raises ReplayError after the time."""
        limiter = self.limiter
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        if not limiter.await_insert(rows, patience_s):
            why = why_not_insert(limiter.rule, limiter.counts, rows)
            raise ReplayError(f"{why or 'nothing'}; that did not come within {patience_s:g} s")

    def before_sample(self, rows: int) -> None:
        """Wait until ``rows`` may be drawn, and count them. Raises ReplayError after the time."""
        limiter = self.limiter
        if not limiter.await_sample(rows, self._timeout_s):
            why = why_not_sample(limiter.rule, limiter.counts, rows)
            raise ReplayError(f"{why or 'nothing'}; that did not come within {self._timeout_s:g} s")

    def not_sampled(self, rows: int) -> None:
        """What `before_sample` counted was not drawn after all."""
        self.limiter.sampled(-rows)

    def note(self, counted: int = 0) -> None:
        """Pass on what the table took in, less what was ``counted`` before, and what left it."""
        table = self._table
        gone = table.evicted.total()
        came, self._inserted = table.inserted - self._inserted - counted, table.inserted
        left, self._gone = gone - self._gone, gone
        if came:
            self.limiter.inserted(came)
        if left:
            self.limiter.removed(left)

    def state_dict(self) -> dict[str, Any]:
        """JSON values; the table's counts are in it."""
        self.note()
        return self.limiter.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """The table was restored, and the limiter goes on from ``state`` by its own rule; None:
        what the table has was neither earned nor spent."""
        self._inserted, self._gone = self._table.inserted, self._table.evicted.total()
        self.limiter.resume(state, self._inserted, self._gone)

    def may_lend(self) -> bool:
        """Whether a writer elsewhere may begin a slot."""
        return self.limiter.may_insert(self._table.rows_per_slot)

    def missing(self, rows: int) -> str:
        """What drawing ``rows`` waits for; empty when it need not."""
        return why_not_sample(self.limiter.rule, self.limiter.counts, rows) or ""
