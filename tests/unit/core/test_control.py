"""Control messages, status page and context between a role and its supervisor."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.control import Channel, encode_message
from penstock.core.role import RoleContext
from penstock.profiling.status import Phase, StatusPage


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = Channel.pair()
    child = Channel(theirs)
    yield ours, child
    ours.close()
    child.close()


def test_messages_keep_their_order_and_bounds(channels: tuple[Channel, Channel]) -> None:
    ours, child = channels
    sent = [{"kind": "note", "text": "ä" * n} for n in (0, 1, 10_000)]
    assert all(child.send(message) for message in sent)
    assert ours.receive(most=1) == sent[:1]
    assert ours.receive() == sent[1:]
    assert ours.receive() == []
    assert not ours.closed


def test_the_first_message_brings_descriptors(channels: tuple[Channel, Channel]) -> None:
    ours, child = channels
    read_fd, write_fd = os.pipe()
    assert ours.send({"kind": "role"}, fds=[write_fd])
    assert ours.send({"kind": "finish"})
    os.close(write_fd)
    message, [received] = child.receive_first()
    assert message == {"kind": "role"}
    assert not os.get_inheritable(received)
    os.write(received, b"x")
    os.close(received)
    assert os.read(read_fd, 2) == b"x"
    os.close(read_fd)
    assert child.receive() == [{"kind": "finish"}]
    ours.close()
    assert child.receive_first() == (None, [])
    assert child.closed


def test_sending_on_a_full_channel_ends_at_its_timeout(channels: tuple[Channel, Channel]) -> None:
    ours, child = channels
    sent = 0
    while child.send({"n": sent}):
        sent += 1
    start_s = time.monotonic()
    assert not child.send({"n": sent}, patience_s=0.2)
    assert 0.15 < time.monotonic() - start_s < 2
    assert [m["n"] for m in ours.receive()] == list(range(sent))
    assert child.send({"n": sent})


def test_last_messages_arrive_after_the_channel_is_closed(
    channels: tuple[Channel, Channel],
) -> None:
    ours, child = channels
    child.send({"kind": "final"})
    child.close()
    assert ours.receive() == [{"kind": "final"}]
    assert ours.closed
    assert not ours.send({"kind": "finish"})


def test_a_message_beyond_all_bounds_is_refused_not_cut(channels: tuple[Channel, Channel]) -> None:
    ours, child = channels
    assert not child.send({"text": "x" * 10_000_000})
    assert ours.receive() == []


@pytest.mark.parametrize("buffer_nbytes", [20_000, 1 << 20])
def test_longest_message_arrives_complete_with_any_buffer_size(buffer_nbytes: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_nbytes)
    sender, receiver = Channel(ours), Channel(theirs)
    longest = {"text": "x" * (sender.most_nbytes - len(encode_message({"text": ""})))}
    assert not sender.send({"text": longest["text"] + "x"})
    assert sender.send(longest)
    assert receiver.receive_first() == (longest, [])
    sender.close()
    receiver.close()


def test_a_status_page_outlives_its_writer() -> None:
    reader, descriptor = StatusPage.create()
    assert (reader.beat_s, reader.phase) == (0.0, Phase.STARTING)
    writer = StatusPage(descriptor)
    writer.beat()
    writer.phase = Phase.ENVIRONMENT
    writer.produced_steps, writer.sequence = 2**40, 7
    writer.close()
    os.close(descriptor)
    assert (reader.phase, reader.produced_steps, reader.sequence) == (2, 2**40, 7)
    assert 0 <= time.monotonic() - reader.beat_s < 10
    reader.close()


def test_role_without_a_supervisor_stops(channels: tuple[Channel, Channel]) -> None:
    ours, child = channels
    status, descriptor = StatusPage.create()
    here = Path()
    ctx = RoleContext("actor", 3, 1, 99, here, here, child, status)
    assert ctx.name == "actor-3"
    assert ctx.report("note", text="hello")
    assert ours.receive() == [{"kind": "note", "text": "hello"}]
    ours.send({"kind": "actors", "alive": 1})
    assert ctx.messages() == [{"kind": "actors", "alive": 1}]
    assert not ctx.stopping()
    ours.close()
    assert ctx.messages() == []
    assert ctx.stopping()
    assert not ctx.report("note", text="nobody hears")
    status.close()
    os.close(descriptor)


def test_status_page_holds_the_start_of_a_phase() -> None:
    page, descriptor = StatusPage.create()
    os.close(descriptor)
    page.phase = Phase.WAITING
    began_s = page.phase_s
    assert 0 <= time.monotonic() - began_s < 10
    page.phase = Phase.WAITING  # it still waits
    assert page.phase_s == began_s
    page.phase = Phase.REDUCING
    assert page.phase_s > began_s
    page.close()


def test_actor_follows_the_last_assignment_of_its_learner(
    channels: tuple[Channel, Channel],
) -> None:
    ours, child = channels
    page, descriptor = StatusPage.create()
    os.close(descriptor)
    ctx = RoleContext("actor", 3, 1, 99, Path(), Path(), child, page, learner=2)
    assert not ctx.leaving()
    for incarnation, rank in ((2, 0), (3, 1)):
        place = {"index": rank, "address": f"ipc:///{rank}", "incarnation": incarnation}
        ours.send({"kind": "learner", **place})
    assert ctx.leaving()
    assert ctx.leaving()
    assert (ctx.learner, ctx.incarnation) == (2, 1)  # until it lets go
    ctx.follow()
    assert (ctx.learner, ctx.address, ctx.incarnation) == (1, "ipc:///1", 3)
    assert not ctx.leaving()
    ours.close()
    assert ctx.leaving()
    page.close()


def test_last_messages_arrive_from_a_peer_with_unread_input() -> None:
    ours, end = Channel.pair()
    theirs = Channel(end)
    assert ours.send({"kind": "actors", "alive": 1})  # never read
    assert theirs.send({"kind": "error", "message": "the reason"})
    theirs.close()
    assert ours.receive() == [{"kind": "error", "message": "the reason"}]
    assert ours.receive() == []
    assert ours.closed
    ours.close()
