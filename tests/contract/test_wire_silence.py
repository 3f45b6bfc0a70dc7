"""Grants of actors that become silent or disconnect, with shortened timeouts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.transport import grants
from penstock.transport.zmq import client
from penstock.transport.zmq.link import ZmqLink
from penstock.transport.zmq.receiver import Receiver
from transport_world import Learner, connector, context, fill, learner
from waiting import wait_until

SILENCE_S = 0.4


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (grants, "GRANT_SILENCE_S", SILENCE_S),
        (grants, "PROBE_AFTER_S", 0.15),
        (grants, "CHECK_S", 0.02),
        (client, "REPEAT_S", 0.1),
        (client, "RENEW_S", 0.25),
    ):
        monkeypatch.setattr(module, name, seconds)


@pytest.fixture
def far_side(tmp_path: Path) -> Iterator[tuple[Learner, Receiver, str]]:
    """A learner with two slots in all."""
    address = f"ipc://{tmp_path}/wire"
    with learner(tmp_path, slots=2) as side, connector(side, address) as receiver:
        yield side, receiver, address


def join(folder: Path, address: str, actor: int, incarnation: int = 0) -> ZmqLink:
    ctx = context(folder, incarnation=incarnation)
    return ZmqLink(ctx, address, None, 2, actor=actor)


def play(link: ZmqLink, actor: int, sequence: int, seconds: float, *, beats: bool) -> None:
    """Send one slot after so many seconds."""
    with link.slot(10) as slot:
        assert slot is not None
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            time.sleep(0.02)
            if beats:
                link.beat()
        fill(slot, sequence, actor=actor, incarnation=link._ctx.incarnation)


def vanish(link: ZmqLink) -> None:
    """Close its connections as the kernel does, without a BYE."""
    link._client.context.destroy(0)


def test_actor_that_beats_while_playing_keeps_its_grants(
    tmp_path: Path, far_side: tuple[Learner, Receiver, str]
) -> None:
    side, receiver, address = far_side
    link = join(tmp_path, address, 1)
    held: list[int] = []
    receiver.grants._pool.withdraw = held.append  # type: ignore[method-assign, assignment]
    play(link, 1, 0, 3 * SILENCE_S, beats=True)
    assert side.take().header["sequence"] == 0
    assert (held, receiver.rejected) == ([], {})
    link.close()


def test_silent_actor_lends_its_grants_to_others_and_loses_no_slot(
    tmp_path: Path, far_side: tuple[Learner, Receiver, str]
) -> None:
    side, receiver, address = far_side
    slow = join(tmp_path, address, 1)
    play(slow, 1, 0, 0, beats=False)
    side.take()
    wait_until(lambda: receiver.grants.streams[1].outstanding == 2)
    other = join(tmp_path, address, 2)
    with slow.slot(10) as slot:
        assert slot is not None
        began_s = time.monotonic()
        for sequence in range(4):
            play(other, 2, sequence, 0, beats=False)
            assert side.take().header["actor"] == 2
        assert time.monotonic() - began_s < SILENCE_S + 1
        fill(slot, 1, actor=1)
    header = side.take().header
    assert (header["actor"], header["sequence"]) == (1, 1)
    assert receiver.rejected == {}
    slow.close()
    other.close()


def test_closed_connections_of_a_vanished_host_return_its_grants(
    tmp_path: Path, far_side: tuple[Learner, Receiver, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grants, "GRANT_SILENCE_S", 60.0)
    side, receiver, address = far_side
    gone = join(tmp_path, address, 1)
    play(gone, 1, 0, 0, beats=False)
    side.take()
    wait_until(lambda: receiver.grants.outstanding == 2)
    vanish(gone)
    other = join(tmp_path, address, 2)
    began_s = time.monotonic()
    play(other, 2, 0, 0, beats=False)
    assert time.monotonic() - began_s < 1.5
    assert side.take().header["actor"] == 2
    other.close()


def test_second_process_with_an_actor_id_waits_until_the_first_dies(
    tmp_path: Path, far_side: tuple[Learner, Receiver, str]
) -> None:
    """The second is refused in words while the first lives, and takes over when it does not."""
    side, _, address = far_side
    first = join(tmp_path, address, 3)
    play(first, 3, 0, 0, beats=False)
    side.take()
    rival = client.Client(context(tmp_path, incarnation=1), address, actor=3, want=2)

    def ask() -> None:
        for _ in range(200):
            rival._report_counters()
            rival.pump(0.02)
            first.beat()

    with pytest.raises(UserError, match="actor 3 is played by another process"):
        ask()
    rival.close()
    vanish(first)
    second = join(tmp_path, address, 3, incarnation=2)
    play(second, 3, 0, 0, beats=False)
    assert side.take().header["incarnation"] == 2
    second.close()
