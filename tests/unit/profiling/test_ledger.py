"""The time ledger: its parts are disjoint and cover the wall clock; other processes read it."""

from __future__ import annotations

import os
import time

import pytest

from penstock.profiling.ledger import (
    COUNT,
    LAST,
    PART_BITS,
    PARTS,
    RING,
    RING_SPANS,
    Part,
    TimeLedger,
    by_learner_part,
    current_span,
    seconds_by_part,
    shares_between,
)
from penstock.profiling.status import LANES, StatusPage


def test_parts_add_up_to_wall_time() -> None:
    began_s = time.perf_counter()
    ledger = TimeLedger()
    for part, seconds in ((Part.WAIT, 0.03), (Part.FORWARD, 0.06), (Part.WAIT, 0.02)):
        ledger.switch(part)
        time.sleep(seconds)
    spent = ledger.snapshot()
    wall_s = time.perf_counter() - began_s
    assert sum(spent.values()) == pytest.approx(wall_s, abs=2e-3)
    assert spent["wait"] >= 0.05
    assert 0.06 <= spent["forward"] <= wall_s - 0.05


def test_snapshot_does_not_change_the_part() -> None:
    ledger = TimeLedger()
    ledger.switch(Part.FORWARD)
    first = ledger.snapshot()
    time.sleep(0.01)
    second = ledger.snapshot()
    assert ledger.part is Part.FORWARD
    assert shares_between(second, first)["forward"] == pytest.approx(1.0)


def test_fractions_of_snapshots_match_figures_by_hand() -> None:
    shares = shares_between(
        {"forward": 9.0, "wait": 3.0, "other": 1.0}, {"forward": 3.0, "other": 1}
    )
    assert shares == {"forward": 6 / 9, "wait": 3 / 9, "other": 0.0}
    assert shares_between({}, {}) == {}


def test_learner_parts_have_their_documented_names() -> None:
    parts = dict(wait=1, gather=2, h2d=4, forward=8, backward=16, optimize=32, device=64)
    parts |= dict(reduce=128, publish=256, save=512, count=2048, other=1024, pull=4096)
    assert by_learner_part(parts) == {
        "wait_data": 3,
        "h2d_exposed": 4,
        "compute": 120,
        "reduce_exposed": 128,
        "pull_exposed": 4096,
        "publish": 256,
        "bookkeeping": 512 + 2048,
        "other": 1024,
    }
    assert list(by_learner_part({}).values()) == [0.0] * 8


def test_another_process_reads_the_current_part_and_earlier_spans() -> None:
    reader, descriptor = StatusPage.create()
    writer = StatusPage(descriptor)
    os.close(descriptor)
    ledger = writer.ledger("main")
    assert list(reader.lanes) == ["main"]
    ledger.switch(Part.STEP)
    before = time.perf_counter_ns()
    ledger.switch(Part.WAIT)
    after = time.perf_counter_ns()
    ledger.switch(Part.WAIT)  # goes on with the same span
    lane = reader.lanes["main"]
    part, since = current_span(lane) or (None, 0)
    assert part is Part.WAIT
    assert before <= since <= after
    assert lane[COUNT] == 3
    spans = [lane[RING + i] for i in range(3)]
    assert [span & PARTS - 1 for span in spans] == [Part.OTHER, Part.STEP, Part.WAIT]
    assert [span >> PART_BITS for span in spans] == sorted(span >> PART_BITS for span in spans)
    time.sleep(0.02)
    assert seconds_by_part(lane)["wait"] >= 0.02
    writer.close()
    assert current_span(reader.lanes["main"]) == (Part.WAIT, since), "it outlives the writer"
    reader.close()


def test_ring_keeps_the_latest_spans_and_complete_totals() -> None:
    lane = memoryview(bytearray(8 * (RING + RING_SPANS))).cast("q")
    ledger = TimeLedger(lane)
    for _ in range(RING_SPANS):
        ledger.switch(Part.STEP)
        ledger.switch(Part.INFER)
    assert lane[COUNT] == 1 + 2 * RING_SPANS
    newest = lane[COUNT] - 1
    assert Part(lane[RING + (newest & LAST)] & PARTS - 1) is Part.INFER
    begun = [lane[RING + (i & LAST)] for i in range(newest + 1 - RING_SPANS, newest + 1)]
    assert begun == sorted(begun)
    wall_s = ((begun[-1] >> PART_BITS) - (begun[0] >> PART_BITS)) * 1e-9
    assert sum(seconds_by_part(lane).values()) > wall_s


def test_returning_thread_continues_in_its_lane() -> None:
    page, descriptor = StatusPage.create()
    os.close(descriptor)
    first = page.ledger("reduce")
    first.switch(Part.REDUCE)
    time.sleep(0.01)
    first.switch(Part.WAIT)
    second = page.ledger("reduce", Part.WAIT)
    assert list(page.lanes) == ["reduce"]
    assert second.snapshot()["reduce"] >= 0.01
    assert page.lanes["reduce"][COUNT] == 4
    page.close()


def test_a_thread_without_a_lane_still_has_a_ledger() -> None:
    page, descriptor = StatusPage.create()
    os.close(descriptor)
    ledgers = [page.ledger(f"thread {i}") for i in range(LANES + 1)]
    ledgers[-1].switch(Part.STEP)
    assert len(page.lanes) == LANES
    assert "step" in ledgers[-1].snapshot()
    page.close()
