"""Hostile peers at a connector, through grants, decoder, store, queue and batch to the counters.

`PENSTOCK_FUZZ_EXAMPLES=20000 pytest --timeout=0 tests/fuzz` goes on for about an hour; how many
examples a test draws by default is in `mutations.fuzzed`. A failure prints the
`@reproduce_failure` line that repeats it.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostile_world import HONEST, MAX_STEPS, RUN_ID, SPEC, VERSION, World, slot_parts
from mutations import (
    DEEP,
    HEAD_FIELDS,
    Raw,
    bounded,
    changed,
    floats,
    fuzzed,
    mutated,
    nested,
    packed_with,
    signed_parts,
    strange_msgpack,
    unsigned,
)
from penstock.transport import wire
from penstock.transport.wire import Header, MessageKind, WireError

ACTORS = st.sampled_from([1, 2, 8, 2**32, 2**63, 2**64 - 1])
PEERS = st.sampled_from([b"evil", b"worse"])
FIELDS = [name for name in HEAD_FIELDS if name not in ("actor", "run_id", "spec_hash")]


class Attacker(RuleBasedStateMachine):
    """One honest actor, and two peers who send whatever they like under other ids."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.begin()

    def attack(self, peer: bytes, parts: list[bytes]) -> None:
        self.world.hostile_messages += 1
        with bounded():
            self.world.handle(peer, parts)
            self.world.turn()

    def stream(self, actor: int) -> Any:
        return self.world.receiver.grants.streams.get(actor)

    @rule(
        peer=PEERS,
        actor=ACTORS,
        incarnation=unsigned(32),
        sequence=st.just(0) | unsigned(62),
        produced=st.just(0) | unsigned(64),
        want=st.integers(-1, 100) | unsigned(64) | floats,
    )
    def hello(
        self, peer: bytes, actor: int, incarnation: int, sequence: int, produced: int, want: Any
    ) -> None:
        head = Header(
            MessageKind.HELLO,
            actor=actor,
            incarnation=incarnation,
            sequence=sequence,
            produced_steps=produced,
        )
        meta = packed_with({"spec": SPEC.to_dict(), "want": want})
        self.attack(peer, signed_parts(head, meta))

    @rule(data=st.data(), peer=PEERS, actor=ACTORS)
    def strange_hello(self, data: st.DataObject, peer: bytes, actor: int) -> None:
        meta = {"spec": SPEC.to_dict(), "want": 2}
        coded = data.draw(strange_msgpack | changed(meta).map(packed_with))
        self.attack(peer, signed_parts(Header(MessageKind.HELLO, actor=actor), coded))

    @rule(
        kind=st.sampled_from([MessageKind.BEAT, MessageKind.BYE]),
        peer=PEERS,
        actor=ACTORS,
        ahead=st.integers(0, 3) | unsigned(62),
        more=st.integers(0, 50) | unsigned(64),
    )
    def beat_or_bye(
        self, kind: MessageKind, peer: bytes, actor: int, ahead: int, more: int
    ) -> None:
        known = self.stream(actor)
        head = Header(
            kind,
            run_id=RUN_ID,
            actor=actor,
            incarnation=known.incarnation if known else 0,
            sequence=min((known.next if known else 0) + ahead, 2**64 - 1),
            produced_steps=min((known.produced_steps if known else 0) + more, 2**64 - 1),
        )
        self.attack(peer, signed_parts(head, b"\xc0"))

    @rule(data=st.data(), peer=PEERS, actor=ACTORS)
    def slot(self, data: st.DataObject, peer: bytes, actor: int) -> None:
        """A slot that is granted, if any is, with one or two fields or its content changed."""
        known = self.stream(actor)
        sequence, produced = (known.next, known.produced_steps) if known else (0, 0)
        head, meta, frames = slot_parts(
            actor,
            min(sequence, 2**64 - 1),
            min(produced + MAX_STEPS, 2**64 - 1),
            incarnation=known.incarnation if known else 0,
        )
        if data.draw(st.booleans()):
            parts = data.draw(mutated(head, meta, frames, FIELDS))
        else:
            name = data.draw(st.sampled_from(["none", "steps", "version", "duration_s"]))
            if name != "none":
                head = head._replace(**{name: data.draw(HEAD_FIELDS[name])})
            parts = signed_parts(head, packed_with(meta), data.draw(hostile_columns(frames)))
        self.attack(peer, parts)

    @rule(data=st.data(), peer=PEERS)
    def weights_get(self, data: st.DataObject, peer: bytes) -> None:
        have: Any = data.draw(
            st.sampled_from([None, [1, VERSION], [2**64 - 1, -1], "12", {}, *DEEP])
        )
        meta = {"have": have}
        if data.draw(st.booleans()):
            meta["policy_id"] = data.draw(
                st.sampled_from(
                    [0, 1, 2, -1, 2**31, 2**64 - 1, True, 0.0, None, "0", [0], {}, *DEEP]
                )
            )
        if data.draw(st.booleans()):
            sound = {"port": 7, "key": "", "failed": ""}
            meta["relay"] = data.draw(
                st.sampled_from([sound, {}, None, [], "", {"port": None}, *DEEP]) | changed(sound)
            )
        head = Header(MessageKind.WEIGHTS_GET, run_id=RUN_ID)
        self.attack(peer, signed_parts(head, packed_with(meta)))

    @rule(
        data=st.data(),
        peer=PEERS,
        kind=st.sampled_from(MessageKind),
        run=st.sampled_from([0, RUN_ID]),
    )
    def anything(self, data: st.DataObject, peer: bytes, kind: MessageKind, run: int) -> None:
        head = Header(kind, spec_hash=SPEC.hash, run_id=run, actor=data.draw(ACTORS))
        frames = data.draw(st.lists(st.binary(max_size=16), max_size=3))
        self.attack(peer, data.draw(mutated(head, {"spec": None, "want": 1}, frames, FIELDS)))

    @rule(peer=PEERS, parts=st.lists(st.binary(max_size=140), max_size=4))
    def noise(self, peer: bytes, parts: list[bytes]) -> None:
        self.attack(peer, parts)

    @rule()
    def honest_slot(self) -> None:
        self.world.send()
        self.world.turn()

    @rule()
    def honest_beat(self) -> None:
        self.world.beat()

    @precondition(lambda self: self.world.receiver.grants.ended)
    @rule()
    def report(self) -> None:
        self.world.report()

    @invariant()
    def holds(self) -> None:
        self.world.check()
        assert HONEST in self.world.receiver.grants.streams

    def teardown(self) -> None:
        with self.world:
            self.world.settle()


@st.composite
def hostile_columns(draw: st.DrawFn, frames: list[bytes]) -> list[bytes]:
    """Frames in which some cells of a column are strange: what `process` and the learner see."""
    payload = [np.frombuffer(frame, np.uint8).copy() for frame in frames]
    columns = SPEC.views(payload)
    for name in draw(st.lists(st.sampled_from(sorted(columns)), min_size=1, max_size=3)):
        column = columns[name]
        item = column.dtype.itemsize
        if column.dtype.kind == "f":
            strange = np.float64(draw(floats | st.sampled_from([1e8, 3e38]))).astype(column.dtype)
        else:
            byte = st.sampled_from([b"\xff", b"\x00", b"\x7f", b"\x80", b"\x01"])
            many = byte.map(lambda b: b * item)  # noqa: B023
            cell = draw(many | st.binary(min_size=item, max_size=item))
            strange = np.frombuffer(cell, column.dtype)[0]
        where = tuple(draw(st.integers(0, n - 1)) for n in column.shape)
        if draw(st.booleans()):
            column[where] = strange
        else:
            column[...] = strange
    return [block.tobytes() for block in payload]


TestAttacker = pytest.mark.filterwarnings("ignore::RuntimeWarning")(Attacker.TestCase)
TestAttacker.settings = fuzzed(cost=2, stateful_step_count=30)


def test_a_hello_of_nested_lists_is_refused() -> None:
    """It is too deep to be shown in a refusal."""
    with World() as world:
        world.begin()
        spec = {**SPEC.to_dict(), "columns": [["obs", "|u1", Raw(nested(990)), "unroll"]]}
        parts = signed_parts(
            Header(MessageKind.HELLO, actor=1), packed_with({"spec": spec, "want": 1})
        )
        world.handle(b"evil", parts)
        assert world.receiver.rejected.total() == 1
        world.settle()


@pytest.mark.parametrize("duration_s", [1e5, 1e300, 1e305, 1.7e308])
def test_slot_with_extreme_times_does_not_end_the_learner(duration_s: float) -> None:
    """Nor does it move the start of the run, by which `stop.minutes` counts."""
    with World() as world:
        world.begin()
        head, meta, frames = slot_parts(1, 0, MAX_STEPS, duration_s=duration_s)
        hello = packed_with({"spec": SPEC.to_dict(), "want": 1})
        world.handle(b"evil", signed_parts(Header(MessageKind.HELLO, actor=1), hello))
        for _ in range(2):
            world.turn()
        world.hostile_messages += 1
        world.handle(b"evil", signed_parts(head, packed_with(meta), frames))
        world.turn()
        world.check()


@pytest.mark.parametrize("meta", [b"\xdd\x00\x10\x00\x00" * 1000, b"\xdf\x00\x10\x00\x00" * 1000])
def test_short_message_is_handled_in_bounded_time(meta: bytes) -> None:
    """Five kilobytes that announce a thousand lists of a million elements each."""
    message = wire.decode(signed_parts(Header(MessageKind.HELLO), meta))
    began_s = time.process_time()
    with pytest.raises(WireError):
        wire.verify(message)
    assert time.process_time() - began_s < 0.02
