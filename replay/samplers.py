"""Samplers: which stored rows a batch takes, uniformly or in proportion to priorities.

The buffer notifies a sampler of the physical rows that were written and removed; `valid`, the
table's own array, marks which of them count. A sampler is used under the buffer's lock, by one
thread at a time. `SampleCountLimit` wraps a sampler and removes rows that were drawn often enough.

A `Schedule` is a number that changes while a buffer is used. It is called with the number of
transitions that its sampler has drawn so far. This unit does not depend on the batch size, the
number of learners or the writers, and a rate limiter counts in it: with S samples per insert,
`S * n` drawn transitions are `n` environment steps; with batches of B, they are `S * n / B` learner
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from penstock.replay.errors import ReplayError
from penstock.replay.sum_tree import Floats, Rows, SumTree

if TYPE_CHECKING:
    from penstock.configs.sections import ReplayConfig

Valid = npt.NDArray[np.bool_]
Weights = npt.NDArray[np.float32]

# The largest priority of a row: the sum over any number of rows stays finite.
MAX_PRIORITY = 1e100
# The smallest epsilon: the sum tree needs weights that are normal numbers.
MIN_EPSILON = 1e-100
# `Uniform` draws so many rows in one go, because generators and numpy are faster in bulk.
ROWS_AHEAD = 4096
# `Uniform` draws one spare row for as many requested ones, as rows of open slots may not be valid.
ROWS_PER_SPARE = 8
# `Uniform` lists the valid rows once it needed so many draws for each valid one.
DRAWS_PER_ROW = 32


class Schedule(Protocol):
    """Any callable that returns a value for the number of transitions drawn so far."""

    def __call__(self, drawn: int, /) -> float: ...


@dataclass(frozen=True)
class Constant:
    """Always the same value."""

    value: float

    def __call__(self, drawn: int, /) -> float:
        return self.value


@dataclass(frozen=True)
class Linear:
    """Linear from ``start`` to ``end`` over the first ``over`` drawn transitions, then ``end``."""

    start: float
    end: float
    over: int

    def __post_init__(self) -> None:
        if self.over < 1:
            raise ReplayError(
                f"Linear over {self.over} transitions has no slope; give at least 1, or Constant"
            )

    def __call__(self, drawn: int, /) -> float:
        if drawn >= self.over:
            return self.end
        return self.start + (self.end - self.start) * (drawn / self.over)


def as_schedule(value: float | Schedule) -> Schedule:
    """Returns ``value`` itself if it is a schedule, and a `Constant` for a number."""
    return value if callable(value) else Constant(float(value))


class Sampler(Protocol):
    """Chooses the rows of a batch. Rows are physical rows of the table, int64.

    Two things are optional. A sampler with a method ``load_moved(state, origin)`` can also continue
    in a replay with another number of slots: see `load_moved` of this module. A sampler whose draws
    have importance weights has the properties ``beta``, the exponent of the next weights, and
    ``probabilities``, ``[count]`` float64, those of the rows of the last draw.
    """

    def bind(self, valid: Valid, rng: np.random.Generator) -> None:
        """Connect to a table; called once, before all else.

        Args:
            valid: ``[rows]`` bool, which rows count. The table keeps this array up to date.
            rng: the generator of all draws.
        """

    def insert(self, start: int, stop: int, priorities: npt.NDArray[Any] | None) -> None:
        """Add the rows ``start`` to ``stop``, which were written; `valid` marks those that count.

        A row that counts only later is inserted again at that time.

        Args:
            start: first physical row.
            stop: one past the last.
            priorities: ``[stop - start]``, NaN for rows that the sampler rates itself; None: it
                rates all.
        """

    def remove(self, start: int, stop: int) -> None:
        """Remove the rows ``start`` to ``stop``, which are no longer valid."""

    def remove_rows(self, rows: Rows) -> None:
        """Remove single rows ``[n]``, which are no longer valid."""

    def sample(self, count: int) -> tuple[Rows, Weights | None]:
        """Draw ``count`` valid rows with replacement.

        Returns:
            Rows ``[count]``, and their importance weights ``[count]`` float32, or None.

        Raises:
            ReplayError: no row can be drawn.
        """

    def update(self, rows: Rows, priorities: npt.NDArray[Any]) -> None:
        """Set the priorities ``[n]`` of rows ``[n]`` that still hold what was sampled."""

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of arrays, and JSON values.

        A sampler that loads them draws the same rows.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; called after `bind` to a table that was loaded too."""


class NamedSampler(Sampler):
    """Base of the samplers in `configs.samplers.SAMPLERS`, which runs and snapshots name.

    A class whose constructor has arguments overrides these methods.
    """

    @classmethod
    def for_run(cls, options: ReplayConfig, steps: Callable[[], int]) -> Self:
        """Make the sampler of a run.

        Args:
            options: the section `replay` of the run's options.
            steps: returns the optimizer steps that the whole run has taken.
        """
        return cls()

    def arguments(self) -> dict[str, Any]:
        """Returns JSON values from which `from_arguments` makes the sampler again."""
        return {}

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self | None:
        """Make the sampler of a snapshot from what `arguments` returned.

        Returns:
            The sampler, or None if the arguments are not enough, as with a user's own schedule.
        """
        return cls(**arguments)


class Uniform(NamedSampler):
    """Draws every valid row with equal probability, each draw independent of the others.

    Rows are drawn among all rows up to the highest ever inserted, and a row that is not valid is
    drawn again. So the cost depends on the share of valid rows and not on their number. Only if
    hardly any row is valid are the valid rows listed.

    Once the highest row stays the same, rows are drawn ahead, `ROWS_AHEAD` at a time. Whether a row
    is valid is looked up when its turn comes, so that drawing ahead changes no probability.
    """

    def __init__(self) -> None:
        # One past the highest row that was ever inserted.
        self._end = 0
        # Rows that were drawn ahead, valid or not, and how many of them have been used.
        self._rows_ahead: Rows = np.empty(0, np.int64)
        self._used_ahead = 0
        # The value of `_end` at the last call of `_draw_ahead`.
        self._last_end = 0
        # The valid rows, if they are so few that they are listed.
        self._valid_rows: Rows | None = None

    def bind(self, valid: Valid, rng: np.random.Generator) -> None:
        self._valid = valid
        self._rng = rng

    def insert(self, start: int, stop: int, priorities: npt.NDArray[Any] | None) -> None:
        if stop > self._end:
            # The rows that were drawn ahead lie below the previous end, and would not be even.
            self._end = stop
            self._used_ahead = len(self._rows_ahead)
        self._valid_rows = None

    def remove(self, start: int, stop: int) -> None:
        self._valid_rows = None

    def remove_rows(self, rows: Rows) -> None:
        self._valid_rows = None

    def sample(self, count: int) -> tuple[Rows, None]:
        if not self._end:
            raise _nothing_to_sample(count)
        if self._valid_rows is not None:
            return self._draw_listed(count), None

        # A few rows more than requested are drawn, because some may not be valid.
        drawn = count + count // ROWS_PER_SPARE + ROWS_PER_SPARE
        first = self._used_ahead
        self._used_ahead += drawn
        if self._used_ahead > len(self._rows_ahead):
            first = 0
            self._used_ahead = drawn
            self._rows_ahead = self._draw_ahead(drawn)
        rows = self._rows_ahead[first : self._used_ahead]

        is_valid = self._valid.take(rows)
        # A byte search takes a tenth of the time that `all` needs to start.
        if 0 in is_valid.tobytes():
            rows = rows[is_valid]
        if len(rows) >= count:
            return rows[:count], None
        return self._complete(rows, drawn, count), None

    def update(self, rows: Rows, priorities: npt.NDArray[Any]) -> None:
        """Do nothing: uniform draws have no priorities."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "end": self._end,
            "listed": self._valid_rows is not None,
            "ahead": self._rows_ahead[self._used_ahead :].copy(),
            "ahead_of": self._last_end,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        end = int(state["end"])
        if not 0 <= end <= len(self._valid) or self._valid[end:].any():
            raise ReplayError(f"the snapshot is damaged: its rows end at {end}; load another")

        # Older snapshots have no rows that were drawn ahead.
        rows_ahead = np.asarray(state.get("ahead", ()), np.int64)
        if rows_ahead.ndim != 1 or ((rows_ahead < 0) | (rows_ahead >= end)).any():
            raise ReplayError(
                f"the snapshot is damaged: rows drawn ahead lie outside its {end}; load another"
            )

        self._end = end
        self._rows_ahead = rows_ahead
        self._used_ahead = 0
        self._last_end = int(state.get("ahead_of", 0))
        self._valid_rows = np.flatnonzero(self._valid[:end]) if state["listed"] else None
        self._rng.bit_generator.state = state["rng"]

    def load_moved(self, state: dict[str, Any], origin: Rows) -> None:
        """Continue with the random numbers of ``state``; nothing else depends on where rows lie."""
        valid_rows = np.flatnonzero(self._valid)
        end = int(valid_rows[-1]) + 1 if len(valid_rows) else 0
        self.load_state_dict({"end": end, "listed": False, "rng": state["rng"]})

    def _draw_ahead(self, least: int) -> Rows:
        """Draw at least ``least`` rows, valid or not.

        They are many, unless the end has moved since the last call and so may move again.
        """
        count = max(least, ROWS_AHEAD) if self._last_end == self._end else least
        self._last_end = self._end
        # Twice as fast as `integers`, and as even: the end is far below the 2**53 of a double.
        rows: Rows = (self._rng.random(count) * self._end).astype(np.int64)
        return rows

    def _complete(self, valid: Rows, drawn: int, count: int) -> Rows:
        """Add further independent draws to ``valid``, until there are ``count`` rows.

        Args:
            valid: ``[n]``, the valid rows among those drawn so far.
            drawn: number of rows drawn so far.
            count: number of rows to return, more than n.
        """
        parts = [valid]
        missing = count - len(valid)
        while missing:
            # If hardly any draw is valid, the few valid rows are listed and drawn directly.
            if drawn > DRAWS_PER_ROW * (count - missing + 1):
                self._valid_rows = np.flatnonzero(self._valid[: self._end])
                parts.append(self._draw_listed(missing))
                break

            rows = self._rng.integers(0, self._end, 2 * missing)
            drawn += len(rows)
            valid_part = rows[self._valid.take(rows)][:missing]
            parts.append(valid_part)
            missing -= len(valid_part)
        return np.concatenate(parts)

    def _draw_listed(self, count: int) -> Rows:
        """Draw ``count`` rows from the list of valid rows; raises ReplayError if it is empty."""
        rows = self._valid_rows
        assert rows is not None
        if not len(rows):
            raise _nothing_to_sample(count)
        return rows[self._rng.integers(0, len(rows), count)]


class Prioritized(NamedSampler):
    """Proportional prioritisation, Schaul et al. 2016 (arXiv 1511.05952), section 3.

    Row i is drawn with P(i) = (p_i + epsilon)^alpha / sum_k (p_k + epsilon)^alpha. A row inserted
    without a priority gets the highest priority given so far, at least 1 (the paper's p_1).

    Draws are stratified (appendix B.2.1): one from each of ``count`` equal shares of the total. So
    a row is drawn count * P(i) times on average, with less spread than independent draws would
    have. A batch is ordered by row: shuffle it before splitting it into parts that must be alike.

    Importance weights are (N P(i))^-beta, divided by the largest of the batch. Learners with one
    shard each divide by the largest of all shards: with K shards that each give an equal part of a
    batch, a row's probability is P(i) / K and N the sum over the shards.

    Args:
        alpha: exponent of the priorities; 0 is uniform.
        beta: exponent of the importance weights, a number or a `Schedule` of the number of drawn
            transitions (not of calls, nor of optimizer steps).
        epsilon: added to each priority.
        fast: True needs numba's tree (the extra "fast"), False uses numpy's, None takes numba's if
            it is installed. Both draw the same rows.
    """

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float | Schedule = 0.4,
        epsilon: float = 1e-6,
        *,
        fast: bool | None = None,
    ) -> None:
        self.alpha = _between_0_and_1("alpha", alpha)
        self.schedule = as_schedule(beta)
        _between_0_and_1("beta", self.schedule(0))
        if not MIN_EPSILON <= epsilon <= MAX_PRIORITY:
            raise ReplayError(
                f"epsilon {epsilon} must be at least {MIN_EPSILON:g}: it keeps rows of priority 0 "
                "from never being sampled"
            )
        self.epsilon = epsilon
        self._fast = fast
        # The highest priority so far, which new rows get; and the number of rows drawn so far.
        self._highest_priority = 1.0
        self._drawn = 0
        # The tree's weights of the rows of the last draw, and of all rows at that time.
        self._drawn_weights: Floats = np.empty(0)
        self._total_weight = 0.0
        # The numbers 0 to count - 1 of the strata of the last draw, as floats.
        self._strata_numbers: Floats = np.empty(0)

    @classmethod
    def for_run(cls, options: ReplayConfig, steps: Callable[[], int]) -> Self:
        if options.beta_steps is None:
            return cls(options.alpha, options.beta)

        # A run counts optimizer steps instead of the transitions that this sampler has drawn.
        beta_of_step = Linear(options.beta, 1.0, options.beta_steps)
        return cls(options.alpha, lambda _: beta_of_step(steps()))

    def arguments(self) -> dict[str, Any]:
        """Returns alpha, beta and epsilon; beta is None for a schedule of the user's own."""
        beta: Any = None
        if isinstance(self.schedule, Constant):
            beta = self.schedule.value
        elif isinstance(self.schedule, Linear):
            beta = asdict(self.schedule)
        return {"alpha": self.alpha, "beta": beta, "epsilon": self.epsilon}

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Self | None:
        beta = arguments["beta"]
        if beta is None:
            return None
        schedule = Linear(**beta) if isinstance(beta, dict) else beta
        return cls(arguments["alpha"], schedule, arguments["epsilon"])

    def bind(self, valid: Valid, rng: np.random.Generator) -> None:
        self._valid = valid
        self._rng = rng
        self._tree = make_tree(len(valid), self._fast)

    @property
    def beta(self) -> float:
        """The exponent of the next batch's weights."""
        return self.schedule(self._drawn)

    @property
    def probabilities(self) -> Floats:
        """P(i) of the rows of the last batch, ``[count]`` float64."""
        return self._drawn_weights / self._total_weight

    @property
    def stored(self) -> int:
        """N, the number of valid rows, which each access counts anew."""
        return int(np.count_nonzero(self._valid))

    def insert(self, start: int, stop: int, priorities: npt.NDArray[Any] | None) -> None:
        is_valid = self._valid[start:stop]
        if priorities is None:
            weights = is_valid * (self._highest_priority + self.epsilon) ** self.alpha
        else:
            _check_count(stop - start, priorities)
            priorities = np.where(np.isnan(priorities), self._highest_priority, priorities)
            # Rows that do not count may hold any number: they are not checked, and get weight 0.
            weights = self._weights(np.where(is_valid, priorities, 0.0)) * is_valid
        self._tree.write(start, stop, weights)

    def remove(self, start: int, stop: int) -> None:
        self._tree.write(start, stop, 0.0)

    def remove_rows(self, rows: Rows) -> None:
        self._tree.set(rows, 0.0)

    def sample(self, count: int) -> tuple[Rows, Weights]:
        total = self._tree.total
        if not total:
            raise _nothing_to_sample(count)

        rows = self._tree.draw(self._strata(count))
        drawn_weights = self._tree.leaves.take(rows)
        self._drawn_weights = drawn_weights
        self._total_weight = total

        # The importance weight (N P)^-beta is divided by its maximum, which is where P is smallest.
        # N and the total cancel. `argmin` is faster than `min`.
        least = drawn_weights.item(drawn_weights.argmin())
        importance = (least / drawn_weights) ** self.beta
        self._drawn += count
        return rows, importance.astype(np.float32)

    def update(self, rows: Rows, priorities: npt.NDArray[Any]) -> None:
        """Set priorities ``[n]`` of rows ``[n]``.

        If a row occurs twice, its last priority counts. Rows that are not valid keep weight 0.
        Raises ReplayError for a priority that is not a number from 0 to `MAX_PRIORITY`.
        """
        _check_count(len(rows), priorities)
        self._tree.set(rows, self._weights(priorities) * self._valid.take(rows))

    def state_dict(self) -> dict[str, Any]:
        return {
            "leaves": self._tree.leaves.copy(),
            "highest": self._highest_priority,
            "drawn": self._drawn,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["leaves"].shape != self._valid.shape:
            raise ReplayError(
                f"the snapshot has {len(state['leaves'])} priorities and the buffer "
                f"{len(self._valid)} rows; load it into a buffer of the same size"
            )

        leaves = state["leaves"].astype(np.float64)
        max_weight = (MAX_PRIORITY + self.epsilon) ** self.alpha
        if not ((leaves >= 0) & (leaves <= max_weight)).all() or leaves[~self._valid].any():
            raise ReplayError("the snapshot's priorities are damaged; load another")
        highest = float(state["highest"])
        if not 0 <= highest <= MAX_PRIORITY:
            raise ReplayError(
                f"the snapshot is damaged: its highest priority is {highest}; load another"
            )

        self._tree.load(leaves)
        self._highest_priority = highest
        self._drawn = max(0, int(state["drawn"]))
        self._rng.bit_generator.state = state["rng"]

    def load_moved(self, state: dict[str, Any], origin: Rows) -> None:
        """Load a state whose rows have moved, as the function `load_moved` describes."""
        # Rows that were evicted as their slot had no room count no longer.
        leaves = _moved(state["leaves"], origin, len(self._valid)) * self._valid
        self.load_state_dict(state | {"leaves": leaves})

    def _strata(self, count: int) -> Floats:
        """Draw one random fraction ``[count]`` in each of ``count`` equal shares of [0, 1)."""
        if len(self._strata_numbers) != count:
            self._strata_numbers = np.arange(count, dtype=np.float64)
        fractions = self._rng.random(count)
        fractions += self._strata_numbers
        fractions /= count
        return fractions

    def _weights(self, priorities: npt.NDArray[Any]) -> Floats:
        """Returns (p + epsilon)^alpha of ``priorities`` [n], and updates the highest priority.

        Raises ReplayError for a priority that is not a number from 0 to `MAX_PRIORITY`.
        """
        priorities = np.asarray(priorities, np.float64)
        if not len(priorities):
            return priorities

        # Like `max` and `min`, in a third of the time; both are NaN if any priority is.
        highest = priorities.item(priorities.argmax())
        lowest = priorities.item(priorities.argmin())
        if not (lowest >= 0 and highest <= MAX_PRIORITY):
            raise _bad_priority(priorities)

        self._highest_priority = max(self._highest_priority, highest)
        weights: Floats = (priorities + self.epsilon) ** self.alpha
        return weights


class RowTable(Protocol):
    """The part of a `Table` that `SampleCountLimit` needs."""

    def remove_rows(self, rows: Rows, reason: str) -> None:
        """Remove single valid rows, each given once, from sampling."""


class SampleCountLimit:
    """A `Sampler` that draws as another does, and each row only a limited number of times.

    A row is removed from the table at its last draw. A draw that would exceed the limit of its row
    within one batch is repeated. The option ``max_times_sampled`` of `Replay` makes one.

    Args:
        sampler: draws the rows.
        max_draws: most draws of a row, from 1.
    """

    def __init__(self, sampler: Sampler, max_draws: int) -> None:
        if max_draws < 1:
            raise ReplayError(
                f"max_times_sampled {max_draws} must be at least 1; None has no limit"
            )
        self.sampler = sampler
        self.max_draws = max_draws

    def place(self, table: RowTable) -> None:
        """Set the table that rows are removed from; called once, before `bind`."""
        self._table = table

    def bind(self, valid: Valid, rng: np.random.Generator) -> None:
        self._valid = valid
        # How often each row was drawn since it was inserted.
        self._draw_counts: npt.NDArray[np.int32] = np.zeros(len(valid), np.int32)
        self.sampler.bind(valid, rng)

    def insert(self, start: int, stop: int, priorities: npt.NDArray[Any] | None) -> None:
        self._draw_counts[start:stop] = 0
        self.sampler.insert(start, stop, priorities)

    def remove(self, start: int, stop: int) -> None:
        self.sampler.remove(start, stop)

    def remove_rows(self, rows: Rows) -> None:
        self.sampler.remove_rows(rows)

    def sample(self, count: int) -> tuple[Rows, Weights | None]:
        """Draw ``count`` rows, at most as many as are valid: each of these has a draw left.

        Draws above a row's limit are repeated, with all rows that are still missing at once. The
        importance weights of these parts are divided by the largest of all parts.
        """
        row_parts: list[Rows] = []
        weight_parts: list[Floats] = []
        missing = count
        while missing:
            beta = getattr(self.sampler, "beta", 0.0)
            rows, weights = self.sampler.sample(missing)
            allowed = self._count_draws(rows)
            row_parts.append(rows[allowed])
            if weights is not None:
                weight_parts.append(self._undivided(weights, beta)[allowed])
            missing -= len(allowed)

        rows = np.concatenate(row_parts)
        if not weight_parts:
            return rows, None
        undivided = np.concatenate(weight_parts)
        return rows, (undivided / undivided.max()).astype(np.float32)

    def update(self, rows: Rows, priorities: npt.NDArray[Any]) -> None:
        self.sampler.update(rows, priorities)

    def state_dict(self) -> dict[str, Any]:
        return {"used": self._draw_counts.copy(), "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load_draw_counts(state["used"])
        self.sampler.load_state_dict(state["sampler"])

    def load_moved(self, state: dict[str, Any], origin: Rows) -> None:
        """Load a state whose rows have moved, as the function `load_moved` describes."""
        self._load_draw_counts(_moved(state["used"], origin, len(self._valid)))
        load_moved(self.sampler, state["sampler"], origin)

    def _load_draw_counts(self, counts: npt.NDArray[Any]) -> None:
        """Load ``counts`` [rows]. Raises ReplayError if they are damaged, or above the limit."""
        if counts.shape != self._draw_counts.shape or not (counts >= 0).all():
            raise ReplayError("the snapshot's counts of draws are damaged; load another")
        # A valid row without a draw left would let `sample` search without end.
        if not (counts[self._valid] < self.max_draws).all():
            raise ReplayError(
                f"the snapshot has rows that were sampled {self.max_draws} times or more, and "
                "max_times_sampled removes them; load another"
            )
        self._draw_counts[...] = counts

    def _count_draws(self, rows: Rows) -> Rows:
        """Count the draws of ``rows`` [n] that the limit allows, and remove rows that reach it.

        Returns:
            The positions ``[<= n]`` of the allowed draws in ``rows``, ascending.
        """
        # Sorted, the draws of one row lie side by side, in the order in which they were drawn.
        order = np.argsort(rows, kind="stable")
        sorted_rows = rows[order]
        first_positions = np.searchsorted(sorted_rows, sorted_rows)
        earlier_draws = np.arange(len(rows)) - first_positions

        is_allowed = self._draw_counts[sorted_rows] + earlier_draws < self.max_draws
        allowed = np.sort(order[is_allowed])
        np.add.at(self._draw_counts, rows[allowed], 1)

        drawn_rows = np.unique(rows[allowed])
        spent_rows = drawn_rows[self._draw_counts[drawn_rows] >= self.max_draws]
        if len(spent_rows):
            self._table.remove_rows(spent_rows, "max_times_sampled")
        return allowed

    def _undivided(self, weights: Weights, beta: float) -> Floats:
        """Returns the weights of the last draw as they were before the division by the largest.

        Args:
            weights: ``[n]`` as `Sampler.sample` returned them.
            beta: the exponent of that draw.
        """
        probabilities: Floats | None = getattr(self.sampler, "probabilities", None)
        if probabilities is None:
            return weights.astype(np.float64)
        undivided: Floats = probabilities**-beta
        return undivided


def load_moved(sampler: Sampler, state: dict[str, Any], origin: Rows) -> None:
    """Load a state whose rows have moved to other places of the table.

    For rows that have not moved, use `load_state_dict`.

    Args:
        sampler: bound to the table, which was loaded too.
        state: what `state_dict` of the saved sampler returned.
        origin: ``[n]`` int64: the rows of ``sampler`` are n equal stretches, and each was the
            stretch of ``state`` with this number; -1 for one that is new.

    Raises:
        ReplayError: the sampler has no method `load_moved`.
    """
    load = getattr(sampler, "load_moved", None)
    if load is None:
        raise ReplayError(
            f"the snapshot has another number of slots, and {type(sampler).__name__} has no "
            "load_moved(state, origin); give the same capacity and in_hand as the saved replay"
        )

    load(state, origin)


def _moved(values: npt.NDArray[Any], origin: Rows, rows: int) -> npt.NDArray[Any]:
    """Returns the values ``[rows]`` of rows that have moved; 0 for those of new rows.

    Args:
        values: of the rows in their saved places.
        origin: as in `load_moved`.
        rows: number of rows now.
    """
    stretches = values.reshape(-1, rows // len(origin))
    is_new = origin[:, None] < 0
    moved_values: npt.NDArray[Any] = np.where(is_new, 0, stretches[origin])
    return moved_values.reshape(-1)


def make_tree(capacity: int, fast: bool | None) -> SumTree:
    """Make a sum tree: numba's if it is installed and ``fast`` allows it, else numpy's.

    Args:
        capacity: number of leaves.
        fast: as the option of `Prioritized`.

    Raises:
        ReplayError: ``fast`` is True and numba is missing.
    """
    if fast is False:
        return SumTree(capacity)

    # Imported here, because importing numba takes long.
    from penstock.replay import fast_sum_tree

    if fast_sum_tree.AVAILABLE:
        return fast_sum_tree.FastSumTree(capacity)
    if fast:
        raise ReplayError(
            "fast=True needs numba, which is not installed; run pip install 'penstock[fast]' or "
            "leave fast out"
        )
    return SumTree(capacity)


def check_priorities(
    keys: npt.ArrayLike, priorities: npt.ArrayLike
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Check the arguments of `Replay.update_priorities`.

    Returns:
        The keys ``[n]`` int64, and the magnitudes of the priorities ``[n]`` float64.

    Raises:
        ReplayError: the lengths differ, or a priority is not finite.
    """
    key_array = np.asarray(keys, np.int64).reshape(-1)
    magnitudes = np.abs(np.asarray(priorities, np.float64)).reshape(-1)
    if key_array.shape != magnitudes.shape:
        raise ReplayError(
            f"{len(magnitudes)} priorities came for {len(key_array)} keys; give one each"
        )

    is_finite = np.isfinite(magnitudes)
    # A byte search takes a tenth of the time that `all` needs to start.
    if 0 in is_finite.tobytes():
        position = int(np.argmin(is_finite))
        raise ReplayError(
            f"priority {magnitudes[position]} at position {position} must be finite; look for what "
            "made it so before it reaches the network"
        )
    return key_array, magnitudes


def are_priorities(values: npt.NDArray[Any]) -> Valid:
    """Returns which of ``values`` are priorities: numbers from 0 to `MAX_PRIORITY`, and no NaN."""
    sound: Valid = (values >= 0) & (values <= MAX_PRIORITY)
    return sound


def _check_count(rows: int, priorities: npt.NDArray[Any]) -> None:
    """Raise ReplayError unless there is one priority for each of ``rows`` rows."""
    if np.shape(priorities) != (rows,):
        raise ReplayError(
            f"priorities of shape {np.shape(priorities)} came for {rows} rows; give one number each"
        )


def _between_0_and_1(name: str, value: float) -> float:
    """Returns ``value``. Raises ReplayError, with the option's ``name``, if it is out of range."""
    if not 0 <= value <= 1:
        raise ReplayError(f"{name} {value} must be between 0 and 1")
    return value


def _nothing_to_sample(count: int) -> ReplayError:
    return ReplayError(
        f"cannot sample {count} rows: no stored row can be sampled yet; add more first, and note "
        "that a row counts once what followed it is known"
    )


def _bad_priority(priorities: Floats) -> ReplayError:
    """Returns the error that names the first of ``priorities`` which is none."""
    position = int(np.flatnonzero(~are_priorities(priorities))[0])
    return ReplayError(
        f"priority {priorities[position]} at position {position} must be a finite number from 0 "
        f"to {MAX_PRIORITY:g}; pass for example the absolute TD error"
    )
