"""Limits of a replay service: requests beyond them are refused, counted and harmless."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from penstock.replay.limiter import RateLimiter
from penstock.replay.remote.intake import WINDOW
from penstock.replay.samplers import Prioritized
from penstock.replay.table import TableListener
from penstock.transport.shm.store import Slot
from penstock.transport.wire import Header, MessageKind, encode
from replay_service import ENVS, UNROLL, Served, frame_replay
from waiting import least_ms

A, B = b"a", b"b"


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def make(limits: dict[str, int] | None = None, **options: Any) -> Served:
        made.append(Served(frame_replay(**options), limits=limits or {}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def fill(served: Served, name: bytes = A, slots: int = 4) -> None:
    served.join(name)
    for sequence in range(slots):
        served.slot(name, sequence)
        served.service.tend()


def put(name: str, value: Any, at: Any = (3, 1)) -> Callable[[dict[str, Any]], None]:
    def change(columns: dict[str, Any]) -> None:
        column = columns[name]
        (column.view(np.uint8) if column.dtype == np.bool_ else column)[at] = value

    return change


# ----------------------------------------------------------------------------- columns

SIDE = frame_replay().layout.spec.side
BAD_COLUMNS = [
    ("side", SIDE), ("side", 32767), ("side", -2), ("side", -32768),
    ("pad", SIDE), ("pad", 32767), ("pad", -1), ("pad", -32768),
    ("terminated", 2), ("truncated", 255),
    ("reward", np.nan), ("reward", -np.inf), ("priority", -1.0), ("priority", np.inf),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_COLUMNS)
def test_a_column_out_of_range_is_refused_and_the_stream_goes_on(
    serve: Callable[..., Served], name: str, value: Any
) -> None:
    served = serve(sampler=Prioritized(fast=False), n_step=2)
    fill(served, slots=2)
    served.slot(A, 2, put(name, value))
    served.slot(A, 3)
    served.service.tend()
    refusal = served.last(A, MessageKind.REFUSE)
    assert refusal["kind"] == MessageKind.SLOT
    assert f"slot 2 was refused: column {name} " in refusal["error"]
    assert served.service.rejected == {"columns": 1}
    assert [line for line in served.lines if name in line] == served.lines[-1:]
    assert len(served.replay) == 3 * UNROLL * ENVS
    for number in range(20):
        served.ask(A, number, batch=32, read=number)
        served.service.tend()
    assert served.count(A, MessageKind.BATCH) == 20
    assert served.service.rejected == {"columns": 1}


@pytest.mark.parametrize(
    "head",
    [
        {"generation": 0}, {"generation": UNROLL + 1}, {"generation": (1 << 32) - 1},
        {"version": (1 << 64) - 1}, {"version": 1 << 63}, {"steps": 3}, {"steps": 0},
    ],
)  # fmt: skip
def test_a_header_that_contradicts_its_slot_is_refused(
    serve: Callable[..., Served], head: dict[str, int]
) -> None:
    served = serve()
    served.join(A)
    served.slot(A, 0, **head)
    served.service.tend()
    assert served.service.rejected in ({"columns": 1}, {"header": 1})
    assert (len(served.replay), served.replay.stats()["inserted"]) == (0, 0)


def test_largest_allowed_values_are_accepted(serve: Callable[..., Served]) -> None:
    """The last side rows, and what lies after the slot's steps, which means nothing."""
    served = serve()
    served.join(A)

    def change(columns: dict[str, Any]) -> None:
        columns["alive"][4:] = 0
        columns["side"][0, 0], columns["pad"][:4] = SIDE - 1, 2 + SIDE - 3
        columns["side"][4:], columns["pad"][4:] = 32767, 32767
        columns["obs@side"][:] = 77

    served.slot(A, 0, change, generation=4)
    served.service.tend()
    served.ask(A, 0, batch=8)
    served.service.tend()
    assert served.count(A, MessageKind.BATCH) == 1
    with served.replay.lock:
        batch = served.replay.gather.batch(np.array([0]), None)
    assert (batch["next_obs"][0, 3] == 77).all()
    assert (batch["obs"][0, :3] == 77).all()


def test_unchecked_slots_of_local_writers_are_rejected_on_collection() -> None:
    """As from a writer of this host: its rows are counted, and its neighbours are drawn."""
    replay = frame_replay(writers=2)
    lane, writer = replay.table.open_lane()
    faults: list[str] = []

    class Faults(TableListener):
        def on_rejected(self, slot: Slot, fault: str) -> None:
            faults.append(fault)

    replay.table.subscribe(Faults())
    for sequence, side in enumerate([-1, SIDE, -1]):
        slot = replay.table.acquire(writer)
        slot.columns["alive"][...], slot.columns["side"][...] = 1, side
        slot.columns["pad"][...], slot.columns["age"][...] = 0, 0
        for name in ("terminated", "truncated"):
            slot.columns[name][...] = 0
        slot.header["actor"], slot.header["sequence"] = 7, sequence
        slot.header["rows"] = UNROLL
        writer.publish(slot)
    replay.sample(16)
    stats = replay.stats()
    assert faults == [f"column side holds {SIDE} to {SIDE}, and must be -1 to {SIDE - 1}"]
    assert stats["evicted"] == {"invalid": UNROLL * ENVS}
    assert stats["inserted"] == 3 * UNROLL * ENVS == stats["stored"] + UNROLL * ENVS
    replay.table.close_lane(lane, -1)
    replay.close()


# ----------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"count": 65}, "refused"), ({"count": 1 << 63}, "refused"),
        ({"batch": 0}, "refused"), ({"batch": 65}, "refused"),
        ({"batch": (1 << 64) - 1, "count": 64}, "refused"),
        ({"batch": -1}, "meta"), ({"batch": True}, "meta"), ({"batch": "4"}, "meta"),
        ({"batch": 4.0}, "meta"), ({"batch": float("nan")}, "meta"), ({"batch": None}, "meta"),
        ({"stacked": 1}, "meta"), ({"read": 1}, "meta"), ({"read": -1}, "meta"),
        ({"read": (1 << 64) - 1}, "meta"),
    ],
)  # fmt: skip
def test_requests_beyond_the_limits_are_refused(
    serve: Callable[..., Served], changes: dict[str, Any], reason: str
) -> None:
    served = serve()
    fill(served)
    served.ask(A, 5, **changes)
    served.service.tend()
    assert served.service.rejected == {reason: 1}
    assert served.count(A, MessageKind.BATCH) == 0
    if reason == "refused":
        assert "ask for 1 to 64 of 1 to 64" in served.last(A, MessageKind.REFUSE)["error"]


@pytest.mark.parametrize("priority", [np.nan, -1.0, np.inf, 1e300, -0.5])
def test_invalid_priorities_are_refused(serve: Callable[..., Served], priority: float) -> None:
    served = serve(sampler=Prioritized(fast=False))
    fill(served)
    keys = served.replay.sample(4).keys
    before = served.replay.sampler.state_dict()["leaves"]
    frames = [keys.tobytes(), np.array([1.0, 1.0, priority, 1.0]).tobytes()]
    served.say(A, MessageKind.UPDATE, None, 0, frames)
    assert served.service.rejected == {"refused": 1}
    assert "must be a number from 0" in served.last(A, MessageKind.REFUSE)["error"]
    np.testing.assert_array_equal(served.replay.sampler.state_dict()["leaves"], before)


def test_updates_of_unknown_keys_are_ignored_and_counted(serve: Callable[..., Served]) -> None:
    """Of other generations, and of rows that are not there: ignored, and counted."""
    served = serve(sampler=Prioritized(fast=False))
    fill(served)
    before = served.replay.sampler.state_dict()["leaves"]
    sound = int(served.replay.sample(1).keys[0])
    rows = served.replay.table.rows
    keys = np.array([
        -1, -(1 << 63), (1 << 63) - 1, 0xFFFFFFFF, rows, (7 << 32) | rows, sound + (1 << 32),
        sound - (1 << 32), sound | (1 << 62),
    ])  # fmt: skip
    frames = [keys.tobytes(), np.full(len(keys), 1e9).tobytes()]
    served.say(A, MessageKind.UPDATE, None, 0, frames)
    np.testing.assert_array_equal(served.replay.sampler.state_dict()["leaves"], before)
    assert served.replay.stale_updates == len(keys)
    assert served.service.rejected == {}


def test_client_of_another_protocol_version_is_refused(serve: Callable[..., Served]) -> None:
    served = serve()
    others: list[Any] = [None, {}, {"version": 1}, {"version": "2"}, []]
    for meta in others:
        served.say(A, MessageKind.JOIN, meta)
        assert (
            "speaks version 2 of the replay protocol" in served.last(A, MessageKind.REFUSE)["error"]
        )
    assert served.service.figures()["peers"] == 0


# ----------------------------------------------------------------------------- memory


def test_peer_that_does_not_read_gets_at_most_its_credit(
    serve: Callable[..., Served],
) -> None:
    served = serve(limits={"peer_nbytes": 40_000, "answers_nbytes": 100_000})
    fill(served)
    for number in range(64):
        served.ask(A, number, batch=32)
        served.service.tend()
    assert 0 < served.sent_nbytes <= 40_000
    figures = served.service.figures()
    assert figures["unread_nbytes"] == served.sent_nbytes
    answered = served.count(A, MessageKind.BATCH)
    served.ask(A, answered, batch=32, read=0)  # it asks again, and hears why
    assert served.last(A, MessageKind.WAIT)["reason"] == "answers that were sent are unread"
    served.ask(A, 0, count=0, read=answered)
    served.service.tend()
    assert served.count(A, MessageKind.BATCH) == answered + 1


def test_peer_with_false_read_reports_gets_at_most_its_credit(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it does not read waits in the server's socket."""
    served = serve(limits={"peer_nbytes": 40_000, "answers_nbytes": 100_000})
    fill(served)
    served.stuck.add(A)
    for number in range(64):
        served.ask(A, number, batch=32, read=served.count(A, MessageKind.BATCH))
        served.service.tend()
    assert 0 < served.sent_nbytes <= 40_000
    assert served.service.figures()["unread_nbytes"] == served.sent_nbytes
    served.stuck.clear()
    served.service.tend()
    served.service.tend()
    assert served.sent_nbytes > 40_000
    served.stuck.add(A)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    served.service.tend()
    assert served.service.rejected == {"unread": 1}


def test_answers_to_all_peers_stay_within_the_total_limit(serve: Callable[..., Served]) -> None:
    served = serve(limits={"peer_nbytes": 40_000, "answers_nbytes": 100_000})
    fill(served)
    names = [f"p{i}".encode() for i in range(20)]
    for name in names:
        served.join(name)
        for number in range(8):
            served.ask(name, number, batch=32)
    for _ in range(10):
        served.service.tend()
    assert 60_000 < served.sent_nbytes <= 100_000


def test_peer_that_does_not_read_for_long_is_removed(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(limits={"peer_nbytes": 40_000, "answers_nbytes": 40_000})
    fill(served)
    for number in range(4):
        served.ask(A, number, batch=64)
        served.service.tend()
    served.join(B)
    served.ask(B, 0, batch=64)
    served.service.tend()
    assert served.count(B, MessageKind.BATCH) == 0
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 100)
    served.service.tend()
    served.service.tend()
    assert served.service.rejected == {"unread": 1}
    assert served.count(B, MessageKind.BATCH) == 1
    assert served.service.stranded_nbytes > 0  # on the connection, until it is closed
    served.gone.add(A)
    monkeypatch.setattr(time, "monotonic", lambda: now + 110)
    served.service.tend()
    assert served.service.stranded_nbytes == 0


def test_endless_joins_stay_within_the_limit_of_peers(serve: Callable[..., Served]) -> None:
    served = serve(limits={"peers": 8})
    fill(served)
    for i in range(1000):
        told = served.join(f"n{i}".encode())
    assert "8 clients are connected" in told["error"]
    assert served.service.figures()["peers"] == 8
    assert served.service.rejected == {"refused": 993}
    assert len(served.lines) == 1
    served.slot(A, 4)  # those who are in go on
    served.service.tend()
    assert len(served.replay) == 5 * UNROLL * ENVS


def test_slots_that_wait_are_bounded_by_count_and_by_bytes() -> None:
    limiter = RateLimiter(1.0, 8, band=200.0)
    replay = frame_replay(limiter=limiter)
    nbytes = replay.layout.spec.payload_nbytes
    served = Served(replay, limits={"waiting_nbytes": 20 * nbytes})
    names = [f"p{i}".encode() for i in range(8)]
    for name in names:
        served.join(name)
    for sequence in range(30):
        for name in names:
            served.slot(name, sequence)
            served.service.tend()
    figures = served.service.figures()
    assert figures["waiting_nbytes"] <= 20 * nbytes
    assert figures["waiting_nbytes"] > 10 * nbytes
    assert served.service.rejected["busy"] > 0
    assert served.service.rejected["ungranted"] > 30 - WINDOW
    served.close()


@pytest.mark.parametrize(
    ("meta", "frames", "reason"),
    [([b"x" * 2000], 1, "size"), ([], 0, "frames"), ([], 60, "frames")],
)
def test_uncounted_overhead_of_a_waiting_slot_is_small(meta: Any, frames: int, reason: str) -> None:
    """A limiter makes slots wait, and a limit counts the bytes of their frames."""
    replay = frame_replay(limiter=RateLimiter(1.0, 8, band=200.0))
    served = Served(replay)
    served.join(A)
    sequence = 0
    while not served.service.waiting:
        served.slot(A, sequence)
        served.service.tend()
        sequence += 1
    before = served.service.figures()["waiting_nbytes"]
    size = len(replay.layout.spec.blocks) if frames == 1 else frames
    head = Header(
        MessageKind.SLOT,
        run_id=served.run_id,
        spec_hash=replay.layout.spec.hash,
        sequence=sequence,
    )
    served.service.handle(A, [bytes(p) for p in encode(head, meta, [b""] * size)])
    assert served.service.rejected == {reason: 1}
    assert served.service.figures()["waiting_nbytes"] == before
    served.close()


@pytest.mark.parametrize("kind", ["JOIN", "SLOT", "SAMPLE", "UPDATE", "ASK_STATS"])
@pytest.mark.parametrize("count", [1_000, 960_000])
def test_no_meta_of_a_client_takes_more_than_two_milliseconds(
    serve: Callable[..., Served], kind: str, count: int
) -> None:
    served = serve()
    served.join(A)
    head = Header(MessageKind[kind], run_id=served.run_id, spec_hash=served.spec.hash)
    parts = [bytes(part) for part in encode(head, [[]] * count, [b""] * 2 * (kind == "UPDATE"))]
    assert least_ms(lambda: served.service.handle(A, parts)) < 2.0


# ----------------------------------------------------------------------------- coming back


def test_client_rejoins_by_its_token_on_a_new_connection(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    told = served.join(A)
    for sequence in range(3):
        served.slot(A, sequence)
    served.service.tend()
    again = served.join(B, told["token"])
    assert (again["next"], again["kept"], again["sent"]) == (3, 3 * UNROLL * ENVS, 0)
    assert again["token"] == told["token"]
    served.slot(B, 2)  # its answer was lost
    served.slot(B, 3)
    served.slot(A, 4)  # the old connection counts no more
    served.service.tend()
    assert len(served.replay) == 4 * UNROLL * ENVS
    assert served.service.rejected == {"unknown": 1}


def test_another_token_takes_over_no_stream(serve: Callable[..., Served]) -> None:
    served = serve()
    told = served.join(A)
    served.slot(A, 0)
    served.service.tend()
    for i, token in enumerate(["", "0" * 32, told["token"].upper() + "0", told["token"][:-1]]):
        other = served.join(f"x{i}".encode(), token)
        assert (other["next"], other["kept"]) == (0, 0)
        assert other["token"] not in (told["token"], token)
    served.say(b"y", MessageKind.JOIN, {"version": 2, "token": "x" * 65})
    assert served.service.rejected == {"meta": 1}


def test_streams_continue_from_a_snapshot(tmp_path: Any) -> None:
    first = Served(frame_replay())
    told = first.join(A)
    for sequence in range(2):
        first.slot(A, sequence)
    first.service.tend()
    first.replay.save(tmp_path, more=first.service.marks)
    first.slot(A, 2)
    first.service.tend()
    first.close()
    replay = frame_replay()
    marks = replay.restore(tmp_path)
    second = Served(replay, marks=marks)
    again = second.join(A, told["token"])
    assert (again["next"], again["kept"]) == (2, 2 * UNROLL * ENVS)
    assert second.service.marks() == marks
    second.slot(A, 2)
    second.service.tend()
    assert len(replay) == 3 * UNROLL * ENVS
    assert second.service.marks() == {told["token"]: [3, 3 * UNROLL * ENVS]}
    second.close()
