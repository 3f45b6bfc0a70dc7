"""Contract of all transports: in one process, shared memory, and ZeroMQ through a connector."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import __version__
from penstock.configs.errors import UserError
from penstock.core.interfaces import LearnerGoneError, LearnerInfo, Link, UnknownPolicyError
from penstock.core.params import Stamp
from penstock.core.specs import Column, SlotSpec
from penstock.transport.inproc import InprocLink
from penstock.transport.registry import TRANSPORTS, make_transport
from penstock.transport.shm.link import ShmLink
from penstock.transport.zmq.link import ZmqLink
from transport_world import (
    LAYOUT,
    SPEC,
    Learner,
    connector,
    context,
    expected,
    fill,
    learner,
    welcome,
)
from waiting import wait_until

CHAIRS = 3  # of the learner in a `World`
OTHER_SPEC = SlotSpec(4, 3, (*SPEC.columns[:-1], Column("obs2", "|u1", (3,))))


@dataclass
class World:
    """A learner, and the transport's way to join it."""

    learner: Learner
    join: Callable[..., Link]
    end_learner: Callable[[], None]
    one_process: bool = False
    patience_s: float = 60.0
    """The silence after which a link counts the learner as gone, for links that join from now on.

    A transport that knows it otherwise may ignore this.
    """

    def send(self, link: Link, sequence: int, **fields: int) -> None:
        with link.slot(10) as slot:
            assert slot is not None
            fill(slot, sequence, **fields)

    def weights(
        self, link: Link, newer_than: Stamp | None, policy_id: int = 0
    ) -> tuple[Stamp, np.ndarray[Any, Any]]:
        """The next weights of a policy that come."""
        out = np.full(LAYOUT.size, np.nan, np.float32)
        found: list[Stamp] = []

        def ask() -> bool:
            stamp = link.read_weights(out, newer_than, policy_id)
            found.extend([] if stamp is None else [stamp])
            return bool(found)

        wait_until(ask)
        return found[0], out


@pytest.fixture(params=TRANSPORTS.specs)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    kind: str = request.param
    with ExitStack() as links, ExitStack() as far_side:
        side = far_side.enter_context(learner(tmp_path, chairs=CHAIRS))
        if kind == "zmq":
            far_side.enter_context(connector(side, f"ipc://{tmp_path}/wire"))

        def join(want: int = 2, *, actor: int = 7, spec: SlotSpec = SPEC) -> Link:
            link: Link
            if kind == "inproc":
                link = side.call(lambda: InprocLink(side.welcome, side.store, side.boards, want))
            elif kind == "shm":
                link = ShmLink(side.path, spec, want)
            else:
                ctx = context(tmp_path)
                link = ZmqLink(
                    ctx,
                    f"ipc://{tmp_path}/wire",
                    spec,
                    want,
                    actor=actor,
                    patience_s=made.patience_s,
                )
            links.callback(link.close)
            return link

        made = World(side, join, far_side.close, TRANSPORTS.one_process(kind))
        yield made


def test_welcome_describes_the_learner(world: World) -> None:
    link = world.join()
    assert link.welcome == welcome(chairs=CHAIRS)


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_an_actor_that_has_only_an_address_gets_the_config(kind: str, tmp_path: Path) -> None:
    transport, ctx = make_transport(TRANSPORTS.specs[kind]), context(tmp_path)
    with learner(tmp_path) as side, connector(side, f"ipc://{tmp_path}/wire"):
        address = str(side.path) if kind == "shm" else f"ipc://{tmp_path}/wire"
        info = transport.ask(ctx, address)
    assert info == LearnerInfo(welcome().config, str(side.path), __version__)


def test_slots_arrive_whole_and_in_order(world: World) -> None:
    link = world.join()
    for sequence in range(20):
        world.send(link, sequence)
    for sequence in range(20):
        taken = world.learner.take()
        assert taken.header["sequence"] == sequence
        for name, values in expected(sequence).items():
            np.testing.assert_array_equal(taken.columns[name], values, err_msg=name)


def test_headers_arrive_as_the_actor_wrote_them(world: World) -> None:
    link = world.join()
    before_s = time.monotonic()
    with link.slot(10) as slot:
        assert slot is not None
        fill(slot, 0)
        written = {name: slot.header[name].item() for name in slot.header.dtype.names or ()}
    taken = world.learner.take().header
    times = {"started_s", "published_s"}
    assert {k: v for k, v in taken.items() if k not in times} == {
        k: v for k, v in written.items() if k not in times
    }
    duration_s = written["published_s"] - written["started_s"]
    assert taken["published_s"] - taken["started_s"] == pytest.approx(duration_s, abs=1e-6)
    assert before_s <= taken["published_s"] <= time.monotonic()


def send_and_fail(link: Link) -> None:
    with link.slot(10) as slot:
        assert slot is not None
        fill(slot, 99)
        raise ZeroDivisionError


def test_exception_within_a_slot_publishes_nothing(world: World) -> None:
    link = world.join()
    world.send(link, 0)
    for _ in range(5):  # more often than there are slots: none of them may be lost
        with pytest.raises(ZeroDivisionError):
            send_and_fail(link)
    world.send(link, 1)
    assert [world.learner.take().header["sequence"] for _ in range(2)] == [0, 1]
    assert not world.learner.taken


def test_actor_blocks_when_the_learner_takes_no_slots(world: World) -> None:
    link = world.join(want=2)
    world.learner.consuming = False
    sent = 0
    for _ in range(5):
        with link.slot(0.2) as slot:
            if slot is not None:
                fill(slot, sent)
                sent += 1
    assert sent == 2
    assert not world.learner.taken
    world.learner.consuming = True
    world.send(link, 2)
    assert [world.learner.take().header["sequence"] for _ in range(3)] == [0, 1, 2]


def test_waiting_for_a_slot_ends_at_its_timeout(world: World) -> None:
    link = world.join(want=1)
    world.learner.consuming = False
    world.send(link, 0)
    wait_until(lambda: world.learner.store.fill_fraction() > 0)
    started_s = time.monotonic()
    with link.slot(0.3) as slot:
        assert slot is None
    assert 0.25 <= time.monotonic() - started_s < 2


def test_actors_do_not_disturb_each_other(world: World) -> None:
    links = {actor: world.join(actor=actor) for actor in (1, 2, 3)}
    for sequence in range(10):
        for actor, link in links.items():
            world.send(link, sequence, actor=actor)
    taken = [world.learner.take().header for _ in range(30)]
    for actor in links:
        assert [h["sequence"] for h in taken if h["actor"] == actor] == list(range(10))


def test_read_weights_returns_none_before_the_first_publication(world: World) -> None:
    link = world.join()
    out = np.full(LAYOUT.size, 5.0, np.float32)
    for _ in range(3):
        assert link.read_weights(out, None) is None
        time.sleep(0.02)
    assert (out == 5.0).all()


def test_read_weights_returns_each_version_once(world: World) -> None:
    link = world.join()
    sent = world.learner.publish(1)
    stamp, weights = world.weights(link, None)
    assert stamp == Stamp(2, 1)
    np.testing.assert_array_equal(weights, sent)
    out = np.full(LAYOUT.size, 5.0, np.float32)
    for _ in range(3):
        assert link.read_weights(out, stamp) is None
        time.sleep(0.02)
    assert (out == 5.0).all()
    sent = world.learner.publish(2)
    stamp, weights = world.weights(link, stamp)
    assert stamp == Stamp(2, 2)
    np.testing.assert_array_equal(weights, sent)


def test_unread_weights_are_replaced_by_newer_ones(world: World) -> None:
    link = world.join()
    world.learner.publish(1)
    stamp, _ = world.weights(link, None)
    for version in range(2, 30):
        sent = world.learner.publish(version)
    seen = []
    while stamp.version != 29:
        stamp, weights = world.weights(link, stamp)
        seen.append(stamp.version)
    np.testing.assert_array_equal(weights, sent)
    assert len(seen) <= 3  # what was on its way, and the newest
    assert seen == sorted(seen)


def test_a_policy_that_the_learner_does_not_publish_is_refused(world: World) -> None:
    link = world.join()
    out = np.full(LAYOUT.size, 5.0, np.float32)
    sent = world.learner.publish(10)

    def ask() -> bool:
        assert link.read_weights(out, None, policy_id=CHAIRS + 1) is None
        return False

    with pytest.raises(UnknownPolicyError, match=f"publishes no policy {CHAIRS + 1}"):
        wait_until(ask)
    assert (out == 5.0).all()
    stamp, weights = world.weights(link, None)  # the link goes on
    assert stamp == Stamp(2, 10)
    np.testing.assert_array_equal(weights, sent)
    world.send(link, 0)
    assert world.learner.take().header["sequence"] == 0


def test_a_chair_has_weights_and_stamps_of_its_own(world: World) -> None:
    link = world.join()
    own = world.learner.publish(10)
    member = world.learner.publish(1, policy_id=2)
    stamp, weights = world.weights(link, None, policy_id=2)
    assert stamp == Stamp(2, 1)
    np.testing.assert_array_equal(weights, member)
    stamp, weights = world.weights(link, None)
    assert stamp == Stamp(2, 10)
    np.testing.assert_array_equal(weights, own)
    out = np.full(LAYOUT.size, 5.0, np.float32)
    for _ in range(3):  # nothing newer is on these chairs
        assert link.read_weights(out, Stamp(2, 1), policy_id=2) is None
        assert link.read_weights(out, None, policy_id=3) is None
        time.sleep(0.02)
    assert (out == 5.0).all()
    world.send(link, 0)
    assert world.learner.take().header["sequence"] == 0


def test_a_chair_that_is_drawn_anew_is_read_while_own_weights_go_on(world: World) -> None:
    link = world.join()
    own, drawn = None, dict.fromkeys(range(1, CHAIRS + 1))
    for version in range(1, 6):
        expected_own = world.learner.publish(10 + version)
        chair = 1 + version % CHAIRS
        member = world.learner.publish(version, policy_id=chair)
        own, weights = world.weights(link, own)
        if own.version == 10 + version:
            np.testing.assert_array_equal(weights, expected_own)
        drawn[chair], weights = world.weights(link, drawn[chair], policy_id=chair)
        assert drawn[chair] == Stamp(2, version)
        np.testing.assert_array_equal(weights, member)


def test_actor_that_joins_late_gets_the_newest_member_of_each_chair(world: World) -> None:
    for version in range(1, 4):
        sent = [world.learner.publish(version + i, policy_id=i) for i in range(1 + CHAIRS)]
    link = world.join()
    for policy_id, values in enumerate(sent):
        stamp, weights = world.weights(link, None, policy_id)
        assert stamp == Stamp(2, 3 + policy_id)
        np.testing.assert_array_equal(weights, values)


def test_actor_that_joins_late_gets_the_newest_weights(world: World) -> None:
    for version in range(1, 6):
        sent = world.learner.publish(version)
    stamp, weights = world.weights(world.join(), None)
    assert stamp == Stamp(2, 5)
    np.testing.assert_array_equal(weights, sent)


def test_slots_sent_before_leaving_are_delivered(world: World) -> None:
    link = world.join(want=4)
    for sequence in range(4):
        world.send(link, sequence)
    link.close()
    assert [world.learner.take().header["sequence"] for _ in range(4)] == [0, 1, 2, 3]


def test_actor_with_another_spec_is_refused_with_the_difference(world: World) -> None:
    if world.one_process:
        pytest.skip("one process has one spec")
    with pytest.raises(UserError, match=r"column seat: learner \|u1\[\] per slot, actor absent"):
        world.join(spec=OTHER_SPEC)


def test_actor_notices_that_the_learner_has_ended(world: World) -> None:
    if world.one_process:
        pytest.skip("a process cannot outlive itself")
    world.patience_s = 1.5
    link = world.join(want=1)
    world.learner.consuming = False
    world.send(link, 0)
    wait_until(lambda: world.learner.store.fill_fraction() > 0)
    world.end_learner()

    def wait_for_a_slot() -> None:
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s:
            with contextlib.suppress(TimeoutError), link.slot(0.1):
                pass

    with pytest.raises(LearnerGoneError):
        wait_for_a_slot()


def lend(side: Learner, quota: int) -> None:
    def set_quota() -> None:
        side.store.quota = quota
        side.store.lend()

    side.call(set_quota)


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_a_slot_that_is_lent_by_batch_comes_with_the_newest_weights(
    kind: str, tmp_path: Path
) -> None:
    wire = f"ipc://{tmp_path}/wire"
    with ExitStack() as opened:
        side = opened.enter_context(learner(tmp_path))
        side.store.quota = 0
        if kind == "zmq":
            opened.enter_context(connector(side, wire, by_batch=True))
        side.publish(1)
        link: Link
        if kind == "shm":
            link = ShmLink(side.path, SPEC, 2)
        else:
            link = ZmqLink(context(tmp_path), wire, SPEC, 2, actor=7)
        opened.callback(link.close)
        weights = np.empty(LAYOUT.size, np.float32)
        stamp: Stamp | None = None
        for sequence in range(40):
            sent = side.publish(10 + sequence)
            lend(side, 1)
            with link.slot(10) as slot:
                assert slot is not None
                lend(side, 0)
                stamp = link.read_weights(weights, stamp)
                assert stamp == Stamp(2, 10 + sequence)
                np.testing.assert_array_equal(weights, sent)
                fill(slot, sequence)
            assert side.take().header["sequence"] == sequence


def test_a_grant_waits_for_the_weights_of_a_relay(tmp_path: Path) -> None:
    wire = f"ipc://{tmp_path}/wire"
    with ExitStack() as opened:
        side = opened.enter_context(learner(tmp_path))
        side.store.quota = 0
        opened.enter_context(connector(side, wire, by_batch=True))
        old = side.publish(10)
        folder = tmp_path / "host"
        folder.mkdir()
        relay = opened.enter_context(learner(folder))
        link = ZmqLink(context(tmp_path), wire, SPEC, 1, actor=7, relay_path=relay.path)
        opened.callback(link.close)
        relay.board.publish(old, Stamp(2, 10))
        weights = np.empty(LAYOUT.size, np.float32)
        stamp = link.read_weights(weights, None)
        new = side.publish(11)
        lend(side, 1)
        for _ in range(3):  # the grant is here, the weights are not
            with link.slot(0.2) as slot:
                assert slot is None
        relay.board.publish(new, Stamp(2, 11))
        with link.slot(10) as slot:
            assert slot is not None
            assert link.read_weights(weights, stamp) == Stamp(2, 11)
            fill(slot, 0)


def test_slots_lent_to_departed_remote_actors_go_to_local_ones(tmp_path: Path) -> None:
    wire = f"ipc://{tmp_path}/wire"
    with ExitStack() as opened:
        side = opened.enter_context(learner(tmp_path))
        side.store.quota = 0
        opened.enter_context(connector(side, wire, by_batch=True))
        side.publish(10)
        remote = ZmqLink(context(tmp_path), wire, SPEC, 1, actor=7)
        opened.callback(remote.close)
        out = np.empty(LAYOUT.size, np.float32)
        wait_until(lambda: remote.read_weights(out, None) is not None)
        lend(side, 1)
        with pytest.raises(ZeroDivisionError):
            send_and_fail(remote)  # has the only slot
        local = ShmLink(side.path, SPEC, 1)
        opened.callback(local.close)
        with local.slot(0.2) as slot:
            assert slot is None
        remote.close()
        with local.slot(10) as slot:
            assert slot is not None
            fill(slot, 0)
        assert side.take().header["sequence"] == 0


def test_slots_within_a_bound_of_lag_are_not_kept_for_remote_actors_that_left(
    tmp_path: Path,
) -> None:
    wire = f"ipc://{tmp_path}/wire"
    with ExitStack() as opened:
        side = opened.enter_context(learner(tmp_path))
        side.store.quota = 2  # as `transport.max_policy_lag` allows
        opened.enter_context(connector(side, wire))
        side.publish(10)
        remote = ZmqLink(context(tmp_path), wire, SPEC, 2, actor=7)
        with pytest.raises(ZeroDivisionError):
            send_and_fail(remote)  # both slots are lent for it
        remote.close()
        local = ShmLink(side.path, SPEC, 1)
        opened.callback(local.close)
        with local.slot(5) as slot:
            assert slot is not None
            fill(slot, 0)
        assert side.take().header["sequence"] == 0


# What a transport from elsewhere must keep as well: test_new_transport, test_extending.
CONTRACT = {
    name: case
    for name, case in list(globals().items())
    if name.startswith("test_") and list(inspect.signature(case).parameters) == ["world"]
}
