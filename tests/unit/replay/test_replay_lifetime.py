"""Memory, threads and descriptors of a replay are freed when it is closed, dropped or killed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.specs import Column, SlotSpec
from penstock.replay import (
    RateLimiter,
    Replay,
    ReplayError,
    Sequences,
    TrajectoryQueue,
    Writer,
)
from penstock.replay.sharing import StoreServer
from penstock.replay.table import TableListener
from penstock.transport.shm.store import Slot, SlotStore
from waiting import wait_until

COLUMNS: dict[str, Any] = {"obs": (np.float32, (1,)), "action": (np.int64, ())}
SPEC = SlotSpec(2, 1, (Column("reward", "<f4"),))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folders of services lie here; what a test leaves there it has to tell."""
    short = Path(tempfile.mkdtemp(prefix="pt-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(short))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield short
    assert not list(short.iterdir())
    short.rmdir()


@pytest.fixture(autouse=True, scope="module")
def little_to_collect() -> None:
    """What was imported meanwhile stays, and `held` collects garbage many times."""
    gc.collect()
    gc.freeze()


def step(i: int = 0) -> dict[str, Any]:
    flags = {"terminated": False, "truncated": False}
    return {"obs": [i], "next_obs": [i + 1], "action": i, "reward": 1.0, **flags}


def held() -> tuple[int, set[str]]:
    """How many descriptors this process has, and its threads."""
    gc.collect()
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("replay-")}
    return len(os.listdir("/proc/self/fd")), names


def in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join()


# ----------------------------------------------------------------------------- threads that ended


@pytest.mark.parametrize("look", [lambda r: r.stats(), lambda r: r.sample(2)], ids=["stats", "get"])
def test_slot_of_a_dead_thread_is_closed_at_the_next_call(look: Callable[[Replay], Any]) -> None:
    with Replay(COLUMNS, 100, unroll=10, writers=2) as replay:

        def add_three() -> None:
            for i in range(3):
                replay.add(**step(i))

        in_thread(add_three)
        assert (len(replay.table.store.lanes), replay.table.closed) == (1, 0)
        look(replay)
        assert (len(replay.table.store.lanes), replay.table.closed) == (0, 1)
        assert len(replay) == 3


def test_ended_threads_free_their_lanes_of_a_trajectory_queue() -> None:
    """More threads than there are lanes, one after the other, each with the only slot."""
    with TrajectoryQueue(SPEC, slots=1) as queue:

        def write() -> None:
            with queue.slot(timeout_s=1.0) as slot:
                slot.columns["reward"][...] = 1

        for _ in range(300):
            in_thread(write)
            queue.release(queue.take(1, timeout_s=1.0))
        assert queue.stats()["taken"] == 600


# ----------------------------------------------------------------------------- closed and dropped


def served(**options: Any) -> Replay:
    replay = Replay(COLUMNS, 100, shared=True, **options)
    replay.add(**step())
    replay.serve()
    return replay


def private(**options: Any) -> Replay:
    replay = Replay(COLUMNS, 100, **options)
    replay.add(**step())
    return replay


def queue() -> TrajectoryQueue:
    made = TrajectoryQueue(SPEC)
    made.serve()
    with made.slot():
        pass
    return made


MAKERS: dict[str, Callable[[], Any]] = {
    "private": private,
    "sequences": lambda: private(sequences=Sequences(4)),
    "limited": lambda: private(max_times_sampled=2),
    "served": served,
    "queue": queue,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("how", ["dropped", "closed", "with"])
def test_close_and_drop_leave_no_memory_thread_or_descriptor(
    make: Callable[[], Any], how: str
) -> None:
    before = held()
    made = make()
    assert held() != before
    if how == "closed":
        made.close()
        made.close()
    elif how == "with":
        with made as same:
            assert same is made
    if how != "dropped":
        descriptors, threads = held()
        assert threads == before[1]
        assert descriptors <= before[0] + 1  # Python's own duplicate, which goes with the memory
    del made
    if how == "with":
        del same
    wait_until(lambda: held() == before)


@pytest.mark.parametrize("make", [private, served], ids=["private", "served"])
def test_memory_is_freed_without_garbage_collection(make: Callable[[], Replay]) -> None:
    gc.collect()
    gc.disable()
    try:
        replay = make()
        memory = weakref.ref(replay.table.store.arena.bytes)
        replay.close()
        del replay
        assert memory() is None
        replay = make()
        memory = weakref.ref(replay.table.store.arena.bytes)
        del replay
        wait_until(lambda: memory() is None)
    finally:
        gc.enable()


def test_failed_construction_leaves_no_memory() -> None:
    before = held()
    with pytest.raises(ReplayError, match="min_size 200 is above the capacity of 100"):
        Replay(COLUMNS, 100, shared=True, limiter=RateLimiter(min_size=200))
    assert held() == before


def test_service_may_be_closed_by_its_own_thread() -> None:
    """As happens where the garbage collector finds the replay there."""
    store, ended = SlotStore(SPEC, 4), threading.Event()
    failures: list[BaseException] = []

    def collect() -> None:
        server.close(then=ended.set)

    server = StoreServer(store, threading.Lock(), None, collect=collect, on_failed=failures.append)
    os.eventfd_write(store.filled_event, 1)
    assert ended.wait(5.0)
    assert not failures
    store.close()


def test_closing_a_forked_copy_does_not_affect_the_owner() -> None:
    with served() as replay:
        child = os.fork()
        if not child:
            replay.close()
            os._exit(0)
        os.waitpid(child, 0)
        with Writer.attach(replay.serve()) as writer:
            writer.add(**step(7))
        wait_until(lambda: len(replay) == 2)


def test_calls_after_close_are_refused() -> None:
    replay = private()
    stream = replay.writer()
    stream.add(**step())
    replay.close()
    calls: list[Callable[[], Any]] = [
        lambda: replay.add(**step()),
        lambda: stream.add(**step()),
        lambda: replay.sample(1),
        lambda: replay.writer(),
        lambda: replay.serve(),
        lambda: in_thread_raising(lambda: replay.add(**step())),
    ]
    for call in calls:
        with pytest.raises(ReplayError, match="this replay is closed; make another one"):
            call()
    made = queue()
    made.close()
    with pytest.raises(ReplayError, match="this queue is closed"), made.slot():
        pass


def in_thread_raising(function: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    in_thread(run)
    for error in errors:
        raise error


# ----------------------------------------------------------------------------- owners that died

OWNER = """
import numpy as np, sys
from penstock.replay import Replay
columns = {"obs": (np.float32, (1,)), "action": (np.int64, ())}
print(Replay(columns, 100, shared=True).serve() if len(sys.argv) < 2 else "", flush=True)
replay = Replay(columns, 100, shared=True)
print(replay.serve(), flush=True)
sys.stdin.read()
"""


def test_folders_of_dead_owners_are_removed(temporary: Path) -> None:
    foreign = temporary / "penstock-run-of-a-user"
    foreign.mkdir()
    (foreign / "results").write_text("mine")
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER, "one"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        folders = []
        for owner in owners:
            assert owner.stdout is not None
            owner.stdout.readline()
            folders.append(Path(owner.stdout.readline().strip()).parent)
        killed, alive = folders
        owners[0].send_signal(signal.SIGKILL)
        owners[0].wait()
        assert killed.is_dir(), "the killed one could not clean up"
        with served() as replay:
            own = Path(replay.serve()).parent
            assert set(temporary.iterdir()) == {foreign, alive, own}
        Writer.attach(str(alive / "store")).close()
    finally:
        for owner in owners:
            owner.communicate()
    assert (foreign / "results").read_text() == "mine"
    (foreign / "results").unlink()
    foreign.rmdir()


# ----------------------------------------------------------------------------- a service that fails


def test_failure_of_the_replay_service_is_raised_in_the_next_call(temporary: Path) -> None:
    replay = served()

    class Failing(TableListener):
        def on_ingested(self, slot: Slot) -> None:
            raise RuntimeError("out of luck")

    replay.table.subscribe(Failing())
    writer = Writer.attach(replay.serve())
    writer.add(**step())
    writer.flush()
    wait_until(lambda: not list(temporary.iterdir()))
    for call in (lambda: replay.add(**step()), lambda: replay.sample(1), replay.stats):
        with pytest.raises(ReplayError, match="RuntimeError: out of luck; save") as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)

    def add_all() -> None:
        for i in range(1000):
            writer.add(**step(i), timeout_s=5.0)

    with pytest.raises(ConnectionError, match="has ended"):
        add_all()
    writer.close()
    replay.close()


def test_failure_of_the_queue_service_is_raised_in_the_next_call(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = queue()

    def fail(_: Any) -> None:
        raise RuntimeError("out of luck")

    writer = Writer.attach(made.serve())
    monkeypatch.setattr(made._accounting, "arrived", fail)
    with writer.slot():
        pass
    wait_until(lambda: not list(temporary.iterdir()))
    calls: list[Callable[[], Any]] = [
        made.stats,
        lambda: made.take(1),
        lambda: made.slot().__enter__(),
    ]
    for call in calls:
        with pytest.raises(ReplayError, match="RuntimeError: out of luck; make another") as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)
    writer.close()
    made.close()
