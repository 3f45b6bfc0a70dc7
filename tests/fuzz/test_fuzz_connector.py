"""Hostile peers at a connector, through grants, decoder, store, queue and batch to the counters.

`PENSTOCK_FUZZ_EXAMPLES=20000 pytest --timeout=0 tests/fuzz` goes on for about an hour; how many
examples a test draws by default is in `mutations.fuzzed`. A failure prints the
`@reproduce_failure` line that repeats it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hostile_world import HONEST, MAX_STEPS, RUN_ID, SPEC, VERSION, World, slot_parts
from mutations import (
    DEEP,
    HEAD_FIELDS,
    bounded,
    changed,
    floats,
    fuzzed,
    mutated,
    packed_with,
    signed_parts,
    strange_msgpack,
    unsigned,
)
from penstock.transport.wire import Head, Kind

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
        head = Head(
            Kind.HELLO,
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
        self.attack(peer, signed_parts(Head(Kind.HELLO, actor=actor), coded))

    @rule(
        kind=st.sampled_from([Kind.BEAT, Kind.BYE]),
        peer=PEERS,
        actor=ACTORS,
        ahead=st.integers(0, 3) | unsigned(62),
        more=st.integers(0, 50) | unsigned(64),
    )
    def beat_or_bye(self, kind: Kind, peer: bytes, actor: int, ahead: int, more: int) -> None:
        known = self.stream(actor)
        head = Head(
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
            coded, raw = data.draw(hostile_columns(frames))
            parts = signed_parts(head, packed_with([["raw", len(r)] for r in raw]) or coded, raw)
        self.attack(peer, parts)

    @rule(data=st.data(), peer=PEERS)
    def weights_get(self, data: st.DataObject, peer: bytes) -> None:
        have = data.draw(st.sampled_from([None, [1, VERSION], [2**64 - 1, -1], "12", {}, *DEEP]))
        head = Head(Kind.WEIGHTS_GET, run_id=RUN_ID)
        self.attack(peer, signed_parts(head, packed_with({"have": have})))

    @rule(data=st.data(), peer=PEERS, kind=st.sampled_from(Kind), run=st.sampled_from([0, RUN_ID]))
    def anything(self, data: st.DataObject, peer: bytes, kind: Kind, run: int) -> None:
        head = Head(kind, spec_hash=SPEC.hash, run_id=run, actor=data.draw(ACTORS))
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
def hostile_columns(draw: st.DrawFn, frames: list[bytes]) -> tuple[bytes, list[bytes]]:
    """Frames in which some cells of a column are strange: what `process` and the learner see."""
    import numpy as np

    payload = [np.frombuffer(frame, np.uint8).copy() for frame in frames]
    columns = SPEC.views(payload)
    for name in draw(st.lists(st.sampled_from(sorted(columns)), min_size=1, max_size=3)):
        column = columns[name]
        item = column.dtype.itemsize
        cell = draw(
            st.sampled_from([b"\xff", b"\x00", b"\x7f", b"\x80", b"\x01"]).map(lambda b: b * item)
            | st.binary(min_size=item, max_size=item)
            | floats.map(
                lambda f: (
                    np.float64(f)
                    .astype(np.float32, casting="unsafe")
                    .tobytes()[:item]
                    .ljust(item, b"\0")
                )
            )
        )
        strange = np.frombuffer(cell, column.dtype)[0]
        where = tuple(draw(st.integers(0, n - 1)) for n in column.shape)
        if draw(st.booleans()):
            column[where] = strange
        else:
            column[...] = strange
    return b"", [block.tobytes() for block in payload]


TestAttacker = Attacker.TestCase
TestAttacker.settings = fuzzed(cost=2, stateful_step_count=30)
TestAttacker.pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
