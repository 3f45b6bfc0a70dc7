"""A learner's side, connectors and contexts for tests of the transports, without environments."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.configs.schema import Config
from penstock.core.control import Channel
from penstock.core.descriptors import wait_readable
from penstock.core.interfaces import SlotProcessor, Welcome
from penstock.core.params import ParamLayout, Stamp
from penstock.core.role import RoleContext
from penstock.core.role_spec import RoleSpec, Stage
from penstock.core.specs import Column, SlotSpec
from penstock.launch.engines.local import LocalHandle
from penstock.launch.topology import role_arguments
from penstock.profiling.status import StatusPage
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import Slot, SlotStore, SlotWriter
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.zmq.receiver import Receiver
from waiting import wait_until

SPEC = SlotSpec(
    4,
    3,
    (
        Column("obs", "|u1", (8, 8), "unroll+1"),
        Column("noise", "<f4", (40,)),
        Column("reward", "<f4"),
        Column("action", "<i4"),
        Column("alive", "|b1"),
        Column("seat", "|u1", (), "slot"),
    ),
)
LAYOUT = ParamLayout((("w", (5, 3)), ("b", (3,))))
SPACES = [
    {
        "Dict": [
            ["seen", {"Box": [0, 255, [8, 8], "|u1"]}],
            ["speed", {"Box": [[-np.inf, 0.0], 9.5, [2], "<f4"]}],
        ]
    },
    {"Discrete": [3, 1]},
]
T = TypeVar("T")
RUN_ID = 0x1234_5678_9ABC_DEF0


def welcome(run_id: int = RUN_ID, spec: SlotSpec = SPEC, chairs: int = 0) -> Welcome:
    """Returns a learner's welcome message."""
    return Welcome(run_id, 2, spec, LAYOUT, {"env": {"id": "Test-v0"}}, SPACES, chairs)


class Heard(Channel):
    """A supervisor channel that records what is reported."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.arriving: list[dict[str, Any]] = []
        self.closed = False

    def send(
        self, message: dict[str, Any], patience_s: float = 0.0, fds: Sequence[int] = ()
    ) -> bool:
        self.messages.append(message)
        return True

    def receive(self, most: int | None = None) -> list[dict[str, Any]]:
        arrived, self.arriving = self.arriving, []
        return arrived


def context(
    folder: Path, role: str = "actor", *, incarnation: int = 0, **fields: Any
) -> RoleContext:
    """Returns the context of a role; `reports` returns what the role has reported."""
    page, descriptor = StatusPage.create()
    os.close(descriptor)
    return RoleContext(role, 0, incarnation, RUN_ID, folder, folder, Heard(), page, **fields)


def reports(ctx: RoleContext, kind: str) -> list[dict[str, Any]]:
    """Returns what a role has reported so far, of one kind."""
    assert isinstance(ctx.channel, Heard)
    return [message for message in ctx.channel.messages if message["kind"] == kind]


def fill(slot: Slot, sequence: int, *, actor: int = 7, incarnation: int = 0) -> None:
    """Fills a slot with the contents that `expected` returns for its sequence number."""
    for name, values in expected(sequence).items():
        slot.columns[name][...] = values
    slot.header["actor"], slot.header["incarnation"] = actor, incarnation
    slot.header["generation"], slot.header["version"] = 2, 10 + sequence
    slot.header["sequence"], slot.header["steps"] = sequence, 12
    slot.header["produced_steps"] = 12 * (sequence + 1)
    slot.header["started_s"] = time.monotonic() - 0.5
    slot.header["published_s"] = time.monotonic()


def expected(sequence: int, spec: SlotSpec = SPEC) -> dict[str, npt.NDArray[Any]]:
    """Returns a slot's columns; `obs` compresses, `noise` does not. All rows are alive."""
    rng = np.random.default_rng(sequence)
    columns: dict[str, npt.NDArray[Any]] = {}
    for column in spec.columns:
        shape = (*spec.rows_of(column), *column.shape)
        if column.name == "noise":
            columns[column.name] = rng.normal(size=shape).astype(np.float32)
        elif column.name == "alive":
            columns[column.name] = np.ones(shape, np.bool_)
        else:
            columns[column.name] = np.full(shape, sequence % 100).astype(column.dtype)
    return columns


@dataclass
class Taken:
    """A slot as the consumer saw it."""

    header: dict[str, Any]
    columns: dict[str, npt.NDArray[Any]]


@dataclass
class Learner:
    """Owns store, boards and Unix socket in a thread; it takes slots while ``consuming``."""

    path: Path
    store: SlotStore
    boards: list[WeightsBoard]
    welcome: Welcome
    consuming: bool = True
    taken: deque[Taken] = field(default_factory=deque)
    _calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = field(
        default_factory=queue.SimpleQueue
    )
    _stop: bool = False
    _thread: threading.Thread | None = None

    @property
    def board(self) -> WeightsBoard:
        """The board of the run's own weights."""
        return self.boards[0]

    def start(self, host: ShmHost) -> None:
        self._thread = threading.Thread(target=self._run, args=(host,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends as a learner does: the Unix socket is removed and all connections close."""
        self._stop = True
        if self._thread is not None:
            self._thread.join()

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function in the thread that owns the store."""
        answer: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._calls.put((function, answer))
        return answer.get(timeout=10)

    def _run(self, host: ShmHost) -> None:
        while not self._stop:
            self._turn(host)
        host.close()

    def _turn(self, host: ShmHost) -> None:
        host.poll(0.005)
        while not self._calls.empty():
            function, answer = self._calls.get()
            answer.put(function())
        self.store.collect()
        while self.consuming and self.store.ready:
            slot = self.store.slots[self.store.ready.popleft()]
            header = {name: slot.header[name].item() for name in slot.header.dtype.names or ()}
            columns = {name: array.copy() for name, array in slot.columns.items()}
            self.taken.append(Taken(header, columns))
            self.store.release(slot.index)

    def take(self, timeout_s: float = 10.0) -> Taken:
        """Returns the next slot that arrives."""
        wait_until(lambda: bool(self.taken), timeout_s)
        return self.taken.popleft()

    def publish(self, version: int, policy_id: int = 0) -> npt.NDArray[np.float32]:
        """Publishes weights that encode version and policy; exact in bfloat16 up to 256."""
        weights = np.arange(LAYOUT.size, dtype=np.float32) + version + 40 * policy_id
        stamp = Stamp(self.welcome.generation, version)
        self.boards[policy_id].publish(weights, stamp, policy_id)
        return weights


@contextmanager
def learner(
    folder: Path,
    *,
    slots: int = 8,
    run_id: int = RUN_ID,
    spec: SlotSpec = SPEC,
    chairs: int = 0,
) -> Iterator[Learner]:
    """Runs a `Learner` with its own store and boards to the end of the block."""
    store = SlotStore(spec, slots)
    boards = [WeightsBoard.create(LAYOUT.size, policy_id=i) for i in range(1 + chairs)]
    path = folder / "learner-0.sock"
    host = ShmHost(path, welcome(run_id, spec, chairs), boards, store)
    side = Learner(path, store, boards, welcome(run_id, spec, chairs))
    side.start(host)
    try:
        yield side
    finally:
        side.stop()
        store.close()
        for board in boards:
            board.close()


@contextmanager
def connector(
    side: Learner, address: str, *, process: SlotProcessor | None = None, **options: Any
) -> Iterator[Receiver]:
    """Runs a connector in a thread of this process."""
    link = ShmLink(side.path, None, want=0, lane=True)
    made = Receiver(link, address, side.path, process=process, **options)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            made.turn(0.01)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join()
        made.close()
        link.close()


def waiting(receiver: Receiver) -> int:
    """Returns how many relays and actors wait for weights newer than the newest."""
    return sum(len(responder._up_to_date) for responder in receiver._responders.values())


@contextmanager
def role_process(
    folder: Path,
    role: str,
    address: str,
    *,
    index: int = 0,
    incarnation: int = 0,
    **settings: Any,
) -> Iterator[LocalHandle]:
    """Starts a connector or relay as a process of its own; ``settings`` are transport options."""
    config = {"env": {"id": "Test-v0"}, "transport": settings, "run": {"interval_s": 0.1}}
    arguments = role_arguments(folder, folder) | {
        "config": Config.model_validate(config).model_dump(mode="json"),
        "run_id": RUN_ID,
        "grace_s": 10.0,
    }
    spec = RoleSpec(
        role, index, f"penstock.transport.zmq.{role}:run", Stage.CARRIERS, address=address
    )
    child = LocalHandle(spec, incarnation, arguments, folder / f"{role}-{index}.log")
    try:
        yield child
    finally:
        child.signal(signal.SIGKILL)
        child.reap()


def heard(child: LocalHandle, kind: str, timeout_s: float = 20.0) -> dict[str, Any]:
    """Waits for the next report of a kind and returns it."""
    found: list[dict[str, Any]] = []

    def listen() -> bool:
        found.extend(m for m in child.channel.receive() if m["kind"] == kind)
        assert found or not child.channel.closed, child.log_tail()
        return bool(found)

    wait_until(listen, timeout_s)
    return found[-1]


def exit_code(child: LocalHandle, timeout_s: float = 20.0) -> int:
    """Waits for a process to end by itself and returns its exit code."""
    assert wait_readable(child.pidfd, timeout_s), f"{child.spec.name} did not end"
    result = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
    assert result is not None
    return int(result.si_status)


def writer_of(store: SlotStore, want: int) -> tuple[int, SlotWriter]:
    """Opens a lane of a store in this process; returns the lane and its writer."""
    lane = store.open_lane(want)
    made = SlotWriter(store.arena, store.geometry, lane, store.lane_event(lane), store.filled_event)
    return lane, made


@contextmanager
def in_thread(ctx: RoleContext, main: Callable[[RoleContext], None]) -> Iterator[None]:
    """Runs a role in a thread of this process to the end of the block."""

    def live() -> None:
        with suppress(SystemExit):
            main(ctx)

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ctx.stop()
        thread.join(20)
        assert not thread.is_alive()
