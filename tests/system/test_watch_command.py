"""`penstock watch` and `penstock train --watch` as commands, beside a living run."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx2")
pytest.importorskip("plotly")

import httpx2

from run_folders import make_run
from train_command import SMALL, WAIT_S, Penstock, address_of, assert_balanced, trained

pytestmark = pytest.mark.system


def test_live_run_is_saved_and_stopped_by_the_page(penstock: Penstock, tmp_path: Path) -> None:
    run = penstock("train", "cartpole", "run.dir=runs/a", "stop.minutes=5", "--json", *SMALL)
    run.wait_until(lambda: trained(tmp_path / "runs/a"))
    address = address_of(penstock("watch", "runs", "--port", "0", "--json"))
    with httpx2.Client(base_url=address, trust_env=False, timeout=WAIT_S) as page:
        assert page.get("/").status_code == 200

        def now() -> Any:
            return page.get("/api/now", params={"run": "a"}).json()

        assert now()["state"] == "running"
        run.wait_until(lambda: any("cpu" in p for p in now()["status"]["processes"]))
        processes = {process["name"]: process for process in now()["status"]["processes"]}
        assert {"learner-0", "actor-0", "actor-1"} <= processes.keys()
        assert processes["learner-0"]["rss_nbytes"] > 1 << 20
        session = page.get("/api/session").json()

        def order(kind: str) -> Any:
            headers = {session["header"]: session["token"]}
            return page.post(f"/order/{kind}", json={"run": "a"}, headers=headers)

        assert order("save").json()["trained_steps"] > 0
        assert (tmp_path / "runs/a/checkpoints/last/checkpoint.safetensors").is_file()
        stacks = {p["name"]: p["stacks"] for p in order("stacks").json()["processes"]}
        assert "File " in stacks["learner-0"]
        assert order("stop").json() == {"pid": run.process.pid}
        again = order("stop")
        assert again.status_code == 400
        assert re.search("already|has ended|is starting or ending", again.json()["error"])
        code, summary, _ = run.end()
        assert (code, summary["exit_reason"]) == (130, "interrupted")
        assert_balanced(summary)
        ends_s = time.monotonic() + 20
        while now()["state"] == "running" and time.monotonic() < ends_s:
            time.sleep(0.2)
        assert now()["state"] == "stopped"


def test_page_of_train_watch_ends_with_its_run(penstock: Penstock, tmp_path: Path) -> None:
    options = ("run.dir=a", "stop.minutes=5", *SMALL)
    run = penstock("train", "cartpole", "--watch", "--json", *options)
    events = tmp_path / "a/logs/events.jsonl"
    run.wait_until(lambda: events.exists() and "is shown at" in events.read_text())
    found = re.search(r"is shown at (http://127\.0\.0\.1:\d+/)", events.read_text())
    assert found
    with httpx2.Client(base_url=found[1], trust_env=False, timeout=WAIT_S) as page:
        [row] = page.get("/api/runs").json()["runs"]
        assert row["name"] == "."
    pages = [
        child
        for child in psutil.Process(run.process.pid).children()
        if "penstock.watch.beside" in child.cmdline()
    ]
    assert len(pages) == 1
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert not pages[0].is_running()


PARENT = """
import sys, time
from pathlib import Path
from penstock.watch.beside import PageBeside

page = PageBeside(Path(sys.argv[1]))
while True:
    page.tick()
    time.sleep(0.05)
"""


def test_page_of_train_watch_ends_with_a_killed_supervisor(tmp_path: Path) -> None:
    make_run(tmp_path / "a", [1.0, 2.0])
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "a")])
    try:
        ends_s = time.monotonic() + WAIT_S
        pages: list[psutil.Process] = []
        while not (pages and listens(pages[0])) and time.monotonic() < ends_s:
            pages = psutil.Process(parent.pid).children()
            time.sleep(0.05)
        assert len(pages) == 1
    finally:
        parent.kill()
        parent.wait()
    psutil.wait_procs(pages, timeout=20)
    assert not pages[0].is_running()


def listens(process: psutil.Process) -> bool:
    return any(found.status == psutil.CONN_LISTEN for found in process.net_connections("tcp"))


def test_invalid_watch_arguments_are_refused_in_one_sentence(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, reason in (
            (["nowhere"], "there is no folder nowhere"),
            (["runs", "--host", "0.0.0.0"], "reachable from other hosts"),
            (["runs", "--token", "env:UNSET_HERE"], "UNSET_HERE: that environment variable"),
            (["runs", "--port", port], f"127.0.0.1:{port}"),
            (["runs", "--tls-cert", "a", "--tls-key", "b"], "cannot be used"),
        ):
            command = penstock("watch", *arguments)
            _, error = command.process.communicate(timeout=WAIT_S)
            assert command.process.returncode == 2, error
            assert error.startswith("penstock: ")
            assert reason in error
            assert len(error.splitlines()) == 1
