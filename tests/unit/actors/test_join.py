"""An actor that waits for its learner: its notes, timeouts and errors."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from penstock.actors import join, role
from penstock.algos.samples import slot_spec
from penstock.configs.load import resolve
from penstock.core.control import Channel
from penstock.core.role import RoleContext
from penstock.envs import probe
from penstock.profiling.status import StatusPage
from penstock.transport.shm.link import ShmTransport
from transport_world import context, reports

ELSEWHERE = {"kind": "learner", "index": 1, "address": None, "incarnation": 2}


@pytest.mark.parametrize(
    ("address", "notes"), [(None, 0), ("ipc:///tmp/by-hand", 1)], ids=["train", "by hand"]
)
def test_only_an_actor_started_by_hand_reports_that_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str | None, notes: int
) -> None:
    monkeypatch.setattr(join, "SAY_SO_AFTER_S", 0.05)
    ours, child = Channel.pair()
    theirs = Channel(child)
    page, descriptor = StatusPage.create()
    os.close(descriptor)
    ctx = RoleContext("actor", 0, 1, 99, tmp_path, tmp_path, theirs, page, address=address)
    config = resolve("cartpole")
    leave = threading.Timer(0.5, lambda: ours.send(ELSEWHERE))
    leave.start()
    path = str(tmp_path / "nobody.sock")
    found = join.LearnerEndpoint(config, ShmTransport(), path)
    assert join.join_learner(ctx, found, slot_spec(config, probe(config.env)), 0) is None
    leave.join()
    waits = {"kind": "note", "text": f"actor-0 waits for the learner at {path}"}
    assert ours.receive() == [waits] * notes
    ours.close()
    theirs.close()
    page.close()


def test_actor_started_by_hand_gives_up_after_its_wait(tmp_path: Path) -> None:
    nobody = f"ipc://{tmp_path}/nobody"
    ctx = context(tmp_path, address=nobody, wait_s=0.2)
    assert not ctx.gave_up
    role.run(ctx)
    [stop] = reports(ctx, "stop")
    assert stop["reason"] == "lost"
    assert stop["error"] == (
        f"no learner answered at {nobody} for 0.2 s; start it, or raise --wait"
    )


def test_lack_of_shared_memory_is_a_fault_without_retries(tmp_path: Path) -> None:
    def connect() -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with pytest.raises(OSError, match="no memory"):
        join.wait_for(connect, context(tmp_path), None)
