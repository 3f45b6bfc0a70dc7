"""Frames of a stream: each is stored once, and reads return exactly what was given.

Row t+1 of a slot's frames is the frame that row t led to. A stack is stored as its newest frame, so
the rest of it must be frames stored before; that is checked, not assumed. An observation that does
not continue the stored frames begins a new history: the frames it replaces, and frames before it
that are neither a repetition nor zeros, go to side rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.replay.columns import Array, checked
from penstock.replay.errors import ReplayError
from penstock.replay.frame_comparer import FrameComparer, either
from penstock.replay.history import OLDEST, REPEAT, SIDE, ZEROS
from penstock.replay.layout import Layout, Observation
from penstock.replay.stream import SlotStream
from penstock.replay.table import NONE, Table

Flags = npt.NDArray[np.bool_]
Arrays = dict[str, Array]


class Framing:
    """The part of a writer for observations that are stored as frames."""

    def __init__(self, table: Table, layout: Layout, stream: SlotStream) -> None:
        envs = table.spec.envs
        self._table, self._layout, self._stream, self._envs = table, layout, stream, envs
        self._depth = layout.history + 1
        self._lie = table.frame_rows
        self._stored = {
            o.name: FrameComparer(
                o, table.frames[o.name], table.sides[o.side_name], envs, self._lie
            )
            for o in layout.framed
        }
        self._only = next(iter(self._stored.values())) if len(self._stored) == 1 else None
        names = table.records.dtype.names or ()
        self._ages, self._sides = table.records["age"], table.records["side"]
        self._pads: Array | None = table.records["pad"] if "pad" in names else None
        self._fresh: Flags | None = np.ones(envs, bool)  # the next row begins an episode
        self._after_reset: Flags = np.zeros(envs, bool)  # the last row was dropped
        self._nobody = self._after_reset
        self._lost: Flags = np.zeros(envs, bool)  # rows whose first frames found no side rows
        self._any_lost = False
        self._age = np.zeros(envs, self._ages.dtype)
        self._pad = np.zeros(envs, np.int64)
        self._sides_used = 0
        self._sides_of = (NONE, 0)  # the slot of those side rows, and its generation

    # ------------------------------------------------------------------------- before the row

    def follows(self, obs: Any, after: Any) -> bool:
        """Whether a step of the only observation continues the last one, in every environment.

        If so, `put` stores it; else call `accept`. A slot must be open.
        """
        words = self._only
        if words is None or self._fresh is not None or self._any_lost:
            return False
        at = self._newest_row()
        return at != NONE and words.continues(obs, after, at)

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
        after: Arrays = {}
        for o in self._layout.framed:
            obs[o.name] = _contiguous(o, flat[o.name], self._envs, o.name)
            after[o.name] = _contiguous(o, flat[o.next_name], self._envs, o.next_name)
        restart = either(self._fresh, self._broken(obs))
        if restart is not None and resetting is not None:
            restart &= ~resetting
        self._check_shift(obs, after, resetting, done, finals)
        if restart is not None or not self._stream.t:
            self._restart(obs, np.zeros(self._envs, bool) if restart is None else restart)
        return after

    def _broken(self, obs: Arrays) -> Flags | None:
        """Environments whose observation is not the one stored as the last next_obs."""
        at = self._newest_row()
        if at == NONE:
            return np.ones(self._envs, bool)
        broken: Flags | None = None
        for name, words in self._stored.items():
            broken = either(broken, words.discontinuous(obs[name], at))
        return broken

    def _check_shift(
        self,
        obs: Arrays,
        after: Arrays,
        resetting: Flags | None,
        done: Flags | None,
        finals: Arrays | None,
    ) -> None:
        edge = either(self._fresh, done)  # where episodes begin or end, all is compared
        edges = None if edge is None else np.flatnonzero(edge)
        for o in self._layout.framed:
            if not o.stack:
                continue
            words = self._stored[o.name]
            wrong = words.no_shift(obs[o.name], after[o.name])
            if wrong is None and edges is not None:
                wrong = np.zeros(self._envs, bool)
                wrong[edges] = words.no_shift_of(obs[o.name][edges], after[o.name][edges])
            if wrong is not None and resetting is not None:
                wrong &= ~resetting
            if finals is not None:
                assert done is not None
                wrong = np.zeros(self._envs, bool) if wrong is None else wrong
                ended = np.flatnonzero(done)
                wrong[ended] = words.no_shift_of(obs[o.name][ended], finals[o.name])
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
            for name, words in self._stored.items():
                words.put(self._frame_row(), which, obs[name][which])
        else:
            for name, words in self._stored.items():
                words.put_all(self._frame_row(), obs[name])
        self._keep_odd(obs, odd)

    def _needs(
        self, obs: Arrays, restart: Flags
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
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
            for name, words in self._stored.items():
                moved |= words.differ_at(self._frame_row(), which, obs[name])
            saves = which[moved & ~self._after_reset[which]]
        repeat, zeros = np.ones(len(which), bool), np.ones(len(which), bool)
        for o in self._layout.framed:
            if o.stack:
                stack = obs[o.name][which].reshape(len(which), o.stack, -1)
                repeat &= (stack[:, :-1] == stack[:, -1:]).all(axis=(1, 2))
                zeros &= ~stack[:, :-1].any(axis=(1, 2))
        pad = np.where(repeat, REPEAT, ZEROS)
        return saves, which[~(repeat | zeros)], pad

    def _save(self, envs: npt.NDArray[np.int64]) -> None:
        """Move the final observations of the last row to side rows."""
        if not len(envs):
            return
        taken = self._take_sides(len(envs))
        for words in self._stored.values():
            words.save(self._frame_row(), envs, taken)
        before = self._stream.start - self._envs
        self._sides[before + envs] = taken - self._stream.slot * self._table.spec.side

    def _keep_odd(self, obs: Arrays, odd: npt.NDArray[np.int64]) -> None:
        """Put frames before a start that are no padding into side rows, while there are any."""
        older = self._depth - 1
        room = (self._table.spec.side - self._sides_taken()) // max(1, older)
        self._lost[odd[room:]] = True
        self._any_lost |= len(odd) > room
        for env in odd[:room]:
            taken = self._take_sides(older)
            for o in self._layout.framed:
                if o.stack:
                    self._stored[o.name].put_history(taken, obs[o.name][env])
            self._pad[env] = SIDE + taken[0] - self._stream.slot * self._table.spec.side

    # ------------------------------------------------------------------------- the row

    def write(self, after: Arrays, done: Flags | None, finals: Arrays | None) -> bool:
        """Write the frames that the row led to; True if the slot must be closed after it.

        A final observation goes to a side row, or, at the end of the slot, in place of the next
        frame, which begins the next slot anyway.
        """
        stream, table = self._stream, self._table
        for name, words in self._stored.items():
            words.put_next(self._frame_row() + self._lie.steps, after[name])
        self._note()
        if finals is None or done is None:
            return False
        ended = np.flatnonzero(done)
        last = stream.t + 1 == table.spec.unroll
        if last or len(ended) > table.spec.side - self._sides_taken():
            for name, words in self._stored.items():
                words.put(self._frame_row() + self._lie.steps, ended, finals[name])
            return not last
        taken = self._take_sides(len(ended))
        for name, words in self._stored.items():
            words.put_aside(taken, finals[name])
        self._sides[stream.start + ended] = taken - stream.slot * table.spec.side
        return False

    def put(self, after: Array) -> None:
        """Write the frame that a row of the only observation led to, where `follows` allowed it."""
        assert self._only is not None
        if self._stream.t:
            self._only.put_next(self._frame_row() + self._lie.steps, after)
        else:
            self._only.put_first(self._frame_row(), after)
        self._note()
        self.advance(None, None)

    def _note(self) -> None:
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
        """Finish the row; ``starts``: environments whose next row begins an episode."""
        self._age += self._age < OLDEST
        self._fresh = None if starts is None else starts.copy()
        self._after_reset = self._nobody if dropped is None else dropped

    # ------------------------------------------------------------------------- places

    def _frame_row(self) -> int:
        """Row of `Table.frames` of (t, environment 0)."""
        return self._stream.slot * self._lie.slots + self._stream.t * self._lie.steps

    def _newest_row(self) -> int:
        """The same for the frame that the last row led to; NONE where it is not stored any more."""
        previous = self._stream.previous
        if self._stream.t or previous == NONE:
            return self._frame_row() if self._stream.t else NONE
        return previous * self._lie.slots + int(self._table.length[previous]) * self._lie.steps

    def _sides_taken(self) -> int:
        generation = (self._stream.slot, int(self._table.generation[self._stream.slot]))
        if self._sides_of != generation:
            self._sides_of, self._sides_used = generation, 0
        return self._sides_used

    def _take_sides(self, count: int) -> npt.NDArray[np.int64]:
        first = self._stream.slot * self._table.spec.side + self._sides_taken()
        self._sides_used += count
        return np.arange(first, first + count)


def _contiguous(o: Observation, value: Any, envs: int, name: str) -> Array:
    if type(value) is np.ndarray and value.dtype is o.leaf.dtype and value.flags.c_contiguous:
        if value.shape == (envs, *o.leaf.shape):
            return value
        if envs == 1 and value.shape == o.leaf.shape:
            return value[None]
    return np.ascontiguousarray(checked(o.leaf, value, envs, name), o.leaf.dtype)


def _no_shift(o: Observation, env: int) -> ReplayError:
    older = o.stack - 1
    return ReplayError(
        f"{o.next_name} of environment {env} is no shift of {o.name}: with frame_stack={o.stack} "
        f"its first {older} frames must be the last {older} of {o.name}; check the order of frames "
        "and what resets the environment (autoreset=), or leave frame_stack out"
    )
