"""An actor written from docs/protocol.md alone, against a real connector."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from penstock.transport.zmq.receiver import Receiver
from stranger import BEAT, GRANT, WEIGHTS, WEIGHTS_GET, WHO, Stranger, json_hash
from transport_world import (
    LAYOUT,
    RUN_ID,
    SPEC,
    Learner,
    connector,
    expected,
    learner,
)
from waiting import wait_until


@pytest.fixture
def far_side(tmp_path: Path) -> Iterator[tuple[Learner, Receiver, str]]:
    address = f"ipc://{tmp_path}/wire"
    with ExitStack() as stack:
        side = stack.enter_context(learner(tmp_path))
        yield side, stack.enter_context(connector(side, address)), address


def test_actor_written_from_the_page_trains_with_the_learner(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    side, receiver, address = far_side
    sent_weights = side.publish(17)
    stranger = Stranger(address)
    told = stranger.join(None)
    assert told["spec"] == json.loads(json.dumps(SPEC.to_dict()))
    assert told["config"] == {"env": {"id": "Test-v0"}}
    observations, actions = told["spaces"]
    assert [key for key, _ in observations["Dict"]] == ["seen", "speed"]
    assert observations["Dict"][1][1]["Box"] == [[-math.inf, 0.0], 9.5, [2], "<f4"]
    assert actions == {"Discrete": [3, 1]}
    assert (stranger.run_id, stranger.spec_hash) == (RUN_ID, json_hash(told["spec"]))

    stamp, weights = stranger.weights(None)
    assert stamp == [2, 17]
    np.testing.assert_array_equal(weights, sent_weights)
    assert weights.size == sum(math.prod(shape) for _, shape in told["layout"])

    for sequence in range(12):
        stranger.send_slot(expected(sequence), steps=12)
    for sequence in range(12):
        taken = side.take()
        assert taken.header["sequence"] == sequence
        assert taken.header["actor"] == 4711
        assert taken.header["version"] == 17
        assert (taken.header["steps"], taken.header["produced_steps"]) == (12, 12 * sequence + 12)
        for name, values in expected(sequence).items():
            np.testing.assert_array_equal(taken.columns[name], values, err_msg=name)
    stranger.leave()
    wait_until(lambda: not receiver.grants.streams)
    assert [stream.final_counters() for stream in receiver.grants.ended] == [
        {"actor": 4711, "incarnation": 0, "produced_steps": 144, "sequence": 12}
    ]
    assert receiver.rejected == {}


def test_actor_with_an_equal_spec_gets_each_new_version_of_weights(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    side, _, address = far_side
    stranger = Stranger(address)
    stranger.join(json.loads(json.dumps(SPEC.to_dict())))
    side.publish(1)
    stamp, _ = stranger.weights(None)
    stranger.say(WEIGHTS_GET, {"have": stamp})
    time.sleep(0.05)
    assert not stranger.socket.poll(50) or stranger.hear(GRANT)
    side.publish(2)
    fields, _, (payload,) = stranger.hear(WEIGHTS)
    assert (fields["generation"], fields["version"]) == (2, 2)
    assert len(payload) == LAYOUT.size * 2
    assert fields["spec_hash"] == json_hash([[n, list(s)] for n, s in LAYOUT.entries])
    stranger.leave()


def test_actor_with_another_spec_is_refused_with_the_difference(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    _, _, address = far_side
    stranger = Stranger(address)
    other = json.loads(json.dumps(SPEC.to_dict())) | {"unroll": 5}
    with pytest.raises(PermissionError, match="unroll: learner 4, actor 5"):
        stranger.join(other)
    stranger.close()


def test_actor_without_a_hello_is_asked_for_one(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    side, receiver, address = far_side
    stranger = Stranger(address)
    stranger.run_id = RUN_ID
    stranger.say(BEAT, sequence=5)
    fields, _, _ = stranger.hear(WHO)
    assert fields["run_id"] == RUN_ID
    stranger.sequence, stranger.produced_steps = 5, 60  # as after a restart of the connector
    stranger.join(None)
    stranger.send_slot(expected(5), steps=12)
    assert side.take().header["sequence"] == 5
    assert receiver.rejected == {"unknown": 1}
    stranger.leave()


def test_beats_of_an_actor_are_answered_by_grants_and_checked(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    side, receiver, address = far_side
    stranger = Stranger(address)
    stranger.join(None)
    for sequence in range(3):
        stranger.send_slot(expected(sequence), steps=12)
        stranger.say(BEAT, sequence=stranger.sequence, produced_steps=stranger.produced_steps)
        fields, _, _ = stranger.hear(GRANT)
        assert fields["sequence"] >= stranger.sequence
    stranger.say(BEAT, sequence=99, produced_steps=stranger.produced_steps)
    wait_until(lambda: receiver.rejected == {"ungranted": 1})
    assert [side.take().header["sequence"] for _ in range(3)] == [0, 1, 2]
    stranger.leave()


def test_actor_of_another_run_gets_the_id_of_this_run(
    far_side: tuple[Learner, Receiver, str],
) -> None:
    _, receiver, address = far_side
    stranger = Stranger(address)
    stranger.run_id = RUN_ID - 1
    stranger.say(WEIGHTS_GET, {"have": None})
    fields, _, _ = stranger.hear(WHO)
    assert fields["run_id"] == RUN_ID
    assert receiver.rejected == {"run": 1}
    stranger.close()
