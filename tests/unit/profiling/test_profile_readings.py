"""Reading the lanes of a thread that writes to them at the same time."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.core.processes import coreless_s, process_facts
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.engines.local import LocalHandle
from penstock.launch.profile_watch import take_reading
from penstock.profiling.ledger import RING_SPANS, Part, TimeLedger
from penstock.profiling.report.readings import read_spans, read_supervisor, read_threads
from penstock.profiling.status import StatusPage

SPEC = RoleSpec("actor", 3, "nowhere:main", Stage.ACTORS)


@pytest.fixture
def page() -> Iterator[StatusPage]:
    page, descriptor = StatusPage.create()
    os.close(descriptor)
    yield page
    page.close()  # which fails where a reader has kept a view


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[LocalHandle]:
    """That of a process which stands still, so that the test writes to its page."""
    one = LocalHandle(SPEC, 0, {}, tmp_path / "actor-3.log")
    one.signal(signal.SIGSTOP)
    yield one
    one.signal(signal.SIGKILL)
    one.reap()


def walk(ledger: TimeLedger, *stops: tuple[Part, float]) -> list[int]:
    """Go through parts, so many seconds each; when each began, by a clock of our own."""
    began = []
    for part, seconds in stops:
        began.append(time.perf_counter_ns())
        ledger.switch(part)
        time.sleep(seconds)
    return began


def test_spans_are_contiguous_and_the_last_is_open(page: StatusPage) -> None:
    ledger = page.ledger("main")
    began = walk(ledger, (Part.STEP, 0.02), (Part.INFER, 0.01), (Part.STEP, 0.01))
    found = read_spans(page.lanes["main"], since_ns=0)
    until_ns = time.perf_counter_ns()
    assert found.part.tolist() == [Part.OTHER, Part.STEP, Part.INFER, Part.STEP]
    assert found.begin_ns[1:].tolist() == found.end_ns[:-1].tolist()
    assert found.begin_ns[1:] == pytest.approx(began, abs=1_000_000)
    assert 0 <= until_ns - found.end_ns[-1] < 50_000_000
    assert found.seconds == pytest.approx((until_ns - found.begin_ns[0]) * 1e-9, abs=0.05)


def test_spans_are_cut_at_the_start_of_the_window(page: StatusPage) -> None:
    ledger = page.ledger("main")
    walk(ledger, (Part.STEP, 0.01), (Part.INFER, 0.01))
    since_ns = time.perf_counter_ns()
    walk(ledger, (Part.WRITE, 0.01))
    found = read_spans(page.lanes["main"], since_ns)
    assert found.part.tolist() == [Part.INFER, Part.WRITE]
    assert found.begin_ns[0] == since_ns
    assert len(read_spans(page.lanes["main"], time.perf_counter_ns() + 10**9)) == 0


def test_wrapped_ring_gives_its_newest_spans(page: StatusPage) -> None:
    ledger = page.ledger("main")
    for _ in range(RING_SPANS):
        ledger.switch(Part.STEP)
        ledger.switch(Part.WAIT)
    before_ns = time.perf_counter_ns()
    ledger.switch(Part.SEND)
    found = read_spans(page.lanes["main"], since_ns=0)
    # One word may be written at any moment, so one span less than there is room for.
    assert len(found) == RING_SPANS - 1
    assert found.part[-3:].tolist() == [Part.STEP, Part.WAIT, Part.SEND]
    assert found.begin_ns[-1] >= before_ns
    assert (np.diff(found.begin_ns) >= 0).all()


def test_no_span_is_torn_while_another_thread_writes(page: StatusPage) -> None:
    ledger, going = page.ledger("main"), True

    def write() -> None:
        while going:
            ledger.switch(Part.STEP)
            ledger.switch(Part.INFER)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        for _ in range(20):
            found = read_spans(page.lanes["main"], since_ns=0)
            assert (np.diff(found.begin_ns) >= 0).all()
            assert (found.end_ns >= found.begin_ns).all()
            assert set(found.part.tolist()) <= {Part.OTHER, Part.STEP, Part.INFER}
    finally:
        going = False
        writer.join()


def test_a_reading_has_every_lane_and_the_counters(handle: LocalHandle) -> None:
    page = handle.page
    main, feeder = page.ledger("main"), page.ledger("feeder", Part.WAIT)
    walk(main, (Part.STEP, 0.02))
    since_s = time.perf_counter()
    walk(feeder, (Part.GATHER, 0.01))
    page.played_steps, page.trained_steps, page.sequence = 640, 512, 20
    reading = take_reading(handle)
    most_s = time.perf_counter() - since_s
    assert (reading.spec, reading.pid) == (SPEC, handle.pid)
    assert reading.lanes.keys() == {"main", "feeder"}
    assert reading.lanes["main"]["step"] >= 0.03  # it went on while the other was walked
    assert 0.01 <= reading.lanes["feeder"]["gather"] < most_s
    assert (reading.played_steps, reading.trained_steps, reading.slots) == (640, 512, 20)
    assert reading.cpu_s == pytest.approx(0.0, abs=0.5)
    named = [(t.process, t.name, t.lane) for t in read_threads(SPEC, 7, page, since_ns=0)]
    assert named == [("actor-3", "main", 0), ("actor-3", "feeder", 1)]


def test_the_supervisor_reads_itself() -> None:
    ledger = TimeLedger()
    walk(ledger, (Part.WAIT, 0.02))
    reading = read_supervisor(ledger)
    assert (reading.spec.name, reading.pid) == ("supervisor-0", os.getpid())
    assert reading.lanes["main"]["wait"] >= 0.02


def test_time_without_a_core_follows_the_kernels_count() -> None:
    """Two busy processes on one core: each has it half the time and waits for the rest."""
    core = min(os.sched_getaffinity(0))
    script = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]

    def seconds() -> list[tuple[float, float, float]]:
        return [
            (time.perf_counter(), coreless_s(process.pid), process_facts(process.pid)[1] or 0.0)
            for process in both
        ]

    try:
        time.sleep(0.5)
        before = seconds()
        time.sleep(1.0)
        after = seconds()
    finally:
        for process in both:
            process.kill()
            process.wait()
    if math.isnan(after[0][1]):
        pytest.skip("this kernel keeps no scheduler statistics")
    for now, first in zip(after, before, strict=True):
        wall_s, without_core_s, cpu_s = (b - a for a, b in zip(first, now, strict=True))
        assert without_core_s > 0.3 * wall_s
        # It did nothing but run or wait for a core; processor time is in hundredths of a second,
        # and of a virtual machine some time is in neither.
        assert without_core_s + cpu_s == pytest.approx(wall_s, abs=0.3)
