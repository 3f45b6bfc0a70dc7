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
from penstock.replay.frames import FrameWindow, window
from penstock.replay.gather import Gather
from penstock.replay.layout import Layout, Observation
from penstock.replay.nstep import continues, ended, follow
from penstock.replay.samplers import Sampler, Valid, Weights, load_moved
from penstock.replay.table import NONE, Array, RecordReader, Rows, Table

Ints = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

# A batch has this column only of the first step of each sequence: the recurrent state.
STATE = "state"


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


class _Ends(NamedTuple):
    """The last steps of n sequences that end in one slot, each array ``[n]``.

    Args:
        steps: of the slot; -1 is the last step before it.
        envs: the environments.
        steps_back: number of steps from the last one back to the start of the sequence.
    """

    steps: Rows
    envs: Rows
    back: Rows


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
        self._unroll, self._envs = table.spec.unroll, table.spec.envs
        self._slot_rows = self._unroll * self._envs
        # For each slot: its neighbours in its stream, the steps already searched (NONE: not in
        # use), and the position in its episode of the next step of each environment.
        self._before: Ints = np.full(table.slots, NONE, np.int32)
        self._after: Ints = np.full(table.slots, NONE, np.int32)
        # How many steps of each slot were searched for starts; NONE for a slot that is not in use.
        self._searched: Ints = np.full(table.slots, NONE, np.int32)
        # The position in its episode of the next step of each environment [slots, envs].
        self._position = np.zeros((table.slots, self._envs), np.int64)
        # Slots that were written since the last search, in order: the older of a stream first.
        self._pending: dict[int, None] = {}

        # The starts by number. The system provides pages of zeros only when they are written, and
        # most numbers are never used.
        rows = table.slots * self._slot_rows
        # The system provides zero pages only when written: most numbers are never used.
        self._number = np.zeros(rows, np.int32)  # number of the start at each row, plus 1
        self._row = np.zeros(rows, np.int64)  # row of each number
        self._taken: Valid = np.zeros(rows, np.bool_)  # by number
        self._freed = np.zeros(rows, np.int32)  # a stack of free numbers
        self._freed_count = self._used = 0

    def __len__(self) -> int:
        """The number of starts that can be drawn."""
        self._search()
        return self._used - self._freed_count

    def bind(self, valid: Valid, rng: np.random.Generator) -> None:
        self._valid = valid
        self.sampler.bind(self._taken, rng)

    def insert(self, start: int, stop: int, priorities: npt.NDArray[Any] | None) -> None:
        """Add rows of one slot; they are searched for starts before the next draw.

        Priorities of single steps, which a foreign writer may send, are ignored.
        """
        slot = start // self._slot_rows
        if self._searched[slot] == NONE:
            self._search()
            self._open(slot)
        self._pending[slot] = None

    def remove(self, start: int, stop: int) -> None:
        """Remove whole slots, with the starts of sequences that lie in them or run into them."""
        self._search()
        for slot in range(start // self._slot_rows, -(-stop // self._slot_rows)):
            previous, following = int(self._before[slot]), int(self._after[slot])
            if following != NONE:
                self._before[following] = NONE
            if previous != NONE:  # of an older policy than the slot before it
                self._after[previous] = NONE
                self._forget_last(previous)
            self._before[slot] = self._after[slot] = self._searched[slot] = NONE
        self._forget(start + np.flatnonzero(self._number[start:stop]))

    def remove_rows(self, rows: Rows) -> None:
        self._search()
        self._forget(np.unique(rows[self._number[rows] > 0]))

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
        return self._row.take(numbers), weights

    def update(self, rows: Rows, priorities: npt.NDArray[Any]) -> None:
        """Set the priorities ``[n]`` of sequences that start at rows ``[n]``.

        Rows that are no starts any more are ignored.
        """
        numbers = self._number.take(rows) - 1
        live = numbers >= 0
        if live.all():
            self.sampler.update(numbers.astype(np.int64), priorities)
        else:
            self.sampler.update(numbers[live].astype(np.int64), np.asarray(priorities)[live])

    def state_dict(self) -> dict[str, Any]:
        self._search()
        return {
            "sampler": self.sampler.state_dict(),
            "rows": self._row[: self._used].copy(),
            "freed": self._freed[: self._freed_count].copy(),
            "before": self._before.copy(),
            "after": self._after.copy(),
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
        slots = len(state["searched"])
        self._check_ranges(state, slots)
        used = origin != NONE
        place = np.full(slots, NONE)
        place[origin[used]] = np.flatnonzero(used)
        moved = {n: state[n][origin] for n in ("before", "after", "searched", "position")}
        for name in ("before", "after"):
            moved[name] = np.where(moved[name] == NONE, NONE, place[moved[name]])
        for name, values in moved.items():
            values[~used] = 0 if name == "position" else NONE
        taken = np.ones(len(state["rows"]), bool)
        taken[state["freed"]] = False
        slot, rest = np.divmod(state["rows"], self._slot_rows)
        rows = place[slot] * self._slot_rows + rest
        numbers = np.flatnonzero(
            taken & (place[slot] != NONE) & self._valid.take(rows, mode="clip")
        )
        self._load(moved | {"rows": rows[numbers], "freed": np.empty(0, np.int64)})
        of_numbers = np.full(len(self._row), NONE)
        of_numbers[: len(numbers)] = numbers
        load_moved(self.sampler, state["sampler"], of_numbers)

    def _check_ranges(self, state: dict[str, Any], slots: int) -> None:
        """Raise ReplayError for a value out of range in the state of a table of ``slots`` slots."""
        ranges = {
            "rows": slots * self._slot_rows,
            "freed": len(state["rows"]),
            "before": slots,
            "after": slots,
            "searched": self._unroll + 1,
            "position": 1 << 62,
        }
        for name, stop in ranges.items():
            values = state[name]
            low = NONE if name in ("before", "after", "searched") else 0
            if len(values) and not low <= values.min() <= values.max() < stop:
                raise ReplayError(f"the snapshot's {name} of sequences are damaged; load another")

    def _load(self, state: dict[str, Any]) -> None:
        """Load all of a state except that of the inner sampler.

        Raises ReplayError if it does not fit to the table.
        """
        previous = state["before"]
        if ((previous != NONE) & (previous != self._table.prev)).any():
            raise ReplayError("the snapshot's sequences have slots that do not follow each other")

        self._used, self._freed_count = len(state["rows"]), len(state["freed"])
        self._row[: self._used] = state["rows"]
        self._freed[: self._freed_count] = state["freed"]
        self._taken[: self._used] = True
        self._taken[state["freed"]] = False
        numbers = np.flatnonzero(self._taken)
        if not self._valid[self._row[numbers]].all():
            raise ReplayError("the snapshot's sequences begin at rows that do not count")
        self._number[self._row[numbers]] = numbers + 1
        for name in ("before", "after", "searched", "position"):
            getattr(self, f"_{name}")[...] = state[name]

    def _open(self, slot: int) -> None:
        """Begin a slot: link it to the previous one of its stream, whose positions it takes on."""
        previous = int(self._table.prev[slot])
        if previous != NONE and self._searched[previous] == NONE:
            previous = NONE
        self._searched[slot] = 0
        self._before[slot], self._after[slot] = previous, NONE
        if previous == NONE:
            self._position[slot] = 0
        else:
            self._after[previous] = slot
            self._position[slot] = self._position[previous]

    def _search(self) -> None:
        """Find the starts whose sequences were completed by the latest rows."""
        pending, self._pending = self._pending, {}
        for slot in pending:
            start, stop = int(self._searched[slot]), int(self._table.length[slot])
            if start < stop:
                ends = self._ends(slot, start, stop)
                self._searched[slot] = stop
                rows = self._rows_back(slot, ends)
                self._add(rows[self._valid.take(rows) & (self._number.take(rows) == 0)])

            # A start that does not count, or that was found before, is no new one.

    def _ends(self, slot: int, start: int, stop: int) -> _Ends:
        """Sequences that end at steps ``start`` to ``stop`` of a slot; advances its positions."""
        first = slot * self._slot_rows
        at = slice(first + start * self._envs, first + stop * self._envs)
        shape = (stop - start, self._envs)
        records, alive = self._table.records[at].reshape(shape), self._valid[at].reshape(shape)

        # The last steps of episodes. An episode may also end without one: the next step is the
        # first of another episode.
        last = records["terminated"] | records["truncated"]
        ends = []
        if "age" in (records.dtype.names or ()):
            begins = (records["age"] == 0) & alive
            last[:-1] |= begins[1:]
            ends.append(self._ends_before(slot, begins[0]))
        last &= alive
        position = self._positions(slot, last | ~alive)
        sequences = self.sequences
        back = position - (sequences.length - 1)
        complete = (back >= 0) & (back % sequences.stride == 0) & alive
        steps, envs = np.nonzero(complete)
        ends.append(_Ends(steps, envs, np.full(len(steps), sequences.length - 1)))
        if sequences.pad:
            at_step, of_env = np.nonzero(last)
            ends.append(self._short(at_step, of_env, position[last]))
        steps, envs, back = (np.concatenate(parts) for parts in zip(*ends, strict=True))
        return _Ends(steps + start, envs, back)

        # Sequences of full length end where their start lies at a multiple of the stride.

    def _ends_before(self, slot: int, begins: npt.NDArray[np.bool_]) -> _Ends:
        """Sequences of episodes without a last step: the next row shows the start of another
        episode.
        """
        envs = np.flatnonzero(begins & (self._position[slot] > 0))
        end = self._position[slot, envs] - 1
        self._position[slot, envs] = 0
        if not self.sequences.pad:
            envs, end = envs[:0], end[:0]
        return self._short(np.full(len(envs), -1), envs, end)

    def _positions(self, slot: int, breaks: npt.NDArray[np.bool_]) -> Rows:
        """Steps since the start of the episode ``[n, envs]``; after a break a new one begins."""
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

    def _short(self, steps: Rows, envs: Rows, end: Rows) -> _Ends:
        """Sequences shorter than `length` that end with their episode, at position `end`."""
        # The starts of an episode, counted in strides: from the first whose sequence has no full
        # length to the last one before the end.
        stride = self.sequences.stride
        oldest = -(-np.maximum(end - self.sequences.length + 2, 0) // stride)
        counts = np.maximum(end // stride - oldest + 1, 0)
        which = np.repeat(np.arange(len(counts)), counts)
        offsets = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        return _Ends(steps[which], envs[which], end[which] - (oldest[which] + offsets) * stride)

        # For each sequence: its episode, and its number among the sequences of that episode.

    def _rows_back(self, slot: int, ends: _Ends) -> Rows:
        """Rows at which the sequences start, ascending; without starts that were removed."""
        steps = ends.steps - ends.back
        slots = np.full(len(steps), slot)
        while (early := np.flatnonzero((steps < 0) & (slots != NONE))).size:
            slots[early] = self._before[slots[early]]
            steps[early] += self._searched[slots[early]]

        rows = (slots * self._unroll + steps) * self._envs + ends.envs
        return np.sort(rows[slots != NONE])

    def _add(self, rows: Rows) -> None:
        if not len(rows):
            return

        # Free numbers are used first, the latest of the stack before the older ones.
        reused = min(len(rows), self._freed_count)
        top = self._freed_count
        fresh = np.arange(self._used, self._used + len(rows) - reused)
        numbers = np.concatenate([self._freed[top - reused : top][::-1], fresh])
        self._freed_count -= reused
        self._used += len(fresh)
        self._row[numbers] = rows
        self._number[rows] = numbers + 1
        self._taken[numbers] = True
        for start, stop in _runs(numbers):
            self.sampler.insert(start, stop, None)

    def _forget_last(self, slot: int) -> None:
        """Remove the starts whose sequences may continue behind ``slot``."""
        steps = self.sequences.length - 1
        while steps > 0 and slot != NONE:
            first, stop = slot * self._slot_rows, int(self._searched[slot])
            begin = max(0, stop - steps)
            rows = np.arange(first + begin * self._envs, first + stop * self._envs)
            self._forget(rows[self._number[rows] > 0])
            steps -= stop - begin
            slot = int(self._before[slot])

    def _forget(self, rows: Rows) -> None:
        if not len(rows):
            return
        numbers = np.sort(self._number[rows] - 1)
        self._number[rows] = 0
        self._taken[numbers] = False
        self._freed[self._freed_count :][: len(numbers)] = numbers[::-1]
        self._freed_count += len(numbers)
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
        steps, records, mask = self._follow(rows)
        batch = Batch()
        self._observe_sequences(batch, steps, records, mask, stacked)

        for root, nest in self.layout.nests.items():
            names = [o.name for o in self.layout.others if o.name.split(".", 1)[0] == root]
            part = slice(1) if root == STATE else slice(None)
            flat = {n: self._steps(n, steps[part], records[part], mask[part]) for n in names}
            if root == STATE:
                flat = {name: array[0] for name, array in flat.items()}
            batch[root] = unflatten(nest, flat)
        reward = self._blank(records["reward"].astype(np.float32), mask)
        discounts = np.array([self.discount, 0], np.float32)
        batch["reward"] = reward
        batch["discount"] = self._blank(discounts.take(records["terminated"].view(np.uint8)), mask)
        batch["terminated"] = self._blank(records["terminated"].copy(), mask)
        batch["truncated"] = self._blank(records["truncated"].copy(), mask)
        batch["mask"] = mask
        batch["burn_in"] = self.sequences.burn_in
        return self._finish(batch, rows, weights)

    def _follow(self, starts: Rows) -> tuple[Rows, Array, Mask]:
        """Returns the steps of the sequences that start at rows ``starts`` [B]."""
        length, count = self.sequences.length, len(starts)
        rows = follow(self.table, starts, length)
        records = self.records.take(rows.reshape(-1)).reshape(length, count)
        mask = np.ones((length, count), bool)
        if self.sequences.pad:
            continuing = ~ended(records)[:-1] & (rows[1:] != NONE)
            if "age" in (records.dtype.names or ()):
                continuing &= records["age"][1:] != 0
            np.logical_and.accumulate(continuing, axis=0, out=mask[1:])
            step, which = np.nonzero(~mask)
            rows[step, which], records[step, which] = starts[which], records[0, which]
        return rows, records, mask

        # A sequence goes on until its episode ends, or until there is no further row.

    def _observe_sequences(
        self, batch: Batch, rows: Rows, records: Array, mask: Mask, stacked: bool
    ) -> None:
        """Put the observations of ``steps`` into ``batch``, as obs and next_obs or as frames."""
        counts = mask.sum(axis=0)
        last = counts - 1, np.arange(mask.shape[1])

        # Each array has the observation after the last step of a sequence at its end.
        arrays: dict[str, Array] = {}
        frames: dict[str, Array] = {}
        for o in self.layout.inline:
            arrays[o.name] = self._inline(o, rows, records, last)
        for o in self.layout.framed:
            steps = window(self.table, rows.reshape(-1), records.reshape(-1), o.depth)
            end = window(self.table, rows[last], records[last], o.depth)
            if stacked or not o.stack:
                parts = [steps.narrow(0, o.depth), end.narrow(1, o.depth + 1)]
                arrays[o.name] = self._windows_of(o, parts, mask)
            else:
                start = window(self.table, rows[0], records[0], o.depth)
                older = [start.narrow(i, i + 1) for i in range(o.depth - 1)]
                newest = steps.narrow(o.depth - 1, o.depth)
                parts = [*older, newest, end.narrow(o.depth, o.depth + 1)]
                frames[o.name] = self._windows_of(o, parts, mask)[:, :, 0]

        # There it is, unless its place is further ahead.
        for array in (*arrays.values(), *frames.values()):
            _place_last(array, counts, len(array) - 1 - len(mask))

        if arrays:
            batch["obs"] = unflatten(self.layout.obs, {k: a[:-1] for k, a in arrays.items()})
            batch["next_obs"] = unflatten(self.layout.obs, {k: a[1:] for k, a in arrays.items()})
        if frames:
            batch["frames"] = unflatten(self.layout.obs, frames)

    def _inline(self, o: Observation, rows: Rows, records: Array, last: Any) -> Array:
        """Returns the observations of an inline column, ``[length + 1, B, *shape]``.

        They are those before the steps, and then those after the last steps.
        """
        length, count = rows.shape
        out = self.pool.empty((length + 1, count, *o.leaf.shape), o.leaf.dtype)
        big = self.table.columns.get(o.name)
        if big is None:
            self.records.write(records, o.name, out[:-1])
        else:
            flat = out[:-1].reshape(-1, *o.leaf.shape)
            big.take(rows.reshape(-1), axis=0, out=flat, mode="clip")
        out[-1] = self._column(o.next_name, rows[last], records[last])
        return out

    def _windows_of(self, o: Observation, parts: list[FrameWindow], mask: Mask) -> Array:
        """Windows of B rows or a multiple, one after the other: [steps, B, width, *frame]."""
        (flat,) = self._frames(o, _joined(parts))
        return flat.reshape(-1, mask.shape[1], *flat.shape[1:])

    def _blank(self, array: Array, mask: Mask) -> Array:
        """Returns ``array`` [length, B, ...] itself, in which steps without ``mask`` become 0."""
        if self.sequences.pad:
            array[~mask] = 0
        return array

    def _steps(self, name: str, rows: Rows, records: Array, mask: Mask) -> Array:
        flat = self._column(name, rows.reshape(-1), records.reshape(-1))
        return self._blank(flat.reshape(*rows.shape, *flat.shape[1:]), mask)


def _joined(parts: list[FrameWindow]) -> FrameWindow:
    """Returns one window over the rows of all ``windows``, which are equally wide."""
    sizes = [part.frames.size for part in parts]
    firsts = np.cumsum([0, *sizes[:-1]])
    return FrameWindow(
        np.concatenate([part.frames for part in parts]),
        np.concatenate([part.zeros + first for part, first in zip(parts, firsts, strict=True)]),
        np.concatenate([part.side_at + first for part, first in zip(parts, firsts, strict=True)]),
        np.concatenate([part.side_rows for part in parts]),
    )


def _place_last(array: Array, counts: Rows, older: int) -> None:
    """Move the observation after a sequence's last step there from the end.

    Blank those after it.
    """
    for which in np.flatnonzero(counts + older < len(array) - 1):
        place = int(counts[which]) + older
        array[place, which] = array[-1, which]
        array[place + 1 :, which] = 0


def draw_future(table: Table, rows: Rows, horizon: int, rng: np.random.Generator) -> Rows:
    """Draw, for each of ``rows`` [B], a row at or after it in its episode.

    The draw is even among the row itself and those that follow it, as far as they are stored, but
    at most ``horizon`` rows in all.

    Returns:
        The rows that were drawn, ``[B]``.
    """
    ahead = follow(table, rows, horizon)
    records = RecordReader(table.records).take(ahead.reshape(-1))
    continuing = ~ended(records).reshape(ahead.shape)[:-1]
    continuing &= (continues(records).reshape(ahead.shape) & (ahead != NONE))[1:]
    np.logical_and.accumulate(continuing, axis=0, out=continuing)

    counts = 1 + continuing.sum(axis=0)
    steps = (rng.random(len(rows)) * counts).astype(np.int64)
    drawn: Rows = ahead[steps, np.arange(len(rows))]
    return drawn
