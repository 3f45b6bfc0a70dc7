"""Writers of a replay in other processes, killed and stopped at any moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.replay.buffer import Replay
from penstock.replay.writer import Writer
from replay_writer import FLOATS, UNROLL, checksum, row
from waiting import wait_until

pytestmark = pytest.mark.system

PROGRAM = Path(__file__).parents[1] / "replay_writer.py"
KILLS = 150
COLUMNS = {
    "obs": (np.float32, (FLOATS,)),
    "action": (np.int64, ()),
    "writer": (np.int64, ()),
    "checksum": (np.uint32, ()),
}


def replay(capacity: int, **options: Any) -> Replay:
    return Replay(COLUMNS, capacity, unroll=UNROLL, shared=True, seed=0, **options)


class Nursery:
    """Starts writers, and hears what they say."""

    def __init__(self, address: str) -> None:
        self.pids: dict[int, int] = {}
        self.published: Counter[int] = Counter()  # rows that a writer knows to be published
        self.said: set[str] = set()
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._tell, self._hear = self._process.stdin, self._process.stdout
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def start(self, what: str, ident: int) -> int:
        """Start a writer; its process id."""
        self._tell.write(f"{what} {ident}\n".encode())
        self._tell.flush()
        wait_until(lambda: ident in self.pids)
        return self.pids[ident]

    def _listen(self) -> None:
        for line in self._hear:
            what, ident, *rest = line.decode().split()
            if what == "pid":
                self.pids[int(ident)] = int(rest[0])
            elif what == "rows":
                self.published[int(ident)] = int(rest[0])
            self.said.add(f"{what} {ident}")

    def close(self) -> None:
        for pid in self.pids.values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._tell.close()
        self._process.wait()
        self._thread.join()
        self._hear.close()


@pytest.fixture
def nursery_of() -> Iterator[Callable[[str], Nursery]]:
    made: list[Nursery] = []

    def make(address: str) -> Nursery:
        made.append(Nursery(address))
        return made[-1]

    yield make
    for each in made:
        each.close()


def check_whole(batch: Any) -> None:
    """No row holds parts of two."""
    for i, (ident, count) in enumerate(zip(batch["writer"], batch["action"], strict=True)):
        sums = checksum(batch["obs"][i], batch["next_obs"][i], int(ident), int(count))
        assert batch["checksum"][i] == sums, f"row {count} of writer {ident} is torn"


def all_rows(rb: Replay) -> Any:
    """Every row that counts, oldest physical row first."""
    with rb.lock:
        rb.table.collect()
        return rb.gather.batch(np.flatnonzero(rb.table.valid), None)


def writers(rb: Replay) -> int:
    return int(rb.stats()["writers"])


def test_writers_killed_at_random_instants_leave_no_torn_rows(
    nursery_of: Callable[[str], Nursery],
) -> None:
    """No torn row, no hang, no published row lost, and all of their memory comes back."""
    rb = replay(200_000, writers=8)
    nursery = nursery_of(rb.serve())
    rng = random.Random(0)
    for ident in range(KILLS):
        pid = nursery.start("add", ident)
        if ident == 0:  # however slow the machine is, one has published
            wait_until(lambda: len(rb) >= 32)
        time.sleep(rng.random() * 0.03)  # also before it is attached
        os.kill(pid, signal.SIGKILL)
        check_whole(rb.sample(32))
    wait_until(lambda: writers(rb) == 0)
    rows = all_rows(rb)
    check_whole(rows)
    assert rb.stats()["evicted"] == {}
    heard = 0
    for ident in range(KILLS):
        counts = np.sort(rows["action"][rows["writer"] == ident])
        np.testing.assert_array_equal(counts, np.arange(len(counts)))
        assert len(counts) >= nursery.published[ident]
        assert len(counts) % UNROLL == 0
        heard += len(counts) > 0
    assert 0 < heard < KILLS  # the kills fell before and after the first publication
    with Writer.attach(rb.serve()) as writer:
        writer.add(**row(KILLS, 0), terminated=False, truncated=False, timeout_s=2.0)
    wait_until(lambda: len(rb) == len(rows["action"]) + 1)
    rb.close()


def test_a_stopped_writer_cannot_write_into_memory_given_away(
    nursery_of: Callable[[str], Nursery],
) -> None:
    rb = replay(200, writers=4)
    nursery = nursery_of(rb.serve())
    pid = nursery.start("hold", 0)
    wait_until(lambda: "holding 0" in nursery.said)
    os.kill(pid, signal.SIGSTOP)
    with Writer.attach(rb.serve()) as writer:  # round and round, over every slot that there is
        for count in range(3 * rb.table.rows):
            writer.add(**row(1, count), terminated=False, truncated=False, timeout_s=5.0)
    wait_until(lambda: rb.stats()["inserted"] == 3 * rb.table.rows)
    wait_until(lambda: writers(rb) == 1)  # one has left; what was lent to the other still is
    before = all_rows(rb)
    check_whole(before)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: "wrote 0" in nursery.said)
    after = all_rows(rb)
    check_whole(after)
    assert set(after["writer"].tolist()) == {1}
    np.testing.assert_array_equal(after["keys"], before["keys"])
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)  # death is confirmed also of who is stopped
    wait_until(lambda: writers(rb) == 0)
    free = len(rb.table.store._free)
    assert free + len(rb.table.order) + sum(
        len(x.lent) for x in rb.table.store._lanes.values()
    ) == (rb.table.slots)
    rb.close()


def test_adding_from_two_threads_while_sampling_keeps_rows_whole() -> None:
    rb = replay(400, writers=3)
    stop = threading.Event()
    errors: list[BaseException] = []
    added = [0, 0]

    def add(ident: int) -> None:
        try:
            while not stop.is_set():
                step = row(ident, added[ident])
                rb.add(**step, terminated=False, truncated=added[ident] % 9 == 8)
                added[ident] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(ident,), daemon=True) for ident in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(rb) >= 64)
    deadline_s = time.monotonic() + 1.5
    batches = 0
    while time.monotonic() < deadline_s:
        check_whole(rb.sample(64))
        batches += 1
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert batches > 20
    stats = rb.stats()
    assert stats["inserted"] == sum(added) == stats["stored"] + sum(stats["evicted"].values())
    assert stats["stored"] >= 400
    check_whole(all_rows(rb))
    rb.close()
