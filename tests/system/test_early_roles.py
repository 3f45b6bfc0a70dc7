"""Role processes that are started before the command is imported, and that end with it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

import waiting
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.engines import early_roles
from penstock.launch.engines.local import LocalHandle
from penstock.launch.engines.shim_process import ShimProcess
from penstock.launch.topology import role_arguments
from train_command import SMALL, WAIT_S, Penstock, pid_of, trained

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
GONE_WITHIN_S = 5.0
wait_until = partial(waiting.wait_until, timeout_s=WAIT_S, every_s=0.01)
LEARNER_IMPORTS, ACTOR_IMPORTS = (
    "penstock.learner.early_imports:import_modules",
    "penstock.actors.role",
)
LEARNER = RoleSpec("learner", 0, "tiny_roles:work", Stage.LEARNER)


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[psutil.Process]]:
    """Returns the live programs of roles, and their shims, that the test has started."""
    monkeypatch.setenv("OF_TEST", secrets.token_hex(8))
    mark = f"OF_TEST={os.environ['OF_TEST']}".encode()

    def found() -> list[psutil.Process]:
        processes = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                process = psutil.Process(int(path.name))
                of_role = "penstock.launch.role" in process.cmdline()
                lives = process.status() != psutil.STATUS_ZOMBIE
                if of_role and lives and mark in (path / "environ").read_bytes():
                    processes.append(process)
            except (OSError, psutil.Error):  # it has ended
                continue
        return processes

    return found


@contextmanager
def early_learner() -> Iterator[ShimProcess]:
    """The process of a learner that this one has started early. Not a fixture, as pytest changes
    the environment between those and the test."""
    early_roles.start(["train", "cartpole"])
    try:
        early_roles.discard([LEARNER.name])
        yield early_roles._waiting[LEARNER.name]
    finally:
        early_roles.discard()


@pytest.mark.smoke
@pytest.mark.parametrize(("threads", "is_early"), [(1, True), (2, False)])
def test_run_uses_early_processes_with_the_right_number_of_threads(
    penstock: Penstock, tmp_path: Path, threads: int, is_early: bool
) -> None:
    run = penstock(
        "train", "cartpole", "--json", *SMALL, "run.dir=run", f"learner.threads={threads}"
    )
    run.wait_until(lambda: trained(tmp_path / "run"))
    learner, actor = (psutil.Process(run.pid_of(name)) for name in ("learner-0", "actor-0"))
    assert (LEARNER_IMPORTS in learner.cmdline()) == is_early
    assert ACTOR_IMPORTS in actor.cmdline()
    assert learner.environ()["OMP_NUM_THREADS"] == str(threads)
    assert (learner.nice(), actor.nice()) == (os.nice(0), os.nice(0) + 5)
    guards = psutil.Process(run.process.pid).children()
    assert len(guards) == 3, "of the learner and two actors"
    held = {os.readlink(path) for path in Path(f"/proc/{learner.pid}/fd").iterdir()}
    assert str(tmp_path / "run") in held, "the lock of the run's folder"
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130


def test_early_processes_end_after_a_config_error(
    penstock: Penstock, marked: Callable[[], list[psutil.Process]]
) -> None:
    code, _, err = penstock("train", "cartpole", "learner.lr=fast").end()
    assert code == 2
    assert len(err.splitlines()) == 1
    wait_until(lambda: not marked(), timeout_s=GONE_WITHIN_S)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_early_processes_end_with_the_command(
    penstock: Penstock, marked: Callable[[], list[psutil.Process]], signum: int
) -> None:
    run = penstock("train", "cartpole", "--json", *SMALL, "run.dir=run")
    run.wait_until(lambda: any("-c" not in process.cmdline() for process in marked()))
    run.process.send_signal(signum)
    code, _, err = run.end()
    assert code == (130 if signum == signal.SIGINT else -signum), err
    assert "Traceback" not in err
    wait_until(lambda: not marked(), timeout_s=GONE_WITHIN_S)


def test_command_without_standard_input_trains_normally(
    tmp_path: Path, marked: Callable[[], list[psutil.Process]]
) -> None:
    words = [sys.executable, "-m", "penstock", "train", "cartpole", *SMALL, "run.dir=run"]
    run = subprocess.Popen(["sh", "-c", 'exec "$@" <&-', "sh", *words], cwd=tmp_path)
    wait_until(lambda: trained(tmp_path / "run"))
    assert LEARNER_IMPORTS in psutil.Process(pid_of(run.pid, "learner-0")).cmdline()
    run.send_signal(signal.SIGINT)
    assert run.wait(WAIT_S) == 130
    assert not marked()


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["train"], ["train", "--help"], ["config", "show", "cartpole"]),
        *(["train", "cartpole", "--seeds", "3"], ["train", "cartpole", "--engine=ray"]),
    ],
)
def test_command_without_roles_starts_no_early_process(
    arguments: list[str], marked: Callable[[], list[psutil.Process]]
) -> None:
    early_roles.start(arguments)
    assert early_roles.take(LEARNER) is None
    assert not marked()


def test_command_in_a_deleted_folder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    deleted = tmp_path / "deleted"
    command = 'mkdir "$1" && cd "$1" && rmdir "$1" && shift && exec "$@"'
    words = [sys.executable, "-m", "penstock", "train", "cartpole", *SMALL]
    run = subprocess.run(
        ["sh", "-c", command, "sh", str(deleted), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr


def test_early_process_with_other_environment_variables_is_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with early_learner() as early:
        monkeypatch.setenv("OMP_WAIT_POLICY", "active")
        assert early_roles.take(LEARNER) is None
        assert early.process.returncode is not None


def test_dead_early_process_is_not_used() -> None:
    with early_learner() as early:
        wait_until(lambda: early.page.role_pid)
        os.kill(early.page.role_pid, signal.SIGKILL)
        early.process.wait(GONE_WITHIN_S)
        assert early_roles.take(LEARNER) is None


def test_stop_request_before_the_role_starts_is_obeyed_by_the_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    with early_learner() as early:
        wait_until(lambda: early.page.phase_s)  # it has its handler and begins to import
        os.kill(early.page.role_pid, signal.SIGTERM)
        assert early_roles.take(LEARNER) is early
        arguments = role_arguments(tmp_path, tmp_path) | {"run_id": 1, "grace_s": 20.0}
        (tmp_path / "logs").mkdir()
        handle = LocalHandle(LEARNER, 0, arguments, tmp_path / "logs" / "role.log", (), early)
        handle.wait(WAIT_S)
        assert "incarnation 0 works" in (tmp_path / "logs" / "role.log").read_text()
        assert handle.reap() == 0


def test_the_first_error_of_an_early_import_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second import of such a module fails in another way, as that of numpy does."""
    (tmp_path / "fails_twice.py").write_text(
        "import sys\n"
        "second, sys.once = hasattr(sys, 'once'), True\n"
        "raise ImportError('cannot load it twice' if second else 'libgfortran.so is absent')\n"
    )
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    early = ShimProcess(LEARNER.name, 1, True, "fails_twice")
    arguments = role_arguments(tmp_path, tmp_path) | {"run_id": 1, "grace_s": 20.0}
    (tmp_path / "logs").mkdir()
    spec = RoleSpec("learner", 0, "fails_twice:work", Stage.LEARNER)
    handle = LocalHandle(spec, 0, arguments, tmp_path / "logs" / "role.log", (), early)
    handle.wait(WAIT_S)
    [error] = [message for message in handle.receive() if message["kind"] == "error"]
    assert handle.reap() == 1
    assert error["message"] == "ImportError: libgfortran.so is absent"
