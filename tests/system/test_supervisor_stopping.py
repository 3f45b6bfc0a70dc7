"""However a supervisor is stopped: what can be saved is saved, and nothing is left behind.

That no process, runtime folder or shared memory stays is checked by the fixture of every system
test; here is what leads to it.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from system.conftest import Supervised

pytestmark = pytest.mark.system

Supervise = Callable[..., "Supervised"]

WORKS = "incarnation 0 works"


def runtime_folders() -> list[Path]:
    return list(Path(os.environ["TMPDIR"]).glob("penstock-*"))


@pytest.mark.parametrize(
    ("signum", "exit_code", "reason"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "terminated"),
    ],
)
def test_first_signal_saves_and_ends_the_run(
    supervise: Supervise, signum: int, exit_code: int, reason: str
) -> None:
    run = supervise(actors=["work", "work"], learner="learn")
    run.wait_for("metrics")
    assert len(runtime_folders()) == 1
    run.signal(signum)
    result = run.result()
    assert (result["exit_code"], result["reason"]) == (exit_code, reason)
    assert run.saved
    assert result["last"]["accounting"] == {"produced": 3, "trained": 3, "in_flight": 0}
    assert result["took_s"] < 3


def test_learner_is_informed_of_each_actors_end_before_finish(
    supervise: Supervise,
) -> None:
    run = supervise(actors=["work", "deaf"], learner="learn", limits={"grace_s": 4})
    run.wait_for("metrics")
    run.wait_for_log("actor-0", WORKS)
    run.wait_for_log("actor-1", WORKS)
    run.signal(signal.SIGINT)
    heard = run.result()["last"]["heard"]
    assert [m["actor"] for m in heard if m["kind"] == "actor_ended"] == [0, 1]
    assert heard[-1] == {"kind": "finish"}


def test_ctrl_c_reaches_only_the_supervisor(supervise: Supervise) -> None:
    run = supervise(actors=["work"], learner="learn")
    run.wait_for("metrics")
    for process in psutil.Process(run.process.pid).children(recursive=True):
        assert os.getpgid(process.pid) != os.getpgid(run.process.pid)
        process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert run.process.poll() is None
    run.signal(signal.SIGINT)
    assert (run.result()["exit_code"], run.saved) == (130, True)


def test_second_signal_kills_all_roles(supervise: Supervise) -> None:
    run = supervise(actors=["work"], learner="deaf", limits={"grace_s": 60})
    run.wait_for_log("learner-0", WORKS)
    run.wait_for_log("actor-0", WORKS)
    run.signal(signal.SIGINT)
    time.sleep(0.5)
    run.signal(signal.SIGINT)
    result = run.result()
    assert (result["exit_code"], result["reason"]) == (130, "interrupted")
    assert result["failure"]["message"] == (
        "was killed by a second signal before it had finished; it had written no checkpoint"
    )
    assert result["took_s"] < 3


def test_a_learner_that_does_not_finish_is_killed_after_the_grace(supervise: Supervise) -> None:
    run = supervise(actors=["work"], learner="deaf", limits={"grace_s": 1})
    run.wait_for_log("learner-0", WORKS)
    run.signal(signal.SIGINT)
    result = run.result()
    assert result["exit_code"] == 1
    assert result["failure"]["message"].startswith("did not finish within run.grace_s = 1 s")
    assert result["took_s"] < 4


def test_signal_during_the_start_ends_the_run_at_once(supervise: Supervise) -> None:
    run = supervise(actors=["never_ready"], learner="never_ready")
    while not runtime_folders():
        assert run.process.poll() is None
    time.sleep(0.2)
    run.signal(signal.SIGINT)
    result = run.result()
    assert (result["exit_code"], result["failure"]) == (130, None)
    assert result["took_s"] < 2


def test_processes_of_an_environment_end_with_its_actor(supervise: Supervise) -> None:
    run = supervise(actors=["with_a_child"], learner="learn")
    run.wait_for("metrics")
    run.wait_for_log("actor-0", WORKS)
    run.signal(signal.SIGTERM)
    assert run.result()["exit_code"] == 143


def test_killed_supervisor_ends_all_roles_and_the_learner_saves(
    supervise: Supervise,
) -> None:
    run = supervise(actors=["work", "deaf"], learner="save_late")
    for name in ("actor-0", "actor-1", "learner-0"):
        run.wait_for_log(name, WORKS)
    run.signal(signal.SIGKILL)
    run.process.wait()
    ends_s = time.monotonic() + 5
    while not run.saved and time.monotonic() < ends_s:
        time.sleep(0.02)
    assert run.saved
    [stale] = runtime_folders()
    again = supervise(actors=["work", "work"], learner="stop_soon")  # sweeps what was left
    assert again.result()["exit_code"] == 0
    assert not stale.exists()


def test_a_learner_that_is_stuck_ends_soon_after_its_supervisor(supervise: Supervise) -> None:
    run = supervise(learner="stuck", limits={"grace_s": 1})
    run.wait_for_log("learner-0", "stuck")
    run.signal(signal.SIGKILL)
    run.process.wait()
    ends_s = time.monotonic() + 5
    while _lives("learner-0") and time.monotonic() < ends_s:
        time.sleep(0.05)
    assert not _lives("learner-0")
    for path in runtime_folders():
        shutil.rmtree(path)


def test_two_runs_do_not_share_a_folder(supervise: Supervise) -> None:
    run = supervise(actors=["work"], learner="learn")
    run.wait_for("metrics")
    second = supervise(actors=["work"], learner="learn")
    _, err = second.process.communicate()
    assert second.process.returncode == 1
    assert "run is in use by a run that has not ended" in err
    run.signal(signal.SIGINT)
    assert run.result()["exit_code"] == 130


def test_run_whose_folder_was_replaced_ends_without_writing_to_it(
    supervise: Supervise, tmp_path: Path
) -> None:
    run = supervise(actors=["work"], learner="learn")
    run.wait_for("metrics")
    taken = tmp_path / "run"
    taken.rename(tmp_path / "moved")
    taken.mkdir()
    (taken / "supervisor.json").write_text("of another run")
    result = run.result()
    assert (result["exit_code"], result["reason"]) == (2, "user_error")
    assert str(taken) in result["failure"]["message"]
    assert [path.name for path in taken.iterdir()] == ["supervisor.json"]
    assert (taken / "supervisor.json").read_text() == "of another run"


def test_fault_of_the_supervisor_still_saves_the_run_and_ends_all_roles(
    supervise: Supervise,
) -> None:
    run = supervise(actors=["work"], learner="learn", fault=True)
    _, err = run.process.communicate()
    assert run.process.returncode == 1
    assert "a fault of the supervisor itself" in err
    assert run.saved


def _lives(name: str) -> bool:
    marker = os.environ["PENSTOCK_TEST"].encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = marker in (process / "environ").read_bytes()
            if ours and name.encode() in (process / "cmdline").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False
