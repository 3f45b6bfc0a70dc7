"""Workers that join, rejoin or are refused by a parameter server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from torch import Tensor, nn

from penstock.configs.errors import UserError
from penstock.learner.extras.parameter_server import protocol
from penstock.learner.extras.parameter_server.client import ServerClient
from penstock.learner.extras.parameter_server.parameters import MAX_SIZE
from penstock.learner.extras.parameter_server.peers import Peers
from penstock.learner.extras.parameter_server.protocol import (
    Packed,
    Payload,
    ServerHeader,
    ServerMessageKind,
    rules,
)
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.transport.checksum import crc32
from penstock.transport.wire import WireError
from penstock.transport.zmq import keys
from penstock.transport.zmq.sockets import dealer
from server_rig import (
    OPTIMUM,
    SIZE,
    Rig,
    config,
    counted,
    optimizer_of,
    pulled,
    push,
    rigs,
    values,
)
from waiting import wait_until


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    yield from rigs(tmp_path)


# ---------------------------------------------------------------------------- whose parameters


def test_the_first_worker_brings_the_parameters(rig: Callable[..., Rig]) -> None:
    made = rig(config("tap", 2))
    first, second = made.client(0, values=OPTIMUM), made.client(1)
    pulled(first)
    pulled(second)
    torch.testing.assert_close(values(second), OPTIMUM)


def test_run_resumes_from_a_fetched_server_state(rig: Callable[..., Rig]) -> None:
    cfg = config("ssp", 2, optimizer="adam", lr=0.01)
    made = rig(cfg)
    client = made.client(0)
    for _ in range(3):
        pulled(client)
        push(client, values(client) - OPTIMUM, samples=5)
    pulled(client)
    state = client.fetch(5.0)
    assert state is not None
    assert (state.version, state.samples, state.tally) == (3, 15, counted(15))
    expected = _two_more(client)
    made.close()

    again = rig(cfg)
    late = again.client(1)  # with nothing: takes what the others have
    pulled(late)
    begun = {"version": state.version, "samples": state.samples, "tally": state.tally}
    resumed = again.client(0, values=torch.from_numpy(state.values), **begun)
    resumed._optimizer.load_state_dict(state.arrays)
    assert pulled(resumed).version == 3
    torch.testing.assert_close(_two_more(resumed), expected)
    assert pulled(resumed).samples == 25
    push(late, torch.ones(SIZE))  # at parameters that are no more
    reply = pulled(late)
    assert (reply.version, reply.lag) == (5, None)
    torch.testing.assert_close(values(late), expected)


def _two_more(client: ServerClient) -> Tensor:
    for _ in range(2):
        push(client, values(client) - OPTIMUM, samples=5)
        pulled(client)
    return values(client).clone()


def test_new_server_adopts_the_parameters_of_the_workers(rig: Callable[..., Rig]) -> None:
    cfg = config("ssp", 2)
    made = rig(cfg)
    client = made.client(0)
    for _ in range(2):
        pulled(client)
        push(client, torch.ones(SIZE))
    pulled(client)
    before = values(client).clone()
    push(client, torch.ones(SIZE))
    made.stop()
    again = rig(cfg)
    reply = pulled(client)
    assert (reply.version, reply.lag) == (2, None)  # the last push is lost, and nothing else
    torch.testing.assert_close(values(client), before)
    assert again.server.figures()["version"] == 2


def test_new_server_ignores_changes_sent_after_its_start(rig: Callable[..., Rig]) -> None:
    cfg = config("asp", 2, significance=0.5)
    made = rig(cfg)
    client = made.client(0, values=OPTIMUM + 10)
    pulled(client)
    push(client, torch.ones(SIZE))  # takes off 0.3, which is not significant
    pulled(client)
    torch.testing.assert_close(values(client), OPTIMUM + 9.7)
    made.stop()
    rig(cfg)
    pulled(client)
    torch.testing.assert_close(values(client), OPTIMUM + 9.7)


# --------------------------------------------------------------------------- what gets lost


def _cut(made: Rig) -> None:
    """The connections of all workers end, as they do when packets are lost for long."""
    for server in made.servers:
        for name in list(server._members):
            server._remove(name)


@pytest.mark.parametrize("pull", ["newest", "ahead"])
def test_counts_of_a_push_that_was_lost_with_its_connection_are_sent_again(
    rig: Callable[..., Rig], pull: str
) -> None:
    made = rig(config("ssp", 2, pull=pull))
    client = made.client(0)
    pulled(client)
    push(client, torch.ones(SIZE), samples=5)
    pulled(client)
    _cut(made)
    push(client, torch.ones(SIZE), samples=7)
    wait_until(lambda: made.server.rejected["unknown"] == 1)
    reply = pulled(client)
    assert (reply.version, reply.lag) == (1, None)  # the gradient is lost
    wait_until(lambda: made.server._tally()[1] == 12)
    push(client, torch.ones(SIZE), samples=11)
    assert pulled(client).tally[1] == 23


def test_a_push_counts_once_though_its_answer_is_lost(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2))
    client = made.client(0)
    pulled(client)
    push(client, torch.ones(SIZE), samples=5)
    wait_until(lambda: made.server._tally()[1] == 5)
    _cut(made)
    for steps in (5, 12):
        reply = pulled(client)
        assert reply.tally[1] == steps
        push(client, torch.ones(SIZE), samples=7)


def test_counts_of_a_worker_from_before_it_joined_are_included(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2))
    early, first = made.client(1), made.client(0, tally=counted(100), version=3)
    early.push(0, counted(5))
    assert early.pull(0.0) is None
    pulled(first)
    pulled(early)
    wait_until(lambda: made.server._tally()[1] == 105)


@pytest.mark.parametrize("way", ["there", "back"])
def test_a_lost_request_for_the_state_is_repeated_well_within_the_grace(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    made = rig(config("ssp", 2))
    client = made.client(0)
    pulled(client)
    shard = client._shards[0]
    lost: list[ServerHeader] = []
    send, tell = shard.send, made.server._send_state

    def lose(head: ServerHeader, *packed: Any) -> None:
        if head.kind != ServerMessageKind.ASK_STATE or lost:
            send(head, *packed)
        else:
            lost.append(head)

    def lose_answer(name: bytes, head: ServerHeader) -> None:
        if lost:
            tell(name, head)
        else:  # as where the answer cannot be sent
            lost.append(head)
            made.server._remove(name)

    if way == "there":
        monkeypatch.setattr(shard, "send", lose)
    else:
        monkeypatch.setattr(made.server, "_send_state", lose_answer)
    assert client.fetch(4.0) is not None  # `run.grace_s` is 10
    assert len(lost) == 1


@pytest.mark.parametrize("damage", ["checksum", "size"])
@pytest.mark.parametrize("pull", ["newest", "ahead", "state"])
def test_damaged_answer_is_requested_again(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, damage: str, pull: str
) -> None:
    made = rig(config("ssp", 2, staleness=0, pull="ahead" if pull == "ahead" else "newest"))
    client = made.client(0)
    pulled(client)
    send = made.server._send
    damaged: list[ServerHeader] = []

    def spoil(name: bytes, head: ServerHeader, packed: Packed | None = None) -> None:
        if packed is not None and not damaged:
            damaged.append(head)
            short = bytes(4 * SIZE - 4)
            if damage == "checksum":
                packed = packed._replace(crc=packed.crc ^ 1)
            else:
                packed = packed._replace(payload=short, entries=SIZE - 1, crc=crc32(short))
        send(name, head, packed)

    monkeypatch.setattr(made.server, "_send", spoil)
    if pull == "state":
        assert client.fetch(4.0) is not None
    else:
        if pull == "ahead":
            client.ask_ahead()
        push(client, torch.ones(SIZE))
        assert pulled(client, 4.0).version == 1
        torch.testing.assert_close(values(client), torch.full((SIZE,), -0.3))
    assert len(damaged) == 1


def test_state_in_transit_is_not_sent_twice(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2))
    client = made.client(0)
    pulled(client)
    shard = client._shards[0]
    shard.begin_request(ServerMessageKind.ASK_STATE)
    for _ in range(3):
        shard.send_request()
    assert shard.socket.poll(5000)
    shard.socket.recv_multipart()
    assert not shard.socket.poll(300)
    assert client.fetch(5.0) is not None


# ---------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"lr": 0.2}, "other settings"), ({"count": 3}, "other settings")],
)
def test_worker_with_other_settings_is_refused(
    rig: Callable[..., Rig], settings: dict[str, Any], says: str
) -> None:
    made = rig(config("ssp", 2))
    cfg = made.cfg.model_copy(update=settings)
    client = ServerClient([made.address], 1, optimizer_of(cfg), cfg)
    with pytest.raises(UserError, match=f"learner 1 has {says}"):
        client.pull(5.0)
    client.close()


def test_worker_with_another_number_of_parameters_is_refused(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2))
    pulled(made.client(0))
    other = FlatOptimizer([("x", nn.Parameter(torch.zeros(5)))], made.cfg)
    client = ServerClient([made.address], 1, other, made.cfg)
    with pytest.raises(UserError, match="has 5 parameters, and the others have 8"):
        client.pull(5.0)
    client.close()


def test_early_worker_with_another_number_of_parameters_is_refused_later(
    rig: Callable[..., Rig],
) -> None:
    made = rig(config("ssp", 2))
    with zmq.Context() as context, context.socket(zmq.DEALER) as early:
        early.connect(made.address)
        join = ServerHeader(
            ServerMessageKind.JOIN, rank=1, session=7, entries=5, rules=rules(made.cfg)
        )
        early.send_multipart(protocol.encode(join))
        assert protocol.decode(early.recv_multipart()).head.kind == ServerMessageKind.WELCOME
        assert pulled(made.client(0)).workers == 1
        answer = protocol.decode(early.recv_multipart())
        assert answer.head.kind == ServerMessageKind.REFUSE
        assert "has 5 parameters, and the others have 8" in protocol.text(answer)


def test_worker_of_another_protocol_version_is_refused_with_the_reason(
    rig: Callable[..., Rig],
) -> None:
    made = rig(config("ssp", 2))
    head = bytearray(protocol.encode(ServerHeader(ServerMessageKind.JOIN, entries=SIZE))[0])
    head[4] += 1
    head[-4:] = crc32(bytes(head[:-4])).to_bytes(4, "little")
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        other.connect(made.address)
        other.send_multipart([bytes(head), b""])
        answer = protocol.decode(other.recv_multipart())
    assert protocol.text(answer).startswith("this learner speaks version ")


def test_second_worker_with_the_same_rank_is_refused(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2))
    pulled(made.client(0))
    second = made.client(0)
    assert second.pull(0.3) is None
    assert second.last_notice == "another learner with rank 0 is connected"


def test_worker_text_beyond_the_limit_is_rejected() -> None:
    text = protocol.pack_text("x" * (protocol.TEXT_NBYTES + 1))
    with pytest.raises(WireError, match="size"):
        protocol.decode(protocol.encode(ServerHeader(ServerMessageKind.PULL), text))


def test_garbage_is_counted_and_dropped(rig: Callable[..., Rig]) -> None:
    made = rig(config("ssp", 2, staleness=0))
    client = made.client(0)
    pulled(client)
    gradient = protocol.pack_dense(np.ones(SIZE, np.float32))
    sound = protocol.encode(ServerHeader(ServerMessageKind.PUSH, session=1, samples=1), gradient)
    shapeless: list[list[Payload]] = [[b"x"] * 3, [b""], [b"PNPS" * 20, b""], [b"x" * 10_000_000]]
    _throw(made.address, [*shapeless, [sound[0], sound[1][:-1]], sound])
    wait_until(lambda: sum(made.server.rejected.values()) == 6)
    assert set(made.server.rejected) == {"frames", "header", "size", "unknown"}
    client._shards[0].send(
        ServerHeader(ServerMessageKind.PUSH, samples=1),
        protocol.pack_dense(np.ones(SIZE + 1, np.float32)),
    )
    reply = pulled(client)  # its turn is taken, with nothing
    assert (reply.version, reply.lag) == (0, None)
    push(client, torch.full((SIZE,), torch.nan))
    assert pulled(client).version == 0
    client.push(1)
    push(client, torch.ones(SIZE))  # has not asked in between
    assert pulled(client).version == 0
    push(client, torch.ones(SIZE))
    assert pulled(client).version == 1
    assert made.server.rejected["not_pulled"] == 1
    assert made.server.rejected["not_finite"] == 2


def test_message_with_many_frames_is_read_only_in_part(tmp_path: Path) -> None:
    peers = Peers(f"ipc://{tmp_path}/s", None, 100)
    try:
        _throw(f"ipc://{tmp_path}/s", [[b"x"] * 10_000, [b"head", b"payload"]])
        received: list[list[bytes]] = []
        while len(received) < 2:
            peers.wait(5.0)
            if (message := peers.receive()) is not None:
                received.append([bytes(frame) for frame in message[1]])
        assert received == [[b"x"] * 3, [b"head", b"payload"]]
    finally:
        peers.close()


def test_worker_accepts_a_state_of_the_largest_size_of_a_server(rig: Callable[..., Rig]) -> None:
    """As many parameters as are allowed, and two moments of Adam."""
    client = rig(config("ssp", 2)).client(0)
    most = client._shards[0].socket.getsockopt(zmq.MAXMSGSIZE)
    assert isinstance(most, int)
    assert most >= 3 * 4 * MAX_SIZE


def _throw(address: str, messages: list[list[Payload]]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(address)
        for message in messages:
            socket.send_multipart(message)


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq without CURVE")
def test_worker_without_the_learners_keys_cannot_connect(
    rig: Callable[..., Rig], tmp_path: Path
) -> None:
    folder, other = tmp_path / "keys", tmp_path / "other"
    keys.make_keys(folder)
    keys.make_keys(other)
    made = rig(config("ssp", 2), curve=folder)
    pulled(made.client(0, curve=folder))
    stranger = made.client(1, curve=other)
    assert stranger.pull(0.6) is None
    away = stranger.unreached()
    assert away is not None
    assert not away.was_reached
    assert away.seconds > 0.5  # however often the handshake was refused meanwhile
    assert made.client(1).pull(0.3) is None
    of_actor = keys.load_actor(folder)  # which the hosts of actors have
    with zmq.Context() as context, dealer(context, made.address, of_actor) as socket:
        assert not socket.poll(500, zmq.POLLOUT)  # the handshake fails
    own = keys.load_learners(folder)[1]
    with zmq.Context() as context, dealer(context, made.address, own) as socket:
        assert socket.poll(5000, zmq.POLLOUT)
