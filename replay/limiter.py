"""Rate limiting: how often each inserted item is sampled, and which side waits.

As in Reverb: with S samples per insert, the *balance* is the number of samples that inserts have
earned, less the samples drawn:

    balance = S * (items inserted beyond the first min_size) - items sampled

A sample that would take the balance below -band waits for inserts. An insert that would take it
above +band waits for samples. Both would wait for each other for ever if there were a balance at
which neither is allowed. With samples of B and inserts of I items this cannot happen if

    2 * band >= B + S * I

which is checked as soon as the sizes are known. While fewer than min_size items are stored, inserts
always proceed and samples never do.

Items are transitions on both sides: a batch of 256 counts 256. Pure functions of `LimiterRule` and
`Counts` decide what is allowed; `RateLimiter` counts and waits. A single thread that both adds and
samples must not wait for itself: it uses `may_insert` and `may_sample`. `RateLimitedTable` connects
a limiter to the table of a replay.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from penstock.core.specs import SlotSpec
from penstock.replay.errors import ReplayError
from penstock.replay.table import Table

# The balance may leave the band by this many items, so that rounding never makes both sides wait.
SLACK = 1e-6
_UNCHANGED: Any = object()  # default of an option of `RateLimiter.update`


@dataclass(frozen=True)
class LimiterRule:
    """What a limiter allows.

    Args:
        samples_per_insert: how often each inserted item is sampled on average; None: only
            ``min_size`` limits sampling.
        min_size: items that must be stored before any is sampled.
        band: how far the balance may deviate from 0, in sampled items.
    """

    samples_per_insert: float | None
    min_size: int
    band: float


@dataclass
class Counts:
    """The items that a limiter has counted, and the point from which its present rule applies.

    When the rule changes, the balance so far becomes ``carried_balance``, and the new rule applies
    to the items after ``earning_from`` inserted and ``spending_from`` sampled ones.
    """

    inserted: int = 0
    sampled: int = 0
    removed: int = 0
    carried_balance: float = 0.0
    earning_from: int = 0
    spending_from: int = 0

    @property
    def stored(self) -> int:
        """The number of items that are stored now."""
        return self.inserted - self.removed

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values for a snapshot, which calls the carried balance "kept"."""
        values = asdict(self)
        values["kept"] = values.pop("carried_balance")
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Counts:
        """Make the counts that `to_dict` described."""
        values = dict(values)
        return cls(carried_balance=values.pop("kept", 0.0), **values)


def balance(rule: LimiterRule, counts: Counts) -> float:
    """Returns the samples that inserts have earned and that were not drawn yet.

    It is negative if more were drawn than earned, and 0 without ``samples_per_insert``.
    """
    if rule.samples_per_insert is None:
        return 0.0

    earning_inserts = max(0, counts.inserted - counts.earning_from)
    spent_samples = counts.sampled - counts.spending_from
    return counts.carried_balance + rule.samples_per_insert * earning_inserts - spent_samples


def samples_missing(rule: LimiterRule, counts: Counts, insert: int) -> int:
    """Returns how many items must be sampled before ``insert`` items may be inserted.

    It is 0 if they may be inserted now.
    """
    if rule.samples_per_insert is None or counts.stored < rule.min_size:
        return 0

    next_balance = balance(rule, replace(counts, inserted=counts.inserted + insert))
    return max(0, math.ceil(next_balance - rule.band - SLACK))


def inserts_missing(rule: LimiterRule, counts: Counts, sample: int) -> int:
    """Returns how many items must be inserted before ``sample`` items may be sampled.

    It is 0 if they may be sampled now.
    """
    inserts_to_min_size = max(0, rule.min_size - counts.stored)
    if rule.samples_per_insert is None:
        return inserts_to_min_size

    # The samples that further inserts have to earn, so that the balance stays within the band.
    owed_samples = sample - rule.band - balance(rule, counts) - SLACK
    if owed_samples <= 0:
        return inserts_to_min_size

    # The first inserts up to `earning_from` earn nothing.
    inserts_without_earning = max(0, counts.earning_from - counts.inserted)
    earning_inserts = math.ceil(owed_samples / rule.samples_per_insert)
    return max(inserts_to_min_size, inserts_without_earning + earning_inserts)


def needed_band(samples_per_insert: float | None, batch: int, insert: int) -> float:
    """Returns the narrowest band in which a sample or an insert is allowed at every balance.

    Args:
        samples_per_insert: of the rule; None counts as 0.
        batch: items of the largest sample.
        insert: items of the largest insert.
    """
    return (batch + (samples_per_insert or 0.0) * insert) / 2


def why_not_insert(rule: LimiterRule, counts: Counts, count: int) -> str | None:
    """Returns a sentence on what an insert of ``count`` items waits for; None if it is allowed."""
    missing = samples_missing(rule, counts, count)
    if not missing:
        return None

    next_balance = balance(rule, replace(counts, inserted=counts.inserted + count))
    return (
        f"inserting {count} waits for {missing} more samples: the balance would rise to "
        f"{next_balance:.10g}, above the band of {rule.band:.10g} around "
        f"{rule.samples_per_insert:.10g} samples per insert"
    )


def why_not_sample(rule: LimiterRule, counts: Counts, count: int) -> str | None:
    """Returns a sentence on what a sample of ``count`` items waits for; None if it is allowed."""
    missing = inserts_missing(rule, counts, count)
    if not missing:
        return None

    waits = f"sampling {count} waits for {missing} more inserts: "
    if counts.stored < rule.min_size:
        return waits + f"{counts.stored} items are stored and min_size is {rule.min_size}"

    next_balance = balance(rule, counts) - count
    return waits + (
        f"the balance would fall to {next_balance:.10g}, below the band of "
        f"-{rule.band:.10g} around {rule.samples_per_insert:.10g} samples per insert"
    )


# `why_not_insert` or `why_not_sample`.
_WhyNot = Callable[[LimiterRule, Counts, int], str | None]


@dataclass(frozen=True)
class _Settings:
    """The options of a `RateLimiter` as requested, with the largest sizes that were announced."""

    samples_per_insert: float | None
    min_size: int
    band: float | None
    batch: int = 1
    insert: int = 1
    capacity: int | None = None

    @property
    def rule(self) -> LimiterRule:
        """The rule of these settings; a band that was not requested is twice the narrowest."""
        band = self.band
        if band is None:
            band = 2 * needed_band(self.samples_per_insert, self.batch, self.insert)
        return LimiterRule(self.samples_per_insert, self.min_size, band)

    def validated(self) -> _Settings:
        """Returns these settings.

        Raises:
            ReplayError: an option is out of range, or with these options sampling would never
                begin, or both sides could wait for each other for ever.
        """
        ratio = self.samples_per_insert
        if ratio is not None and not 0 < ratio < math.inf:
            raise ReplayError(f"samples_per_insert {ratio} must be above 0, or None for no ratio")

        if self.min_size < 1:
            raise ReplayError(f"min_size {self.min_size} must be at least 1")
        if self.capacity is not None and self.min_size > self.capacity:
            raise ReplayError(
                f"min_size {self.min_size} is above the capacity of {self.capacity}, so that "
                "sampling would never begin; lower min_size or raise capacity"
            )

        # The default band is always wide enough, and without a ratio there is no balance.
        if ratio is None or self.band is None:
            return self
        needed = needed_band(ratio, self.batch, self.insert)
        if not needed - SLACK <= self.band < math.inf:
            raise ReplayError(
                f"band {self.band} is too narrow for samples of {self.batch} and inserts of "
                f"{self.insert} at {ratio} samples per insert: each would wait for the other for "
                f"ever; make it at least {needed:.10g}"
            )
        return self


class RateLimiter:
    """Keeps sampling and inserting in step: the side that is ahead waits. Any thread may use it.

    The methods `may_insert` and `may_sample` only query. `inserted`, `sampled` and `removed` count
    what happened. `await_insert` and `await_sample` wait until it may happen and count it at once,
    so that two waiting threads cannot both take the last place.

    Args:
        samples_per_insert: how often each inserted item is sampled on average; None: only
            ``min_size`` holds.
        min_size: items that must be stored before any is sampled.
        band: how far the balance may deviate from 0, in sampled items; None: as far as alternating
            with the largest batch and insert needs, `batch + samples_per_insert * insert`.
        batch: expected items of a sample.
        insert: expected items of an insert.
        capacity: of the buffer, in items.

    Raises:
        ReplayError: an option is out of range, or both sides could wait for each other.
    """

    def __init__(
        self,
        samples_per_insert: float | None = None,
        min_size: int = 1,
        band: float | None = None,
        *,
        batch: int = 1,
        insert: int = 1,
        capacity: int | None = None,
    ) -> None:
        self._settings = _Settings(
            samples_per_insert=samples_per_insert,
            min_size=min_size,
            band=band,
            batch=batch,
            insert=insert,
            capacity=capacity,
        ).validated()
        self._counts = Counts(earning_from=min_size)
        # Guards all attributes; notified of each change of the settings or the counts.
        self._changed = threading.Condition()
        # The number of calls that wait now, by their kind and their items.
        self._waiting: Counter[tuple[_WhyNot, int]] = Counter()

    @property
    def rule(self) -> LimiterRule:
        """The rule that applies now."""
        return self._settings.rule

    @property
    def counts(self) -> Counts:
        """A copy of the counts."""
        with self._changed:
            return replace(self._counts)

    @property
    def reasons(self) -> list[str]:
        """A sentence for each kind and size of the calls that wait now."""
        with self._changed:
            reasons = [why_not(self.rule, self._counts, count) for why_not, count in self._waiting]
        return [reason for reason in reasons if reason]

    def expect(self, *, batch: int = 1, insert: int = 1, capacity: int | None = None) -> None:
        """Announce the sizes of coming samples and inserts; a default band grows with the largest.

        Args:
            batch: items of a sample.
            insert: items of an insert.
            capacity: of the buffer, in items; None: as announced before.

        Raises:
            ReplayError: with these sizes, calls could wait for ever. The settings stay as before.
        """
        with self._changed:
            settings = self._settings
            if capacity is None:
                capacity = settings.capacity
            # Every sample and insert announces itself, and all but the first change nothing.
            is_known = batch <= settings.batch and insert <= settings.insert
            if is_known and capacity == settings.capacity:
                return

            self._settings = replace(
                settings,
                batch=max(settings.batch, batch),
                insert=max(settings.insert, insert),
                capacity=capacity,
            ).validated()
            self._changed.notify_all()

    def update(
        self,
        *,
        samples_per_insert: float | None = _UNCHANGED,
        min_size: int = _UNCHANGED,
        band: float | None = _UNCHANGED,
    ) -> None:
        """Change options of the rule from now on, also while calls wait.

        Options that are not given stay as they are. The balance stays too: a new ratio does not
        apply to items inserted before.

        Raises:
            ReplayError: the new rule is invalid. Nothing changes then.
        """
        options: dict[str, Any] = {
            "samples_per_insert": samples_per_insert,
            "min_size": min_size,
            "band": band,
        }
        changes = {name: value for name, value in options.items() if value is not _UNCHANGED}

        with self._changed:
            settings = replace(self._settings, **changes).validated()
            self._counts.carried_balance = balance(self.rule, self._counts)
            self._settings = settings
            self._begin_from(self._counts)

    def may_insert(self, count: int) -> bool:
        """Whether ``count`` items may be inserted now."""
        with self._changed:
            return not samples_missing(self.rule, self._counts, count)

    def may_sample(self, count: int) -> bool:
        """Whether ``count`` items may be sampled now."""
        with self._changed:
            return not inserts_missing(self.rule, self._counts, count)

    def inserted(self, count: int) -> None:
        """Count items that were added; a negative count takes back what `await_insert` counted."""
        self._add(inserted=count)

    def sampled(self, count: int) -> None:
        """Count items that were drawn; a negative count takes back what `await_sample` counted."""
        self._add(sampled=count)

    def removed(self, count: int) -> None:
        """Count items that were evicted. While fewer than min_size are stored, none is sampled."""
        self._add(removed=count)

    def await_insert(self, count: int, timeout_s: float | None = None) -> bool:
        """Wait until ``count`` items may be inserted, and count them as inserted.

        Args:
            count: items of the insert.
            timeout_s: longest wait, in seconds; None: no limit.

        Returns:
            Whether they were counted; False after ``timeout_s`` seconds.

        Raises:
            ReplayError: so many items could never be inserted.
        """
        self.expect(insert=count)
        return self._await(why_not_insert, count, timeout_s, inserted=count)

    def await_sample(self, count: int, timeout_s: float | None = None) -> bool:
        """Wait until ``count`` items may be sampled, and count them as sampled.

        Arguments, result and errors are those of `await_insert`.
        """
        self.expect(batch=count)
        return self._await(why_not_sample, count, timeout_s, sampled=count)

    def state_dict(self) -> dict[str, Any]:
        """The settings and the counts, as JSON values."""
        with self._changed:
            return {"settings": asdict(self._settings), "counts": self._counts.to_dict()}

    def resume(self, state: dict[str, Any] | None, inserted: int, removed: int) -> None:
        """Continue from the balance in ``state``, by the rule of this limiter.

        Args:
            state: what `state_dict` of a limiter returned, which may have another rule; None: the
                balance starts at 0.
            inserted: items that were inserted before; ``state`` has its own number of them.
            removed: items that were removed before.

        Raises:
            ReplayError: ``state`` holds something else than finite numbers.
        """
        with self._changed:
            if state is None:
                self._begin_from(Counts(inserted=inserted, removed=removed))
                return

            counts = Counts.from_dict(state["counts"])
            if not all(isinstance(n, int | float) and math.isfinite(n) for n in astuple(counts)):
                raise ReplayError(f"the snapshot's limiter is damaged: {counts}; load another")
            # A buffer with fewer slots than the snapshot's has removed more items than the state.
            counts.removed = removed
            saved_rule = _Settings(**state["settings"]).rule
            counts.carried_balance = balance(saved_rule, counts)
            self._begin_from(counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the settings and the counts that `state_dict` returned."""
        with self._changed:
            self._settings = _Settings(**state["settings"]).validated()
            self._counts = Counts.from_dict(state["counts"])
            self._changed.notify_all()

    def _begin_from(self, counts: Counts) -> None:
        """Apply the rule to the items after ``counts``, which hold the balance of the past."""
        counts.spending_from = counts.sampled
        counts.earning_from = max(self._settings.min_size, counts.inserted)
        self._counts = counts
        self._changed.notify_all()

    def _add(self, **increments: int) -> None:
        """Add to the fields of the counts that are named, and wake the calls that wait."""
        with self._changed:
            for name, increment in increments.items():
                setattr(self._counts, name, getattr(self._counts, name) + increment)
            self._changed.notify_all()

    def _await(
        self, why_not: _WhyNot, count: int, timeout_s: float | None, **increments: int
    ) -> bool:
        """Wait until ``why_not`` has no reason against ``count`` items; then add ``increments``.

        Returns whether that happened within ``timeout_s`` seconds.
        """

        def is_allowed() -> bool:
            return why_not(self.rule, self._counts, count) is None

        with self._changed:
            allowed = is_allowed()
            if not allowed:
                # While this call waits, it is among the `reasons`.
                self._waiting[why_not, count] += 1
                try:
                    allowed = self._changed.wait_for(is_allowed, timeout_s)
                finally:
                    # A subtraction removes the entries that fall to 0.
                    self._waiting -= Counter({(why_not, count): 1})
            if allowed:
                self._add(**increments)
            return allowed


def expect_sizes(limiter: RateLimiter, spec: SlotSpec, capacity: int, *, shared: bool) -> None:
    """Announce the sizes of a replay that ``limiter`` will serve, before its table is made.

    Raises ReplayError where adding and sampling could wait for each other for ever.
    """
    # Other processes add whole slots; a writer of this process adds one step of its environments.
    insert = spec.unroll * spec.envs if shared else spec.envs
    limiter.expect(insert=insert, capacity=capacity)


class RateLimitedTable:
    """Passes the counts of a table's rows to a limiter, and waits for the limiter.

    The table counts the rows of all writers itself. Adding and sampling wait outside the buffer's
    lock, so that the other side can proceed.

    Args:
        limiter: whose items are the rows of ``table``.
        table: of one replay.
        timeout_s: longest wait, in seconds, where a call gives no other.
    """

    def __init__(self, limiter: RateLimiter, table: Table, timeout_s: float) -> None:
        self.limiter = limiter
        self._table = table
        self._timeout_s = timeout_s
        # The table's counts when they were last passed on.
        self._passed_inserted = 0
        self._passed_evicted = 0

    def before_insert(self, rows: int, timeout_s: float | None = None) -> None:
        """Wait until ``rows`` may be added, and count them in the limiter.

        Raises ReplayError after ``timeout_s`` seconds; None: after those of the constructor.
        """
        limiter = self.limiter
        if timeout_s is None:
            timeout_s = self._timeout_s
        if not limiter.await_insert(rows, timeout_s):
            raise _timed_out(why_not_insert(limiter.rule, limiter.counts, rows), timeout_s)

    def before_sample(self, rows: int, timeout_s: float | None = None) -> None:
        """Wait until ``rows`` may be drawn, and count them in the limiter.

        Raises ReplayError after ``timeout_s`` seconds; None: after those of the constructor.
        """
        limiter = self.limiter
        if timeout_s is None:
            timeout_s = self._timeout_s
        if not limiter.await_sample(rows, timeout_s):
            raise _timed_out(why_not_sample(limiter.rule, limiter.counts, rows), timeout_s)

    def take_back_sample(self, rows: int) -> None:
        """Take back the ``rows`` that `before_sample` counted, as none was drawn."""
        self.limiter.sampled(-rows)

    def pass_on_counts(self, already_counted: int = 0) -> None:
        """Tell the limiter which rows the table took in and evicted since the last call.

        Args:
            already_counted: rows that `before_insert` counted since then.
        """
        inserted = self._table.inserted
        if new_rows := inserted - self._passed_inserted - already_counted:
            self.limiter.inserted(new_rows)
        self._passed_inserted = inserted

        evicted = self._table.evicted.total()
        if evicted_rows := evicted - self._passed_evicted:
            self.limiter.removed(evicted_rows)
        self._passed_evicted = evicted

    def state_dict(self) -> dict[str, Any]:
        """The limiter's state as JSON values; it includes the table's present counts."""
        self.pass_on_counts()
        return self.limiter.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue by the limiter's own rule, after the table was restored.

        Args:
            state: what `state_dict` returned; None: the stored rows earned no samples, and none
                was drawn.
        """
        self._passed_inserted = self._table.inserted
        self._passed_evicted = self._table.evicted.total()
        self.limiter.resume(state, self._passed_inserted, self._passed_evicted)

    def may_lend(self) -> bool:
        """Whether a writer in another process may begin a slot."""
        return self.limiter.may_insert(self._table.rows_per_slot)

    def why_not_sample(self, rows: int) -> str:
        """Returns why ``rows`` cannot be drawn yet, as a sentence; empty if they can."""
        return why_not_sample(self.limiter.rule, self.limiter.counts, rows) or ""


def _timed_out(reason: str | None, timeout_s: float) -> ReplayError:
    """The error of a wait; ``reason`` is None if the limiter would allow the call by now."""
    return ReplayError(f"{reason or 'nothing'}; it timed out after {timeout_s:g} s")
