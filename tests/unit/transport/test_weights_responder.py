"""Which peer is sent weights, and when."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pytest

from penstock.core.interfaces import Welcome
from penstock.core.params import ParamLayout, Stamp
from penstock.core.specs import Column, SlotSpec
from penstock.transport import wire
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.zmq import relay
from penstock.transport.zmq.relay import ARRIVAL_S, HeldCopies, WeightsResponder
from penstock.transport.zmq.sockets import SENT, IsReleased

LAYOUT = ParamLayout((("w", (3,)),))
WELCOME = Welcome(1, 0, SlotSpec(2, 1, (Column("obs", "|u1"),)), LAYOUT, {})


@pytest.fixture
def board() -> Iterator[WeightsBoard]:
    made = WeightsBoard.create(LAYOUT.size)
    yield made
    made.close()


def publish(board: WeightsBoard, version: int) -> Stamp:
    stamp = Stamp(0, version)
    board.publish(np.full(LAYOUT.size, version, np.float32), stamp)
    return stamp


def given(
    desk: WeightsResponder, now_s: float = 0.0, stuck: Collection[bytes] = ()
) -> dict[bytes, int]:
    """Versions by peer, which the weights themselves confirm. The socket holds copies to ``stuck``
    peers."""
    versions: dict[bytes, int] = {}

    def send(peer: bytes, parts: Sequence[wire.Buffer]) -> tuple[int, IsReleased]:
        message = wire.decode(parts)
        assert peer not in versions
        versions[peer] = message.head.version
        weights = wire.to_float32(wire.decode_weights(message, LAYOUT)[1])
        np.testing.assert_array_equal(weights, message.head.version)
        return SENT, lambda: peer not in stuck

    desk.serve(now_s, send)
    return versions


def test_each_peer_gets_every_newer_version_once(board: WeightsBoard) -> None:
    desk = WeightsResponder(board, WELCOME, "fp32")
    assert not desk.on_request(b"early", None)
    assert given(desk) == {}
    first = publish(board, 1)
    assert given(desk) == {b"early": 1}
    assert given(desk) == {}
    assert not desk.on_request(b"early", first)
    assert not desk.on_request(b"late", None)
    assert given(desk) == {b"late": 1}
    assert given(desk) == {}
    publish(board, 2)
    publish(board, 3)
    assert given(desk) == {b"early": 3}
    assert given(desk) == {}


def test_waiting_peer_that_asks_again_is_answered_once(board: WeightsBoard) -> None:
    desk = WeightsResponder(board, WELCOME, "bf16")
    first = publish(board, 1)
    assert [desk.on_request(b"peer", first) for _ in range(2)] == [False, True]
    assert given(desk) == {}
    assert desk.on_request(b"peer", first)  # still waits, after it was looked at
    publish(board, 2)
    assert given(desk) == {b"peer": 2}
    assert not desk.on_request(b"peer", first)  # it never came
    assert given(desk, ARRIVAL_S) == {b"peer": 2}


def test_a_slow_link_gets_one_copy_at_a_time(board: WeightsBoard) -> None:
    desk = WeightsResponder(board, WELCOME, "fp32")
    first = publish(board, 1)
    desk.on_request(b"slow", None)
    assert given(desk, 0.0) == {b"slow": 1}
    for second in range(1, 9):  # it takes that long to arrive
        publish(board, 1 + second)
        desk.on_request(b"slow", None)
        desk.on_request(b"fast", Stamp(0, second))
        assert given(desk, float(second)) == {b"fast": 1 + second}
    desk.on_request(b"slow", first)
    assert given(desk, 9.0) == {b"slow": 9}


def test_peer_with_an_unsent_copy_is_sent_no_other(
    board: WeightsBoard,
) -> None:
    desk = WeightsResponder(board, WELCOME, "fp32")
    stuck = {b"liar"}
    desk.on_request(b"liar", publish(board, 1)._replace(version=0))
    assert given(desk, stuck=stuck) == {b"liar": 1}
    for version in range(2, 9):
        desk.on_request(b"liar", Stamp(0, version - 1))
        publish(board, version)
        assert given(desk, version * ARRIVAL_S, stuck) == {}
    stuck.clear()
    assert given(desk, 8 * ARRIVAL_S) == {b"liar": 8}, "as soon as the socket has released it"


def test_host_whose_connections_read_nothing_gets_few_copies_and_others_all(
    board: WeightsBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "HOST_NBYTES", 3 * 4 * LAYOUT.size)
    desk = WeightsResponder(board, WELCOME, "fp32")
    silent = [b"%d" % number for number in range(10)]
    for version, peer in enumerate(silent, 1):
        publish(board, version)
        desk.on_request(peer, None, "10.0.0.66")
        desk.on_request(b"honest", Stamp(0, version - 1), "10.0.0.7")
        sent = given(desk, float(version), silent)
        assert sent == {b"honest": version} | ({peer: version} if version <= 4 else {})


def test_own_weights_come_before_those_of_chairs_and_each_peer_has_one_copy_at_a_time(
    board: WeightsBoard,
) -> None:
    chairs = [WeightsBoard.create(LAYOUT.size, policy_id=policy_id) for policy_id in (1, 2)]
    held = HeldCopies()
    own, *others = [WeightsResponder(each, WELCOME, "fp32", held=held) for each in (board, *chairs)]
    for chair in chairs:
        chair.publish(np.full(LAYOUT.size, 5, np.float32), Stamp(0, 5), chair.policy_id)

    stuck = {b"slow"}
    for desk in (own, *others):
        desk.on_request(b"slow", None)
        desk.on_request(b"fast", None)
    publish(board, 1)
    assert given(own, stuck=stuck) == {b"slow": 1, b"fast": 1}
    assert [given(desk, stuck=stuck) for desk in others] == [{b"fast": 5}] * 2
    assert [given(desk, stuck=stuck) for desk in (own, *others)] == [{}] * 3

    stuck.clear()  # the socket has sent the own copy
    assert given(others[0], stuck={b"slow"}) == {b"slow": 5}
    assert given(others[1]) == {}, "until the socket has sent the first chair's"
    for chair in chairs:
        chair.close()


def test_a_chair_has_its_turn_while_own_weights_are_on_their_way(board: WeightsBoard) -> None:
    """A peer does not request the next version before the last one has arrived."""
    chair = WeightsBoard.create(LAYOUT.size, policy_id=1)
    held = HeldCopies()
    own = WeightsResponder(board, WELCOME, "fp32", held=held)
    other = WeightsResponder(chair, WELCOME, "fp32", held=held)
    chair.publish(np.full(LAYOUT.size, 7, np.float32), Stamp(0, 7), 1)
    own.on_request(b"peer", None)
    other.on_request(b"peer", None)
    publish(board, 1)
    assert given(own) == {b"peer": 1}
    publish(board, 2)
    own.on_request(b"peer", None)  # repeated, as after a second
    assert given(own, 1.0) == {}
    assert given(other, 1.0) == {b"peer": 7}
    chair.close()


def test_statistics_of_observations_arrive_exactly(board: WeightsBoard) -> None:
    """With 8 bits of 10000 a value of 10003 would be 19 away from its mean; with the statistics
    everything is sent as fp32."""
    layout = ParamLayout((("w", (1,)), ("normalizer.mean", (2,))))
    values = np.array([1 / 3, 10_000, -0.123], np.float32)
    board.publish(values, Stamp(0, 1))
    desk = WeightsResponder(board, Welcome(1, 0, WELCOME.spec, layout, {}), "bf16")
    desk.on_request(b"peer", None)
    answers: list[Sequence[wire.Buffer]] = []

    def send(_: bytes, parts: Sequence[wire.Buffer]) -> tuple[int, IsReleased]:
        answers.append(parts)
        return SENT, lambda: True

    desk.serve(0.0, send)
    _, sent = wire.decode_weights(wire.decode(answers[0]), layout)
    np.testing.assert_array_equal(wire.to_float32(sent), values)


def test_stamp_of_an_earlier_learner_does_not_count_as_newest(board: WeightsBoard) -> None:
    desk = WeightsResponder(board, WELCOME, "fp32")
    publish(board, 1)
    desk.on_request(b"peer", Stamp(0, 9))
    assert given(desk) == {b"peer": 1}
