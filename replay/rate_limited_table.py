"""A table under a rate limiter: rows are counted, and the side that is ahead waits.

The table counts rows itself; here its counts are passed to the limiter, for all writers. Adding and
sampling wait outside the buffer's lock, so that the other side can proceed.
"""

from __future__ import annotations

from typing import Any

from penstock.replay.errors import ReplayError
from penstock.replay.limiter import RateLimiter, why_not_insert, why_not_sample
from penstock.replay.table import Table


class RateLimitedTable:
    """Connects one ``table`` to its ``limiter``; ``timeout_s`` bounds every wait."""

    def __init__(self, limiter: RateLimiter, table: Table, capacity: int, timeout_s: float) -> None:
        by_slot = table.store.arena.fd is not None  # what other processes add arrives in slots
        insert = table.rows_per_slot if by_slot else table.spec.envs
        limiter.expect(insert=insert, capacity=capacity)
        self.limiter = limiter
        self._table = table
        self._timeout_s = timeout_s
        self._inserted = self._gone = 0

    def before_insert(self, rows: int, timeout_s: float | None = None) -> None:
        """Wait until ``rows`` may be added, and count them. Raises ReplayError on timeout."""
        limiter = self.limiter
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        if not limiter.await_insert(rows, patience_s):
            why = why_not_insert(limiter.rule, limiter.counts, rows)
            raise ReplayError(f"{why or 'nothing'}; it timed out after {patience_s:g} s")

    def before_sample(self, rows: int, timeout_s: float | None = None) -> None:
        """Wait until ``rows`` may be drawn, and count them. Raises ReplayError on timeout."""
        limiter = self.limiter
        patience_s = self._timeout_s if timeout_s is None else timeout_s
        if not limiter.await_sample(rows, patience_s):
            why = why_not_sample(limiter.rule, limiter.counts, rows)
            raise ReplayError(f"{why or 'nothing'}; it timed out after {patience_s:g} s")

    def not_sampled(self, rows: int) -> None:
        """Take back the count of `before_sample`: nothing was drawn."""
        self.limiter.sampled(-rows)

    def note(self, counted: int = 0) -> None:
        """Pass on the rows that the table took in, less those ``counted`` before, and those that
        left.
        """
        table = self._table
        gone = table.evicted.total()
        came, self._inserted = table.inserted - self._inserted - counted, table.inserted
        left, self._gone = gone - self._gone, gone
        if came:
            self.limiter.inserted(came)
        if left:
            self.limiter.removed(left)

    def state_dict(self) -> dict[str, Any]:
        """The limiter's state as JSON values; it includes the table's counts."""
        self.note()
        return self.limiter.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from ``state`` after the table was restored, by the limiter's own rule.

        None: the stored rows were neither earned nor spent.
        """
        self._inserted, self._gone = self._table.inserted, self._table.evicted.total()
        self.limiter.resume(state, self._inserted, self._gone)

    def may_lend(self) -> bool:
        """Whether a writer in another process may begin a slot."""
        return self.limiter.may_insert(self._table.rows_per_slot)

    def missing(self, rows: int) -> str:
        """Why ``rows`` cannot be drawn yet; empty when they can."""
        return why_not_sample(self.limiter.rule, self.limiter.counts, rows) or ""
