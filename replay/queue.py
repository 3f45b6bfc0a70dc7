"""First-in, first-out queues of slots: each slot is consumed once, the oldest first.

`SlotQueue` reads a store that its caller owns; a learner uses it. `TrajectoryQueue` owns its memory
and serves any training loop. The reader drops slots that are too old and, with
``overflow="drop_stale"``, slots that block fresher ones. It counts them by reason.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.core.specs import Column, SlotSpec
from penstock.replay.accounting import Accounting
from penstock.replay.errors import ReplayError
from penstock.replay.sharing import StoreServer
from penstock.replay.writer import Lane, OpenSlot
from penstock.transport.shm.store import Slot, SlotStore

# Threads and processes that may write to a `TrajectoryQueue`.
LANES = 256

# Steps of a slot, where the caller gives none.
DEFAULT_UNROLL = 20


class WaitingSlot(NamedTuple):
    """A slot that arrived, with those values of its header that are read often."""

    slot: Slot
    version: int
    steps: int


class SlotQueue:
    """A queue of filled slots; used by the one thread that owns ``store``."""

    def __init__(
        self,
        store: SlotStore,
        accounting: Accounting,
        *,
        max_policy_lag: int,
        overflow: Literal["block", "drop_stale"] = "block",
        deep: bool = False,
    ) -> None:
        """Make the queue.

        Args:
            store: the store whose filled slots are read.
            accounting: counts arrived and dropped steps.
            max_policy_lag: slots more policy versions behind are dropped.
            overflow: "block": writers wait when the store is full; "drop_stale": old slots are
                dropped for fresher ones.
            deep: waiting slots do not count against the number that their writer may hold.
        """
        self._store = store
        self._accounting = accounting
        self._max_policy_lag = max_policy_lag
        self._overflow = overflow
        self._deep = deep

        self._waiting: list[WaitingSlot] = []
        """Slots that arrived and were neither taken nor dropped, the oldest first."""

    def take(self, count: int, version: int) -> list[Slot]:
        """Take the ``count`` oldest slots that a learner at ``version`` may train on.

        Returns:
            The slots, or an empty list if there are fewer.
        """
        self.collect()
        self._drop_old(version)

        # Where writers lack slots, only the newest ``count`` are kept.
        if self._overflow == "drop_stale" and (
            self._store.has_starved_writer or self._store.lacks_slots
        ):
            while len(self._waiting) > count:
                self._drop("stale", self._waiting.pop(0))

        # With fewer slots, writers may all wait for this reader: one more is lent then.
        if len(self._waiting) < count:
            self._store.lend_one_more()
            return []

        taken = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return [waiting.slot for waiting in taken]

    def in_flight_steps(self) -> int:
        """Agent steps that arrived and were neither taken nor dropped."""
        self.collect()
        return sum(waiting.steps for waiting in self._waiting)

    def waiting(self) -> list[Slot]:
        """The slots that arrived and were neither taken nor dropped, the oldest first."""
        self.collect()
        return [waiting.slot for waiting in self._waiting]

    def release(self, slots: list[Slot]) -> None:
        """Free slots that were taken, once they are copied."""
        self._store.release(*(slot.index for slot in slots))

    def collect(self) -> None:
        """Take in slots that were filled since; the accounting counts them here."""
        self._store.collect()
        ready = self._store.ready
        while ready:
            slot = self._store.slots[ready.popleft()]
            if self._deep:
                self._store.hold_slot(slot.index)
            header = slot.header
            self._accounting.arrived(header)
            self._waiting.append(WaitingSlot(slot, int(header["version"]), int(header["steps"])))

        # Slots that are kept do not count as their writers', which may have others now.
        if self._deep:
            self._store.lend()

    def _drop_old(self, version: int) -> None:
        """Drop slots that are too old for a learner at ``version``.

        They are searched behind fresh slots too: a suspended actor's slots arrive after those of
        the others.
        """
        oldest_version = version - self._max_policy_lag
        old = [waiting for waiting in self._waiting if waiting.version < oldest_version]
        if old:
            self._waiting = [slot for slot in self._waiting if slot.version >= oldest_version]
        for waiting in old:
            self._drop("lag", waiting)

    def _drop(self, reason: str, waiting: WaitingSlot) -> None:
        """Count the steps of a slot by the reason for which it is dropped, and free it."""
        self._accounting.dropped[reason] += waiting.steps
        self._store.release(waiting.slot.index)


class TrajectoryQueue:
    """A queue of trajectories: actors fill slots of ``unroll`` steps, a learner takes each once.

    For on-policy learners, which train on each step once, while it is fresh. The queue has its own
    memory; any thread may use it, and other processes of this host write through `Writer.attach`
    and `serve`. Slots are filled in place and come out oldest first:

        queue = TrajectoryQueue(columns, unroll=20, envs=8, slots=64, max_policy_lag=4)
        with queue.slot(version=version) as slot:  # in an actor
            slot.columns["reward"][...] = rewards  # [20, 8]
        slots = queue.take(4, version=version, timeout_s=1.0)  # in the learner
        train([slot.columns for slot in slots])
        queue.release(slots)

    Close it with `close` or a ``with`` block.

    Args:
        spec: a slot's columns, `penstock.core.specs.Column`: arrays ``[unroll, envs, *shape]``, or
            ``[unroll + 1, envs, *shape]`` for rows "unroll+1". Or a whole `SlotSpec`.
        unroll: steps per slot, 20 by default; replaces that of a SlotSpec.
        envs: environments per slot, 1 by default; replaces that of a SlotSpec.
        slots: number of slots, for writers and waiting slots together. With more, writers wait less
            and the learner trains on older steps.
        max_policy_lag: slots that were played by a policy more versions behind that of the learner
            are dropped, and counted. A writer gives its version with each slot.
        overflow: when writers wait because the queue is full, "block" lets them wait;
            "drop_stale" drops the oldest slots for fresher ones.

    Raises:
        ReplayError: a number is out of range.
        UserError: there is not enough memory.
    """

    def __init__(
        self,
        spec: SlotSpec | Sequence[Column],
        *,
        unroll: int | None = None,
        envs: int | None = None,
        slots: int = 64,
        max_policy_lag: int = 8,
        overflow: Literal["block", "drop_stale"] = "block",
    ) -> None:
        _check_numbers(slots, max_policy_lag, overflow)
        self.spec = _slot_spec(spec, unroll, envs)
        self._store = SlotStore(self.spec, slots, LANES)
        self._accounting = Accounting()
        self._queue = SlotQueue(
            self._store,
            self._accounting,
            max_policy_lag=max_policy_lag,
            overflow=overflow,
            deep=True,
        )

        self._lock = threading.Lock()
        """Guards the queue, the lanes and the set of taken slots."""

        self._filled = threading.Condition(self._lock)
        """Is notified when slots may have been published."""

        self._this_thread = threading.local()
        """``lane``: the lane of the calling thread."""

        self._lanes: dict[threading.Thread, int] = {}
        """The store's lane of each thread that writes."""

        self._taken: set[int] = set()
        """Indices of slots that `take` returned and that are not released."""

        self._streams = 0
        """Threads that have written so far; each is a stream of its own."""

        # Other processes write through a server, which is started by the first call of `serve`.
        self._server: StoreServer | None = None
        self._failures: list[BaseException] = []
        self._end: weakref.finalize[..., TrajectoryQueue] = weakref.finalize(
            self, self._store.close
        )

    @contextmanager
    def slot(self, timeout_s: float = 1.0, version: int = 0) -> Iterator[OpenSlot]:
        """Lend a slot to fill in place; leaving the block publishes it, an exception does not.

        Args:
            timeout_s: longest wait for a free slot, in seconds.
            version: of the policy that plays it.

        Raises:
            TimeoutError: no slot was free in time.
        """
        self._check()
        with self._own_lane().slot(timeout_s, version) as slot:
            yield slot

        # Without an exception, the slot is published now.
        self._collect()

    def take(self, count: int, version: int = 0, timeout_s: float = 0.0) -> list[Slot]:
        """Take the ``count`` oldest slots that a learner at ``version`` may train on.

        Args:
            count: slots.
            version: of the learner's policy; older slots than ``max_policy_lag`` allows are
                dropped.
            timeout_s: longest wait for so many slots, in seconds.

        Returns:
            The slots, with ``columns`` by name; an empty list when there are fewer in time. They
            are overwritten after `release`.

        Raises:
            ReplayError: the queue has fewer slots than ``count``.
        """
        if not 1 <= count <= len(self._store.slots):
            raise ReplayError(
                f"take({count}) can never be served by {len(self._store.slots)} slots; take from 1 "
                "to that many"
            )
        self._check()

        deadline_s = time.monotonic() + timeout_s
        with self._filled:
            self._close_dead()
            while not (slots := self._queue.take(count, version)):
                remaining_s = deadline_s - time.monotonic()
                if remaining_s <= 0:
                    break
                self._filled.wait(remaining_s)

            self._accounting.trained += sum(int(slot.header["steps"]) for slot in slots)
            self._taken.update(slot.index for slot in slots)
            return slots

    def release(self, slots: list[Slot]) -> None:
        """Free taken slots, once they are used or copied: they will be overwritten.

        Raises:
            ReplayError: one of them is not taken. None is freed then: freed twice, a slot would be
                lent to two writers.
        """
        indices = {slot.index for slot in slots}
        with self._lock:
            if len(indices) < len(slots) or not indices <= self._taken:
                raise ReplayError(
                    "release() was given a slot that is not taken; release each slot of take() once"
                )

            self._taken -= indices
            self._queue.release(slots)

    def serve(self, path: str | Path | None = None) -> str:
        """Let processes of this host write.

        Args:
            path: of the Unix socket; None: in a new private folder.

        Returns:
            The address for `Writer.attach`.
        """
        self._check()
        if self._server is None:
            # The thread's arguments do not refer to this queue, which may be garbage-collected.
            self._server = StoreServer(
                self._store,
                self._lock,
                Path(path) if path is not None else None,
                collect=partial(_collect, self._queue, self._filled),
                on_failed=self._failures.append,
            )
            self._end.detach()
            self._end = weakref.finalize(self, self._server.close, self._store.close)
        return self._server.address

    def stats(self) -> dict[str, Any]:
        """Count what went through the queue, and what it holds.

        Returns:
            Agent steps, with produced = taken + dropped + lost + in_flight; the number of slots
            and their size as ``nbytes``; the number of other processes that write now as
            ``writers``.
        """
        self._check()
        with self._lock:
            in_flight = self._queue.in_flight_steps()
            counts = self._accounting.to_dict(in_flight)

        # The accounting is also that of a learner, which trains on what it takes.
        counts["taken"] = counts.pop("trained")
        return counts | {
            "slots": len(self._store.slots),
            "nbytes": self._store.geometry.nbytes,
            "writers": self._server.writers if self._server else 0,
        }

    def close(self) -> None:
        """Detach writers and free the memory; taken slots must not be used any more."""
        self._end()

    def __enter__(self) -> TrajectoryQueue:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _own_lane(self) -> Lane:
        """The lane of the calling thread, opened at its first call."""
        lane: Lane | None = getattr(self._this_thread, "lane", None)
        if lane is not None:
            return lane

        with self._lock:
            self._close_dead()
            self._streams += 1
            stream = self._streams
            index = self._store.open_lane(1)
            writer = self._store.local_writer(index)
            self._lanes[threading.current_thread()] = index

        # Streams of other processes are numbered from 1 on, those of threads far above them.
        lane = Lane(writer, stream << 32, lambda: False)
        self._this_thread.lane = lane
        return lane

    def _close_dead(self) -> None:
        """Free the lanes of threads that have ended."""
        for thread in [t for t in self._lanes if not t.is_alive()]:
            self._queue.collect()
            self._store.close_lane(self._lanes.pop(thread))

    def _collect(self) -> None:
        """Take in published slots, and wake a thread that waits for them."""
        with self._lock:
            _collect(self._queue, self._filled)

    def _check(self) -> None:
        """Raise ReplayError if the queue is closed, or its server has failed."""
        if not self._end.alive:
            raise ReplayError("this queue is closed; make another one")
        if self._failures:
            error = self._failures[0]
            raise ReplayError(
                f"other processes can no longer write to this queue: what served them failed with "
                f"{type(error).__name__}: {error}; make another queue"
            ) from error


def _collect(queue: SlotQueue, filled: threading.Condition) -> None:
    """Take in published slots, and wake a thread that waits for them."""
    queue.collect()
    filled.notify_all()


def _check_numbers(slots: int, max_policy_lag: int, overflow: str) -> None:
    """Raise ReplayError for a value out of range."""
    if slots < 1 or max_policy_lag < 0 or overflow not in ("block", "drop_stale"):
        raise ReplayError(
            f"slots {slots} must be at least 1, max_policy_lag {max_policy_lag} at least 0, "
            f'and overflow {overflow!r} "block" or "drop_stale"'
        )


def _slot_spec(spec: SlotSpec | Sequence[Column], unroll: int | None, envs: int | None) -> SlotSpec:
    """The spec of a slot of these columns. Raises ReplayError if there can be none."""
    try:
        if isinstance(spec, SlotSpec):
            return SlotSpec(
                unroll=unroll or spec.unroll,
                envs=envs or spec.envs,
                columns=spec.columns,
                side=spec.side,
            )
        return SlotSpec(
            unroll=DEFAULT_UNROLL if unroll is None else unroll,
            envs=envs or 1,
            columns=tuple(spec),
        )
    except (TypeError, ValueError) as error:
        raise ReplayError(f"slots cannot be made of these columns: {error}") from error
