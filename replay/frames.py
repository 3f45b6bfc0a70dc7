"""Observations that are stored as frames: written once each, and read back exactly as given.

Row t+1 of a slot's frames is the frame that row t led to. A stack is stored as its newest frame:
the rest of it are the frames stored before, back to the start of the episode. Before the start lies
the padding of the environment: the first frame again (pad 0), zeros (1), or frames kept in side
rows (2 + index of the oldest).

`FrameWriter` stores the frames of a stream. That a stack continues the stored frames is checked,
not assumed: `FrameComparer` compares them. An observation that does not continue them begins a new
history: the frames it replaces, and frames before it that are neither a repetition nor zeros, go to
side rows. `find_window` finds the frames of rows, for a batch.
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

# Steps of at most so many bytes are compared completely; see `FrameComparer`.
COMPLETE_NBYTES = 1 << 20

# Larger steps are compared at every `EVERY`th step, for one environment in `PARTS`.
EVERY = 8
PARTS = 8

# Words of an older frame that are compared together: a cache line.
LOOK = 8

# Words by which the compared place moves from step to step. It is prime, so all are reached.
STRIDE = 37


class FrameWriter:
    """The part of a writer for observations that are stored as frames."""

    def __init__(self, table: Table, layout: Layout, stream: SlotStream) -> None:
        envs = table.spec.envs
        self._table = table
        self._layout = layout
        self._stream = stream
        self._envs = envs
        self._depth = layout.history + 1
        self._strides = table.frame_rows
        self._comparers = {
            o.name: FrameComparer(
                o,
                frames=table.frames[o.name],
                sides=table.sides[o.side_name],
                envs=envs,
                strides=self._strides,
            )
            for o in layout.framed
        }

        self._only = next(iter(self._comparers.values())) if len(self._comparers) == 1 else None
        """The comparer, if there is one observation only."""

        # The frame columns of the table's records.
        names = table.records.dtype.names or ()
        self._ages = table.records["age"]
        self._sides = table.records["side"]
        self._pads: Array | None = table.records["pad"] if "pad" in names else None

        self._fresh: Flags | None = np.ones(envs, bool)
        """Environments whose next row begins an episode; None: no environment."""

        self._after_reset: Flags = np.zeros(envs, bool)
        """Environments whose last row only reset them and was dropped."""

        self._no_envs: Flags = np.zeros(envs, bool)

        self._lost: Flags = np.zeros(envs, bool)
        """Environments whose history began with frames for which no side rows were left."""

        self._any_lost = False
        """Whether there is such an environment whose row may come to need those frames."""

        self._age = np.zeros(envs, self._ages.dtype)
        """Steps since the current history of each environment began, up to `OLDEST`."""

        self._pad = np.zeros(envs, np.int64)
        """What lies before the current history of each environment, as in the records."""

        self._side_rows = _SideRowAllocator(table, stream)

    # ------------------------------------------------------------------------- before the row

    def follows(self, obs: Any, next_obs: Any) -> bool:
        """Whether a step of the only observation continues the last one, in every environment.

        If so, `write_following` stores it; else call `accept`. A slot must be open.
        """
        comparer = self._only
        if comparer is None or self._fresh is not None or self._any_lost:
            return False
        newest_row = self._newest_row()
        return newest_row != NONE and comparer.continues(obs, next_obs, newest_row)

    def accept(
        self,
        flat: dict[str, Any],
        resetting: Flags | None,
        done: Flags | None,
        finals: Arrays | None,
    ) -> Arrays:
        """Check what the row led to; start new histories where obs begins one.

        Args:
            flat: values of the step by column.
            resetting: environments [E] that this step only resets; None: no environment.
            done: environments [E] whose episode the step ends; None: no environment.
            finals: final observations [n, ...] of the n environments that are done, where
                ``next_obs`` is already that of the next episode.

        Returns:
            The next observations [E, ...] by the name of the observation, for `write`.

        Raises:
            ReplayError: a next_obs is no shift of obs. Nothing has changed then.
        """
        obs: Arrays = {}
        next_obs: Arrays = {}
        for o in self._layout.framed:
            obs[o.name] = _contiguous(o, flat[o.name], self._envs, column=o.name)
            next_obs[o.name] = _contiguous(o, flat[o.next_name], self._envs, column=o.next_name)

        restart = either(self._fresh, self._broken(obs))
        if restart is not None and resetting is not None:
            restart &= ~resetting
        self._check_shift(obs, next_obs, resetting=resetting, done=done, finals=finals)

        # The first row of a slot also stores the frames before it.
        if restart is not None or not self._stream.t:
            self._restart(obs, np.zeros(self._envs, bool) if restart is None else restart)
        return next_obs

    def _broken(self, obs: Arrays) -> Flags | None:
        """Environments whose observation is not the one stored as the last next_obs."""
        newest_row = self._newest_row()
        if newest_row == NONE:
            return np.ones(self._envs, bool)
        broken: Flags | None = None
        for name, comparer in self._comparers.items():
            broken = either(broken, comparer.discontinuous(obs[name], newest_row))
        return broken

    def _check_shift(
        self,
        obs: Arrays,
        next_obs: Arrays,
        *,
        resetting: Flags | None,
        done: Flags | None,
        finals: Arrays | None,
    ) -> None:
        """Raise ReplayError where the newest frames of obs do not begin the stack that follows.

        What follows is next_obs, and also the final observation where there is one. Rows that only
        reset may lead anywhere.
        """
        # Where episodes begin or end, everything is compared.
        edge = either(self._fresh, done)
        edges = None if edge is None else np.flatnonzero(edge)

        for o in self._layout.framed:
            if not o.stack:
                continue
            comparer = self._comparers[o.name]
            stacks = obs[o.name]
            next_stacks = next_obs[o.name]

            wrong = comparer.shift_faults(stacks, next_stacks)
            if wrong is None and edges is not None:
                wrong = np.zeros(self._envs, bool)
                wrong[edges] = comparer.all_shift_faults(stacks[edges], next_stacks[edges])
            if wrong is not None and resetting is not None:
                wrong &= ~resetting

            # Final observations are few, and compared completely.
            if finals is not None:
                assert done is not None
                if wrong is None:
                    wrong = np.zeros(self._envs, bool)
                done_envs = np.flatnonzero(done)
                wrong[done_envs] = comparer.all_shift_faults(stacks[done_envs], finals[o.name])

            if wrong is not None and wrong.any():
                raise _no_shift(o, int(np.flatnonzero(wrong)[0]))

    def _restart(self, obs: Arrays, restart: Flags) -> None:
        """Begin new histories with ``obs`` in the environments ``restart`` [E].

        In the first row of a slot the frames of all other environments are stored too.
        """
        # If side rows are short the row goes to a new slot, in which nothing has to be saved.
        stream = self._stream
        needs = self._restart_needs(obs, restart)
        side_rows = len(needs.saved_envs) + (self._depth - 1) * len(needs.prehistory_envs)
        if stream.t and side_rows > self._side_rows.free:
            stream.end()
            stream.begin()

        # A slot that follows no other holds the start of every history.
        if not stream.t and stream.previous == NONE:
            restart = np.ones(self._envs, bool)
            needs = self._restart_needs(obs, restart)

        restarting = np.flatnonzero(restart)
        self._age[restarting] = 0
        self._pad[restarting] = needs.pads
        self._lost[restarting] = False

        # Within a slot, all other environments have their frame already.
        if stream.t:
            self._save_finals(needs.saved_envs)
            for name, comparer in self._comparers.items():
                comparer.put(self._frame_row(), restarting, obs[name][restarting])
        else:
            for name, comparer in self._comparers.items():
                comparer.put_all(self._frame_row(), obs[name])
        self._store_prehistories(obs, needs.prehistory_envs)

    def _restart_needs(self, obs: Arrays, restart: Flags) -> _RestartNeeds:
        """What new histories that begin with ``obs`` in the environments ``restart`` [E] need."""
        restarting = np.flatnonzero(restart)
        none = restarting[:0]
        if not len(restarting):
            return _RestartNeeds(none, none, none)

        # A stored frame that is about to be replaced is the final observation of the last row,
        # unless that row was dropped.
        saved_envs = none
        if self._stream.t:
            moved = np.zeros(len(restarting), bool)
            for name, comparer in self._comparers.items():
                moved |= comparer.differ_at(self._frame_row(), restarting, obs[name])
            saved_envs = restarting[moved & ~self._after_reset[restarting]]

        # The older frames of a stack need no memory if they repeat the newest one or are zeros.
        repeats = np.ones(len(restarting), bool)
        zeros = np.ones(len(restarting), bool)
        for o in self._layout.framed:
            if o.stack:
                stacks = obs[o.name][restarting].reshape(len(restarting), o.stack, -1)
                repeats &= (stacks[:, :-1] == stacks[:, -1:]).all(axis=(1, 2))
                zeros &= ~stacks[:, :-1].any(axis=(1, 2))
        pads = np.where(repeats, REPEAT, ZEROS)
        return _RestartNeeds(saved_envs, restarting[~(repeats | zeros)], pads)

    def _save_finals(self, envs: Rows) -> None:
        """Move the final observations of the last row to side rows."""
        if not len(envs):
            return
        side_rows = self._side_rows.take(len(envs))
        for comparer in self._comparers.values():
            comparer.save(self._frame_row(), envs, side_rows)
        previous = self._stream.start - self._envs
        self._sides[previous + envs] = self._side_rows.in_slot(side_rows)

    def _store_prehistories(self, obs: Arrays, envs: Rows) -> None:
        """Put the older frames of stacks with which histories begin into side rows.

        Environments for which no side rows are left are marked in `_lost`.
        """
        older_frames = self._depth - 1
        room = self._side_rows.free // max(1, older_frames)
        self._lost[envs[room:]] = True
        self._any_lost |= len(envs) > room
        for env in envs[:room]:
            side_rows = self._side_rows.take(older_frames)
            for o in self._layout.framed:
                if o.stack:
                    self._comparers[o.name].put_prehistory(side_rows, obs[o.name][env])
            self._pad[env] = SIDE + self._side_rows.in_slot(side_rows)[0]

    # ------------------------------------------------------------------------- the row

    def write(self, next_obs: Arrays, done: Flags | None, finals: Arrays | None) -> bool:
        """Write the frames that the row led to.

        A final observation goes to a side row, or, at the end of the slot, in place of the next
        frame, which begins the next slot anyway.

        Args:
            next_obs: next observations [E, ...], as from `accept`.
            done: environments [E] whose episode the step ends.
            finals: final observations [n, ...] of these n; None: next_obs is the final one.

        Returns:
            Whether the slot must be closed after the row, for want of side rows.
        """
        stream = self._stream
        next_frame_row = self._frame_row() + self._strides.steps
        for name, comparer in self._comparers.items():
            comparer.put_next(next_frame_row, next_obs[name])
        self._write_records()
        if finals is None or done is None:
            return False

        done_envs = np.flatnonzero(done)
        is_last = stream.t + 1 == self._table.spec.unroll
        if is_last or len(done_envs) > self._side_rows.free:
            for name, comparer in self._comparers.items():
                comparer.put(next_frame_row, done_envs, finals[name])
            return not is_last

        side_rows = self._side_rows.take(len(done_envs))
        for name, comparer in self._comparers.items():
            comparer.put_aside(side_rows, finals[name])
        self._sides[stream.start + done_envs] = self._side_rows.in_slot(side_rows)
        return False

    def write_following(self, next_obs: Array) -> None:
        """Write the frame that a row of the only observation led to, where `follows` allowed it.

        The row is finished too; `advance` is not called.
        """
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
        """Row of `Table.frames` with the frame that the last row led to, of environment 0.

        NONE where it is not stored any more.
        """
        if self._stream.t:
            return self._frame_row()
        previous = self._stream.previous
        if previous == NONE:
            return NONE
        length = int(self._table.length[previous])
        return previous * self._strides.slots + length * self._strides.steps


class _RestartNeeds(NamedTuple):
    """What environments need whose histories begin anew."""

    saved_envs: Rows
    """Environments whose last final observation must be moved to a side row."""
    prehistory_envs: Rows
    """Environments whose stack has older frames which are neither a repetition nor zeros."""
    pads: Rows
    """The padding of each environment that restarts."""


class _SideRowAllocator:
    """The side rows of the slot that a stream is writing, which are taken in order."""

    def __init__(self, table: Table, stream: SlotStream) -> None:
        self._table = table
        self._stream = stream
        self._taken = 0

        # The count of taken rows holds for this use of this slot only.
        self._slot = NONE
        self._generation = 0

    @property
    def free(self) -> int:
        """The number of side rows that are not taken."""
        return self._table.spec.side - self._taken_in_slot()

    def take(self, count: int) -> Rows:
        """Take so many rows of `Table.sides`, one after the other."""
        first = self._stream.slot * self._table.spec.side + self._taken_in_slot()
        self._taken += count
        return np.arange(first, first + count)

    def in_slot(self, side_rows: Rows) -> Rows:
        """Indices of rows of `Table.sides` within the slot, as records hold them."""
        return side_rows - self._stream.slot * self._table.spec.side

    def _taken_in_slot(self) -> int:
        slot = self._stream.slot
        generation = int(self._table.generation[slot])
        if (self._slot, self._generation) != (slot, generation):
            self._slot = slot
            self._generation = generation
            self._taken = 0
        return self._taken


def _contiguous(o: Observation, value: Any, envs: int, column: str) -> Array:
    """A validated observation as a contiguous array [envs, ...], copied only where it is not one.

    ``column`` is its name in an error.
    """
    if type(value) is np.ndarray and value.dtype is o.leaf.dtype and value.flags.c_contiguous:
        if value.shape == (envs, *o.leaf.shape):
            return value
        if envs == 1 and value.shape == o.leaf.shape:
            return value[None]
    return np.ascontiguousarray(validated(o.leaf, value, envs, column), o.leaf.dtype)


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
        self,
        observation: Observation,
        *,
        frames: Array,
        sides: Array,
        envs: int,
        strides: FrameRows,
    ) -> None:
        self._depth = observation.depth
        self._stacked = bool(observation.stack)
        self._envs = envs
        self._env_stride = strides.envs
        self._step_stride = strides.steps
        self._frames = frames
        self._sides = sides

        # Frames are compared in the widest words of which they consist.
        frame_nbytes = observation.leaf.nbytes // self._depth
        width = next(w for w in (8, 4, 2, 1) if frame_nbytes % w == 0)
        self._word = np.dtype(f"u{width}")
        self._word_count = frame_nbytes // width
        self._stored = frames.reshape(len(frames), -1).view(self._word)

        # Whether the newest frames of a step, and all older ones, are always compared completely.
        self._complete = envs * frame_nbytes <= COMPLETE_NBYTES
        self._all_complete = envs * frame_nbytes * max(1, self._depth - 2) <= COMPLETE_NBYTES
        self._parts = min(PARTS, envs)

        self._turn = 0
        """Steps that were stored: which part of a large step is compared next."""

        self._last: Array | None = None
        """The newest next_obs, referred to so that its memory is not reused."""

    # ------------------------------------------------------------------------- comparing

    def continues(self, obs: Array, next_obs: Array, frame_row: int) -> bool:
        """Whether ``obs`` is the last next_obs, and ``next_obs`` its shift, as far as is compared.

        The frames of ``obs`` are stored at ``frame_row``. False: a complete comparison is needed.
        """
        last = self._last
        if last is None or not _same_memory(obs, last) or not _alike(next_obs, last):
            return False
        if self._turn % EVERY and not self._complete:
            return True

        frames = self._words(obs)
        stored = self._stored[self._rows(frame_row)]
        if self._depth == 1:
            return self._differ_partly(frames[:, -1], stored) is None
        next_frames = self._words(next_obs)
        if self._differ(next_frames[:, -2], stored) is not None:
            return False
        if self._depth == 2:
            return self._differ_partly(frames[:, -1], stored) is None
        return self._differ_partly(next_frames[:, :-2], frames[:, 1:-1]) is None

    def discontinuous(self, obs: Array, frame_row: int) -> Flags | None:
        """Environments [E] whose ``obs`` is not the last next_obs; None: no environment.

        The last next_obs is stored at ``frame_row``.
        """
        frames = self._words(obs)
        stored = self._stored[self._rows(frame_row)]
        last = self._last
        broken = self._differ(frames[:, -1], stored)
        if last is None or self._depth == 1:
            return broken

        # The same array has the older frames of the last next_obs, unless it was overwritten.
        if _same_memory(obs, last):
            return broken

        # Nor can the older frames be compared if the last next_obs has other content by now.
        last_frames = self._words(last)
        if self._differ(last_frames[:, -1], stored) is not None:
            return broken
        return either(broken, self._differ_partly(frames[:, :-1], last_frames[:, :-1]))

    def shift_faults(self, obs: Array, next_obs: Array) -> Flags | None:
        """Environments [E] whose ``next_obs`` does not begin with the newest frames of ``obs``.

        None: no environment, as far as is compared.
        """
        frames = self._words(obs)
        next_frames = self._words(next_obs)
        wrong = self._differ(next_frames[:, -2], frames[:, -1])
        if self._depth > 2:
            wrong = either(wrong, self._differ_partly(next_frames[:, :-2], frames[:, 1:-1]))
        return wrong

    def all_shift_faults(self, obs: Array, next_obs: Array) -> Flags:
        """`shift_faults` of the given environments only, compared completely."""
        wrong: Flags = (self._words(next_obs)[:, :-1] != self._words(obs)[:, 1:]).any(axis=(1, 2))
        return wrong

    def differ_at(self, frame_row: int, envs: Rows, obs: Array) -> Flags:
        """Which of ``envs`` have a newest frame that differs from the stored one."""
        stored = self._stored[frame_row + envs * self._env_stride]
        differ: Flags = (stored != self._words(obs[envs])[:, -1]).any(axis=1)
        return differ

    def _differ(self, frames: Array, others: Array) -> Flags | None:
        """Which of the frames [E, words] differ, as far as is compared; None: none do."""
        if not self._complete:
            envs = self._compared_envs()
            if _equal(frames[envs], others[envs]):
                return None
        return _differing(frames, others)

    def _differ_partly(self, frames: Array, others: Array) -> Flags | None:
        """A shorter comparison, of [E, ..., words] that were compared before."""
        if not self._all_complete:
            first_word = self._turn * STRIDE % max(1, self._word_count - LOOK + 1)
            part = self._compared_envs(), ..., slice(first_word, first_word + LOOK)
            if _equal(frames[part], others[part]):
                return None
        return _differing(frames, others)

    def _compared_envs(self) -> slice:
        """The environments to compare in this step."""
        return slice(self._turn // EVERY % self._parts, None, self._parts)

    # ------------------------------------------------------------------------- copying

    def put_all(self, frame_row: int, obs: Array) -> None:
        """Store the newest frames of ``obs``."""
        self._frames[self._rows(frame_row)] = self._newest(obs)

    def put_next(self, frame_row: int, next_obs: Array) -> None:
        """Store the frames that a row led to, and remember them for the next row."""
        self.put_all(frame_row, next_obs)
        self._last = next_obs
        self._turn += 1

    def put_first(self, frame_row: int, next_obs: Array) -> None:
        """Store what `put_next` does for a slot's first row, and the frames before it."""
        assert self._last is not None
        if self._stacked and self._step_stride == 1:
            # Both frames of an environment lie together, in the stack and in the table.
            streams = self._frames.reshape(-1, self._env_stride, *self._frames.shape[1:])
            first = frame_row // self._env_stride
            streams[first : first + self._envs, :2] = next_obs[:, -2:]
            self._last = next_obs
            self._turn += 1
        else:
            self.put_all(frame_row, self._last)
            self.put_next(frame_row + self._step_stride, next_obs)

    def put(self, frame_row: int, envs: Rows, obs: Array) -> None:
        """Store the newest frames of ``obs`` [n, ...] for ``envs`` [n]."""
        self._frames[frame_row + envs * self._env_stride] = self._newest(obs)

    def save(self, frame_row: int, envs: Rows, side_rows: Rows) -> None:
        """Copy the stored frames of ``envs`` to side rows."""
        self._sides[side_rows] = self._frames[frame_row + envs * self._env_stride]

    def put_aside(self, side_rows: Rows, obs: Array) -> None:
        """Store the newest frames of ``obs`` [n, ...] in side rows."""
        self._sides[side_rows] = self._newest(obs)

    def put_prehistory(self, side_rows: Rows, obs: Array) -> None:
        """Store all but the newest frame of one observation in side rows."""
        self._sides[side_rows] = obs[:-1]

    def _rows(self, frame_row: int) -> slice:
        """Rows of `Table.frames` of all environments at one step."""
        stop = frame_row + (self._envs - 1) * self._env_stride + 1
        return slice(frame_row, stop, self._env_stride)

    def _newest(self, obs: Array) -> Array:
        """The newest frames [n, ...] of observations."""
        return obs[:, -1] if self._stacked else obs

    def _words(self, obs: Array) -> Array:
        """A view of observations as [n, depth, words]."""
        words: Array = obs.reshape(len(obs), self._depth, -1).view(self._word)
        return words


def _same_memory(array: Any, other: Array) -> bool:
    """Whether two arrays are views of the same values."""
    if array is other:
        return True
    if not _alike(array, other):
        return False
    first = array.__array_interface__["data"]
    second = other.__array_interface__["data"]
    return bool(first == second)


def _alike(array: Any, other: Array) -> bool:
    """Whether ``array`` is contiguous, with the dtype and shape of another that is."""
    if type(array) is not np.ndarray or array.dtype is not other.dtype:
        return False
    return array.shape == other.shape and array.flags.c_contiguous


def _equal(array: Array, other: Array) -> bool:
    return not np.count_nonzero(array != other)


def _differing(array: Array, other: Array) -> Flags | None:
    """Which of [n, ...] differ anywhere; None: none do."""
    unequal = array != other
    if not np.count_nonzero(unequal):
        return None
    differing: Flags = unequal.reshape(len(unequal), -1).any(axis=1)
    return differing


def either(first: Flags | None, second: Flags | None) -> Flags | None:
    """The union of two sets of environments; None: empty."""
    if first is None:
        return second
    if second is None:
        return first
    return first | second


@dataclass(frozen=True)
class FrameWindow:
    """Which stored frames make up the observations of rows, before and after the step.

    Frames are in order, oldest first; the last is that of the row's next observation.

    ``frames`` [n, depth + 1] are rows of `Table.frames`. Missing frames are patched in: zeros at
    flat positions ``zeros``, side rows ``side_rows`` at flat positions ``side_positions``.
    """

    frames: Rows
    zeros: Rows
    side_positions: Rows
    side_rows: Rows

    def narrow(self, first: int, stop: int) -> FrameWindow:
        """Keep only columns ``first`` to ``stop`` of the frames.

        Returns:
            A window whose flat positions are those in the narrower frames.
        """
        width = self.frames.shape[1]
        if (first, stop) == (0, width):
            return self

        frames = np.ascontiguousarray(self.frames[:, first:stop])
        zeros = self.zeros
        if len(zeros):
            zeros, _ = _narrowed(zeros, width, first=first, stop=stop)
        side_positions = self.side_positions
        side_rows = self.side_rows
        if len(side_positions):
            side_positions, inside = _narrowed(side_positions, width, first=first, stop=stop)
            side_rows = side_rows[inside]
        return FrameWindow(frames, zeros=zeros, side_positions=side_positions, side_rows=side_rows)


def _narrowed(
    positions: Rows, width: int, *, first: int, stop: int
) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Convert flat positions in an array of ``width`` columns to its columns ``first`` to ``stop``.

    Returns:
        The flat positions in the narrower array of those that lie in it, and which ones these are.
    """
    row, column = np.divmod(positions, width)
    inside = (column >= first) & (column < stop)
    return (row * (stop - first) + column - first)[inside], inside


def find_window(table: Table, rows: Rows, records: Array, depth: int) -> FrameWindow:
    """Find the stored frames of which the observations of ``rows`` consist.

    Args:
        table: the table that holds them.
        rows: physical rows [n].
        records: their records [n].
        depth: frames of a stack; 1 for an observation that is no stack.

    Returns:
        For each row the frames of its stack and the one that follows, the oldest first.
    """
    # Division is used since divmod is several times slower.
    spec = table.spec
    strides = table.frame_rows
    slot = rows // table.rows_per_slot
    row_in_slot = rows - slot * table.rows_per_slot
    t = row_in_slot // spec.envs
    env = row_in_slot - t * spec.envs

    # Most stacks lie in one piece, from depth - 1 steps before the row to one step after it.
    newest = slot * strides.slots + t * strides.steps + env * strides.envs
    frames = newest[:, None] + np.arange(1 - depth, 2) * strides.steps
    no_rows = np.empty(0, np.int64)
    padding = _Padding(no_rows, no_rows, no_rows)
    if depth > 1:
        age = records["age"]
        at_edge = np.flatnonzero((age < depth - 1) | (t < depth - 1))
        if len(at_edge):
            edge = _EdgeRows(
                position=at_edge,
                slot=slot[at_edge],
                t=t[at_edge],
                age=age[at_edge].astype(np.int64),
            )
            _reach_back(table, frames, edge, depth)
            padding = _find_padding(table, records["pad"], edge, depth)

    # A final observation replaces the frame after the row.
    side_positions = padding.side_positions
    side_rows = padding.side_rows
    if "side" in (records.dtype.names or ()):
        final = np.flatnonzero(records["side"] >= 0)
        if len(final):
            side_positions = np.concatenate([side_positions, final * (depth + 1) + depth])
            final_rows = slot[final] * spec.side + records["side"][final]
            side_rows = np.concatenate([side_rows, final_rows])
    return FrameWindow(
        frames, zeros=padding.zeros, side_positions=side_positions, side_rows=side_rows
    )


class _EdgeRows(NamedTuple):
    """Rows of a batch whose stacks begin before their slot, or with their episode; each [n]."""

    position: Rows
    """Their positions in the batch."""
    slot: Rows
    t: Rows
    """Their steps within the slot."""
    age: Rows
    """Steps since their episodes began."""


class _Padding(NamedTuple):
    """Frames of a window that are not in `Table.frames`, by their flat positions in it."""

    zeros: Rows
    """Positions of frames of zeros."""
    side_positions: Rows
    """Positions of frames in side rows."""
    side_rows: Rows
    """These side rows, of `Table.sides`."""


def _reach_back(table: Table, frames: Rows, edge: _EdgeRows, depth: int) -> None:
    """Clip stacks at the start of the episode, and continue them in the slots before.

    Changes the rows ``edge`` of ``frames`` [n, depth + 1].
    """
    # No frame lies further back than the start of the episode.
    strides = table.frame_rows
    steps_back = np.arange(depth - 1, 0, -1)
    reach = np.minimum(steps_back, edge.age[:, None])
    older = frames[edge.position, : depth - 1] + (steps_back - reach) * strides.steps

    # From slot to slot, move the frames that lie before its first step to the slot before it.
    slot = edge.slot
    stored_steps = edge.t  # steps stored from `slot` on, before the row's own
    while (beyond := reach > stored_steps[:, None]).any():
        previous = table.prev.take(slot).astype(np.int64)
        if (beyond[:, 0] & (previous < 0)).any():
            raise AssertionError("a row that counts reaches back to a slot that is gone")
        length = table.length.take(previous)
        older += beyond * ((previous - slot) * strides.slots + length * strides.steps)[:, None]
        slot = previous
        stored_steps = stored_steps + length
    frames[edge.position, : depth - 1] = older


def walk_back(table: Table, slot: Rows, t: Rows) -> tuple[Rows, Rows]:
    """Find steps that are counted from the first of a later slot.

    Args:
        table: that holds them.
        slot: slots [n] from which steps are counted.
        t: steps [n], mostly negative.

    Returns:
        The slot and the step within it of each, [n].
    """
    slot = slot.copy()
    t = t.copy()
    earlier = np.flatnonzero(t < 0)
    while len(earlier):
        previous = table.prev.take(slot[earlier])
        if (previous < 0).any():
            raise AssertionError("a row that counts reaches back to a slot that is gone")
        slot[earlier] = previous
        t[earlier] += table.length.take(previous)
        earlier = earlier[t[earlier] < 0]
    return slot, t


def _find_padding(table: Table, pads: Array, edge: _EdgeRows, depth: int) -> _Padding:
    """Find the frames before a start in stacks that reach there, but for repetitions.

    Args:
        table: that holds them.
        pads: column "pad" of the batch's records.
        edge: rows whose stacks may begin before a start.
        depth: frames of a stack.
    """
    pad = pads[edge.position]
    young = np.flatnonzero((edge.age < depth - 1) & (pad > REPEAT))
    if not len(young):
        no_rows = np.empty(0, np.int64)
        return _Padding(no_rows, no_rows, no_rows)

    # The oldest frames of a stack are missing, as many as the episode has steps too few.
    pad = pad[young]
    age = edge.age[young]
    missing = np.arange(depth - 1) < (depth - 1 - age)[:, None]
    positions = edge.position[young, None] * (depth + 1) + np.arange(depth - 1)

    has_zeros = pad == ZEROS
    zeros = positions[has_zeros][missing[has_zeros]]

    # The stack at the start was side rows and its own frame; `age` steps later it has moved on.
    odd = ~has_zeros
    start, _ = walk_back(table, edge.slot[young[odd]], edge.t[young[odd]] - age[odd])
    first = start * table.spec.side + pad[odd] - SIDE + age[odd]
    side_rows = (first[:, None] + np.arange(depth - 1))[missing[odd]]
    return _Padding(zeros, side_positions=positions[odd][missing[odd]], side_rows=side_rows)
