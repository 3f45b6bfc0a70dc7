"""The relay as a real process: weights reach the actors of a host across restarts."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from penstock.core.interfaces import Link
from penstock.core.params import POLICY_ID, Stamp
from penstock.core.role import EXIT_REJOIN
from penstock.launch.engines.local import LocalHandle
from penstock.transport.shm.link import ShmLink
from penstock.transport.zmq.link import ZmqLink
from penstock.transport.zmq.receiver import Receiver
from penstock.transport.zmq.relay_peers import PATIENCE_S
from penstock.transport.zmq.relay_tree import RelayTree
from transport_world import (
    LAYOUT,
    RUN_ID,
    Learner,
    connector,
    context,
    exit_code,
    heard,
    learner,
    role_process,
    waiting,
)
from waiting import free_port, wait_until

pytestmark = pytest.mark.system


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """The actors' host, as far as files go."""
    (tmp_path / "far").mkdir()
    return tmp_path / "far"


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Learner]:
    with learner(tmp_path) as made, connector(made, f"ipc://{tmp_path}/wire"):
        yield made


def newest(link: Link, version: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The weights of one version, as soon as they are there."""
    out = np.zeros(LAYOUT.size, np.float32)
    wait_until(lambda: link.read_weights(out, None) == Stamp(2, version))
    return out


def test_weights_reach_all_actors_of_a_host(tmp_path: Path, far: Path, side: Learner) -> None:
    address = f"ipc://{tmp_path}/wire"
    with role_process(far, "relay", address) as child:
        heard(child, "ready")
        wait_until(lambda: child.status().phase == "receiving")
        link = ZmqLink(context(far), address, None, 2, actor=7, relay_path=far / "relay-0.sock")
        other = ShmLink(far / "relay-0.sock", None, want=0)
        for version in (1, 2, 5):
            sent = side.publish(version)
            np.testing.assert_array_equal(newest(link, version), sent)
            np.testing.assert_array_equal(newest(other, version), sent)
        assert link.read_weights(np.zeros(LAYOUT.size, np.float32), Stamp(2, 5)) is None
        link.close()
        other.close()


def test_an_actor_follows_a_relay_that_was_killed(tmp_path: Path, far: Path, side: Learner) -> None:
    address = f"ipc://{tmp_path}/wire"
    link = ZmqLink(context(far), address, None, 2, actor=7, relay_path=far / "relay-0.sock")
    side.publish(1)
    with role_process(far, "relay", address) as child:
        newest(link, 1)
        child.signal(signal.SIGKILL)
    assert link.read_weights(np.zeros(LAYOUT.size, np.float32), Stamp(2, 1)) is None
    sent = side.publish(2)
    with role_process(far, "relay", address, incarnation=1):
        np.testing.assert_array_equal(newest(link, 2), sent)
    link.close()


def test_a_relay_follows_a_connector_that_was_replaced(tmp_path: Path, far: Path) -> None:
    address = f"ipc://{tmp_path}/wire"
    with learner(tmp_path) as side, role_process(far, "relay", address) as child:
        with connector(side, address):
            heard(child, "ready")
            link = ShmLink(far / "relay-0.sock", None, want=0)
            side.publish(1)
            newest(link, 1)
        with connector(side, address):
            sent = side.publish(2)
            np.testing.assert_array_equal(newest(link, 2), sent)
        link.close()


def test_relay_of_a_replaced_learner_ends_for_its_restart(tmp_path: Path, far: Path) -> None:
    address = f"ipc://{tmp_path}/wire"
    with role_process(far, "relay", address) as child:
        with learner(tmp_path) as side, connector(side, address):
            heard(child, "ready")
        with learner(tmp_path, run_id=RUN_ID + 1) as side, connector(side, address):
            assert exit_code(child) == EXIT_REJOIN


def test_relay_ends_on_sigterm(tmp_path: Path, far: Path, side: Learner) -> None:
    with role_process(far, "relay", f"ipc://{tmp_path}/wire") as child:
        heard(child, "ready")
        started_s = time.monotonic()
        child.signal(signal.SIGTERM)
        assert exit_code(child) == 0
        assert time.monotonic() - started_s < 2


def test_relay_waiting_for_its_learner_reports_it_and_can_be_stopped(far: Path) -> None:
    with role_process(far, "relay", f"ipc://{far}/nobody") as child:
        assert heard(child, "note")["text"] == f"waiting for the learner at ipc://{far}/nobody"
        child.signal(signal.SIGTERM)
        assert exit_code(child) == 0


# -------------------------------------------------------------------------- relays of relays


Chain = tuple[Learner, Receiver, list[LocalHandle], list[ShmLink]]


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    """Four relays, as if on four hosts, each the parent of the next: the fan-out is one."""
    tree = RelayTree(LAYOUT.size * 2, fanout=1, min_relays=2, min_nbytes=0)
    address = f"tcp://127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        side = stack.enter_context(learner(tmp_path))
        receiver = stack.enter_context(connector(side, address, tree=tree))
        side.publish(1)
        children, links = [], []
        for number in range(4):
            (host := tmp_path / f"host-{number}").mkdir()
            children.append(stack.enter_context(role_process(host, "relay", address)))
            heard(children[-1], "ready")
            links.append(ShmLink(host / "relay-0.sock", None, want=0))
            stack.callback(links[-1].close)
            newest(links[-1], 1)  # so the first one asks first
        wait_until(lambda: waiting(receiver) == 4)
        yield side, receiver, children, links


def test_relays_fetch_weights_from_each_other(chain: Chain) -> None:
    side, receiver, _, links = chain
    for version in (2, 3):
        sent = side.publish(version)
        for link in links:
            np.testing.assert_array_equal(newest(link, version), sent)
        wait_until(lambda: waiting(receiver) == 4)
        parents = list(receiver._responders[POLICY_ID].tree._version.parents.values())
        assert len(parents) == 4
        assert parents.count(None) == 1, "the connector sent one copy"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_relays_continue_when_their_parent_dies_or_hangs(chain: Chain, how: signal.Signals) -> None:
    side, _, children, links = chain
    children[1].signal(how)
    for version in (2, 3):
        sent = side.publish(version)
        began_s = time.monotonic()
        for number in (0, 2, 3):
            np.testing.assert_array_equal(newest(links[number], version), sent)
        # The child of a parent at the second level waits for it twice as long.
        assert time.monotonic() - began_s < 2 * PATIENCE_S + 1.5
    assert all(child.status().phase == "receiving" for child in (children[0], *children[2:]))
