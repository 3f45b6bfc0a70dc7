"""No process of a role is left, whichever of role, shim and supervisor is killed first."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from penstock.core.interfaces import Liveness
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.engines import local, shim_process
from penstock.launch.engines.local import LocalHandle
from penstock.launch.supervisor_messages import why_not_started
from penstock.launch.topology import role_arguments
from waiting import wait_until

pytestmark = pytest.mark.system

HERE = Path(__file__).parent
GONE_WITHIN_S = 5.0
LIVES = "supervisor", "guard", "keeper", "role", "daemon"

SUPERVISOR = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
from penstock.core.interfaces import Liveness
from system.test_shim import start
child = start(Path(sys.argv[1]), "with_a_daemon", sys.argv[2])
while child.liveness() is not Liveness.DEAD:
    time.sleep(0.02)
print(child.reap())
"""


def start(
    folder: Path, main: str, role: str = "actor", log: Path | None = None, grace_s: float = 1.0
) -> LocalHandle:
    """A role of `tiny_roles`; learners are essential."""
    stage = Stage.LEARNER if role == "learner" else Stage.ACTORS
    arguments = role_arguments(folder, folder) | {"run_id": 1, "grace_s": grace_s}
    spec = RoleSpec(role, 0, f"tiny_roles:{main}", stage)
    (folder / "logs").mkdir(exist_ok=True)
    return LocalHandle(spec, 0, arguments, log or folder / "logs" / "role.log")


@pytest.fixture(autouse=True)
def _roles_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    path = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


@contextmanager
def ending(supervisor: subprocess.Popen[str]) -> Iterator[None]:
    """End it if a test fails, or the test would wait for it."""
    try:
        yield
    finally:
        supervisor.kill()


def lives(one: psutil.Process) -> bool:
    try:
        return bool(one.is_running()) and one.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def siblings(one: psutil.Process) -> list[psutil.Process]:
    """The children of its parent."""
    try:
        parent = one.parent()
        return [] if parent is None else list(parent.children())
    except psutil.NoSuchProcess:  # the parent has just ended
        return []


def processes(folder: Path) -> dict[str, psutil.Process]:
    """All that live, by what they are, once the environment's program runs."""
    wait_until((folder / "daemon").exists)
    daemon = psutil.Process(int((folder / "daemon").read_text()))
    wait_until(lambda: len(siblings(daemon)) == 2)  # the keeper has adopted it: role and daemon
    keeper = daemon.parent()
    assert keeper is not None
    guard = keeper.parent()
    assert guard is not None
    supervisor = guard.parent()
    assert supervisor is not None
    [role] = [child for child in keeper.children() if child != daemon]
    return dict(zip(LIVES, (supervisor, guard, keeper, role, daemon), strict=True))


FIRST = [("supervisor",), ("guard",), ("keeper",), ("role",)]
# Without both of its guards, what has cleared its environment cannot be found any more.
PAIRS = [(a, b) for (a,) in FIRST for (b,) in FIRST if a != b and {a, b} != {"guard", "keeper"}]
TWO = [pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS]


@pytest.mark.parametrize("role", ["actor", "learner"])
@pytest.mark.parametrize("killed", [*FIRST, *TWO])
def test_killing_any_process_of_a_role_first_leaves_no_process(
    tmp_path: Path, killed: tuple[str, ...], role: str
) -> None:
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), role]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor,
        ending(supervisor),
    ):
        found = processes(tmp_path)
        assert found["supervisor"].pid == supervisor.pid
        for name in killed:
            with suppress(psutil.NoSuchProcess):  # it has ended with the one before
                found[name].kill()
        ends_s = time.monotonic() + GONE_WITHIN_S
        while left := [name for name, one in found.items() if lives(one)]:
            assert time.monotonic() < ends_s, left
            time.sleep(0.02)
        assert supervisor.stdout is not None
        if "supervisor" not in killed:
            assert supervisor.stdout.read() == "-9\n"


def test_role_has_its_niceness_and_ignores_ctrl_c_of_the_terminal(tmp_path: Path) -> None:
    """Where each role was a session of its own, autogroup (`sched`(7)) gave all of them equal
    shares of the cores, whatever their niceness."""
    terminal, inside = os.openpty()
    command = [sys.executable, "-c", SUPERVISOR, str(tmp_path), "actor"]
    with (
        subprocess.Popen(
            command,
            stdin=inside,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        ) as supervisor,
        ending(supervisor),
    ):
        found = processes(tmp_path)
        group = os.getpgid(supervisor.pid)
        for name in ("guard", "keeper", "role"):
            assert os.getsid(found[name].pid) == os.getsid(supervisor.pid), name
            assert os.getpgid(found[name].pid) != group, name
            assert found[name].terminal() is None, name
        assert found["supervisor"].terminal() is not None
    for fd in (terminal, inside):
        os.close(fd)


def test_supervisor_kills_marked_processes_when_guard_and_keeper_are_killed(
    tmp_path: Path,
) -> None:
    child = start(tmp_path, "with_a_marked_daemon")
    found = processes(tmp_path)
    for name in ("guard", "keeper"):
        found[name].kill()
    child.wait()
    assert child.reap() == -signal.SIGKILL
    wait_until(lambda: not any(map(lives, list(found.values())[1:])), GONE_WITHIN_S)


def test_role_ends_with_its_own_process(tmp_path: Path) -> None:
    """The guard's death alone gives no memory back: a stopped process still has it mapped."""
    child = start(tmp_path, "with_a_daemon", "learner", grace_s=0.5)
    found = processes(tmp_path)
    assert child.pid == found["role"].pid
    assert child.liveness() is not Liveness.DEAD
    for name in ("role", "keeper"):
        found[name].suspend()
    found["guard"].kill()
    wait_until(lambda: not lives(found["guard"]))
    begin_s = time.monotonic()
    while child.liveness() is not Liveness.DEAD:
        assert time.monotonic() - begin_s < GONE_WITHIN_S
    assert not lives(found["role"])
    assert time.monotonic() - begin_s >= 0.5, "it was given its grace"
    found["keeper"].resume()
    assert child.reap() == -signal.SIGKILL


def test_a_guard_that_is_stopped_does_not_hold_a_role_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LINGER_S", 0.2)
    child = start(tmp_path, "with_a_daemon")
    found = processes(tmp_path)
    found["guard"].suspend()
    child.signal(signal.SIGKILL)
    assert child.reap() == -signal.SIGKILL
    wait_until(lambda: not any(map(lives, [found["keeper"], found["daemon"]])), GONE_WITHIN_S)


@pytest.mark.slow
def test_a_keeper_that_is_stopped_is_killed_after_its_role(tmp_path: Path) -> None:
    child = start(tmp_path, "with_a_daemon")
    found = processes(tmp_path)
    found["keeper"].suspend()
    child.signal(signal.SIGKILL)
    assert child.wait(10.0)
    assert child.reap() == -signal.SIGKILL
    assert not any(lives(found[name]) for name in ("keeper", "role", "daemon"))


def test_no_role_starts_for_a_dead_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    child = start(tmp_path, "work")
    monkeypatch.undo()
    child.wait()
    assert not child.began
    assert child.reap() == 1


def test_last_output_of_a_role_is_kept_when_its_log_overflows(tmp_path: Path) -> None:
    child = start(tmp_path, "talk")
    child.wait()
    assert child.log_tail().endswith("the last line")
    assert child.reap() == 7
    log, older = (tmp_path / "logs" / name for name in ("role.log", "role.log.1"))
    assert all(path.stat().st_size <= 10_000_000 for path in (log, older) if path.exists())
    assert "bytes of output were dropped: " in log.read_text()
    assert "line 0 " in (older if older.exists() else log).read_text()


def test_a_full_disk_does_not_end_a_role_that_writes(tmp_path: Path) -> None:
    child = start(tmp_path, "talk", log=Path("/dev/full"))
    child.wait()
    assert child.page.role_dropped > 20_000_000
    assert child.log_tail().endswith("the last line")
    assert child.reap() == 7


def test_role_can_write_after_its_keeper_is_killed(tmp_path: Path) -> None:
    """Its output is taken in by the guard then: a learner that saves gets no broken pipe."""
    child = start(tmp_path, "talk_when_asked", "learner", grace_s=10.0)
    wait_until(lambda: "ready" in child.log_tail())
    role = psutil.Process(child.pid)
    keeper = role.parent()
    assert keeper is not None
    keeper.kill()
    child.wait()
    assert child.log_tail().endswith("the last line")
    assert child.reap() == 7


@pytest.mark.parametrize("killed", ["guard", "keeper"])
def test_learner_in_a_group_ends_at_once_with_its_shim(tmp_path: Path, killed: str) -> None:
    child = start(tmp_path, "work", "learner", grace_s=60.0)
    wait_until(lambda: any(message["kind"] == "ready" for message in child.receive()))
    keeper = psutil.Process(child.pid).parent()
    assert keeper is not None
    shim = {"guard": keeper.parent(), "keeper": keeper}[killed]
    assert shim is not None
    shim.kill()
    assert child.wait(GONE_WITHIN_S)
    [error] = [message for message in child.receive() if message["kind"] == "error"]
    assert not error["user"]
    child.reap()


def test_missing_interpreter_is_reported_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim_process, "python", lambda *_: ["/no/such/python"])
    child = start(tmp_path, "work")
    child.wait()
    assert child.log_tail().startswith("/no/such/python cannot be executed: [Errno 2]")
    assert child.reap() == os.EX_OSERR


@pytest.mark.parametrize("forks", [0, 1])
def test_shim_that_cannot_fork_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: int
) -> None:
    program = f"""
import errno, os, sys
sys.path.append(sys.argv.pop(1))
fork, left = os.fork, {forks}
def limited():
    global left
    if not left:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    left -= 1
    return fork()
os.fork = limited
import shim
shim.main()
"""
    monkeypatch.setattr(shim_process, "BOOT", program)
    child = start(tmp_path, "work")
    child.wait()
    assert not child.began
    assert child.log_tail() == (
        "the role could not be started: [Errno 11] Resource temporarily unavailable"
    )
    assert child.reap() == os.EX_OSERR


@pytest.mark.parametrize("function", ["socketpair", "memfd_create", "mmap", "Popen", "pidfd_open"])
def test_failed_start_leaves_no_process_or_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    place = {
        "socketpair": "penstock.core.control.socket",
        "mmap": "penstock.profiling.status.mmap",
        "Popen": "subprocess",
    }
    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(f"{place.get(function, 'os')}.{function}", fail)
        with pytest.raises(OSError, match="Too many") as raised:
            start(tmp_path, "work")
    assert why_not_started(raised.value).startswith(
        "could not be started: Too many open files; raise the limit of `ulimit -n`"
    )
    assert sorted(os.listdir("/proc/self/fd")) == before
