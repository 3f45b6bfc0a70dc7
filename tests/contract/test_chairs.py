"""Opponents' weights of a learner that publishes several policies, beyond the transports' contract:
a relay, learners that follow one another, actors that know of no chairs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock.core.interfaces import LearnerGoneError, Link, UnknownPolicyError
from penstock.core.params import Stamp
from penstock.core.role import EXIT_REJOIN, relay_socket
from penstock.transport.shm.link import ShmLink
from penstock.transport.zmq import keys, relay
from penstock.transport.zmq.link import ZmqLink
from penstock.transport.zmq.relay_tree import RelayTree
from stranger import REFUSE, WEIGHTS, WEIGHTS_GET, Stranger, decoded
from transport_world import (
    LAYOUT,
    RUN_ID,
    SPEC,
    Learner,
    connector,
    context,
    expected,
    fill,
    in_thread,
    learner,
)
from waiting import free_port, wait_until


@contextmanager
def relay_of(folder: Path, address: str, curve: Path | None = None) -> Iterator[Path]:
    """Runs a relay of another host, whose folder is ``folder``; yields the path of its socket."""
    folder.mkdir(exist_ok=True)
    ctx = context(folder, "relay", address=address, curve=curve)
    with in_thread(ctx, relay.run):
        path = relay_socket(folder, 0)
        wait_until(path.exists)
        yield path


class Reader:
    """An actor that takes newer weights of each policy, as they come."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._stamps: dict[int, Stamp | None] = {}

    def wait_for(self, policy_id: int, values: npt.NDArray[np.float32]) -> None:
        """Read until the newest weights of a policy are these."""
        out = np.zeros(LAYOUT.size, np.float32)

        def has_read() -> bool:
            stamp = self._stamps.get(policy_id)
            self._stamps[policy_id] = self.link.read_weights(out, stamp, policy_id) or stamp
            return np.array_equal(out, values)

        wait_until(has_read)


@pytest.mark.parametrize("with_keys", [False, True], ids=["plain", "curve"])
def test_a_relay_brings_its_host_each_members_weights(tmp_path: Path, with_keys: bool) -> None:
    address = f"ipc://{tmp_path}/wire"
    curve = tmp_path / "keys" if with_keys else None
    if curve is not None:
        keys.make_keys(curve)
    with ExitStack() as stack:
        side = stack.enter_context(learner(tmp_path, chairs=3))
        receiver = stack.enter_context(connector(side, address, curve=curve))
        sent = [side.publish(1 + policy_id, policy_id) for policy_id in range(3)]
        path = stack.enter_context(relay_of(tmp_path / "host", address, curve))
        ctx = context(tmp_path, curve=curve)
        actor = ZmqLink(ctx, address, SPEC, 2, actor=7, relay_path=path)
        stack.callback(actor.close)
        direct = ZmqLink(ctx, address, SPEC, 2, actor=8)
        stack.callback(direct.close)
        assert actor.welcome.chairs == 3

        readers = [Reader(actor), Reader(direct)]
        for policy_id, values in enumerate(sent):
            for reader in readers:
                reader.wait_for(policy_id, values)
        out = np.zeros(LAYOUT.size, np.float32)
        assert actor.read_weights(out, None, policy_id=3) is None, "nobody sits there yet"
        for version in range(5, 10):  # own weights go on, and chairs are drawn anew
            for policy_id in (0, 2, 3):
                values = side.publish(version, policy_id)
                for reader in readers:
                    reader.wait_for(policy_id, values)
        with pytest.raises(UnknownPolicyError, match="no policy 4"):
            actor.read_weights(out, None, policy_id=4)
        assert not receiver.rejected


def test_chairs_come_from_the_connector_where_relays_pass_on_the_runs_weights(
    tmp_path: Path,
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    tree = RelayTree(LAYOUT.size, fanout=1, min_relays=2, min_nbytes=0)
    with ExitStack() as stack:
        side = stack.enter_context(learner(tmp_path, chairs=2))
        receiver = stack.enter_context(connector(side, address, tree=tree))
        paths = [
            stack.enter_context(relay_of(tmp_path / f"host-{host}", address)) for host in range(3)
        ]
        links = [ShmLink(path, None, want=0) for path in paths]
        for link in links:
            stack.callback(link.close)
        readers = [Reader(link) for link in links]
        for version in range(1, 6):
            for policy_id in range(3):
                values = side.publish(version, policy_id)
                for reader in readers:
                    reader.wait_for(policy_id, values)
        assert tree.in_use
        assert not any(receiver._responders[chair].tree.in_use for chair in (1, 2))
        assert not receiver.rejected


def test_own_weights_of_direct_actor_count_for_its_grants_not_those_of_a_chair(
    tmp_path: Path,
) -> None:
    """A chair's stamp, which may be the higher one, does not stand for the run's weights."""
    address = f"ipc://{tmp_path}/wire"
    with ExitStack() as stack:
        side = stack.enter_context(learner(tmp_path, chairs=1))
        side.store.quota = 0
        stack.enter_context(connector(side, address, by_batch=True))
        own = side.publish(10)
        link = ZmqLink(context(tmp_path), address, SPEC, 1, actor=7)
        stack.callback(link.close)
        reader = Reader(link)
        reader.wait_for(0, own)
        reader.wait_for(1, side.publish(99, policy_id=1))

        newest = side.publish(11)

        def lend() -> None:
            side.store.quota = 1
            side.store.lend()

        side.call(lend)
        with link.slot(10) as slot:
            assert slot is not None
            out = np.zeros(LAYOUT.size, np.float32)
            assert link.read_weights(out, Stamp(2, 10)) == Stamp(2, 11)
            np.testing.assert_array_equal(out, newest)
            fill(slot, 0)
        assert side.take().header["sequence"] == 0


@pytest.mark.parametrize("chairs", [0, 1, 5])
@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_an_actor_follows_to_a_learner_with_more_or_fewer_chairs(
    kind: str, chairs: int, tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/wire"

    def join(side: Learner) -> Link:
        link: Link
        if kind == "shm":
            link = ShmLink(side.path, SPEC, 2)
        else:
            link = ZmqLink(context(tmp_path), address, SPEC, 2, actor=7)
        assert link.welcome.chairs == len(side.boards) - 1
        last = len(side.boards) - 1
        Reader(link).wait_for(last, side.publish(3, last))
        return link

    with learner(tmp_path, chairs=3) as first, connector(first, address):
        link = join(first)
    with (
        learner(tmp_path, run_id=RUN_ID + 1, chairs=chairs) as second,
        connector(second, address),
    ):
        out = np.zeros(LAYOUT.size, np.float32)

        def play() -> bool:
            link.read_weights(out, Stamp(9, 9), policy_id=3)
            with link.slot(0.1):
                return False

        with pytest.raises(LearnerGoneError):
            wait_until(play)
        link.close()
        join(second).close()


def test_relay_of_another_run_ends_to_be_started_anew_with_as_many_boards_as_chairs(
    tmp_path: Path,
) -> None:
    address = f"ipc://{tmp_path}/wire"
    folder = tmp_path / "host"
    folder.mkdir()
    ctx = context(folder, "relay", address=address)
    codes: list[object] = []

    def serve(ctx: object) -> None:
        try:
            relay.run(ctx)  # type: ignore[arg-type]
        except SystemExit as ended:
            codes.append(ended.code)

    with in_thread(ctx, serve):
        with learner(tmp_path, chairs=1) as first, connector(first, address):
            wait_until(relay_socket(folder, 0).exists)
        with (
            learner(tmp_path, run_id=RUN_ID + 1, chairs=2) as second,
            connector(second, address),
        ):
            wait_until(lambda: bool(codes))
            assert codes == [EXIT_REJOIN]
            sent = second.publish(6, policy_id=2)
            with relay_of(folder, address) as path:
                link = ShmLink(path, None, want=0)
                Reader(link).wait_for(2, sent)
                link.close()


def test_an_actor_that_knows_of_no_chairs_is_not_disturbed(tmp_path: Path) -> None:
    """It is told of chairs by a key that it may ignore, and is sent no weights that it did not
    request."""
    address = f"ipc://{tmp_path}/wire"
    with learner(tmp_path, chairs=2) as side, connector(side, address) as receiver:
        stranger = Stranger(address)
        assert stranger.join(None)["chairs"] == 2
        stamp = None
        for sequence in range(6):
            own = side.publish(17 + sequence)
            side.publish(sequence, policy_id=1)
            stamp, weights = stranger.weights(stamp)
            assert stamp == [2, 17 + sequence]
            np.testing.assert_array_equal(weights, own)
            stranger.send_slot(expected(sequence), steps=12)
        for sequence in range(6):
            assert side.take().header["sequence"] == sequence
        stranger.leave()
        assert not receiver.rejected


def test_an_actor_written_from_the_page_gets_the_weights_of_a_chair(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/wire"
    offer = {"port": 7001, "key": "", "failed": ""}
    with learner(tmp_path, chairs=2) as side, connector(side, address) as receiver:
        member = side.publish(4, policy_id=2)
        for more in ({}, {"relay": offer}):  # of a chair a relay, too, gets a copy
            stranger = Stranger(address)
            stranger.join(None)
            stranger.say(WEIGHTS_GET, {"have": None, "policy_id": 2, **more})
            fields, meta, (payload,) = stranger.hear(WEIGHTS)
            assert (fields["generation"], fields["version"]) == (2, 4)
            assert meta["policy_id"] == 2
            np.testing.assert_array_equal(decoded(meta, payload), member)

            stranger.say(WEIGHTS_GET, {"have": None, "policy_id": 3})
            _, meta, _ = stranger.hear(REFUSE)
            assert meta == {"error": "the learner publishes no policy 3", "policy_id": 3}
            stranger.leave()
        assert receiver.rejected == {"policy": 2}
