"""Sequences for recurrent learners: where they start, how starts are drawn, and their batches.

Starts lie every `length - overlap` steps, counted from each episode's first stored step. A start
counts once its sequence is complete: `length` steps were written or, where sequences are padded,
the episode ended before. The cost of a row does not depend on the number of stored rows: as a slot
is written, the position in the episode is carried along per environment, and a start is found when
the last step of its sequence is written.

Only some rows are starts, so the inner sampler does not draw rows but *numbers* of starts, dense
from 0. A new start gets the number of a start that was removed, or else the lowest that was never
used. So uniform and prioritised sampling work on numbers without change.

`SequenceSampler` finds and draws starts; `SequenceGather` makes batches of the sequences there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.specs import SlotSpec
from penstock.replay.batch import Batch
from penstock.replay.columns import unflatten
from penstock.replay.errors import ReplayError
from penstock.replay.frames import FrameWindow, find_window
from penstock.replay.gather import Gather
from penstock.replay.layout import Layout, Observation
from penstock.replay.nstep import ends_episode, follow
from penstock.replay.samplers import Sampler, Valid, Weights, load_moved
from penstock.replay.table import NONE, Array, Rows, Table

Ints = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

# A batch has this column only of the first step of each sequence: the recurrent state.
STATE = "state"
# Future rows are looked for among so many rows first, then among twice as many.
FIRST_BLOCK = 32


@dataclass(frozen=True)
class Sequences:
    """Which sequences of a stream's steps are drawn, as an option of `Replay`.

    Args:
        length: steps of a sequence.
        overlap: steps that neighbouring sequences of an episode share.
        burn_in: first steps, which only warm up the recurrent state.
        pad: True: a sequence may end with its episode, and the mask marks where. False: only
            sequences that lie within one episode are drawn, and the rest of an episode never is.
    """

    length: int
    overlap: int = 0
    burn_in: int = 0
    pad: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ReplayError(f"sequences of length {self.length} hold nothing; give at least 1")

        for name, value in (("overlap", self.overlap), ("burn_in", self.burn_in)):
            if not 0 <= value < self.length:
                raise ReplayError(
                    f"{name} {value} must be between 0 and length - 1 = {self.length - 1}"
                )

    @property
    def stride(self) -> int:
        """Steps from one start to the next."""
        return self.length - self.overlap

    def refuse_n_step(self, n_step: int) -> None:
        """Raise ReplayError unless ``n_step`` is 1."""
        if n_step != 1:
            raise ReplayError(
                f"n_step {n_step} does not go with sequences, which bring every step; leave it out "
                "and sum up in the learner"
            )


class Slots(Protocol):
    """The part of a `Table` that `SequenceSampler` needs."""

    spec: SlotSpec
    slots: int
    records: npt.NDArray[Any]
    length: Ints
    prev: Ints


class _SequenceEnds(NamedTuple):
    """The last steps of n sequences that end in one slot, each array ``[n]``.

    Args:
        steps: of the slot; -1 is the last step before it.
        envs: the environments.
        steps_back: number of steps from the last one back to the start of the sequence.
    """

    steps: Rows
    envs: Rows
    steps_back: Rows


class SequenceSampler:
    """A `Sampler` that draws rows at which sequences start.

    It finds the starts among the rows that are inserted; the inner ``sampler`` chooses among their
    numbers. The slots of a stream are inserted and removed in their order.
    """

    def __init__(self, sequences: Sequences, sampler: Sampler) -> None:
        self.sequences = sequences
        self.sampler = sampler

    def place(self, table: Slots) -> None:
        """Set the table of the rows; called once, before `bind`."""
        self._table = table
        self._unroll = table.spec.unroll
        self._envs = table.spec.envs
        self._rows_per_slot = self._unroll * self._envs

        # The neighbours of each slot in its stream.
        self._previous_slot: Ints = np.full(table.slots, NONE, np.int32)
        self._next_slot: Ints = np.full(table.slots, NONE, np.int32)
        # How many steps of each slot were searched for starts; NONE for a slot that is not in use.
        self._searched: Ints = np.full(table.slots, NONE, np.int32)
        # The position in its episode of the next step of each environment [slots, envs].
        self._position = np.zeros((table.slots, self._envs), np.int64)
        # Slots that were written since the last search, in order: the older of a stream first.
        self._pending: dict[int, None] = {}

        # The starts by number. The system provides pages of zeros only when they are written, and
        # most numbers are never used.
        rows = table.slots * self._rows_per_slot
        self._row_of_number = np.zeros(rows, np.int64)
        self._in_use: Valid = np.zeros(rows, np.bool_)
        self._free_numbers = np.zeros(rows, np.int32)  # a stack
        self._free_count = 0
        self._lowest_unused = 0  # all numbers from here on were never used
        # The number of the start at each row, plus 1; 0 for a row that is no start.
        self._number_of_row = np.zeros(rows, np.int32)

    def __len__(self) -> int:
        """The number of starts that can be drawn."""
        self._search()
        return self._lowest_unused - self._free_count

    def bind(self, valid: Valid, rng: np.random.Generator) -> None:
        self._valid = valid
        self.sampler.bind(self._in_use, rng)

    def insert(self, start: int, stop: int, priorities: npt.NDArray[Any] | None) -> None:
        """Add rows of one slot; they are searched for starts before the next draw.

        Priorities of single steps, which a foreign writer may send, are ignored.
        """
        slot = start // self._rows_per_slot
        if self._searched[slot] == NONE:
            self._search()
            self._open(slot)
        self._pending[slot] = None

    def remove(self, start: int, stop: int) -> None:
        """Remove whole slots, with the starts of sequences that lie in them or run into them."""
        self._search()
        first_slot = start // self._rows_per_slot
        stop_slot = -(-stop // self._rows_per_slot)
        for slot in range(first_slot, stop_slot):
            previous_slot = int(self._previous_slot[slot])
            next_slot = int(self._next_slot[slot])
            if next_slot != NONE:
                self._previous_slot[next_slot] = NONE
            # A slot leaves before its predecessor if a policy limit removes it as the older one.
            if previous_slot != NONE:
                self._next_slot[previous_slot] = NONE
                self._remove_last_starts(previous_slot)
            self._previous_slot[slot] = NONE
            self._next_slot[slot] = NONE
            self._searched[slot] = NONE

        start_rows = start + np.flatnonzero(self._number_of_row[start:stop])
        self._remove_starts(start_rows)

    def remove_rows(self, rows: Rows) -> None:
        self._search()
        start_rows = rows[self._number_of_row[rows] > 0]
        self._remove_starts(np.unique(start_rows))

    def sample(self, count: int) -> tuple[Rows, Weights | None]:
        """Draw ``count`` rows at which sequences start.

        Returns:
            Rows ``[count]``, and their weights ``[count]`` if the inner sampler has any.

        Raises:
            ReplayError: no stored sequence is complete.
        """
        if not len(self):
            raise ReplayError(
                f"cannot sample {count} sequences: no stored one is complete; add at least "
                f"{self.sequences.length} steps of one episode first"
                + ("" if self.sequences.pad else ", or give pad=True for shorter episodes")
            )

        numbers, weights = self.sampler.sample(count)
        return self._row_of_number.take(numbers), weights

    def update(self, rows: Rows, priorities: npt.NDArray[Any]) -> None:
        """Set the priorities ``[n]`` of sequences that start at rows ``[n]``.

        Rows that are no starts any more are ignored.
        """
        numbers = self._number_of_row.take(rows) - 1
        is_start = numbers >= 0
        if is_start.all():
            self.sampler.update(numbers.astype(np.int64), priorities)
        else:
            start_numbers = numbers[is_start].astype(np.int64)
            self.sampler.update(start_numbers, np.asarray(priorities)[is_start])

    def state_dict(self) -> dict[str, Any]:
        self._search()
        return {
            "sampler": self.sampler.state_dict(),
            "rows": self._row_of_number[: self._lowest_unused].copy(),
            "freed": self._free_numbers[: self._free_count].copy(),
            "before": self._previous_slot.copy(),
            "after": self._next_slot.copy(),
            "searched": self._searched.copy(),
            "position": self._position.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._check_ranges(state, self._table.slots)
        self._load(state)
        self.sampler.load_state_dict(state["sampler"])

    def load_moved(self, state: dict[str, Any], origin: Rows) -> None:
        """Load a state whose slots have moved, as the function `samplers.load_moved` describes.

        The stretches of ``origin`` are slots. Starts get new numbers, as there may be room for
        fewer of them.
        """
        saved_slots = len(state["searched"])
        self._check_ranges(state, saved_slots)

        # The place in this table of each saved slot; NONE for one that was not loaded.
        is_loaded = origin != NONE
        place = np.full(saved_slots, NONE)
        place[origin[is_loaded]] = np.flatnonzero(is_loaded)

        # The values of each slot, in which the neighbours have their new places.
        moved = {name: state[name][origin] for name in ("before", "after", "searched", "position")}
        for name in ("before", "after"):
            moved[name] = np.where(moved[name] == NONE, NONE, place[moved[name]])
        for name, values in moved.items():
            values[~is_loaded] = 0 if name == "position" else NONE

        # The saved numbers that are in use, and whose rows were loaded and still count.
        in_use = np.ones(len(state["rows"]), bool)
        in_use[state["freed"]] = False
        saved_slot, row_in_slot = np.divmod(state["rows"], self._rows_per_slot)
        rows = place[saved_slot] * self._rows_per_slot + row_in_slot
        still_counts = self._valid.take(rows, mode="clip")
        saved_numbers = np.flatnonzero(in_use & (place[saved_slot] != NONE) & still_counts)

        # These starts get the numbers from 0 on. For the inner sampler, which has one row for each
        # number, its rows have moved.
        self._load(moved | {"rows": rows[saved_numbers], "freed": np.empty(0, np.int64)})
        origin_of_number = np.full(len(self._row_of_number), NONE)
        origin_of_number[: len(saved_numbers)] = saved_numbers
        load_moved(self.sampler, state["sampler"], origin_of_number)

    def _check_ranges(self, state: dict[str, Any], slots: int) -> None:
        """Raise ReplayError for a value out of range in the state of a table of ``slots`` slots."""
        ranges = {
            "rows": slots * self._rows_per_slot,
            "freed": len(state["rows"]),
            "before": slots,
            "after": slots,
            "searched": self._unroll + 1,
            "position": 1 << 62,
        }
        for name, stop in ranges.items():
            values = state[name]
            least = NONE if name in ("before", "after", "searched") else 0
            if len(values) and not least <= values.min() <= values.max() < stop:
                raise ReplayError(f"the snapshot's {name} of sequences are damaged; load another")

    def _load(self, state: dict[str, Any]) -> None:
        """Load all of a state except that of the inner sampler.

        Raises ReplayError if it does not fit to the table.
        """
        previous_slots = state["before"]
        has_previous = previous_slots != NONE
        if (has_previous & (previous_slots != self._table.prev)).any():
            raise ReplayError("the snapshot's sequences have slots that do not follow each other")

        self._lowest_unused = len(state["rows"])
        self._free_count = len(state["freed"])
        self._row_of_number[: self._lowest_unused] = state["rows"]
        self._free_numbers[: self._free_count] = state["freed"]
        self._in_use[: self._lowest_unused] = True
        self._in_use[state["freed"]] = False

        numbers = np.flatnonzero(self._in_use)
        start_rows = self._row_of_number[numbers]
        if not self._valid[start_rows].all():
            raise ReplayError("the snapshot's sequences begin at rows that do not count")
        self._number_of_row[start_rows] = numbers + 1

        self._previous_slot[...] = previous_slots
        self._next_slot[...] = state["after"]
        self._searched[...] = state["searched"]
        self._position[...] = state["position"]

    def _open(self, slot: int) -> None:
        """Begin a slot: link it to the previous one of its stream, whose positions it takes on."""
        self._searched[slot] = 0
        self._next_slot[slot] = NONE

        previous_slot = int(self._table.prev[slot])
        if previous_slot != NONE and self._searched[previous_slot] == NONE:
            previous_slot = NONE
        self._previous_slot[slot] = previous_slot
        if previous_slot == NONE:
            self._position[slot] = 0
        else:
            self._next_slot[previous_slot] = slot
            self._position[slot] = self._position[previous_slot]

    def _search(self) -> None:
        """Find the starts whose sequences were completed by the latest rows."""
        pending, self._pending = self._pending, {}
        for slot in pending:
            start = int(self._searched[slot])
            stop = int(self._table.length[slot])
            if start >= stop:
                continue
            ends = self._find_ends(slot, start, stop)
            self._searched[slot] = stop

            # A start that does not count, or that was found before, is no new one.
            rows = self._start_rows(slot, ends)
            is_new = self._valid.take(rows) & (self._number_of_row.take(rows) == 0)
            self._add_starts(rows[is_new])

    def _find_ends(self, slot: int, start: int, stop: int) -> _SequenceEnds:
        """Find the sequences that end at the steps ``start`` to ``stop`` of a slot.

        The positions of the slot's environments advance to the step ``stop``.
        """
        first_row = slot * self._rows_per_slot
        rows = slice(first_row + start * self._envs, first_row + stop * self._envs)
        shape = (stop - start, self._envs)
        records = self._table.records[rows].reshape(shape)
        alive = self._valid[rows].reshape(shape)
        parts: list[_SequenceEnds] = []

        # The last steps of episodes. An episode may also end without one: the next step is the
        # first of another episode.
        last = records["terminated"] | records["truncated"]
        if "age" in (records.dtype.names or ()):
            begins = (records["age"] == 0) & alive
            last[:-1] |= begins[1:]
            parts.append(self._end_before_slot(slot, begins[0]))
        last &= alive

        # Sequences of full length end where their start lies at a multiple of the stride.
        positions = self._advance_positions(slot, last | ~alive)
        length = self.sequences.length
        start_positions = positions - (length - 1)
        is_end = (start_positions >= 0) & (start_positions % self.sequences.stride == 0) & alive
        steps, envs = np.nonzero(is_end)
        parts.append(_SequenceEnds(steps, envs, np.full(len(steps), length - 1)))

        # Shorter sequences end with their episodes.
        if self.sequences.pad:
            last_steps, last_envs = np.nonzero(last)
            parts.append(self._short_sequences(last_steps, last_envs, positions[last]))

        steps, envs, steps_back = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return _SequenceEnds(start + steps, envs, steps_back)

    def _end_before_slot(self, slot: int, begins: Mask) -> _SequenceEnds:
        """Find the shorter sequences of episodes that ended without a last step before this one.

        The positions of these environments become 0.

        Args:
            slot: of the step that is searched now.
            begins: ``[envs]``, whether that step is the first of an episode.
        """
        envs = np.flatnonzero(begins & (self._position[slot] > 0))
        end_positions = self._position[slot, envs] - 1
        self._position[slot, envs] = 0
        if not self.sequences.pad:
            envs = envs[:0]
            end_positions = end_positions[:0]
        return self._short_sequences(np.full(len(envs), -1), envs, end_positions)

    def _advance_positions(self, slot: int, breaks: Mask) -> Rows:
        """Advance the positions of a slot's environments by n steps.

        Args:
            slot: of the steps.
            breaks: ``[n, envs]``, whether an episode begins after the step.

        Returns:
            The position of each step in its episode, ``[n, envs]``.
        """
        count = len(breaks)
        # The latest step from 0 to n at which an episode began; negative if it was in an earlier
        # step than those of `breaks`.
        begins = np.empty((count + 1, self._envs), np.int64)
        begins[0] = -self._position[slot]
        begins[1:] = np.where(breaks, np.arange(1, count + 1)[:, None], -(1 << 62))
        np.maximum.accumulate(begins, axis=0, out=begins)

        self._position[slot] = count - begins[count]
        positions: Rows = np.arange(count)[:, None] - begins[:count]
        return positions

    def _short_sequences(self, steps: Rows, envs: Rows, end_positions: Rows) -> _SequenceEnds:
        """Returns the sequences shorter than `length` that end with one of n episodes.

        Args:
            steps: ``[n]``, the last step of each episode, in the slot.
            envs: ``[n]``, its environment.
            end_positions: ``[n]``, its position in the episode.
        """
        # The starts of an episode, counted in strides: from the first whose sequence has no full
        # length to the last one before the end.
        stride = self.sequences.stride
        first_starts = -(-np.maximum(end_positions - self.sequences.length + 2, 0) // stride)
        counts = np.maximum(end_positions // stride - first_starts + 1, 0)

        # For each sequence: its episode, and its number among the sequences of that episode.
        episodes = np.repeat(np.arange(len(counts)), counts)
        numbers = np.arange(len(episodes)) - np.repeat(np.cumsum(counts) - counts, counts)
        start_positions = (first_starts[episodes] + numbers) * stride
        return _SequenceEnds(
            steps[episodes], envs[episodes], end_positions[episodes] - start_positions
        )

    def _start_rows(self, slot: int, ends: _SequenceEnds) -> Rows:
        """Returns the rows at which sequences start, ascending.

        Starts in slots that were removed are left out.

        Args:
            slot: in which the sequences end.
            ends: their last steps.
        """
        # Starts before the first step of a slot lie in the slots before it.
        steps = ends.steps - ends.steps_back
        slots = np.full(len(steps), slot)
        while (earlier := np.flatnonzero((steps < 0) & (slots != NONE))).size:
            slots[earlier] = self._previous_slot[slots[earlier]]
            steps[earlier] += self._searched[slots[earlier]]

        rows = (slots * self._unroll + steps) * self._envs + ends.envs
        return np.sort(rows[slots != NONE])

    def _add_starts(self, rows: Rows) -> None:
        """Give numbers to the starts at ``rows``, and insert them into the inner sampler."""
        if not len(rows):
            return

        # Free numbers are used first, the latest of the stack before the older ones.
        reused_count = min(len(rows), self._free_count)
        remaining = self._free_count - reused_count
        reused = self._free_numbers[remaining : self._free_count][::-1]
        unused = np.arange(self._lowest_unused, self._lowest_unused + len(rows) - reused_count)
        numbers = np.concatenate([reused, unused])
        self._free_count = remaining
        self._lowest_unused += len(unused)

        self._row_of_number[numbers] = rows
        self._number_of_row[rows] = numbers + 1
        self._in_use[numbers] = True
        for start, stop in _runs(numbers):
            self.sampler.insert(start, stop, None)

    def _remove_last_starts(self, slot: int) -> None:
        """Remove the starts whose sequences may continue after ``slot``."""
        steps = self.sequences.length - 1
        while steps > 0 and slot != NONE:
            first_row = slot * self._rows_per_slot
            stop = int(self._searched[slot])
            start = max(0, stop - steps)
            rows = np.arange(first_row + start * self._envs, first_row + stop * self._envs)
            self._remove_starts(rows[self._number_of_row[rows] > 0])
            steps -= stop - start
            slot = int(self._previous_slot[slot])

    def _remove_starts(self, rows: Rows) -> None:
        """Free the numbers of the starts at ``rows``, and remove them from the inner sampler."""
        if not len(rows):
            return
        numbers = np.sort(self._number_of_row[rows] - 1)
        self._number_of_row[rows] = 0
        self._in_use[numbers] = False

        # The lowest number is the top of the stack, and will be used again first.
        self._free_numbers[self._free_count :][: len(numbers)] = numbers[::-1]
        self._free_count += len(numbers)
        for start, stop in _runs(numbers):
            self.sampler.remove(start, stop)


def _runs(numbers: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """Returns start and stop of each stretch of consecutive numbers in ``numbers`` [n], n > 0."""
    edges = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = numbers[np.concatenate([[0], edges])]
    stops = numbers[np.concatenate([edges - 1, [len(numbers) - 1]])] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def no_priorities() -> ReplayError:
    """Returns the error for a priority of a single step."""
    return ReplayError(
        "priorities come with single steps, but sequences are drawn; leave them out and call "
        "update_priorities with one priority per sequence"
    )


class SequenceSteps(NamedTuple):
    """The steps of B sequences, time-major.

    Args:
        rows: ``[length, B]``; steps after the end of a sequence repeat its first step.
        records: ``[length, B]``, of these rows, as `RecordReader.take` returns them.
        mask: ``[length, B]``, whether the step belongs to the sequence.
    """

    rows: Rows
    records: Array
    mask: Mask


class LastSteps(NamedTuple):
    """The last step of each of B sequences: its row and its record, ``[B]`` each."""

    rows: Rows
    records: Array


class SequenceGather(Gather):
    """Makes batches of sequences, under the buffer's lock. Arrays are time-major.

    | key                   | shape and dtype                | meaning                             |
    | --------------------- | ------------------------------ | ----------------------------------- |
    | obs, next_obs         | [length, B, *shape], nested    | before, and one step later          |
    | action, other columns | [length, B, *shape], nested    | as added                            |
    | reward, discount      | [length, B] float32            | as added; gamma, 0 where terminated |
    | terminated, truncated | [length, B] bool               |                                     |
    | mask                  | [length, B] bool               | False after the episode's end,      |
    |                       |                                | where everything else is 0          |
    | state                 | [B, *shape], nested            | of the first step, where declared   |
    | weights, keys         | [B]                            | of the sequence                     |
    | burn_in               | int                            | steps that only warm up the state   |

    A sequence crosses the edges of slots, never the end of its episode, so the observation after
    step t is the one at step t + 1: `obs` and `next_obs` are two views of one array [length + 1, B,
    *shape]. next_obs holds the observation after the last step too, also where the mask ends
    earlier.

    With ``stacked=False``, observations that are frame stacks come as ``frames`` [length + K, B,
    *frame] in place of obs and next_obs: the stack of K before step t is ``frames[t : t + K]``.
    """

    def __init__(self, table: Table, layout: Layout, discount: float, sequences: Sequences) -> None:
        super().__init__(table, layout, 1, discount)
        self.sequences = sequences

    def batch(self, rows: Rows, weights: Array | None, *, stacked: bool = True) -> Batch:
        """Make a batch of sequences, as the class describes it.

        Args:
            rows: ``[B]``, at which the sequences start.
            weights: ``[B]`` float32 importance weights; None: all are 1.
            stacked: False returns frame stacks as ``frames``.
        """
        batch = Batch()
        steps = self._follow(rows)
        self._observe_sequences(batch, steps, stacked=stacked)

        for root, nest in self.layout.other_nests.items():
            names = [
                leaf.name for leaf in self.layout.other_leaves if leaf.name.split(".", 1)[0] == root
            ]
            if root == STATE:
                first_steps = SequenceSteps(steps.rows[:1], steps.records[:1], steps.mask[:1])
                arrays = {name: self._column_of(name, first_steps)[0] for name in names}
            else:
                arrays = {name: self._column_of(name, steps) for name in names}
            batch[root] = unflatten(nest, arrays)

        records = steps.records
        discounts_by_flag = np.array([self.discount, 0], np.float32)
        discount = discounts_by_flag.take(records["terminated"].view(np.uint8))
        batch["reward"] = self._blank(records["reward"].astype(np.float32), steps.mask)
        batch["discount"] = self._blank(discount, steps.mask)
        batch["terminated"] = self._blank(records["terminated"].copy(), steps.mask)
        batch["truncated"] = self._blank(records["truncated"].copy(), steps.mask)
        batch["mask"] = steps.mask
        batch["burn_in"] = self.sequences.burn_in
        return self._finish(batch, rows, weights)

    def _follow(self, starts: Rows) -> SequenceSteps:
        """Returns the steps of the sequences that start at rows ``starts`` [B]."""
        length = self.sequences.length
        count = len(starts)
        rows = follow(self.table, starts, length)
        records = self.records.take(rows.reshape(-1)).reshape(length, count)
        mask = np.ones((length, count), bool)
        if not self.sequences.pad:
            return SequenceSteps(rows, records, mask)

        # A sequence goes on until its episode ends, or until there is no further row.
        continuing = ~ends_episode(records)[:-1] & (rows[1:] != NONE)
        if "age" in (records.dtype.names or ()):
            continuing &= records["age"][1:] != 0
        np.logical_and.accumulate(continuing, axis=0, out=mask[1:])

        # The steps after that repeat the first step, whose row exists.
        step, sequence = np.nonzero(~mask)
        rows[step, sequence] = starts[sequence]
        records[step, sequence] = records[0, sequence]
        return SequenceSteps(rows, records, mask)

    def _observe_sequences(self, batch: Batch, steps: SequenceSteps, *, stacked: bool) -> None:
        """Put the observations of ``steps`` into ``batch``, as obs and next_obs or as frames."""
        lengths = steps.mask.sum(axis=0)
        last = (lengths - 1, np.arange(len(lengths)))
        last_steps = LastSteps(steps.rows[last], steps.records[last])

        # At first, each array has the observations after the last steps at its end.
        arrays: dict[str, Array] = {}
        frames: dict[str, Array] = {}
        for observation in self.layout.inline:
            arrays[observation.name] = self._inline(observation, steps, last_steps)
        for observation in self.layout.framed:
            if stacked or not observation.stack:
                arrays[observation.name] = self._stacked(observation, steps, last_steps)
            else:
                frames[observation.name] = self._single_frames(observation, steps, last_steps)

        # Those of sequences that end earlier move to the step after their last.
        for array in (*arrays.values(), *frames.values()):
            older_frames = len(array) - 1 - len(steps.mask)
            _place_final(array, lengths + older_frames)

        if arrays:
            obs = {name: array[:-1] for name, array in arrays.items()}
            next_obs = {name: array[1:] for name, array in arrays.items()}
            batch["obs"] = unflatten(self.layout.obs, obs)
            batch["next_obs"] = unflatten(self.layout.obs, next_obs)
        if frames:
            batch["frames"] = unflatten(self.layout.obs, frames)

    def _inline(
        self, observation: Observation, steps: SequenceSteps, last_steps: LastSteps
    ) -> Array:
        """Returns the observations of an inline column, ``[length + 1, B, *shape]``.

        They are those before the steps, and then those after the last steps.
        """
        length, count = steps.rows.shape
        leaf = observation.leaf
        array = self.pool.empty((length + 1, count, *leaf.shape), leaf.dtype)

        big_column = self.table.columns.get(observation.name)
        if big_column is None:
            self.records.write(steps.records, observation.name, array[:-1])
        else:
            flat = array[:-1].reshape(-1, *leaf.shape)
            big_column.take(steps.rows.reshape(-1), axis=0, out=flat, mode="clip")

        array[-1] = self._column(observation.next_name, *last_steps)
        return array

    def _stacked(
        self, observation: Observation, steps: SequenceSteps, last_steps: LastSteps
    ) -> Array:
        """Returns the frame stacks of an observation, ``[length + 1, B, *shape]``.

        They are those before the steps, and then those after the last steps.
        """
        depth = observation.depth
        before_steps = self._window(steps.rows, steps.records, depth).narrow(0, depth)
        after_last = self._window(*last_steps, depth).narrow(1, depth + 1)
        return self._take_windows(observation, [before_steps, after_last], steps)

    def _single_frames(
        self, observation: Observation, steps: SequenceSteps, last_steps: LastSteps
    ) -> Array:
        """Returns each frame of an observation's stacks once, ``[length + depth, B, *frame]``.

        They are the older frames of the first stack, the newest frame before each step, and then
        the newest after the last steps.
        """
        depth = observation.depth
        newest = self._window(steps.rows, steps.records, depth).narrow(depth - 1, depth)
        after_last = self._window(*last_steps, depth).narrow(depth, depth + 1)
        first_stack = self._window(steps.rows[0], steps.records[0], depth)
        older = [first_stack.narrow(i, i + 1) for i in range(depth - 1)]
        return self._take_windows(observation, [*older, newest, after_last], steps)[:, :, 0]

    def _window(self, rows: Rows, records: Array, depth: int) -> FrameWindow:
        """Returns the window of all ``rows`` in their order; see `frames.find_window`."""
        return find_window(self.table, rows.reshape(-1), records.reshape(-1), depth)

    def _take_windows(
        self, observation: Observation, windows: list[FrameWindow], steps: SequenceSteps
    ) -> Array:
        """Returns the frames of windows, ``[n, B, width, *frame]``, one window after the other.

        Each window has as many rows as there are sequences, B, or a multiple of it. The axis
        ``width`` is absent for an observation that is one frame a row.
        """
        (flat,) = self._frames(observation, _joined(windows))
        return flat.reshape(-1, steps.mask.shape[1], *flat.shape[1:])

    def _column_of(self, name: str, steps: SequenceSteps) -> Array:
        """Returns a column of ``steps``, ``[length, B, *shape]``, 0 after the end of a sequence."""
        flat = self._column(name, steps.rows.reshape(-1), steps.records.reshape(-1))
        return self._blank(flat.reshape(*steps.rows.shape, *flat.shape[1:]), steps.mask)

    def _blank(self, array: Array, mask: Mask) -> Array:
        """Returns ``array`` [length, B, ...] itself, in which steps without ``mask`` become 0."""
        if self.sequences.pad:
            array[~mask] = 0
        return array


def _joined(windows: list[FrameWindow]) -> FrameWindow:
    """Returns one window over the rows of all ``windows``, which are equally wide."""
    sizes = [window.frames.size for window in windows]
    # The flat position of each window's first frame.
    offsets = np.cumsum([0, *sizes[:-1]])
    pairs = list(zip(windows, offsets, strict=True))
    return FrameWindow(
        frames=np.concatenate([window.frames for window in windows]),
        zeros=np.concatenate([window.zeros + offset for window, offset in pairs]),
        side_positions=np.concatenate([window.side_positions + offset for window, offset in pairs]),
        side_rows=np.concatenate([window.side_rows for window in windows]),
    )


def _place_final(array: Array, places: Rows) -> None:
    """Move final observations from the end of ``array`` to their places, and blank what follows.

    Args:
        array: ``[n, B, ...]``; ``array[-1]`` holds the observation after each sequence's last step.
        places: ``[B]``, the index on the first axis at which that observation belongs.
    """
    for sequence in np.flatnonzero(places < len(array) - 1):
        place = int(places[sequence])
        array[place, sequence] = array[-1, sequence]
        array[place + 1 :, sequence] = 0


def draw_future(table: Table, rows: Rows, horizon: int, rng: np.random.Generator) -> Rows:
    """Draw, for each of ``rows`` [B], a row at or after it in its episode.

    The draw is even among the row itself and those that follow it, as far as they are stored, but
    at most ``horizon`` rows in all.

    Returns:
        The rows that were drawn, ``[B]``.
    """
    # Episodes are followed block by block, each twice as long as the one before: most of them end
    # long before the horizon.
    blocks: list[FollowedBlock] = []
    counts = np.ones(len(rows), np.int64)
    columns = np.arange(len(rows))
    starts = rows
    first_step = 0
    length = FIRST_BLOCK
    while len(columns) and first_step < horizon - 1:
        length = min(length, horizon - 1 - first_step)
        following = follow(table, starts, 1 + length)
        blocks.append(FollowedBlock(first_step, columns, following))

        further = _continuing(table, following).sum(axis=0)
        counts[columns] += further
        is_whole = further == length
        columns = columns[is_whole]
        starts = following[-1, is_whole]
        first_step += length
        length *= 2

    steps = (rng.random(len(rows)) * counts).astype(np.int64)
    drawn: Rows = rows.copy()
    for block in blocks:
        steps_into_block = steps[block.columns] - block.first_step
        lies_here = (steps_into_block >= 0) & (steps_into_block < len(block.following))
        places = np.flatnonzero(lies_here)
        drawn[block.columns[places]] = block.following[steps_into_block[places], places]
    return drawn


class FollowedBlock(NamedTuple):
    """Rows that follow each other, of some columns of a draw."""

    first_step: int
    """Steps from the row of the draw to the first row here."""
    columns: Rows
    """``[K]``, the numbers of the columns in the draw."""
    following: Rows
    """``[length, K]``"""


def _continuing(table: Table, following: Rows) -> Mask:
    """Returns whether each row but the first continues the episode of the first row.

    Args:
        table: of the rows.
        following: ``[length, K]``, as `follow` returns them.

    Returns:
        ``[length - 1, K]``.
    """
    # Only the columns of flags are read: a record may hold whole observations.
    records = table.records
    is_last = records["terminated"][following] | records["truncated"][following]
    continuing: Mask = ~is_last[:-1] & (following[1:] != NONE)
    for name in ("alive", "age"):
        if name in (records.dtype.names or ()):
            continuing &= records[name][following[1:]] != 0
    np.logical_and.accumulate(continuing, axis=0, out=continuing)
    return continuing
