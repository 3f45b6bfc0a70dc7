"""Observations that are stored as frames: written once each, and read back exactly as given.

Row t+1 of a slot's frames is the frame that row t led to. A stack is stored as its newest frame:
the rest of it are the frames stored before, back to the start of the episode. Before the start lies
the padding of the environment: the first frame again (pad 0), zeros (1), or frames kept in side
rows (2 + index of the oldest).

`FrameWriter` stores the frames of a stream. That a stack continues the stored frames is checked,
not assumed: `FrameComparer` compares them. An observation that does not continue them begins a new
history: the frames it replaces, and frames before it that are neither a repetition nor zeros, go to
side rows. `window` finds the frames of rows, for a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.replay.columns import Array, validated
from penstock.replay.errors import ReplayError
from penstock.replay.layout import OLDEST, REPEAT, SIDE, ZEROS, Layout, Observation
from penstock.replay.table import NONE, FrameRows, Rows, SlotStream, Table

Arrays = dict[str, Array]
Flags = npt.NDArray[np.bool_]

COMPLETE_NBYTES = 1 << 20
EVERY, PARTS = 8, 8
LOOK = 8  # words that are compared together: a cache line
STRIDE = 37  # words by which the position moves from step to step; prime


class FrameWriter:
    """The part of a writer for observations that are stored as frames."""

    def __init__(self, table: Table, layout: Layout, stream: SlotStream) -> None:
        envs = table.spec.envs
        self._table, self._layout, self._stream, self._envs = table, layout, stream, envs
        self._depth = layout.history + 1
        self._strides = table.frame_rows
        self._comparers = {
            o.name: FrameComparer(
                o, table.frames[o.name], table.sides[o.side_name], envs, self._strides
            )
            for o in layout.framed
        }
        self._only = next(iter(self._comparers.values())) if len(self._comparers) == 1 else None
        names = table.records.dtype.names or ()
        self._ages, self._sides = table.records["age"], table.records["side"]
        self._pads: Array | None = table.records["pad"] if "pad" in names else None
        self._fresh: Flags | None = np.ones(envs, bool)  # the next row begins an episode
        self._after_reset: Flags = np.zeros(envs, bool)  # the last row was dropped
        self._no_envs = self._after_reset
        self._lost: Flags = np.zeros(envs, bool)  # rows whose first frames found no side rows
        self._any_lost = False
        self._age = np.zeros(envs, self._ages.dtype)
        self._pad = np.zeros(envs, np.int64)
        self._sides_used = 0
        self._sides_of = (NONE, 0)  # the slot of those side rows, and its generation

    # ------------------------------------------------------------------------- before the row

    def follows(self, obs: Any, next_obs: Any) -> bool:
        """Whether a step of the only observation continues the last one, in every environment.

        If so, `put` stores it; else call `accept`. A slot must be open.
        """
        comparer = self._only
        if comparer is None or self._fresh is not None or self._any_lost:
            return False
        at = self._newest_row()
        return at != NONE and comparer.continues(obs, next_obs, at)

    def accept(
        self,
        flat: dict[str, Any],
        resetting: Flags | None,
        done: Flags | None,
        finals: Arrays | None,
    ) -> Arrays:
        """Check what the row led to; start new histories where obs begins one.

        Raises ReplayError, before anything is changed, for a next_obs that is no shift of obs.
        """
        obs: Arrays = {}
        next_obs: Arrays = {}
        for o in self._layout.framed:
            obs[o.name] = _contiguous(o, flat[o.name], self._envs, o.name)
            next_obs[o.name] = _contiguous(o, flat[o.next_name], self._envs, o.next_name)
        restart = either(self._fresh, self._broken(obs))
        if restart is not None and resetting is not None:
            restart &= ~resetting
        self._check_shift(obs, next_obs, resetting, done, finals)
        if restart is not None or not self._stream.t:
            self._restart(obs, np.zeros(self._envs, bool) if restart is None else restart)
        return next_obs

    def _broken(self, obs: Arrays) -> Flags | None:
        """Environments whose observation is not the one stored as the last next_obs."""
        at = self._newest_row()
        if at == NONE:
            return np.ones(self._envs, bool)
        broken: Flags | None = None
        for name, comparer in self._comparers.items():
            broken = either(broken, comparer.discontinuous(obs[name], at))
        return broken

    def _check_shift(
        self,
        obs: Arrays,
        next_obs: Arrays,
        resetting: Flags | None,
        done: Flags | None,
        finals: Arrays | None,
    ) -> None:
        edge = either(self._fresh, done)  # where episodes begin or end, all is compared
        edges = None if edge is None else np.flatnonzero(edge)
        for o in self._layout.framed:
            if not o.stack:
                continue
            comparer = self._comparers[o.name]
            wrong = comparer.no_shift(obs[o.name], next_obs[o.name])
            if wrong is None and edges is not None:
                wrong = np.zeros(self._envs, bool)
                wrong[edges] = comparer.no_shift_of(obs[o.name][edges], next_obs[o.name][edges])
            if wrong is not None and resetting is not None:
                wrong &= ~resetting
            if finals is not None:
                assert done is not None
                wrong = np.zeros(self._envs, bool) if wrong is None else wrong
                ended = np.flatnonzero(done)
                wrong[ended] = comparer.no_shift_of(obs[o.name][ended], finals[o.name])
            if wrong is not None and wrong.any():
                raise _no_shift(o, int(np.flatnonzero(wrong)[0]))

    def _restart(self, obs: Arrays, restart: Flags) -> None:
        stream = self._stream
        saves, odd, pad = self._needs(obs, restart)
        need = len(saves) + (self._depth - 1) * len(odd)
        if stream.t and need > self._table.spec.side - self._sides_taken():
            stream.end()  # in a new slot nothing has to be saved
            stream.begin()
        if not stream.t and stream.previous == NONE:
            restart = np.ones(self._envs, bool)
            _, odd, pad = self._needs(obs, restart)
        which = np.flatnonzero(restart)
        self._age[which] = 0
        self._pad[which] = pad
        self._lost[which] = False
        if stream.t:
            self._save(saves)
            for name, comparer in self._comparers.items():
                comparer.put(self._frame_row(), which, obs[name][which])
        else:
            for name, comparer in self._comparers.items():
                comparer.put_all(self._frame_row(), obs[name])
        self._keep_odd(obs, odd)

    def _needs(self, obs: Arrays, restart: Flags) -> tuple[Rows, Rows, Rows]:
        """Environments whose final observation must be saved, those that begin with frames of their
        own, and the padding of all that restart.
        """
        which = np.flatnonzero(restart)
        none = which[:0]
        if not len(which):
            return none, none, none
        saves = none
        if self._stream.t:
            moved = np.zeros(len(which), bool)
            for name, comparer in self._comparers.items():
                moved |= comparer.differ_at(self._frame_row(), which, obs[name])
            saves = which[moved & ~self._after_reset[which]]
        repeat, zeros = np.ones(len(which), bool), np.ones(len(which), bool)
        for o in self._layout.framed:
            if o.stack:
                stack = obs[o.name][which].reshape(len(which), o.stack, -1)
                repeat &= (stack[:, :-1] == stack[:, -1:]).all(axis=(1, 2))
                zeros &= ~stack[:, :-1].any(axis=(1, 2))
        pad = np.where(repeat, REPEAT, ZEROS)
        return saves, which[~(repeat | zeros)], pad

    def _save(self, envs: Rows) -> None:
        """Move the final observations of the last row to side rows."""
        if not len(envs):
            return
        side_rows = self._take_sides(len(envs))
        for comparer in self._comparers.values():
            comparer.save(self._frame_row(), envs, side_rows)
        previous = self._stream.start - self._envs
        self._sides[previous + envs] = side_rows - self._stream.slot * self._table.spec.side

    def _keep_odd(self, obs: Arrays, odd: Rows) -> None:
        """Put frames before a start that are no padding into side rows, while there are any."""
        older = self._depth - 1
        room = (self._table.spec.side - self._sides_taken()) // max(1, older)
        self._lost[odd[room:]] = True
        self._any_lost |= len(odd) > room
        for env in odd[:room]:
            side_rows = self._take_sides(older)
            for o in self._layout.framed:
                if o.stack:
                    self._comparers[o.name].put_history(side_rows, obs[o.name][env])
            self._pad[env] = SIDE + side_rows[0] - self._stream.slot * self._table.spec.side

    # ------------------------------------------------------------------------- the row

    def write(self, next_obs: Arrays, done: Flags | None, finals: Arrays | None) -> bool:
        """Write the frames that the row led to; True if the slot must be closed after it.

        A final observation goes to a side row, or, at the end of the slot, in place of the next
        frame, which begins the next slot anyway.
        """
        stream, table = self._stream, self._table
        for name, comparer in self._comparers.items():
            comparer.put_next(self._frame_row() + self._strides.steps, next_obs[name])
        self._write_records()
        if finals is None or done is None:
            return False
        ended = np.flatnonzero(done)
        last = stream.t + 1 == table.spec.unroll
        if last or len(ended) > table.spec.side - self._sides_taken():
            for name, comparer in self._comparers.items():
                comparer.put(self._frame_row() + self._strides.steps, ended, finals[name])
            return not last
        side_rows = self._take_sides(len(ended))
        for name, comparer in self._comparers.items():
            comparer.put_aside(side_rows, finals[name])
        self._sides[stream.start + ended] = side_rows - stream.slot * table.spec.side
        return False

    def put(self, next_obs: Array) -> None:
        """Write the frame that a row of the only observation led to, where `follows` allowed it."""
        assert self._only is not None
        if self._stream.t:
            self._only.put_next(self._frame_row() + self._strides.steps, next_obs)
        else:
            self._only.put_first(self._frame_row(), next_obs)
        self._write_records()
        self.advance(None, None)

    def _write_records(self) -> None:
        """Write the frame columns of the row's records."""
        rows = slice(self._stream.start, self._stream.start + self._envs)
        self._ages[rows] = self._age
        self._sides[rows] = NONE
        if self._pads is not None:
            self._pads[rows] = self._pad

    @property
    def lost(self) -> Flags | None:
        """Environments whose row cannot be read back as it was given; None: no environment."""
        if not self._any_lost:
            return None
        lost = self._lost & (self._age < self._depth - 1)
        self._any_lost = bool(lost.any())
        return lost if self._any_lost else None

    def advance(self, starts: Flags | None, dropped: Flags | None) -> None:
        """Finish the row.

        Args:
            starts: environments [E] whose next row begins an episode; None: no environment.
            dropped: environments [E] whose row only reset them; None: no environment.
        """
        self._age += self._age < OLDEST
        self._fresh = None if starts is None else starts.copy()
        self._after_reset = self._no_envs if dropped is None else dropped

    # ------------------------------------------------------------------------- places

    def _frame_row(self) -> int:
        """Row of `Table.frames` of (t, environment 0)."""
        return self._stream.slot * self._strides.slots + self._stream.t * self._strides.steps

    def _newest_row(self) -> int:
        """The same for the frame that the last row led to; NONE where it is not stored any more."""
        previous = self._stream.previous
        if self._stream.t or previous == NONE:
            return self._frame_row() if self._stream.t else NONE
        return (
            previous * self._strides.slots + int(self._table.length[previous]) * self._strides.steps
        )

    def _sides_taken(self) -> int:
        generation = (self._stream.slot, int(self._table.generation[self._stream.slot]))
        if self._sides_of != generation:
            self._sides_of, self._sides_used = generation, 0
        return self._sides_used

    def _take_sides(self, count: int) -> Rows:
        first = self._stream.slot * self._table.spec.side + self._sides_taken()
        self._sides_used += count
        return np.arange(first, first + count)


def _contiguous(o: Observation, value: Any, envs: int, name: str) -> Array:
    if type(value) is np.ndarray and value.dtype is o.leaf.dtype and value.flags.c_contiguous:
        if value.shape == (envs, *o.leaf.shape):
            return value
        if envs == 1 and value.shape == o.leaf.shape:
            return value[None]
    return np.ascontiguousarray(validated(o.leaf, value, envs, name), o.leaf.dtype)


def _no_shift(o: Observation, env: int) -> ReplayError:
    """The error for a next observation whose frames do not continue those before it."""
    older = o.stack - 1
    return ReplayError(
        f"{o.next_name} of environment {env} is no shift of {o.name}: with frame_stack={o.stack} "
        f"its first {older} frames must be the last {older} of {o.name}; check the order of frames "
        "and what resets the environment (autoreset=), or leave frame_stack out"
    )


class FrameComparer:
    """Frames of one observation as machine words: copied, and compared bit by bit.

    Comparing every frame of a large vector of environments takes longer than storing them: 300 us
    to 200 us for 256 Atari frames. Up to `COMPLETE_NBYTES` of a step everything is compared: first
    the frame that history continues with, then the older ones, which were compared when they were
    the newest. Beyond that size, at every `EVERY`th step, the newest frame is compared for one
    environment in `PARTS`, and older ones at a few words, in turn. So a frame that stays wrong is
    found within `EVERY` * `PARTS` steps. Where a difference is found, everything is compared; so
    are steps that begin or end an episode.

    Everywhere ``frame_row`` is the row of `Table.frames` of environment 0, and observations are
    arrays [E, depth, ...] if they are stacks, else [E, ...].
    """

    def __init__(
        self, observation: Observation, frames: Array, sides: Array, envs: int, strides: FrameRows
    ) -> None:
        self._depth = observation.depth
        self._envs, self._stride, self._step = envs, strides.envs, strides.steps
        self._stacked = bool(observation.stack)
        self._frames, self._sides = frames, sides
        frame_nbytes = observation.leaf.nbytes // self._depth
        width = next(w for w in (8, 4, 2, 1) if frame_nbytes % w == 0)
        self._word = np.dtype(f"u{width}")
        self._count = frame_nbytes // width
        self._stored = frames.reshape(len(frames), -1).view(self._word)
        self._complete = envs * frame_nbytes <= COMPLETE_NBYTES
        self._all_complete = envs * frame_nbytes * max(1, self._depth - 2) <= COMPLETE_NBYTES
        # the newest next_obs, kept so that its memory is not reused
        self._last: Array | None = None
        self._parts, self._turn = min(PARTS, envs), 0

    # ------------------------------------------------------------------------- comparing

    def continues(self, obs: Array, next_obs: Array, at: int) -> bool:
        """Whether ``obs`` is the last next_obs, and ``next_obs`` its shift, as far as is compared.

        The frames of ``obs`` are stored at ``at``. False: a complete comparison is needed.
        """
        last = self._last
        if last is None or not _same_memory(obs, last) or not _alike(next_obs, last):
            return False
        if self._turn % EVERY and not self._complete:
            return True
        frames, stored = self._words(obs), self._stored[self._rows(at)]
        if self._depth == 1:
            return self._differ_partly(frames[:, -1], stored) is None
        next_frames = self._words(next_obs)
        if self._differ(next_frames[:, -2], stored) is not None:
            return False
        if self._depth == 2:
            return self._differ_partly(frames[:, -1], stored) is None
        return self._differ_partly(next_frames[:, :-2], frames[:, 1:-1]) is None

    def discontinuous(self, obs: Array, at: int) -> Flags | None:
        """Environments [E] whose ``obs`` is not the last next_obs, stored at ``at``; None: no
        environment.
        """
        frames, stored, last = self._words(obs), self._stored[self._rows(at)], self._last
        broken = self._differ(frames[:, -1], stored)
        if last is None or self._depth == 1:
            return broken
        # The same array has the older frames of the last next_obs, unless it was overwritten.
        if _same_memory(obs, last):
            return broken
        last_frames = self._words(last)
        if self._differ(last_frames[:, -1], stored) is not None:
            return broken  # the last next_obs has other content now
        return either(broken, self._differ_partly(frames[:, :-1], last_frames[:, :-1]))

    def no_shift(self, obs: Array, next_obs: Array) -> Flags | None:
        """Environments [E] whose ``next_obs`` does not begin with the newest frames of ``obs``."""
        frames, next_frames = self._words(obs), self._words(next_obs)
        wrong = self._differ(next_frames[:, -2], frames[:, -1])
        if self._depth > 2:
            wrong = either(wrong, self._differ_partly(next_frames[:, :-2], frames[:, 1:-1]))
        return wrong

    def no_shift_of(self, obs: Array, next_obs: Array) -> Flags:
        """The same, complete, for the given environments."""
        wrong: Flags = (self._words(next_obs)[:, :-1] != self._words(obs)[:, 1:]).any(axis=(1, 2))
        return wrong

    def differ_at(self, at: int, envs: Rows, obs: Array) -> Flags:
        """Which of ``envs`` have a newest frame that differs from the stored one."""
        stored = self._stored[at + envs * self._stride]
        differ: Flags = (stored != self._words(obs[envs])[:, -1]).any(axis=1)
        return differ

    def _differ(self, left: Array, right: Array) -> Flags | None:
        """Which of the frames [E, words] differ, as far as is compared; None: none do."""
        if not self._complete:
            envs = self._compared_envs()
            if _equal(left[envs], right[envs]):
                return None
        return _differing(left, right)

    def _differ_partly(self, left: Array, right: Array) -> Flags | None:
        """A shorter comparison, of [E, ..., words] that were compared before."""
        if not self._all_complete:
            first = self._turn * STRIDE % max(1, self._count - LOOK + 1)
            place = self._compared_envs(), ..., slice(first, first + LOOK)
            if _equal(left[place], right[place]):
                return None
        return _differing(left, right)

    def _compared_envs(self) -> slice:
        """The environments to compare in this step."""
        return slice(self._turn // EVERY % self._parts, None, self._parts)

    # ------------------------------------------------------------------------- copying

    def put_all(self, at: int, obs: Array) -> None:
        """Store the newest frame of ``obs`` [E, ...]."""
        self._frames[self._rows(at)] = self._newest(obs)

    def put_next(self, at: int, next_obs: Array) -> None:
        """Store the frame that a row led to, and remember it for the next row."""
        self.put_all(at, next_obs)
        self._last = next_obs
        self._turn += 1

    def put_first(self, at: int, next_obs: Array) -> None:
        """The same for a slot's first row, which also needs the frame before it."""
        assert self._last is not None
        if self._stacked and self._step == 1:  # two frames that lie together on either side
            streams = self._frames.reshape(-1, self._stride, *self._frames.shape[1:])
            first = at // self._stride
            streams[first : first + self._envs, :2] = next_obs[:, -2:]
            self._last = next_obs
            self._turn += 1
        else:
            self.put_all(at, self._last)
            self.put_next(at + self._step, next_obs)

    def put(self, at: int, envs: Rows, obs: Array) -> None:
        """Store the newest frames of ``obs`` [n, ...] for ``envs`` [n]."""
        self._frames[at + envs * self._stride] = self._newest(obs)

    def save(self, at: int, envs: Rows, side_rows: Rows) -> None:
        """Copy the stored frames of ``envs`` to side rows."""
        self._sides[side_rows] = self._frames[at + envs * self._stride]

    def put_aside(self, side_rows: Rows, obs: Array) -> None:
        """Store the newest frames of ``obs`` [n, ...] in side rows."""
        self._sides[side_rows] = self._newest(obs)

    def put_history(self, side_rows: Rows, obs: Array) -> None:
        """Store all but the newest frame of one observation in side rows."""
        self._sides[side_rows] = obs[:-1]

    def _rows(self, at: int) -> slice:
        return slice(at, at + (self._envs - 1) * self._stride + 1, self._stride)

    def _newest(self, obs: Array) -> Array:
        """The newest frames [n, ...] of observations."""
        return obs[:, -1] if self._stacked else obs

    def _words(self, obs: Array) -> Array:
        """A view of observations as [n, depth, words]."""
        words: Array = obs.reshape(len(obs), self._depth, -1).view(self._word)
        return words


def _same_memory(left: Any, right: Array) -> bool:
    if left is right:
        return True
    if not _alike(left, right):
        return False
    first, second = left.__array_interface__["data"], right.__array_interface__["data"]
    return bool(first == second)


def _alike(array: Any, other: Array) -> bool:
    """Whether ``array`` is contiguous, with the dtype and shape of another that is."""
    if type(array) is not np.ndarray or array.dtype is not other.dtype:
        return False
    return array.shape == other.shape and array.flags.c_contiguous


def _equal(left: Array, right: Array) -> bool:
    return not np.count_nonzero(left != right)


def _differing(left: Array, right: Array) -> Flags | None:
    """Which of [n, ...] differ anywhere; None: none do."""
    unequal = left != right
    if not np.count_nonzero(unequal):
        return None
    differing: Flags = unequal.reshape(len(unequal), -1).any(axis=1)
    return differing


def either(left: Flags | None, right: Flags | None) -> Flags | None:
    """The union of two sets of environments; None: empty."""
    if left is None or right is None:
        return right if left is None else left
    return left | right


@dataclass(frozen=True)
class FrameWindow:
    """Which stored frames make up the observations of rows, before and after the step.

    Frames are in order, oldest first; the last is that of the row's next observation.

    ``frames`` [n, depth + 1] are rows of `Table.frames`. Missing frames are patched in: zeros at
    flat positions ``zeros``, side rows ``side_rows`` at flat positions ``side_at``.
    """

    frames: Rows
    zeros: Rows
    side_at: Rows
    side_rows: Rows

    def narrow(self, first: int, stop: int) -> FrameWindow:
        """Its columns ``first`` to ``stop``."""
        width = self.frames.shape[1]
        if (first, stop) == (0, width):
            return self
        frames = np.ascontiguousarray(self.frames[:, first:stop])
        zeros, side_at, side_rows = self.zeros, self.side_at, self.side_rows
        if len(zeros):
            zeros, _ = _narrowed(zeros, width, first, stop)
        if len(side_at):
            side_at, inside = _narrowed(side_at, width, first, stop)
            side_rows = side_rows[inside]
        return FrameWindow(frames, zeros, side_at, side_rows)


def _narrowed(at: Rows, width: int, first: int, stop: int) -> tuple[Rows, npt.NDArray[np.bool_]]:
    row, column = np.divmod(at, width)
    inside = (column >= first) & (column < stop)
    return (row * (stop - first) + column - first)[inside], inside


def window(table: Table, rows: Rows, records: Array, depth: int) -> FrameWindow:
    """Frames of ``rows`` [n] with records ``records`` [n]; ``depth``: frames of a stack."""
    spec, strides = table.spec, table.frame_rows
    slot = rows // table.rows_per_slot  # divmod is several times slower
    rest = rows - slot * table.rows_per_slot
    t = rest // spec.envs
    newest = slot * strides.slots + t * strides.steps + (rest - t * spec.envs) * strides.envs
    frames = newest[:, None] + np.arange(1 - depth, 2) * strides.steps
    zeros = side_at = side_rows = np.empty(0, np.int64)
    if depth > 1:
        age = records["age"]
        odd = np.flatnonzero((age < depth - 1) | (t < depth - 1))
        if len(odd):
            edge = _EdgeRows(odd, slot[odd], t[odd], age[odd].astype(np.int64))
            _reach_back(table, frames, edge, depth)
            zeros, side_at, side_rows = _padding(table, records["pad"], edge, depth)
    if "side" in (records.dtype.names or ()):
        final = np.flatnonzero(records["side"] >= 0)
        if len(final):
            side_at = np.concatenate([side_at, final * (depth + 1) + depth])
            final_rows = slot[final] * spec.side + records["side"][final]
            side_rows = np.concatenate([side_rows, final_rows])
    return FrameWindow(frames, zeros, side_at, side_rows)


class _EdgeRows(NamedTuple):
    """Rows of a batch whose stacks begin before their slot, or with their episode; each [n]."""

    at: Rows
    slot: Rows
    t: Rows
    age: Rows


def _reach_back(table: Table, frames: Rows, edge: _EdgeRows, depth: int) -> None:
    """Clip stacks at the start of the episode, and continue them in the slots before."""
    strides = table.frame_rows
    back = np.arange(depth - 1, 0, -1)
    reach = np.minimum(back, edge.age[:, None])  # not further back than the start
    older = frames[edge.at, : depth - 1] + (back - reach) * strides.steps
    slot, behind = edge.slot, edge.t  # steps stored from `slot` on, before the row's own
    while (beyond := reach > behind[:, None]).any():
        previous = table.prev.take(slot).astype(np.int64)
        if (beyond[:, 0] & (previous < 0)).any():
            raise AssertionError("a row that counts reaches back to a slot that is gone")
        steps = table.length.take(previous)
        older += beyond * ((previous - slot) * strides.slots + steps * strides.steps)[:, None]
        slot, behind = previous, behind + steps
    frames[edge.at, : depth - 1] = older


def walk_back(table: Table, slot: Rows, t: Rows) -> tuple[Rows, Rows]:
    """Slot and step of steps ``t``, counted from the first of ``slot`` and mostly negative."""
    slot, t = slot.copy(), t.copy()
    earlier = np.flatnonzero(t < 0)
    while len(earlier):
        previous = table.prev.take(slot[earlier])
        if (previous < 0).any():
            raise AssertionError("a row that counts reaches back to a slot that is gone")
        slot[earlier] = previous
        t[earlier] += table.length.take(previous)
        earlier = earlier[t[earlier] < 0]
    return slot, t


def _padding(table: Table, pads: Array, edge: _EdgeRows, depth: int) -> tuple[Rows, Rows, Rows]:
    """Flat positions of zeros, and of side rows with these rows, in stacks that begin before a
    start.
    """
    pad = pads[edge.at]
    young = np.flatnonzero((edge.age < depth - 1) & (pad > 0))
    if not len(young):
        none = np.empty(0, np.int64)
        return none, none, none
    pad, age = pad[young], edge.age[young]
    missing = np.arange(depth - 1) < (depth - 1 - age)[:, None]  # the oldest ones
    at = edge.at[young, None] * (depth + 1) + np.arange(depth - 1)
    zero = pad == 1
    zeros = at[zero][missing[zero]]
    odd = ~zero
    start, _ = walk_back(table, edge.slot[young[odd]], edge.t[young[odd]] - age[odd])
    # The stack at the start was side rows and its own frame; `age` steps later it has moved on.
    first = start * table.spec.side + pad[odd] - 2 + age[odd]
    side_rows = (first[:, None] + np.arange(depth - 1))[missing[odd]]
    return zeros, at[odd][missing[odd]], side_rows
