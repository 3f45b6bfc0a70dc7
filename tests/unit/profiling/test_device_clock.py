"""How a GPU's seconds are attributed to parts, on simulated streams and on a real GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from penstock.device.choice import device_of
from penstock.learner.device_queue import DeviceQueue
from penstock.profiling.device import DeviceClock, blame, bounded_mark_ns
from penstock.profiling.ledger import Part, TimeLedger, by_learner_part

MS = 1_000_000


class Stream:
    """A stream whose marks pass when the test says so, at times of its own clock, in ms."""

    def __init__(self) -> None:
        self.waiting: list[Passing] = []

    def make(self) -> Passing:
        return Passing(self)

    def passes(self, at_ms: float) -> None:
        """The next mark passes."""
        self.waiting.pop(0).at_ms = at_ms


class Passing:
    """An event of that stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = None
        self._stream.waiting.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end_event: Passing) -> float:
        assert self.at_ms is not None
        assert end_event.at_ms is not None
        return end_event.at_ms - self.at_ms


@pytest.fixture
def clock_ns(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the host's clock, in ms."""
    now = [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now[0])

    def at(ms: int) -> None:
        now[0] = ms * MS

    return at


def milliseconds(ledger: TimeLedger) -> dict[str, float]:
    return {part: round(s * 1e3, 6) for part, s in ledger.snapshot().items()}


def test_host_that_runs_ahead_is_not_counted_as_waiting(
    clock_ns: Callable[[int], None],
) -> None:
    # Worked out by hand. The host puts a batch on the stream from 0 to 4, then has no data until
    # 60 and is told so; the stream copies for 10 ms, computes for 20, waits 10 for other learners,
    # computes 5 more, and has nothing to do from 45 on.
    host, seconds, stream = TimeLedger(part=Part.COUNT), TimeLedger(part=Part.WAIT), Stream()
    clock = DeviceClock(host, seconds, stream.make)
    host.follow(clock.mark)
    stream.passes(0.0)
    for at, part in enumerate((Part.H2D, Part.FORWARD, Part.BACKWARD, Part.REDUCE)):
        clock_ns(at)
        host.switch(part)
    host.switch(Part.OPTIMIZE)
    clock_ns(4)
    host.switch(Part.WAIT)
    for passed_at in (0.0, 10.0, 20.0, 30.0, 40.0, 45.0):
        stream.passes(passed_at)
    clock_ns(60)
    host.switch(Part.COUNT)
    clock.settle()
    assert milliseconds(host) == {"h2d": 1, "forward": 1, "backward": 1, "optimize": 1, "wait": 56}
    spent = milliseconds(seconds)
    assert spent == {
        "h2d": 10, "forward": 10, "backward": 10, "reduce": 10, "optimize": 5, "wait": 15,
    }  # fmt: skip
    shares = by_learner_part(spent)
    assert shares["compute"] == 25
    assert (shares["h2d_exposed"], shares["reduce_exposed"], shares["wait_data"]) == (10, 10, 15)


def test_empty_stream_is_attributed_to_the_part_of_the_host(
    clock_ns: Callable[[int], None],
) -> None:
    host, seconds, stream = TimeLedger(part=Part.WAIT), TimeLedger(part=Part.WAIT), Stream()
    clock = DeviceClock(host, seconds, stream.make)
    host.follow(clock.mark)
    stream.passes(0.0)
    for at, part in ((7, Part.GATHER), (11, Part.PUBLISH), (12, Part.FORWARD)):
        clock_ns(at)
        host.switch(part)
    clock_ns(15)
    stream.passes(14.0)  # two milliseconds after it was put there
    host.switch(Part.DEVICE)
    clock_ns(30)
    stream.passes(24.0)
    clock.settle()
    assert milliseconds(seconds) == {
        "wait": 7, "gather": 4, "publish": 1, "other": 2 + 6, "forward": 10,
    }  # fmt: skip


def test_current_part_of_the_stream_shows_before_its_end(clock_ns: Callable[[int], None]) -> None:
    host, seconds, stream = TimeLedger(part=Part.WAIT), TimeLedger(part=Part.WAIT), Stream()
    clock = DeviceClock(host, seconds, stream.make)
    host.follow(clock.mark)
    stream.passes(0.0)
    clock_ns(5)
    clock.settle()
    assert milliseconds(seconds) == {"wait": 5}
    host.switch(Part.FORWARD)
    stream.passes(5.0)
    clock_ns(9)
    clock.settle()
    clock_ns(12)
    assert milliseconds(seconds) == {"wait": 5, "forward": 7}


def test_switches_without_stream_work_share_one_mark() -> None:
    host, stream = TimeLedger(), Stream()
    clock = DeviceClock(host, TimeLedger(), stream.make)
    host.follow(clock.mark)
    for part in (Part.WAIT, Part.COUNT, Part.FORWARD, Part.DEVICE, Part.PUBLISH, Part.COUNT):
        host.switch(part)
    assert len(stream.waiting) == 1 + 2  # the first, and the pass from its begin to its end


@pytest.mark.parametrize(
    ("estimate", "recorded", "seen", "at"),
    [(50, 40, 60, 50), (30, 40, 60, 40), (70, 40, 60, 60), (30, 40, 40, 40)],
)
def test_mark_time_lies_between_recording_and_observation(
    estimate: int, recorded: int, seen: int, at: int
) -> None:
    assert bounded_mark_ns(estimate, recorded, seen) == at


def test_launching_does_not_count_as_computing() -> None:
    assert {blame(part) for part in (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZE, Part.DEVICE)} == {
        Part.OTHER
    }
    assert blame(Part.WAIT) is Part.WAIT
    assert blame(Part.REDUCE) is Part.REDUCE


def test_ledger_lists_the_parts_between_two_times(clock_ns: Callable[[int], None]) -> None:
    ledger = TimeLedger(part=Part.OTHER)
    for at, part in ((10, Part.WAIT), (20, Part.COUNT), (30, Part.PUBLISH)):
        clock_ns(at)
        ledger.switch(part)
    assert ledger.between(15 * MS, 25 * MS) == [(Part.WAIT, 15 * MS), (Part.COUNT, 20 * MS)]
    assert ledger.between(20 * MS, 20 * MS) == []
    assert ledger.between(-5, 40 * MS) == [
        (Part.OTHER, 0), (Part.WAIT, 10 * MS), (Part.COUNT, 20 * MS), (Part.PUBLISH, 30 * MS),
    ]  # fmt: skip
    for at in range(40, 40 + 70_000):  # more than it remembers
        clock_ns(at)
        ledger.switch(Part.WAIT if at % 2 else Part.COUNT)
    assert ledger.between(0, 1000 * MS) == []
    assert ledger.between(70_030 * MS, 70_032 * MS) == [
        (Part.COUNT, 70_030 * MS), (Part.WAIT, 70_031 * MS),
    ]  # fmt: skip


def test_device_queue_on_a_cpu_never_waits() -> None:
    ledger = TimeLedger(part=Part.FORWARD)
    queue = DeviceQueue(torch.device("cpu"), ledger)
    queue.call_while_waiting(lambda: pytest.fail("waits"))
    queue.on_batch_queued()
    assert ledger.part is Part.FORWARD


def matrix_products(count: int, size: int = 4096) -> None:
    values = torch.ones(size, size, device="cuda")
    for _ in range(count):
        values = values @ values


@pytest.mark.gpu
def test_a_gpu_is_one_batch_behind_its_host() -> None:
    device = torch.device("cuda")
    matrix_products(1)
    torch.cuda.synchronize()
    ledger, asked = TimeLedger(), []
    queue = DeviceQueue(device, ledger)
    queue.call_while_waiting(lambda: asked.append(1))
    matrix_products(50)
    queue.on_batch_queued()
    assert not asked  # the first is not waited for
    first = torch.cuda.Event()
    first.record()
    matrix_products(50)
    queue.on_batch_queued()
    assert first.query()  # the second is still computed
    assert asked
    assert not queue._ends[0].query()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_gpu_that_computes_while_the_host_waits_is_busy() -> None:
    device = torch.device("cuda")
    matrix_products(1)
    torch.cuda.synchronize()
    host, seconds = TimeLedger(part=Part.WAIT), TimeLedger(part=Part.WAIT)
    make_event = partial(device_of(device).make_event, timed=True)
    clock, queue = DeviceClock(host, seconds, make_event), DeviceQueue(device, host)
    host.follow(clock.mark)
    queue.call_while_waiting(clock.settle)
    for _ in range(20):
        host.switch(Part.FORWARD)
        matrix_products(20)
        queue.on_batch_queued()
        host.switch(Part.WAIT)
        time.sleep(0.001)
    torch.cuda.synchronize()
    clock.settle()
    shares = by_learner_part(seconds.snapshot())
    assert shares["compute"] > 0.9 * sum(shares.values())
    host.switch(Part.WAIT)
    time.sleep(2 * sum(shares.values()))
    clock.settle()
    assert seconds.snapshot()["wait"] > 1.5 * shares["compute"]
