"""Orders of the page, and the folders that accept them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.errors import UserError
from penstock.core.run_dir import SUPERVISOR_FILE, run_folder
from penstock.launch.supervisor_server import SupervisorServer
from penstock.monitor.supervisor_client import Reached, reach
from penstock.watch import orders
from penstock.watch.orders import Orders, supervisor_of
from run_folders import make_run


@pytest.fixture
def run() -> Iterator[Path]:
    """The folder of a run in progress, whose supervisor replies from a thread."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place, ExitStack() as stack:
        folder = Path(place) / "run"
        stack.enter_context(run_folder(folder, "auto"))
        server = stack.enter_context(SupervisorServer(folder, folder))
        ends = threading.Event()

        def reply() -> None:
            while not ends.is_set():
                server.serve_clients([], {})
                time.sleep(0.01)

        thread = threading.Thread(target=reply)
        thread.start()
        stack.callback(thread.join)
        stack.callback(ends.set)
        yield folder


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was carried out, in place of it."""
    found: list[Any] = []

    def record(folder: Path, cwd: str, cancels: object) -> dict[str, Any]:
        found.append(folder)
        return {"file": "now.mp4"}

    monkeypatch.setattr(orders, "record_newest", record)
    send = lambda _, number: found.append(number)  # noqa: E731
    monkeypatch.setattr(signal, "pidfd_send_signal", send)
    return found


def test_the_folder_of_a_run_in_progress_takes_orders(run: Path, given: list[Any]) -> None:
    assert Orders().give("record", run) == {"file": "now.mp4"}
    assert Orders().give("stop", run) == {"pid": supervisor_of(run)}
    assert given == [run, signal.SIGINT]


@pytest.mark.parametrize("order", ["record", "stop"])
@pytest.mark.parametrize("locked", [False, True])
def test_a_folder_that_names_the_socket_of_another_run_is_refused(
    run: Path, given: list[Any], order: str, locked: bool
) -> None:
    crafted = run.parent / "crafted"
    with ExitStack() as stack:
        crafted.mkdir()
        if locked:
            stack.enter_context(run_folder(crafted, "auto"))
        (crafted / SUPERVISOR_FILE).write_text((run / SUPERVISOR_FILE).read_text())
        with pytest.raises(UserError, match="is not that of a run in"):
            Orders().give(order, crafted)
    assert given == []


def test_forged_run_folder_without_a_lock_is_refused(
    run: Path, given: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = reach(str(run))
    crafted = run.parent / "crafted"
    crafted.mkdir()
    report = {**(reached.report or {}), "run": str(crafted)}
    made = Reached(reached.pid, report)
    monkeypatch.setattr(orders, "reach", lambda _: made)
    with pytest.raises(UserError, match="is not that of a run in"):
        Orders().give("record", crafted)
    assert given == []
    with run_folder(crafted, "auto"):
        assert Orders().give("record", crafted) == {"file": "now.mp4"}


def test_a_socket_that_does_not_reply_takes_no_orders(
    run: Path, given: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    about = json.loads((run / SUPERVISOR_FILE).read_text())
    made = Reached(about["pid"], None)
    monkeypatch.setattr(orders, "reach", lambda _: made)
    with pytest.raises(UserError, match="does not reply"):
        Orders().give("record", run)
    assert given == []


SERVER = """
import http.client, json, os, signal, sys, threading
from penstock.evaluation import best_videos
from penstock.watch import orders
from penstock.core.web.listen import Listen
from penstock.watch.server import serve

orders.supervisor_of = lambda folder: os.getpid()
RECORD = (
    "import os, signal, sys, time; os.kill(int(sys.argv[1]), signal.SIGINT); time.sleep(100)"
)
best_videos.python = lambda module, parent, *rest: [sys.executable, "-c", RECORD, str(parent)]

def record(address):
    connection = http.client.HTTPConnection(address.split("/")[2])
    connection.request("GET", "/api/session")
    session = json.loads(connection.getresponse().read())
    headers = {"content-type": "application/json", session["header"]: session["token"]}
    connection.request("POST", "/order/record", json.dumps({"run": "."}), headers)
    print(connection.getresponse().read().decode())

ready = lambda address: threading.Thread(target=record, args=(address,)).start()
serve(sys.argv[1], Listen(port=0), ready)
"""


def test_server_ends_at_once_during_a_recording(tmp_path: Path) -> None:
    for name in ("uvicorn", "starlette", "plotly"):
        pytest.importorskip(name)
    folder = make_run(tmp_path / "run", [1.0])
    command = [sys.executable, "-c", SERVER, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "the recording was cancelled" in done.stdout, done.stderr
