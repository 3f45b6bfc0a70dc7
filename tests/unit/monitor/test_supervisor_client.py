"""Requests to a supervisor that is missing, does not answer, or is about to end."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.core.run_dir import SUPERVISOR_FILE, run_folder
from penstock.launch.supervisor_server import SupervisorServer
from penstock.monitor import status as process_status
from penstock.monitor import supervisor_client
from penstock.monitor.status import lasting, status
from penstock.monitor.supervisor_client import give_order, reach


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path, as a runtime folder has, which others may look into."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        (Path(place) / "logs").mkdir()
        Path(place).chmod(0o755)
        yield Path(place)


@contextmanager
def crowd(path: str) -> Iterator[None]:
    """So many ask that the socket takes no more."""
    with ExitStack() as clients:
        for _ in range(64):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.settimeout(0.2)
            try:
                client.connect(path)
            except (TimeoutError, BlockingIOError):
                yield
                return
        pytest.fail("the backlog never filled")


def dead(folder: Path) -> None:
    """What a supervisor that was killed leaves behind."""
    with SupervisorServer(folder, folder) as server:
        about = json.loads((folder / SUPERVISOR_FILE).read_text())
        del server
    about["began"] -= 1  # of a process that has ended, whose number this one has got
    (folder / SUPERVISOR_FILE).write_text(json.dumps(about))


def without_a_socket(folder: Path) -> None:
    with SupervisorServer(folder, folder):
        text = (folder / SUPERVISOR_FILE).read_text()
    (folder / SUPERVISOR_FILE).write_text(text)


def killed_but_for_its_socket(folder: Path) -> None:
    dead(folder)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(json.loads((folder / SUPERVISOR_FILE).read_text())["socket"])


def ended(folder: Path) -> None:
    summary = {"exit_reason": "fault", "error": "learner-0: out of luck"}
    (folder / "summary.json").write_text(json.dumps(summary))
    os.utime(folder / "summary.json", (1e9, 1e9))


def elsewhere(folder: Path) -> None:
    about = {"pid": 1, "began": 5, "host": "another", "socket": "/tmp/none"}
    (folder / SUPERVISOR_FILE).write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda _: None, "no run is live in {}, and it has no summary.json; give the folder of a"),
        (
            lambda folder: (folder / "summary.json").write_text("[]"),
            "no run is live in {}, and it has no summary.json; give the folder of a",
        ),
        (
            lambda folder: (folder / "summary.json").write_text("[" * 10**5),
            "no run is live in {}, and it has no summary.json; give the folder of a",
        ),
        (lambda folder: os.mkfifo(folder / "summary.json"), "no run is live in {}, and it has no"),
        (lambda folder: os.mkfifo(folder / SUPERVISOR_FILE), "{}/supervisor.json is damaged"),
        (ended, "the run in {} has ended, at {when}: fault (learner-0: out of luck)"),
        (dead, "the supervisor of {} (pid {pid}) has died without ending the run, and its"),
        (killed_but_for_its_socket, "the supervisor of {} (pid {pid}) has died without ending"),
        (without_a_socket, "the supervisor of {} (pid {pid}) runs, but its socket "),
        (elsewhere, "{} is of a run on another, and this host is {host}; run this command on "),
        (
            lambda folder: (folder / SUPERVISOR_FILE).write_text("[]"),
            "{}/supervisor.json is damaged",
        ),
        (lambda folder: (folder / "logs").rmdir() or folder.rmdir(), "there is no folder {}; give"),
    ],
)
def test_unreachable_supervisor_is_explained_in_one_sentence(
    tmp_path: Path, folder: Path, prepare: Callable[[Path], object], sentence: str
) -> None:
    prepare(folder)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1e9))
    words = {"pid": os.getpid(), "host": socket.gethostname(), "when": when}
    with pytest.raises(UserError) as raised:
        reach(str(folder))
    assert str(raised.value).startswith(sentence.format(folder, **words))
    folder.mkdir(exist_ok=True)


@pytest.mark.parametrize("prepare", [lambda _: None, ended], ids=["first", "resumed"])
def test_ending_run_is_not_reported_as_ended(
    folder: Path, prepare: Callable[[Path], object]
) -> None:
    prepare(folder)  # a summary is of the time before the run was resumed
    with (
        run_folder(folder, "auto"),
        pytest.raises(UserError, match="is starting or ending; try again in a moment"),
    ):
        reach(str(folder))


def test_process_that_reuses_the_supervisors_pid_is_not_signalled(folder: Path) -> None:
    with SupervisorServer(folder, folder):  # nobody takes its turn
        about = json.loads((folder / SUPERVISOR_FILE).read_text())
        (folder / SUPERVISOR_FILE).write_text(json.dumps({**about, "began": about["began"] + 1}))
        words = "run this command in the container of the run"
        with crowd(about["socket"]), pytest.raises(UserError, match=words):
            reach(str(folder))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_run_of_another_user_is_refused(folder: Path) -> None:
    private = folder / "runtime"
    private.mkdir(mode=0o700)
    with SupervisorServer(folder, private):
        os.seteuid(65534)
        try:
            with pytest.raises(UserError, match="is a run of root, and you are user 65534"):
                reach(str(folder))
        finally:
            os.seteuid(0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_folder_of_another_user_cannot_name_a_process_to_signal(folder: Path) -> None:
    """Its reply could say anything, and be of any process that this user may signal."""
    with SupervisorServer(folder, folder) as server:
        server.path.chmod(0o777)
        (folder / SUPERVISOR_FILE).chmod(0o644)
        os.seteuid(65534)
        try:
            with pytest.raises(UserError, match="is a run of root, and you are user 65534"):
                reach(str(folder))
        finally:
            os.seteuid(0)


def test_stuck_supervisor_with_many_clients_is_reported_as_stuck(folder: Path) -> None:
    # Nobody takes its turn.
    with SupervisorServer(folder, folder) as server, crowd(str(server.path)):
        reached = reach(str(folder))
        assert (reached.pid, reached.report) == (os.getpid(), None)


def test_a_supervisor_that_is_stuck_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (supervisor_client, process_status):
        monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    with SupervisorServer(folder, folder):
        assert reach(str(folder)) == supervisor_client.Reached(os.getpid(), None)
        with pytest.raises(TimeoutError):
            give_order(str(folder), "save", 0.2)
        with pytest.raises(UserError) as raised:
            status(str(folder))
    assert str(raised.value) == (
        f"the supervisor of {folder} (pid {os.getpid()}) did not reply within 0.2 s; "
        f"penstock stacks {folder} shows where it hangs"
    )


def test_supervisor_that_ends_during_a_request_is_reported_at_once(folder: Path) -> None:
    with SupervisorServer(folder, folder) as server, ThreadPoolExecutor(1) as pool:
        order = pool.submit(give_order, str(folder), "save", 30.0)
        while not server.serve_clients([], {}):
            time.sleep(0.01)
        for client in server._clients:
            client.close()
        with pytest.raises(UserError, match="has just ended, without a reply"):
            order.result(10)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0213, "0.02 s"), (41.3, "41 s"), (200, "3 min 20 s"), (7400, "2 h 3 min")],
)
def test_durations_are_formatted_briefly(seconds: float, text: str) -> None:
    assert lasting(seconds) == text
