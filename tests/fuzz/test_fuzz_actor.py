"""Fuzz tests of an actor and a relay with a hostile learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hostile_world import CHAIRS, CONFIG, LAYOUT, RUN_ID, SPEC
from mutations import (
    DEEP,
    HEAD_FIELDS,
    bounded,
    changed,
    fuzzed,
    mutated,
    packed_with,
    signed_parts,
    strange_msgpack,
    unsigned,
)
from penstock.actors.join import find_learner
from penstock.configs.errors import UserError
from penstock.core.interfaces import LearnerGoneError, UnknownPolicyError
from penstock.core.params import Stamp
from penstock.transport import wire
from penstock.transport.shm.arena import Arena
from penstock.transport.shm.store import Geometry
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.wire import Header, MessageKind, SlotEncoder
from penstock.transport.zmq import link as link_module
from penstock.transport.zmq import sockets
from penstock.transport.zmq.client import Client
from transport_world import context

REFUSED = (UserError, LearnerGoneError, UnknownPolicyError)
META: dict[str, Any] = {
    "spec": SPEC.to_dict(),
    "layout": LAYOUT.to_list(),
    "chairs": CHAIRS,
    "config": CONFIG.model_dump(mode="json"),
    "boot_id": "0",
    "unix_path": "/nowhere",
    "error": "no",
}
WELCOME = Header(MessageKind.WELCOME, spec_hash=SPEC.hash, run_id=RUN_ID, generation=1)
NAMES = ["kind", "run_id", "generation", "version", "sequence", "spec_hash", "actor"]
HUGE = [
    {**META, "layout": [["w", [2**31, 2**31]]]},
    {**META, "layout": [["w", [-5]], ["v", [2]]]},
    {**META, "spec": {**SPEC.to_dict(), "unroll": 2**40}},
    {**META, "spec": {**SPEC.to_dict(), "envs": 2**62}},
    {**META, "config": None},
    {**META, "config": {}},
    {**META, "unix_path": 5},
    *({**META, "layout": deep} for deep in DEEP),
    *({**META, "config": deep} for deep in DEEP),
]


class LocalClient:
    """A client whose socket gives what a test puts into it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, want: int) -> None:
        self.coming: list[list[bytes]] = []
        patch.setattr(sockets, "receive", lambda _: self.coming.pop() if self.coming else None)
        self.client = Client(context(folder), "ipc:///nowhere/socket", want=want)

    def take(self, parts: list[bytes]) -> None:
        self.coming.append(parts)
        self.client.pump(0)


def build(client: Client) -> None:
    """What an actor and a relay make of a welcome."""
    welcome = client.welcome
    for policy_id in range(1 + welcome.chairs):
        board = WeightsBoard.create(welcome.layout.size, policy_id=policy_id)
        board.close()
    geometry = Geometry(welcome.spec, slots=1, lanes=0)
    slot = geometry.slot(Arena.private(geometry.nbytes), 0)
    SlotEncoder(welcome.spec, "none").encode(slot.header, slot.payload, welcome.run_id)


@fuzzed(cost=1)
@given(data=st.data())
def test_an_actor_survives_any_learner(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        local = LocalClient(folder, patch, 0)
        client = local.client
        board = WeightsBoard.create(LAYOUT.size, shared=False)
        out = np.empty(LAYOUT.size, np.float32)
        try:
            if data.draw(st.booleans()):
                local.take(signed_parts(WELCOME, packed_with(META)))
            for _ in range(data.draw(st.integers(1, 5))):
                parts = _message(local, data)
                with bounded():
                    local.take(parts)
                    policy_id = data.draw(st.integers(0, CHAIRS + 1))
                    fresh = None
                    if hasattr(client, "welcome"):
                        fresh = client.take_weights(policy_id)
                    client.take_weights_at(policy_id)
                    if fresh is not None:
                        board.publish(fresh[1], fresh[0])
                        board.read(out)
                assert client.stream.next <= client.stream.limit
        except REFUSED:
            pass  # a typed refusal
        finally:
            client.close()
            board.close()


def _message(local: LocalClient, data: st.DataObject) -> list[bytes]:
    kinds = st.sampled_from(
        [
            MessageKind.WELCOME,
            MessageKind.REFUSE,
            MessageKind.GRANT,
            MessageKind.WHO,
            MessageKind.WEIGHTS,
            MessageKind.WEIGHTS_AT,
        ]
    )
    head = WELCOME._replace(kind=data.draw(kinds | st.sampled_from(MessageKind)))
    meta: Any = META
    frames: list[bytes] = []
    if head.kind == MessageKind.WEIGHTS:
        dtype = data.draw(st.sampled_from(["fp32", "bf16"]))
        policy_id = data.draw(st.integers(0, CHAIRS + 1))
        local.client.ask_weights(None, policy_id)
        meta = {"dtype": dtype} | wire.policy_meta(policy_id)
        frames = [bytes(LAYOUT.size * (4 if dtype == "fp32" else 2))]
        head = head._replace(spec_hash=LAYOUT.hash)
        if data.draw(st.booleans()):
            head = head._replace(
                version=data.draw(unsigned(64)), generation=data.draw(HEAD_FIELDS["generation"])
            )
            return signed_parts(head, packed_with(meta), frames)
    if head.kind == MessageKind.WEIGHTS_AT:
        local.client.ask_weights(None, offer=wire.RelayOffer(None))
        meta = {"address": "tcp://10.0.0.9:7", "key": "", "sha256": "0" * 64, "depth": 1}
    how = data.draw(st.integers(0, 2))
    if how == 0:
        return data.draw(mutated(head, meta, frames, NAMES))
    if how == 1:
        return signed_parts(head, data.draw(strange_msgpack), frames)
    return signed_parts(head, packed_with(data.draw(changed(meta))), frames)


@fuzzed(cost=1)
@given(meta=changed(META))
@example(meta=HUGE[0])
@example(meta=HUGE[1])
@example(meta=HUGE[2])
@example(meta=HUGE[3])
@example(meta=HUGE[4])
@example(meta=HUGE[5])
@example(meta=HUGE[6])
@example(meta=HUGE[7])
@example(meta=HUGE[10])
@example(meta=HUGE[11])
@example(meta=HUGE[14])
def test_a_welcome_builds_an_actor_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, meta: dict[str, Any]
) -> None:
    """Nothing that cannot be built is taken for a welcome: an actor goes on waiting."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        local = LocalClient(folder, patch, 0)
        try:
            with bounded():
                local.take(signed_parts(WELCOME, packed_with(meta)))
                if hasattr(local.client, "welcome"):
                    build(local.client)
                    patch.setattr(link_module, "Client", lambda *_: local.client)
                    ctx = context(folder, address="ipc:///nowhere/socket", insecure=True)
                    find_learner(ctx)
        except REFUSED:
            pass  # a typed refusal
        finally:
            local.client.close()


@pytest.mark.parametrize("version", [2**63 - 1, 2**63, 2**64 - 1])
def test_weights_with_an_unstorable_version_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    local = LocalClient(tmp_path, monkeypatch, 0)
    board = WeightsBoard.create(LAYOUT.size, shared=False)
    try:
        local.take(signed_parts(WELCOME, packed_with(META)))
        values = np.zeros(LAYOUT.size, np.float32)
        parts = wire.encode_weights(values, Stamp(1, version), "fp32", LAYOUT, RUN_ID)
        local.take([bytes(part) for part in parts])
        fresh = local.client.take_weights()
        if fresh is not None:
            board.publish(fresh[1], fresh[0])
    finally:
        local.client.close()
        board.close()
