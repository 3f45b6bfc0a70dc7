"""Status requests and orders to a supervisor, over its real socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.core.role_spec import RoleSpec, Stage
from penstock.core.run_dir import SUPERVISOR_FILE
from penstock.launch.engines.local import LocalHandle
from penstock.launch.supervisor_server import SupervisorServer
from penstock.monitor.status import describe, status
from penstock.monitor.supervisor_client import reach
from penstock.profiling.ledger import Part
from penstock.profiling.status import Phase

SPEC = RoleSpec("actor", 3, "does_not_matter:run", Stage.ACTORS, learner=1)


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path, as a runtime folder has, which others may look into."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        (Path(place) / "logs").mkdir()
        Path(place).chmod(0o755)
        yield Path(place)


@pytest.fixture
def child(folder: Path) -> Iterator[LocalHandle]:
    """A process stopped at its very start, so that its page says what the test writes there."""
    one = LocalHandle(SPEC, 7, {}, folder / "logs" / "actor-3.log")
    one.signal(signal.SIGSTOP)
    yield one
    one.signal(signal.SIGKILL)
    one.reap()


def connect(folder: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5.0)
    client.connect(json.loads((folder / SUPERVISOR_FILE).read_text())["socket"])
    return client


def asking(folder: Path, request: str = "status", **fields: Any) -> socket.socket:
    client = connect(folder)
    client.sendall(json.dumps({"request": request, **fields}).encode() + b"\n")
    return client


def read_all(client: socket.socket) -> Any:
    with client:
        return json.loads(b"".join(iter(lambda: client.recv(1 << 16), b"")))


@contextmanager
def served(
    folder: Path, names: list[str], children: Mapping[str, LocalHandle], every_s: float = 0.01
) -> Iterator[SupervisorServer]:
    """A supervisor's loop that only answers questions, in a thread of its own."""
    ended = threading.Event()
    with SupervisorServer(folder, folder) as server:

        def loop() -> None:
            while not ended.wait(every_s):
                server.serve_clients(names, children)

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            ended.set()
            thread.join()


def test_status_request_gets_phase_and_duration_of_each_process(
    folder: Path, child: LocalHandle
) -> None:
    child.page.phase = Phase.ENVIRONMENT
    child.page.beat()
    ledger = child.page.ledger("main")
    ledger.switch(Part.STEP)
    time.sleep(0.2)
    with SupervisorServer(folder, folder) as server:
        client = asking(folder)
        server.serve_clients(["actor-3", "actor-4"], {"actor-3": child})
        report = read_all(client)
    assert (report["run"], report["pid"]) == (str(folder), os.getpid())
    told, absent = report["processes"]
    assert absent == {"name": "actor-4", "pid": None}
    assert (told["name"], told["pid"], told["learner"]) == ("actor-3", child.pid, 1)
    assert (told["incarnation"], told["phase"], told["state"]) == (7, "environment", "stopped")
    [thread] = told["threads"]
    assert (thread["name"], thread["part"]) == ("main", "step")
    for seconds in (thread["for_s"], thread["seconds"]["step"], told["silent_s"]):
        assert 0.2 <= seconds < 5
    assert 0.2 <= told["phase_for_s"] <= told["age_s"] + 0.02 < 10


def test_newly_started_process_has_an_empty_status(folder: Path, child: LocalHandle) -> None:
    with SupervisorServer(folder, folder) as server:
        client = asking(folder)
        server.serve_clients(["actor-3"], {"actor-3": child})
        [told] = read_all(client)["processes"]
    assert (told["phase"], told["silent_s"], told["threads"]) == ("starting", None, [])
    assert told["phase_for_s"] == told["age_s"]


def test_vanished_client_leaves_no_open_connection(folder: Path) -> None:
    with SupervisorServer(folder, folder) as server:
        before = len(os.listdir("/proc/self/fd"))
        many = [f"actor-{i}" for i in range(50_000)]  # more than a socket takes at once
        for _ in range(3):
            connect(folder).close()
            asking(folder, "save").close()
            client = asking(folder)
            server.serve_clients(many, {})
            client.close()
            server.serve_clients(many, {})
        assert len(os.listdir("/proc/self/fd")) <= before  # what others left open may be closed


def test_silent_and_slow_clients_delay_no_other(folder: Path) -> None:
    many = [f"actor-{i}" for i in range(50_000)]
    with SupervisorServer(folder, folder) as server, ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(connect(folder))
            server.serve_clients(many, {})
        for _ in range(8):
            stack.enter_context(asking(folder))
        server.serve_clients(many, {})
        patient = asking(folder)
        start_s = time.monotonic()
        server.serve_clients([], {})
        assert time.monotonic() - start_s < 0.3
        assert read_all(patient)["processes"] == []


def test_a_request_may_arrive_in_pieces(folder: Path) -> None:
    with SupervisorServer(folder, folder) as server:
        client = connect(folder)
        for part in (b'{"requ', b'est": "sta', b'tus"}', b"\n"):
            client.sendall(part)
            server.serve_clients([], {})
        assert read_all(client)["processes"] == []


def test_all_clients_that_ordered_a_checkpoint_get_the_same_answer(folder: Path) -> None:
    with SupervisorServer(folder, folder) as server:
        clients = [asking(folder, "save") for _ in range(2)]
        assert server.serve_clients([], {}) == [{"request": "save"}, {"request": "save"}]
        assert server.serve_clients([], {}) == []
        server.reply("timeline", {})
        server.reply("save", {"folder": "last"})
        assert [read_all(client) for client in clients] == [{"folder": "last"}] * 2
        assert server.serve_clients([], {}) == []


def test_timeline_order_is_answered_once_the_file_is_written(folder: Path) -> None:
    with SupervisorServer(folder, folder) as server:
        client = asking(folder, "timeline")
        assert server.serve_clients([], {}) == [{"request": "timeline"}]
        assert server.serve_clients([], {}) == []
        server.reply("timeline", {})
        assert read_all(client) == {}


def test_an_order_for_stacks_is_answered_at_once(folder: Path) -> None:
    with SupervisorServer(folder, folder) as server:
        client = asking(folder, "stacks", roles=["actor-1"])
        assert server.serve_clients([], {}) == [{"request": "stacks", "roles": ["actor-1"]}]
        assert read_all(client) == {}


@pytest.mark.parametrize(
    "line",
    [
        b'{"request": "erase"}',
        b'{"request": ["save"]}',
        b"{}",
        b'{"request": "stacks"}',
        b'{"request": "stacks", "roles": [["actor-1"]]}',
        b"save",
        b"[1]",
        b"\xff" * 100,
        b"[" * 100_000,
    ],
)
def test_an_unknown_request_is_refused(folder: Path, line: bytes) -> None:
    with SupervisorServer(folder, folder) as server:
        client = connect(folder)
        client.sendall(line + b"\n")
        assert [server.serve_clients([], {}) for _ in range(3)] == [[]] * 3
        assert "is unknown to this run's release" in read_all(client)["error"]


def test_end_of_the_run_answers_pending_requests(folder: Path) -> None:
    with SupervisorServer(folder, folder) as server:
        client = asking(folder, "save")
        server.serve_clients([], {})
    assert "the run has ended" in read_all(client)["error"]


def test_long_answer_is_sent_completely_over_many_turns(folder: Path) -> None:
    names = [f"actor-{i}" for i in range(50_000)]
    with served(folder, names, {}, every_s=0.001):
        report = reach(str(folder)).report
    assert report is not None
    assert [p["name"] for p in report["processes"]] == names


def test_time_shares_are_those_of_the_window(folder: Path, child: LocalHandle) -> None:
    ledger = child.page.ledger("main", Part.INFER)
    time.sleep(0.5)
    ledger.switch(Part.STEP)
    with served(folder, ["actor-3"], {"actor-3": child}):
        report = status(str(folder), window_s=0.3)
    [process] = report["processes"]
    [thread] = process["threads"]
    assert 0.3 <= report["window_s"] < 1
    assert thread["ledger"] == {"infer": pytest.approx(0), "step": pytest.approx(1)}
    assert process["cpu"] == 0
    _, line, inside = describe(report).splitlines()
    assert f"pid {child.pid}, incarnation 7, stopped, silent for " in line
    assert inside.split()[:3] == ["main", "in", "step"]
    assert inside.endswith("step 100%")


def test_supervisor_file_and_socket_exist_while_the_server_runs(folder: Path) -> None:
    with SupervisorServer(folder, folder):
        about = json.loads((folder / SUPERVISOR_FILE).read_text())
        assert about["pid"] == os.getpid()
        assert Path(about["socket"]).is_socket()
    assert [path.name for path in folder.rglob("*")] == ["logs"]


def test_a_clock_that_was_set_back_changes_no_duration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(folder, [], {}):
        hour_ago_s = time.time() - 3600
        monkeypatch.setattr(time, "time", lambda: hour_ago_s)
        assert 0 <= read_all(asking(folder))["running_s"] < 600
