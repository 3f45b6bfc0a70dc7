"""The sockets of one host: attaching to shared memory, the status of a run."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hostile_world import SPEC
from mutations import (
    DEEP,
    EXTREMES,
    bounded,
    changed,
    fuzzed,
    only,
    packed_with,
    strange_msgpack,
    values,
)
from penstock.configs.errors import UserError
from penstock.core.processes import began_ticks
from penstock.core.run_dir import SUPERVISOR_FILE
from penstock.monitor import status, supervisor_client
from penstock.transport.shm.attach import ATTACH_VERSION, AttachClient
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard
from transport_world import LAYOUT, welcome

DEEP_JSON = "[" * 50_000 + "]" * 50_000
REQUEST = {"attach": ATTACH_VERSION, "spec": SPEC.to_dict(), "want": 2, "lane": True}


class Owner:
    """A learner's store behind its Unix socket, in this thread."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "door"
        self.store = SlotStore(SPEC, 8, lanes=4)
        self.board = WeightsBoard.create(LAYOUT.size)
        self.host = ShmHost(self.path, welcome(spec=SPEC), [self.board], self.store)

    def poll(self) -> None:
        for _ in range(4):
            self.host.poll(0)

    def close(self) -> None:
        self.host.close()
        self.store.close()
        self.board.close()


@pytest.fixture(scope="module")
def owner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owner]:
    made = Owner(tmp_path_factory.mktemp("o"))
    yield made
    made.close()


ODD_VALUES: list[Any] = [*EXTREMES, -1, None, "x", [], 1.5, True, *DEEP]
requests = strange_msgpack | changed(REQUEST).map(packed_with) | st.sampled_from(
    [
        packed_with({**REQUEST, name: value})
        for name in REQUEST
        for value in ODD_VALUES
    ]
)  # fmt: skip


@fuzzed(cost=0.5)
@given(sent=st.lists(requests, min_size=1, max_size=3), descriptors=st.integers(0, 3))
def test_hostile_client_of_shared_memory_does_not_disturb_others(
    owner: Owner, sent: list[bytes], descriptors: int
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for request in sent:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(owner.path))
            socket.send_fds(client, [request], [0] * descriptors)
            with bounded():
                owner.poll()
            client.setblocking(False)
            try:
                data, fds, _, _ = socket.recv_fds(client, 1 << 17, 8)
                for fd in fds:
                    os.close(fd)
                reply = msgpack.unpackb(data) if data else {}
                assert "lane" in reply or "error" in reply or "spec" in reply or not data
            except BlockingIOError:
                pass
            with suppress(BrokenPipeError):
                client.send(b"bye")
            owner.poll()
        owner.poll()
    assert not owner.store.lanes
    assert len(owner.store.free) == 8
    assert len(os.listdir("/proc/self/fd")) <= before
    entries: list[AttachClient] = []
    honest = threading.Thread(
        target=lambda: entries.append(AttachClient(owner.path, REQUEST)), daemon=True
    )
    honest.start()
    while honest.is_alive():
        owner.host.poll(0.01)
    assert entries[0].reply["lane"] == 0
    for fd in entries[0].fds:
        os.close(fd)
    entries[0].leave()
    owner.poll()


@fuzzed(cost=0.5)
@given(reply=strange_msgpack | values(["error", "lane"]).map(packed_with))
@example(reply=b"\x01")
@example(reply=b"\x81\xa5error\x01")
def test_an_owner_of_shared_memory_answers_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, reply: bytes
) -> None:
    """Its folder is the user's own, yet another program may listen there."""
    path = tmp_path_factory.getbasetemp() / "owner"
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 17)
                peer.send(reply)

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        try:
            entry = AttachClient(path, REQUEST, timeout_s=5.0)
            assert isinstance(entry.reply, dict)
            entry.leave()
        except (UserError, OSError, EOFError):
            pass  # a typed refusal
        finally:
            answering.join()


PROCESS = {
    "name": "actor-0", "pid": 3, "learner": 0, "incarnation": 1, "state": "running", "cpu_s": 1.0,
    "age_s": 1.0, "phase": "x", "phase_for_s": 1.0, "silent_s": None,
    "threads": [{"name": "main", "part": "wait", "for_s": 1.0, "seconds": {"wait": 1.0}}],
}  # fmt: skip
REPORT = {
    "run": "x", "host": "h", "pid": 2, "since": 1e9, "running_s": 4.0, "processes": [PROCESS],
}  # fmt: skip


@fuzzed(cost=0.5)
@given(report=st.sampled_from([REPORT, [], None, 3, "x", DEEP_JSON]))
def test_a_status_is_shown_or_refused(
    tmp_path_factory: pytest.TempPathFactory, report: Any
) -> None:
    text = report if report is DEEP_JSON else json.dumps(report, default=str)
    path, folder = _answering(tmp_path_factory, text)
    refused = only(UserError)

    def use() -> None:
        status.describe(status.status(str(folder), 0.0))

    with path, bounded():
        refused(use)


def _answering(factory: pytest.TempPathFactory, text: str) -> tuple[Any, Path]:
    """A run whose supervisor answers with a text, twice."""
    folder = factory.getbasetemp() / "asked"
    folder.mkdir(exist_ok=True)
    path = folder / "sock"
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(2.0)

    def answer() -> None:
        try:
            while True:
                peer, _ = listener.accept()
                with peer:
                    peer.sendall(text.encode(errors="replace"))
        except OSError:
            return

    threading.Thread(target=answer, daemon=True).start()
    about: dict[str, Any] = {"pid": os.getpid(), "began": began_ticks(os.getpid())}
    about |= {"host": socket.gethostname(), "socket": str(path)}
    (folder / SUPERVISOR_FILE).write_text(json.dumps(about))
    return listener, folder


ABOUT = {"pid": 1, "began": 1, "host": socket.gethostname(), "socket": "/nowhere/x"}


@fuzzed(cost=0.5)
@given(
    text=changed(ABOUT).map(lambda v: json.dumps(v, default=str))
    | st.sampled_from(["", "[]", "3", DEEP_JSON, '"x"', "NaN"])
)
@example(text=json.dumps({**ABOUT, "socket": 5}))
@example(text=json.dumps({**ABOUT, "socket": "/a\0b"}))
@example(text=json.dumps({**ABOUT, "socket": "\ud800"}))
@example(text=json.dumps({**ABOUT, "pid": "../.."}))
@example(text=json.dumps({**ABOUT, "pid": "self", "socket": "/" + "x" * 300}))
def test_supervisor_file_of_a_run_is_used_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / "about"
    folder.mkdir(exist_ok=True)
    (folder / SUPERVISOR_FILE).write_text(text)
    only(UserError)(lambda: supervisor_client.reach(str(folder)))
