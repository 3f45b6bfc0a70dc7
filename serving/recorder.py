"""What games play, row by row, in slots of one seat each that a learner trains on.

The place of a seat in the table is a stream of slots with E = 1, for as long as the process lives.
It goes through many games and episodes, as an environment of an actor goes through episodes, and
its rows are those of `penstock.actors.rollout`: row t holds the decision at ``obs[t]`` and its
outcome, and the row between two episodes is not ``alive``.

An unroll in progress lies in an image of a slot in this process. When its T rows are complete, it
is copied into a lent slot and published. If none is lent, its copy waits, and the place is *held*:
its next rows are not decided until the copy is published. So writing rows never blocks, and each
place has at most two copies that wait.

A game may abandon an episode, or vanish. The row whose outcome is not known is then *dropped*: it
is not alive, and the rows before it are bootstrapped from its observation. Where a seat leaves, its
unroll is *flushed*: the rows that are missing are not alive, and it is published. What is not
published was never produced.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.algos.batch_policy import RecordedBatch
from penstock.algos.registry import algorithm
from penstock.algos.slots import RETURN
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.interfaces import SlotProcessor
from penstock.core.params import Array, Float32, Stamp
from penstock.core.specs import HEADER, Bytes, SlotSpec
from penstock.serving.seats import Bools, Indices
from penstock.transport.shm.arena import Arena, available_nbytes
from penstock.transport.shm.store import Geometry, Slot, SlotWriter

# The share of the free memory that the images and the unrolls that wait may take.
MEMORY_SHARE = 0.25
# A place has an image, and at most two unrolls that wait.
COPIES = 3

# What a place does. Numbers, and not an enum, for arithmetic with many places.
NEW = 0  # nothing was seen
BEGUN = 1  # obs[t] begins an episode, and is not decided
SHOWN = 2  # obs[t] follows an action, and is not decided
DECIDED = 3  # row t has an action, whose outcome is awaited
OVER = 4  # the episode is over: row t only resets


class _WaitingUnroll(NamedTuple):
    """An unroll that waits for a slot."""

    place: int
    header: npt.NDArray[np.void]
    payload: list[Bytes]
    """The bytes of each block of a slot."""


class Recorder:
    """The unrolls of all places, and what was published of them.

    For each place, calls come in this order:

        first                       an episode begins
            decided, outcome        until it ends, or until
            abandon                 it ends without a result
        leave                       the game has gone, or a seat of it

    `decided` may also be called for a place whose episode is over, with what the policy says of its
    final observation. A place occurs once in a call.
    """

    def __init__(
        self,
        config: Config,
        spec: SlotSpec,
        seats: int,
        writer: SlotWriter,
        *,
        first_actor: int,
        incarnation: int,
        process: SlotProcessor,
    ) -> None:
        """Create a recorder of places in which nothing was seen.

        Args:
            config: of the run.
            spec: of its slots, with one environment.
            seats: the most places; there are fewer if their images would take more than a quarter
                of the free memory.
            writer: of the learner's slots.
            first_actor: the actor's id of place 0, which those of the others follow.
            incarnation: of all streams.
            process: prepares the columns of a slot for training.

        Raises:
            UserError: the algorithm records columns of its own on actors.
        """
        assert spec.envs == 1, spec.envs
        if names := list(algorithm(config.algo).recorded):
            raise UserError(
                f"the algorithm records {', '.join(names)} from environments, and games have none; "
                "train it with actors (penstock train)"
            )
        most_nbytes = int(MEMORY_SHARE * available_nbytes())
        self.capacity = max(1, min(seats, most_nbytes // (COPIES * spec.payload_nbytes)))
        """The number of places."""
        self.slots = 0
        """Slots that were published."""
        self.steps = 0
        """Agent steps that were published."""
        self._spec = spec
        self._unroll = spec.unroll
        self._writer = writer
        self._first_actor = first_actor
        self._incarnation = incarnation
        self._process = process
        self._discount = config.algo.discount

        # Pages of an image take memory from their first row on.
        geometry = Geometry(spec, self.capacity, lanes=0)
        self._images = geometry.blocks(Arena.private(geometry.nbytes))
        """Each block of all places, ``[places, *block.shape]``."""
        self._bytes = {
            name: block.reshape(self.capacity, -1).view(np.uint8)
            for name, block in self._images.items()
        }
        """The same as bytes, ``[places, nbytes]``."""
        records = self._images["records"]
        self._alive: Bools = records["alive"][..., 0]
        """Which rows are decisions, ``[places, T]``."""
        self._versions = records["policy_version"][..., 0]
        self._columns = _row_columns(spec, self._images)
        """The columns by row: ``place * T + t``, or ``place * (T + 1) + t`` of observations."""

        # By place.
        self._phase = np.zeros(self.capacity, np.uint8)
        self._t = np.zeros(self.capacity, np.int64)
        self._held = np.zeros(self.capacity, np.uint8)
        """The number of its unrolls that wait."""
        self._sums = np.zeros((self.capacity, 3))
        """Return, length and discounted return of the episode so far."""
        self._started_s = np.zeros(self.capacity)
        self._sequence = np.zeros(self.capacity, np.int64)
        self._produced_steps = np.zeros(self.capacity, np.int64)

        self._waiting: deque[_WaitingUnroll] = deque()
        self._recorded_steps = 0
        self._stamp = Stamp(0, 0)
        """The weights of the last decision."""

    @property
    def nbytes(self) -> int:
        """Bytes that were published."""
        return self.slots * self._spec.payload_nbytes

    @property
    def playing(self) -> int:
        """Agent steps that were recorded and are not published yet."""
        return self._recorded_steps - self.steps

    @property
    def held(self) -> int:
        """The number of places whose unrolls wait."""
        return int(np.count_nonzero(self._held))

    def figures(self) -> dict[str, int]:
        """Returns the counts that the page shows."""
        return {
            "slots": self.slots,
            "steps": self.steps,
            "playing": self.playing,
            "held": self.held,
        }

    # ------------------------------------------------------------------------------ rows

    def first(self, seats: Indices, observations: Array) -> None:
        """Begin episodes, which abandons those in progress.

        Args:
            seats: places ``[B]``.
            observations: packed, ``[B, *shape]``.
        """
        phase = self._phase[seats]
        is_new = phase == NEW
        if is_new.any():
            self._begin_unrolls(seats[is_new])
        self._sums[seats] = 0.0

        # An observation that nobody has acted on is replaced; else row t only resets.
        closes = phase > BEGUN
        if closes.all():
            self._show(seats, observations)
        else:
            kept = seats[~closes]
            self._columns["obs"].put(
                kept * (self._unroll + 1) + self._t[kept], observations[~closes]
            )
            self._show(seats[closes], observations[closes])
        self._phase[seats] = BEGUN

    def decided(self, seats: Indices, batch: RecordedBatch, state: Float32, stamp: Stamp) -> None:
        """Record what the policy decided for places that `are_held` does not name.

        Args:
            seats: places ``[B]``.
            batch: actions, and what the policy records with them.
            state: the recurrent state before the decisions, ``[B, size]``.
            stamp: of the weights.
        """
        t = self._t[seats]
        row = seats * self._unroll + t
        self._columns["action"].put(row, batch.actions)
        for name, values in batch.recorded.items():
            self._columns[name].put(row, values)
        self._columns["policy_version"].put(row, stamp.version)
        if "core_state" in self._columns:
            begins = t == 0
            self._columns["core_state"].put(seats[begins], state[begins])

        self._stamp = stamp
        self._phase[seats] = np.maximum(self._phase[seats], DECIDED)

    def outcome(
        self,
        seats: Indices,
        rewards: npt.NDArray[np.float32],
        terminated: Bools,
        truncated: Bools,
        observations: Array,
    ) -> None:
        """Record what came of the last decisions.

        Args:
            seats: places ``[B]``, all of which have been decided.
            rewards: raw, ``[B]``.
            terminated: whether the episode has ended, ``[B]``.
            truncated: whether it was cut off, ``[B]``.
            observations: what is seen now, packed, ``[B, *shape]``.
        """
        row = seats * self._unroll + self._t[seats]
        sums = self._sums[seats]
        sums[:, 0] += rewards
        sums[:, 1] += 1
        sums[:, 2] *= self._discount
        sums[:, 2] += rewards
        self._sums[seats] = sums
        self._recorded_steps += len(seats)

        columns = self._columns
        columns["alive"].put(row, True)
        columns["reward"].put(row, rewards)
        columns["episode_return"].put(row, sums[:, 0])
        columns["episode_length"].put(row, sums[:, 1])
        if RETURN in columns:
            columns[RETURN].put(row, sums[:, 2])
        ended = terminated | truncated
        if ended.any():
            columns["terminated"].put(row, terminated)
            columns["truncated"].put(row, truncated)
            self._phase[seats] = np.where(ended, OVER, SHOWN)
        else:
            self._phase[seats] = SHOWN
        self._show(seats, observations)

    def abandon(self, seats: Indices) -> None:
        """End episodes without a result: the row of an action that is outstanding is dropped."""
        phase = self._phase[seats]
        phase[phase > BEGUN] = OVER
        self._phase[seats] = phase

    def leave(self, seats: Indices) -> None:
        """Abandon episodes in progress, and publish the rows of these places."""
        self.abandon(seats)
        flushed = seats[self._alive[seats].any(axis=1)]
        for place in flushed.tolist():
            # The rest is like row t, which is not alive.
            t = int(self._t[place])
            for block in self._images.values():
                if block.shape[1] >= self._unroll:
                    block[place, t + 1 :] = block[place, t]
        self._complete(flushed)
        self._phase[flushed] = OVER

    def observations(self, seats: Indices) -> Array:
        """Returns what the places were shown last, packed, ``[B, *shape]``: a copy."""
        observations: Array = self._images["obs"][seats, self._t[seats], 0]
        return observations

    def are_decided(self, seats: Indices) -> Bools:
        """Returns which of these places await the outcome of an action."""
        return np.asarray(self._phase[seats] == DECIDED)

    def are_held(self, seats: Indices) -> Bools:
        """Returns which of these places must not be decided, as their unrolls wait."""
        if not self._waiting:
            return np.zeros(len(seats), np.bool_)
        return np.asarray(self._held[seats] > 0)

    def _show(self, seats: Indices, observations: Array) -> None:
        """Go on to row t + 1, which has these observations; publish the unrolls that are full."""
        t = self._t[seats] + 1
        self._t[seats] = t
        self._columns["obs"].put(seats * (self._unroll + 1) + t, observations)
        is_full = t == self._unroll
        if is_full.any():
            self._complete(seats[is_full])

    def _begin_unrolls(self, places: Indices) -> None:
        """Clear all rows but the first observation."""
        for name, block in self._bytes.items():
            if name != "obs":
                block[places] = 0
        # Rows that are not decided have the version of the last decision before them.
        self._versions[places] = self._stamp.version
        self._started_s[places] = time.monotonic()
        self._t[places] = 0

    # --------------------------------------------------------------------------- unrolls

    def publish_waiting(self) -> bool:
        """Publish unrolls that wait, as far as slots are lent.

        Returns: whether a place is held no longer.
        """
        was_freed = False
        while self._waiting and (slot := self._writer.acquire(0)) is not None:
            unroll = self._waiting.popleft()
            for target, source in zip(slot.payload, unroll.payload, strict=True):
                target[:] = source
            self._publish(slot, unroll.header)
            self._held[unroll.place] -= 1
            was_freed |= not self._held[unroll.place]
        return was_freed

    def flush_all(self) -> None:
        """Leave all places, and publish what slots are lent for."""
        self.leave(np.flatnonzero(self._phase))
        self.publish_waiting()

    def _complete(self, places: Indices) -> None:
        """Publish unrolls, or let them wait, and begin the next ones of these places."""
        headers = self._headers(places)
        for place, header in zip(places.tolist(), headers, strict=True):
            payload = [block[place] for block in self._bytes.values()]
            slot = None if self._waiting else self._writer.acquire(0)
            if slot is None:
                copies = [block.copy() for block in payload]
                self._waiting.append(_WaitingUnroll(place, header, copies))
                self._held[place] += 1
                continue
            for target, source in zip(slot.payload, payload, strict=True):
                target[:] = source
            self._publish(slot, header)

        obs = self._images["obs"]
        obs[places, 0] = obs[places, self._unroll]
        self._begin_unrolls(places)

    def _headers(self, places: Indices) -> npt.NDArray[np.void]:
        """Returns the headers of the unrolls of these places, and counts them in their streams."""
        alive = self._alive[places]
        steps = np.count_nonzero(alive, axis=1)
        versions = np.where(alive, self._versions[places], np.iinfo(np.uint32).max).min(axis=1)
        self._produced_steps[places] += steps

        headers = np.zeros(len(places), HEADER)
        headers["actor"] = self._first_actor + places
        headers["incarnation"] = self._incarnation
        headers["generation"] = self._stamp.generation
        headers["version"] = np.minimum(versions, self._stamp.version)
        headers["sequence"] = self._sequence[places]
        headers["steps"] = steps
        headers["produced_steps"] = self._produced_steps[places]
        headers["started_s"] = self._started_s[places]
        self._sequence[places] += 1
        return headers

    def _publish(self, slot: Slot, header: npt.NDArray[np.void]) -> None:
        """Publish a slot whose payload is filled."""
        self._process(slot.columns)
        slot.header[...] = header
        slot.header["published_s"] = time.monotonic()
        self._writer.publish(slot)
        self.slots += 1
        self.steps += int(header["steps"])


class _RowColumn:
    """A column of all places, row by row."""

    def __init__(self, column: Array, axes: int) -> None:
        """Create a view of ``column``; its first ``axes`` axes count rows."""
        self._dtype = column.dtype
        self._size = math.prod(column.shape[axes:])
        rows = column.reshape(math.prod(column.shape[:axes]), self._size)
        assert np.shares_memory(rows, column), "the rows of a column lie at equal distances"
        # Rows of several values are written as one item each, in a tenth of the time.
        if self._size == 1:
            self._rows = rows[:, 0]
        else:
            self._rows = rows.view(f"V{self._size * rows.itemsize}")[:, 0]

    def put(self, rows: Indices, values: Any) -> None:
        """Write values ``[B, *shape]`` into these rows; of a column without shape one for all."""
        if self._size > 1:
            items = np.ascontiguousarray(values, self._dtype).reshape(len(rows), self._size)
            values = items.view(self._rows.dtype)[:, 0]
        elif np.ndim(values):
            values = np.reshape(values, len(rows))
        self._rows[rows] = values


def _row_columns(spec: SlotSpec, images: Mapping[str, Array]) -> dict[str, _RowColumn]:
    """Returns the columns of all places by name, without a copy.

    ``images`` has each block of the places, ``[places, *block.shape]``.
    """
    arrays: dict[str, Array] = {}
    for name, block in images.items():
        fields = block.dtype.names
        arrays |= {name: block} if fields is None else {field: block[field] for field in fields}
    return {
        column.name: _RowColumn(arrays[column.name], axes=1 + len(spec.rows_of(column)))
        for column in spec.columns
    }
