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
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.algos.batch_policy import RecordedBatch
from penstock.algos.registry import algorithm
from penstock.algos.slots import CORE_STATE, RETURN, STATE
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.interfaces import SlotProcessor
from penstock.core.params import Array, Float32, Stamp
from penstock.core.specs import HEADER, Bytes, Column, SlotSpec
from penstock.serving.seats import Bools, Indices
from penstock.transport.shm.arena import Arena, available_nbytes
from penstock.transport.shm.store import Geometry, Slot, SlotWriter

# The share of the free memory that the images and the unrolls that wait may take.
MEMORY_SHARE = 0.25
# A place has an image, and at most two unrolls that wait.
COPIES = 3

# What a place does. Numbers, and not an enum, for arithmetic with many places.
NEW = 0  # nothing was seen since the last unroll was published
BEGUN = 1  # obs[t] begins an episode, and is not decided
SHOWN = 2  # obs[t] follows an action, and is not decided
DECIDED = 3  # row t has an action, whose outcome is awaited
OVER = 4  # the episode is over: row t only resets


class _WaitingUnroll(NamedTuple):
    """An unroll that waits for a slot."""

    place: int
    header: npt.NDArray[np.void]
    """``[1]``"""
    payload: list[Bytes]
    """The bytes of each block of a slot."""


class GameRecorder:
    """The unrolls of all places, and what was published of them.

    For each place, calls come in this order:

        first, show                     an episode begins
            decided, outcome, show      until it ends, or until
            abandon                     it ends without a result
        looked                          may follow the last `show` of an episode
        leave                           the game has gone, or a seat of it

    A place occurs once in a call.
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
        self._bytes = [(name, _as_bytes(block)) for name, block in self._images.items()]
        """The same as bytes, ``[places, nbytes]``."""
        self._slot_bytes = [_as_bytes(block) for block in writer.blocks.values()]
        """The blocks of all slots of the learner, in the same order."""
        records = self._images["records"]
        self._alive: Bools = records["alive"][..., 0]
        """Which rows are decisions, ``[places, T]``."""
        self._versions = records["policy_version"][..., 0]
        self._rows = _row_columns(spec, self._images)
        """Each column row by row, as `_RowColumn`."""
        self._obs = self._rows["obs"]

        # By place.
        self._phase = np.zeros(self.capacity, np.uint8)
        self._t = np.zeros(self.capacity, np.int64)
        self._held = np.zeros(self.capacity, np.uint8)
        """The number of its unrolls that wait."""
        # Of the episode so far.
        self._return = np.zeros(self.capacity)
        self._length = np.zeros(self.capacity, np.int32)
        self._discounted = np.zeros(self.capacity)
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
    def is_holding(self) -> bool:
        """Whether some place is held."""
        return bool(self._waiting)

    @property
    def held(self) -> int:
        """The number of places whose unrolls wait."""
        return len({unroll.place for unroll in self._waiting})

    def figures(self) -> dict[str, int]:
        """Returns the counts that the page shows."""
        return {
            "slots": self.slots,
            "steps": self.steps,
            "playing": self.playing,
            "held": self.held,
        }

    # ------------------------------------------------------------------------------ rows

    def first(self, seats: Indices) -> None:
        """Begin episodes in these places ``[B]``, which abandons those in progress."""
        self._return[seats] = 0.0
        self._length[seats] = 0
        self._discounted[seats] = 0.0
        phase = self._phase[seats]
        self._phase[seats] = BEGUN
        if phase.min(initial=OVER) > BEGUN:  # row t only resets, as in most places
            return

        # `show` replaces an observation that nobody has acted on.
        self._begin_unrolls(seats[phase == NEW])
        self._t[seats[phase <= BEGUN]] -= 1

    def decided(self, seats: Indices, batch: RecordedBatch, state: Float32, stamp: Stamp) -> None:
        """Record what the policy decided for places that `are_held` does not name.

        Args:
            seats: places ``[B]``.
            batch: actions, and what the policy records with them.
            state: the recurrent state before the decisions, ``[B, size]``.
            stamp: of the weights.
        """
        self.looked(seats, batch, state, stamp)
        self._phase[seats] = DECIDED

    def looked(self, seats: Indices, batch: RecordedBatch, state: Float32, stamp: Stamp) -> None:
        """Record what the policy says of the last observations of episodes that are over.

        The arguments are those of `decided`.
        """
        t = self._t[seats]
        row = seats * self._unroll + t
        columns = self._rows
        columns["action"].put(row, batch.actions)
        for name, values in batch.recorded.items():
            columns[name].put(row, values)
        columns["policy_version"].items[row] = stamp.version
        if CORE_STATE in columns:
            begins = t == 0
            columns[CORE_STATE].put(seats[begins], state[begins])
        if STATE in columns:
            columns[STATE].put(row, state)
        self._stamp = stamp

    def outcome(
        self,
        seats: Indices,
        rewards: npt.NDArray[np.float32],
        terminated: Bools | None,
        truncated: Bools | None,
        recorded: Mapping[str, Array] = MappingProxyType({}),
    ) -> None:
        """Record what came of the last decisions.

        Args:
            seats: places ``[B]``, all of which have been decided.
            rewards: raw, ``[B]``.
            terminated: whether the episode has ended, ``[B]``; None if none has.
            truncated: whether it was cut off, likewise.
            recorded: further columns of these rows, ``[B]``.
        """
        row = seats * self._unroll + self._t[seats]
        columns = self._rows
        columns["alive"].items[row] = True
        columns["reward"].items[row] = rewards
        self._recorded_steps += len(seats)

        returns = self._return[seats] + rewards
        self._return[seats] = returns
        columns["episode_return"].items[row] = returns.astype(np.float32)
        lengths = self._length[seats] + 1
        self._length[seats] = lengths
        columns["episode_length"].items[row] = lengths
        if RETURN in columns:
            discounted = self._discounted[seats] * self._discount + rewards
            self._discounted[seats] = discounted
            columns[RETURN].items[row] = discounted.astype(np.float32)
        for name, values in recorded.items():
            columns[name].items[row] = values
        self._phase[seats] = SHOWN
        if terminated is not None and truncated is not None:
            columns["terminated"].items[row] = terminated
            columns["truncated"].items[row] = truncated
            self._phase[seats[terminated | truncated]] = OVER

    def show(self, seats: Indices, observations: Array) -> None:
        """Go on to the next rows, and complete the unrolls that are full.

        Args:
            seats: places ``[B]``, which have begun an episode or have an outcome.
            observations: what is seen now, packed, ``[B, *shape]``.
        """
        t = self._t[seats] + 1
        self._t[seats] = t
        self._obs.put(seats * self._obs.rows + t, observations)
        is_full = t == self._unroll
        if is_full.any():
            self._complete(seats[is_full])

    def abandon(self, seats: Indices) -> None:
        """End episodes without a result: the row of an action that is outstanding is dropped."""
        phase = self._phase[seats]
        phase[phase > BEGUN] = OVER
        self._phase[seats] = phase

    def leave(self, seats: Indices) -> None:
        """Abandon episodes in progress, and publish the rows of these places.

        The next game of a place that had rows begins a new unroll, as old as its first row.
        """
        self.abandon(seats)
        flushed = seats[self._alive[seats].any(axis=1)]
        for place in flushed.tolist():
            # The rest is like row t, which is not alive.
            t = int(self._t[place])
            for block in self._images.values():
                if block.shape[1] >= self._unroll:
                    block[place, t + 1 :] = block[place, t]
        self._complete(flushed)
        self._phase[flushed] = NEW

    def observations(self, seats: Indices) -> Array:
        """Returns what the places were shown last, packed, ``[B, *shape]``: a copy."""
        observations: Array = self._images["obs"][seats, self._t[seats], 0]
        return observations

    def are_decided(self, seats: Indices) -> Bools:
        """Returns which of these places await the outcome of an action."""
        return np.asarray(self._phase[seats] == DECIDED)

    def are_held(self, seats: Indices) -> Bools:
        """Returns which of these places must not be decided, as their unrolls wait."""
        return np.asarray(self._held[seats] > 0)

    def _begin_unrolls(self, places: Indices) -> None:
        """Clear all rows but the first observation."""
        for name, block in self._bytes:
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
        for slot in self._lent_slots(len(self._waiting)):
            unroll = self._waiting.popleft()
            for target, source in zip(slot.payload, unroll.payload, strict=True):
                target[:] = source
            self._publish([slot], unroll.header)
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
        slots = self._lent_slots(0 if self._waiting else len(places))
        published = len(slots)
        if slots:
            filled = np.array([slot.index for slot in slots])
            for (_, image), target in zip(self._bytes, self._slot_bytes, strict=True):
                target[filled] = image[places[:published]]
            self._publish(slots, headers[:published])

        for i, place in enumerate(places[published:].tolist(), start=published):
            payload = [image[place].copy() for _, image in self._bytes]
            self._waiting.append(_WaitingUnroll(place, headers[i : i + 1], payload))
            self._held[place] += 1

        first_row = places * self._obs.rows
        self._obs.items[first_row] = self._obs.items[first_row + self._unroll]
        self._begin_unrolls(places)

    def _lent_slots(self, most: int) -> list[Slot]:
        """Returns slots that are lent, at most so many."""
        slots: list[Slot] = []
        while len(slots) < most and (slot := self._writer.acquire(0)) is not None:
            slots.append(slot)
        return slots

    def _headers(self, places: Indices) -> npt.NDArray[np.void]:
        """Returns the headers of the unrolls of these places, and counts them in their streams."""
        alive = self._alive[places]
        steps = alive.sum(axis=1)
        # Weights only become newer, so the oldest are those of the first decision.
        oldest = self._versions[places, alive.argmax(axis=1)]
        self._produced_steps[places] += steps

        headers = np.zeros(len(places), HEADER)
        headers["actor"] = self._first_actor + places
        headers["incarnation"] = self._incarnation
        headers["generation"] = self._stamp.generation
        headers["version"] = oldest
        headers["sequence"] = self._sequence[places]
        headers["steps"] = steps
        headers["produced_steps"] = self._produced_steps[places]
        headers["started_s"] = self._started_s[places]
        self._sequence[places] += 1
        return headers

    def _publish(self, slots: Sequence[Slot], headers: npt.NDArray[np.void]) -> None:
        """Publish slots whose payloads are filled."""
        for slot in slots:
            self._process(slot.columns)
        headers["published_s"] = time.monotonic()
        for slot, header in zip(slots, headers, strict=True):
            slot.header[...] = header
        self._writer.publish(*slots)
        self.slots += len(slots)
        self.steps += int(headers["steps"].sum())


def _as_bytes(block: Array) -> npt.NDArray[np.uint8]:
    """Returns a view of contiguous arrays ``[count, ...]`` as bytes, ``[count, nbytes]``."""
    return block.reshape(len(block), -1).view(np.uint8)


class _RowColumn:
    """A column of all places, row by row: row t of a place is item ``place * rows + t``."""

    def __init__(self, column: Column, array: Array, rows: int) -> None:
        """Create a view.

        Args:
            column: its name, dtype and shape.
            array: its values, ``[places, ..., *column.shape]``.
            rows: of each place.
        """
        self.rows = rows
        self._dtype = np.dtype(column.dtype)
        size = math.prod(column.shape)
        items = array.reshape(len(array) * rows, size)
        assert np.shares_memory(items, array), f"the rows of {column.name} lie at equal distances"
        # Rows of several values are written as one item each, in a tenth of the time.
        self._itemtype = np.dtype(f"V{column.cell_nbytes}") if column.shape else self._dtype
        self.items: Array = items.view(self._itemtype)[:, 0]

    def put(self, items: Indices, values: Array) -> None:
        """Write values ``[B, *shape]`` to items ``[B]``."""
        if self._itemtype is not self._dtype:
            values = np.ascontiguousarray(values, self._dtype)
            size = self._itemtype.itemsize // self._dtype.itemsize
            values = values.reshape(len(items), size).view(self._itemtype)[:, 0]
        self.items[items] = values


def _row_columns(spec: SlotSpec, images: Mapping[str, npt.NDArray[Any]]) -> dict[str, _RowColumn]:
    """Returns the columns of all places by name, without a copy.

    ``images`` has each block of the places, ``[places, *block.shape]``.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, block in images.items():
        fields = block.dtype.names
        arrays |= {name: block} if fields is None else {field: block[field] for field in fields}
    return {
        column.name: _RowColumn(column, arrays[column.name], rows=math.prod(spec.rows_of(column)))
        for column in spec.columns
    }
