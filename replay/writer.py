"""The producer's side of a replay buffer or a trajectory queue: slots, filled in place.

A *slot* is memory for a fixed number of steps. The owner of the memory, which is the consumer,
lends slots to each writer through the writer's *lane*; a published slot goes back to the owner.

    w = Writer.attach(address)
    with w.slot(timeout_s=1.0) as s:
        s.columns["reward"][...] = rewards
        decompress_raw_into(frame, s.raw("obs"))

Leaving the block publishes the slot; an exception, or the death of the process, does not.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.core.specs import SlotSpec
from penstock.replay.errors import ReplayError
from penstock.replay.layout import Layout
from penstock.replay.steps import StepArguments, StepWriter
from penstock.replay.table import NONE, Array, Table, frame_rows, place_columns, preset
from penstock.transport.shm.attach import ATTACH_TIMEOUT_S, AttachClient
from penstock.transport.shm.store import Slot, SlotWriter

# Longest wait for room in a buffer of another process, where the caller gives none.
TIMEOUT_S = 60.0

# Time between two checks that the owner lives, while no slot is lent.
CHECK_S = 0.5


class StepAdder(ABC):
    """A stream that steps can be added to: in this process, in another, on another host."""

    def add(
        self,
        *,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        next_obs: Any,
        info: Mapping[str, Any] | None = None,
        priority: Any = None,
        timeout_s: float | None = None,
        **extra: Any,
    ) -> None:
        """Add one step of every environment; all other arguments are those of `Replay.add`.

        Args:
            timeout_s: longest wait for room, in seconds; None: the timeout of the replay, or 60 in
                another process.

        Raises:
            ReplayError: a value does not fit; in the replay's process also: no room in time.
            TimeoutError: no room in time, in another process.
            ConnectionError: the owner has ended.
        """
        self._add(
            (obs, action, reward, terminated, truncated, next_obs, info, priority, extra), timeout_s
        )

    @abstractmethod
    def _add(self, step: StepArguments, timeout_s: float | None) -> None:
        """Store a step, and wait for room for up to ``timeout_s`` seconds.

        None is the default of the implementation.
        """


class OpenSlot:
    """A slot that is being filled: ``columns`` by name, ``header`` one HEADER record."""

    def __init__(self, spec: SlotSpec, slot: Slot) -> None:
        self.columns: dict[str, npt.NDArray[Any]] = slot.columns
        self.header = slot.header
        self._blocks = {b.name: i for i, b in enumerate(spec.blocks)}
        self._payload = slot.payload

    def raw(self, name: str) -> memoryview:
        """The writable bytes of a column with its own block, or of "records".

        Raises:
            ReplayError: the column has no block of its own, or the slot has no such column.
        """
        if name not in self._blocks:
            packed = "is packed in records" if name in self.columns else "is none of this slot's"
            raise ReplayError(
                f"column {name} {packed}; raw bytes exist for {list(self._blocks)}, and every "
                "column in .columns"
            )
        return self._payload[self._blocks[name]].data


class Lane:
    """One writer's lane of a store; numbers its slots in their headers.

    Args:
        writer: lends and publishes slots.
        stream: the number by which the owner tells this writer's slots from those of others.
        owner_gone: whether the process that owns the store has ended.
    """

    def __init__(self, writer: SlotWriter, stream: int, owner_gone: Callable[[], bool]) -> None:
        self.spec = writer.spec
        self.blocks = writer.blocks
        self._writer = writer
        self._stream = stream
        self._owner_gone = owner_gone

        self._sequence = 0
        """Number of the next slot."""

        self._produced = 0
        """Agent steps of all slots so far."""

        # A row counts as a step if it is marked in column `alive`; without one, all rows do.
        self._all_steps = self.spec.unroll * self.spec.envs
        self._has_alive = any(column.name == "alive" for column in self.spec.columns)

    def acquire(self, timeout_s: float, version: int = 0) -> Slot:
        """Wait for a slot to fill.

        Args:
            timeout_s: longest wait, in seconds.
            version: of the policy that plays the slot.

        Raises:
            TimeoutError: no slot was lent in time.
            ConnectionError: the owner has ended.
        """
        slot = self._wait(timeout_s)

        header = slot.header
        header["started_s"] = time.monotonic()
        header["version"] = version
        header["rows"] = 0
        preset(slot.columns)
        return slot

    def publish(self, slot: Slot) -> None:
        """Number and publish a complete slot; it must not be written to afterwards."""
        steps = np.count_nonzero(slot.columns["alive"]) if self._has_alive else self._all_steps
        self._produced += int(steps)

        header = slot.header
        header["actor"] = self._stream
        header["incarnation"] = 0
        header["sequence"] = self._sequence
        header["steps"] = steps
        header["produced_steps"] = self._produced
        header["published_s"] = time.monotonic()
        self._sequence += 1
        self._writer.publish(slot)

    @contextmanager
    def slot(self, timeout_s: float, version: int) -> Iterator[OpenSlot]:
        """Lend a slot and publish it when the block is left; an exception gives it back.

        Raises:
            TimeoutError: no slot was lent in time.
            ConnectionError: the owner has ended.
        """
        slot = self.acquire(timeout_s, version)
        try:
            yield OpenSlot(self.spec, slot)
        except BaseException:
            self._writer.reuse_later(slot)
            raise
        self.publish(slot)

    def _wait(self, timeout_s: float) -> Slot:
        """Wait until a slot is lent. Raises TimeoutError, or ConnectionError without an owner."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            remaining_s = deadline_s - time.monotonic()
            slot = self._writer.acquire(max(0.0, min(CHECK_S, remaining_s)))
            if slot is not None:
                return slot

            if self._owner_gone():
                raise ConnectionError("the buffer's process has ended; attach to its successor")
            if remaining_s <= 0:
                raise TimeoutError(
                    f"no slot was lent within {timeout_s:g} s: the buffer holds writers back, by "
                    "its rate limiter or because it is full; its stats() tell which"
                )


class LaneTable:
    """A table as a writer in another process sees it: the columns, and a lane of the store.

    It takes the place of the owner's `Table` under the same `StepWriter`. Rows are committed into
    the slot itself, which carries everything that the owner needs: `alive` marks the rows that
    count, the header's `rows` is the number of rows written. ``timeout_s`` bounds the wait for a
    slot, and ``version`` is that of the acting policy; set both before each step.
    """

    def __init__(self, lane: Lane) -> None:
        spec = lane.spec
        self.spec = spec
        self.timeout_s = 0.0
        self.version = 0
        self.rows_per_slot = spec.unroll * spec.envs
        self.records, self.columns, self.frames, self.sides = place_columns(spec, lane.blocks)
        self.frame_rows = frame_rows(spec)

        names = self.records.dtype.names or ()
        if "alive" not in names:
            raise ReplayError(
                "this buffer takes whole slots only: slot(); its rows have no column alive"
            )
        self._lane = lane
        self._alive = self.records["alive"]
        self._priority = self.records["priority"] if "priority" in names else None

        # How often each slot was begun here, and the rows that are written in it.
        slots = len(lane.blocks["records"])
        self.generation: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self.length: npt.NDArray[np.int32] = np.zeros(slots, np.int32)

    def open_lane(self) -> tuple[int, LaneTable]:
        """Return this lane, which is its own writer."""
        return 0, self

    def close_lane(self, lane: int, slot: int) -> None:
        """Does nothing: a slot that has no row yet is not published."""

    def acquire(self, writer: LaneTable) -> Slot:
        """Wait for a lent slot. Raises TimeoutError, ConnectionError."""
        return self._lane.acquire(self.timeout_s, self.version)

    def open(self, slot: int, follows: int = NONE) -> None:
        """Begin a slot, whose columns `Lane.acquire` has preset."""
        self.generation[slot] += 1
        self.length[slot] = 0

    def commit(
        self,
        slot: int,
        t: int,
        counts: npt.NDArray[np.bool_] | None = None,
        priorities: Array | None = None,
    ) -> None:
        """Mark row ``t`` of a slot as written.

        Args:
            slot: that is being filled.
            t: the step within it.
            counts: environments [E] whose row can be sampled; None: all.
            priorities: of the rows [E]; None: the owner's sampler chooses them.

        Raises:
            ReplayError: the owner's sampler has no priorities.
        """
        start = slot * self.rows_per_slot + t * self.spec.envs
        if counts is not None:
            self._alive[start : start + self.spec.envs] = counts
        if priorities is not None:
            if self._priority is None:
                raise ReplayError("this buffer samples without priorities; leave priority out")
            self._priority[start : start + self.spec.envs] = priorities

        # The row is complete: it is published with the slot, whatever comes next.
        self.length[slot] = t + 1

    def publish(self, slot: Slot) -> None:
        """Publish a slot with the rows written so far."""
        rows = int(self.length[slot.index])
        slot.columns["alive"][rows:] = 0
        slot.header["rows"] = rows
        slot.header["published_s"] = time.monotonic()
        self._lane.publish(slot)

    def commit_all(self, slot: int, t: int, rows: slice) -> None:
        """Mark row ``t`` as written, with all environments."""
        self.commit(slot, t)

    def count_refused(self, count: int, reason: str) -> None:
        """Does nothing: the owner counts refused rows."""

    def collect(self) -> None:
        """Does nothing: the owner collects."""


class Steps:
    """Writes steps over a lane, with the columns that the owner described.

    Args:
        lane: of this writer.
        about: what the owner tells of its buffer: ``frame_stack`` and ``autoreset``.

    Raises:
        ReplayError: the owner's buffer takes whole slots only.
    """

    def __init__(self, lane: Lane, about: Mapping[str, Any]) -> None:
        if "autoreset" not in about:
            raise ReplayError("this address takes whole slots only: use slot() instead of add()")
        self.table = LaneTable(lane)
        layout = Layout(lane.spec, about["frame_stack"])
        self.writer = StepWriter(cast(Table, self.table), layout, about["autoreset"])


class Writer(StepAdder):
    """Writes to a buffer that another process of this host owns; one thread at a time.

    The buffer sees the steps of a slot together, when the slot is full or at `flush`. ``spec`` is
    the layout of a slot. Set ``version`` to that of the acting policy where the buffer limits the
    policy lag: `add` stamps it on the slots that it begins. Ends with `close` or a ``with`` block.
    """

    def __init__(self, entry: AttachClient) -> None:
        self.version = 0
        with ExitStack() as opening:
            opening.callback(entry.leave)
            self.spec = SlotSpec.from_dict(entry.reply["spec"])
            attaching = SlotWriter.attached(self.spec, entry.reply, entry.fds)
            writer = opening.enter_context(attaching)
            self._lane = Lane(writer, entry.reply["stream"], lambda: entry.owner_gone)
            self._about = entry.reply

            self._steps: Steps | None = None
            """Writes the steps of `add`; made at the first of them."""

            self._opened = opening.pop_all()

    @classmethod
    def attach(cls, address: str, timeout_s: float = ATTACH_TIMEOUT_S) -> Writer:
        """Attach to a buffer.

        Args:
            address: as returned by ``serve()`` of the replay or queue.
            timeout_s: longest wait for an answer, in seconds.

        Raises:
            ReplayError: no buffer listens at ``address``, something else does, or it did not answer
                in time.
        """
        # Each error becomes a sentence about the address.
        try:
            return cls(AttachClient(_path(address), {"lane": "writer"}, timeout_s))
        except TimeoutError as error:
            raise ReplayError(str(error)) from error
        except OSError as error:
            raise ReplayError(
                f"no buffer answers at {address} ({error.strerror}); its process must run on this "
                "host, under this user, and have called serve()"
            ) from error
        except (EOFError, LookupError, TypeError, ValueError) as error:
            raise ReplayError(f"what listens at {address} is no replay buffer") from error
        except UserError as error:
            raise ReplayError(f"{address} refused: {error}") from error

    @contextmanager
    def slot(self, timeout_s: float = 1.0, version: int = 0) -> Iterator[OpenSlot]:
        """Lend a slot to fill in place; leaving the block publishes it, an exception does not.

        Args:
            timeout_s: longest wait for a slot, in seconds.
            version: of the policy that played the slot.

        Raises:
            TimeoutError: no slot was lent in time.
            ConnectionError: the owner has ended.
        """
        with self._lane.slot(timeout_s, version) as slot:
            yield slot

    def _add(self, step: StepArguments, timeout_s: float | None) -> None:
        if self._steps is None:
            self._steps = Steps(self._lane, self._about)
        self._steps.table.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self._steps.table.version = self.version
        self._steps.writer.add(*step)

    def flush(self) -> None:
        """Publish the steps added so far; the rest of the slot stays empty."""
        if self._steps is not None:
            self._steps.writer.flush()

    def close(self) -> None:
        """Detach. Added steps and published slots stay; slots must not be used any more."""
        self.flush()
        self._opened.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _path(address: str) -> Path:
    return Path(address.removeprefix("unix://"))
