"""Connections with CURVE keys: only listed actors connect, and samples and weights arrive."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from penstock.configs.errors import UserError
from penstock.core.interfaces import LearnerGoneError
from penstock.core.role import RoleContext
from penstock.transport.wire import MessageKind
from penstock.transport.zmq import keys
from penstock.transport.zmq.client import Client
from penstock.transport.zmq.link import ZmqLink
from transport_world import LAYOUT, Learner, connector, context, fill, learner, reports
from waiting import wait_until

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq without CURVE")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The learner's keys."""
    keys.make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def actor_folder(tmp_path: Path, folder: Path) -> Path:
    """What the learner's operator gives to an actor's host."""
    made = tmp_path / "actor_keys"
    made.mkdir()
    for name in ("learner.key", "actor.key_secret"):
        shutil.copy(folder / name, made)
    return made


@pytest.fixture
def address(tmp_path: Path, folder: Path) -> Iterator[str]:
    where = f"ipc://{tmp_path}/wire"
    with learner(tmp_path) as side, connector(side, where, curve=folder):
        LEARNERS[where] = side
        yield where


LEARNERS: dict[str, Learner] = {}


def test_a_listed_actor_works_as_without_keys(
    tmp_path: Path, actor_folder: Path, address: str
) -> None:
    side = LEARNERS[address]
    link = ZmqLink(context(tmp_path, curve=actor_folder), address, None, 2, actor=7)
    for sequence in range(10):
        with link.slot(10) as slot:
            assert slot is not None
            fill(slot, sequence)
    assert [side.take().header["sequence"] for _ in range(10)] == list(range(10))
    sent = side.publish(3)
    out = np.zeros(LAYOUT.size, np.float32)
    while link.read_weights(out, None) is None:
        pass
    np.testing.assert_array_equal(out, sent)
    link.close()


class Impatient(RoleContext):
    """Leaves after the first note that it waits."""

    def leaving(self) -> bool:
        return bool(reports(self, "note"))


def refused(ctx: RoleContext, address: str) -> bool:
    """Whether an actor stays outside for as long as it is willing to wait."""
    ctx.__class__ = Impatient
    try:
        ZmqLink(ctx, address, None, 2, actor=8).close()
    except LearnerGoneError:
        return True
    return False


def test_actor_without_keys_cannot_connect(tmp_path: Path, address: str) -> None:
    assert refused(context(tmp_path), address)


@pytest.mark.slow
def test_actor_with_only_the_learners_public_key_cannot_connect(
    tmp_path: Path, actor_folder: Path, address: str
) -> None:
    stranger = tmp_path / "stranger"
    keys.make_keys(stranger)
    shutil.copy(actor_folder / "learner.key", stranger)
    assert refused(context(tmp_path, curve=stranger), address)


def test_actor_rejects_a_learner_with_another_key(
    tmp_path: Path, actor_folder: Path, address: str
) -> None:
    shutil.copy(actor_folder / "learner.key", tmp_path / "right.key")
    keys.make_keys(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "learner.key", actor_folder)
    assert refused(context(tmp_path, curve=actor_folder), address)


def test_a_stream_belongs_to_the_key_that_began_it(tmp_path: Path, folder: Path) -> None:
    hosts = [keys_of_host(tmp_path, folder, name) for name in ("one", "two")]
    where = f"ipc://{tmp_path}/wire"
    with learner(tmp_path) as side, connector(side, where, curve=folder) as receiver:
        link = ZmqLink(context(tmp_path, curve=hosts[0]), where, None, 2, actor=7)
        other = Client(context(tmp_path, curve=hosts[1], incarnation=5), where, actor=7, want=2)
        own = Client(context(tmp_path, curve=hosts[1]), where, actor=8, want=2)
        own.join()  # an actor of its own is welcome
        other.welcome = own.welcome
        other._run_id, other._joined = own.welcome.run_id, True
        other._ctx.incarnation = 0
        for kind in (MessageKind.BEAT, MessageKind.BYE):
            other._send(kind)
        wait_until(lambda: receiver.rejected == {"key": 2})
        with pytest.raises(UserError, match="actor 7 was begun with another key"):
            keep_asking(other, link)
        with link.slot(10) as slot:
            assert slot is not None
            fill(slot, 0)
        assert side.take().header["actor"] == 7
        for made in (link, other, own):
            made.close()


def keep_asking(client: Client, other: ZmqLink) -> None:
    """Say HELLO until it is refused, while ``other`` lives."""
    client.rejoin()
    for _ in range(100):
        client._next_report_s = 0.0
        client._report_counters()
        client.pump(0.05)
        other._client._next_report_s = 0.0
        other.beat()


def keys_of_host(tmp_path: Path, folder: Path, name: str) -> Path:
    """A pair of its own for one host, listed by the learner."""
    made = tmp_path / name
    keys.make_keys(made)
    shutil.copy(folder / "learner.key", made / "learner.key")
    shutil.copy(made / "allowed" / "actor.key", folder / "allowed" / f"{name}.key")
    return made


def test_keys_are_secret_and_never_overwritten(folder: Path) -> None:
    assert (folder.stat().st_mode & 0o777) == 0o700
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*.key*")) == [
        "actor.key_secret",
        "allowed/actor.key",
        "learner.key",
        "learner.key_secret",
    ]
    for path in folder.glob("*.key_secret"):
        assert (path.stat().st_mode & 0o777) == 0o600
    with pytest.raises(UserError, match="holds keys already"):
        keys.make_keys(folder)


def test_a_missing_key_is_named(tmp_path: Path, folder: Path, actor_folder: Path) -> None:
    with pytest.raises(UserError, match=r"actor\.key_secret cannot be read"):
        keys.load_actor(tmp_path)
    (actor_folder / "learner.key").unlink()
    with pytest.raises(UserError, match=r"learner\.key cannot be read"):
        keys.load_actor(actor_folder)
    shutil.copy(folder / "learner.key", folder / "learner.key_secret")
    with pytest.raises(UserError, match="holds no secret key"):
        keys.load_learner(folder)
    (folder / "allowed" / "actor.key").unlink()
    with pytest.raises(UserError, match="holds no public key, so no actor could connect"):
        keys.load_learner(folder)
