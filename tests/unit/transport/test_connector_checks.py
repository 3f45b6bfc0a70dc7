"""Well-formed slots that a connector refuses, and bounds of its counters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import __version__
from penstock.core.params import Stamp
from penstock.core.specs import Column, SlotSpec
from penstock.learner.role import StreamTracker
from penstock.profiling.status import StatusPage
from penstock.replay import Accounting
from penstock.transport import wire
from penstock.transport.shm.link import ShmLink
from penstock.transport.wire import Header, MessageKind
from penstock.transport.zmq import connector as room
from penstock.transport.zmq.receiver import MAX_RELEASES, ActorShare, Receiver
from penstock.transport.zmq.sockets import SENT
from transport_world import RUN_ID, Learner, context, learner, reports
from waiting import wait_until

FLAGS = ("terminated", "truncated", "alive")
SPEC = SlotSpec(4, 2, tuple(Column(name, "|b1") for name in FLAGS))
RECORD = SPEC.blocks[0].dtype


@pytest.fixture
def far_side(tmp_path: Path) -> Iterator[tuple[Learner, Receiver]]:
    """A connector that is driven by hand, with an actor 5 that may send."""
    with learner(tmp_path, spec=SPEC) as side:
        link = ShmLink(side.path, None, want=0, lane=True)
        receiver = Receiver(link, f"ipc://{tmp_path}/wire", side.path)
        receiver._send = lambda *_, **__: (SENT, lambda: True)  # type: ignore[method-assign]
        say(receiver, MessageKind.HELLO, {"spec": None, "want": 8})
        wait_until(lambda: bool(receiver.turn(0) or receiver.grants.outstanding >= 8))
        yield side, receiver
        receiver.close()
        link.close()


def say(receiver: Receiver, kind: MessageKind, meta: Any = None, **fields: int) -> None:
    head = Header(kind, run_id=RUN_ID, spec_hash=SPEC.hash, actor=5)._replace(**fields)
    receiver.handle(b"peer", [bytes(part) for part in wire.encode(head, meta)])


def send(
    receiver: Receiver,
    sequence: int,
    *,
    over: tuple[int, int] | None = None,
    dead: tuple[tuple[int, int], ...] = (),
    steps: int | None = None,
    **fields: int,
) -> None:
    """A slot whose rows are alive but those of ``dead``; an episode ends with row ``over``."""
    rows = np.zeros((4, 2), RECORD)
    rows["alive"] = True
    for at in dead:
        rows["alive"][at] = False
    if over is not None:
        rows["terminated"][over] = True
    counted = int(np.count_nonzero(rows["alive"])) if steps is None else steps
    raw = rows.tobytes()
    head = Header(MessageKind.SLOT, run_id=RUN_ID, spec_hash=SPEC.hash, actor=5, sequence=sequence)
    made = receiver.grants.streams[5].produced_steps + counted
    head = head._replace(steps=counted, produced_steps=made, raw_nbytes=len(raw), **fields)
    parts = wire.encode(head, [["raw", len(raw)]], [raw])
    receiver.handle(b"peer", [bytes(part) for part in parts])


@pytest.mark.parametrize("steps", [0, 6, 8])
def test_steps_are_the_alive_rows(far_side: tuple[Learner, Receiver], steps: int) -> None:
    side, receiver = far_side
    send(receiver, 0, dead=((1, 0),), steps=steps)
    assert receiver.rejected == {"steps": 1}
    send(receiver, 0, over=(0, 0), dead=((1, 0),))
    assert side.take().header["steps"] == 7


def test_a_row_that_only_resets_is_not_alive(far_side: tuple[Learner, Receiver]) -> None:
    side, receiver = far_side
    send(receiver, 0, over=(1, 1))
    assert receiver.rejected == {"alive": 1}
    send(receiver, 0, over=(3, 0))
    send(receiver, 1)  # its first row follows the end of an episode
    assert receiver.rejected == {"alive": 2}
    send(receiver, 1, dead=((0, 0),))
    assert [side.take().header["sequence"] for _ in range(2)] == [0, 1]
    assert receiver.received["steps"] == 8 + 7


@pytest.mark.parametrize(
    ("generation", "version", "is_taken"),
    [(2, 10, True), (1, 10, True), (1, 11, True), (2, 11, False), (2, 1010, False), (3, 0, False)],
)
def test_slot_by_unpublished_weights_is_refused(
    far_side: tuple[Learner, Receiver], generation: int, version: int, is_taken: bool
) -> None:
    side, receiver = far_side
    side.publish(10)
    send(receiver, 0, generation=generation, version=version)
    assert receiver.rejected == ({} if is_taken else {"policy": 1})
    side.board.publish(np.zeros(18, np.float32), Stamp(3, 2000))
    send(receiver, 1, generation=generation, version=version)
    assert side.take().header["version"] == version


@pytest.mark.parametrize("produced", [2**64 - 1, 2**62 - 1, 2**40])
def test_false_counters_in_a_goodbye_are_ignored(
    far_side: tuple[Learner, Receiver], tmp_path: Path, produced: int
) -> None:
    """The learner died of it: its status page holds 64-bit integers."""
    side, receiver = far_side
    send(receiver, 0)
    accounting = Accounting(slot_steps=8)
    others = StreamTracker(accounting)
    taken = np.zeros((), [(name, "<u8") for name in side.take().header])
    for name, value in {"actor": 5, "steps": 8, "produced_steps": 8}.items():
        taken[name] = value
    accounting.arrived(taken)
    say(receiver, MessageKind.BYE, sequence=1, produced_steps=produced)
    say(receiver, MessageKind.BEAT, sequence=2**61, produced_steps=8)
    assert set(receiver.rejected) <= {"header", "steps", "ungranted"}
    assert receiver.rejected.total() == 2
    receiver.grants.end_all()
    ctx = context(tmp_path, "connector")
    room._report(ctx, receiver)
    others.handle_messages(reports(ctx, "connector"))
    others.close_streams(everything_arrived=True)
    assert accounting.to_dict(8) | {"trained": 0} == {
        "produced": 8, "trained": 0, "dropped": {}, "lost": {}, "in_flight": 8,
    }  # fmt: skip


def test_refused_messages_are_reported_once_per_reason(
    far_side: tuple[Learner, Receiver], tmp_path: Path
) -> None:
    _, receiver = far_side
    ctx = context(tmp_path, "connector")
    refusals = room.Refusals(ctx, receiver)
    for version in (1, 2):
        send(receiver, 0, steps=3 + version)
    receiver.handle(b"peer", [b"?"])
    refusals.report()
    refusals.report()
    assert [(m["event"], m["text"], m["data"]) for m in reports(ctx, "event")] == [
        (
            "rejected",
            "connector-0 refused messages: steps",
            {"reason": "steps", "count": 2, "last": "8 rows are alive, not 5"},
        ),
        (
            "rejected",
            "connector-0 refused messages: frames",
            {"reason": "frames", "count": 1, "last": "1 parts"},
        ),
    ]


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 10**30, -(2**63) - 1])
def test_status_page_clamps_out_of_range_values(value: int) -> None:
    page, _ = StatusPage.create()
    page.produced_steps = value
    assert page.produced_steps == (2**63 - 1 if value > 0 else -(2**63))
    page.produced_steps = 5
    assert page.produced_steps == 5
    page.close()


def test_actors_are_assigned_to_connectors_by_id() -> None:
    """Those of a run by index, which learners take in turn; others by a random number and index."""
    share = ActorShare(("a", "b"), 0, learners=2)
    assert [share.connector(actor) for actor in (0, 2, 4, 6)] == [0, 1, 0, 1]
    assert [share.connector(actor) for actor in (1, 3, 5, 7)] == [0, 1, 0, 1]
    assert [share.connector(5 << 16 | index) for index in range(4)] == [1, 0, 1, 0]
    assert [share.connector(group << 16) for group in range(1, 5)] == [1, 0, 1, 0]
    assert {ActorShare(("a",), 0).connector(actor) for actor in range(9)} == {0}


def test_other_releases_of_actors_are_reported_once_up_to_a_limit(
    far_side: tuple[Learner, Receiver], tmp_path: Path
) -> None:
    _, receiver = far_side
    ctx = context(tmp_path, "connector")
    refusals = room.Refusals(ctx, receiver)
    for release in ("9.0", "9.0", __version__, "bad\n"):
        hello = {"spec": None, "want": 0, "release": release}
        receiver.handle(b"peer", wire.encode(Header(MessageKind.HELLO), hello))
    refusals.report()
    refusals.report()
    assert [(m["event"], m["text"]) for m in reports(ctx, "event")] == [
        (
            "note",
            f"an actor has Penstock 9.0, and the learner {__version__}; if it cannot play, use the "
            "same release on both sides",
        )
    ]
    for i in range(100):
        hello = {"spec": None, "want": 0, "release": f"9.{i}"}
        receiver.handle(b"peer", wire.encode(Header(MessageKind.HELLO), hello))
    assert len(receiver.other_releases) == MAX_RELEASES
