"""Real processes that crash, hang or refuse: which are restarted, and when the run ends."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from train_command import pid_of

if TYPE_CHECKING:
    from system.conftest import Supervised

pytestmark = pytest.mark.system

Supervise = Callable[..., "Supervised"]

MOST_FDS = resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_stop_message_of_the_learner_ends_the_run(supervise: Supervise) -> None:
    result = supervise(actors=["work", "work"], learner="stop_soon").result()
    assert (result["exit_code"], result["reason"]) == (0, "return")
    assert result["failure"] is None
    about = {name: value for name, value in result["last"].items() if name != "accounting"}
    assert about == {"actors_alive": 0, "actors_restarted": 0, "solved_at_s": 0.5}


def test_log_line_of_a_role_becomes_a_note_of_the_run(supervise: Supervise) -> None:
    result = supervise(actors=["work"], learner="log_and_stop").result()
    assert (result["exit_code"], result["notes"]) == (0, ["3 boards are loaded"])


def test_dead_actor_is_replaced_and_its_steps_are_reported_to_the_learner(
    supervise: Supervise,
) -> None:
    run = supervise(actors=["crash_once"], learner="learn")
    run.wait_for("actor-0: was killed by SIGKILL")
    run.wait_for_log("actor-0", "incarnation 1 works")
    run.signal(signal.SIGINT)
    result = run.result()
    assert (result["exit_code"], result["reason"]) == (130, "interrupted")
    assert result["last"]["actors_restarted"] == 1
    first, second = [m for m in result["last"]["heard"] if m["kind"] == "actor_ended"]
    assert first == {
        "kind": "actor_ended",
        "actor": 0,
        "incarnation": 0,
        "produced_steps": 100,
        "sequence": 4,
    }
    assert (second["incarnation"], second["produced_steps"]) == (1, 10 * second["sequence"])


def test_a_crash_loop_ends_the_run_with_the_first_traceback(supervise: Supervise) -> None:
    run = supervise(actors=["work", "crash"], learner="learn", limits={"max_restarts": 2})
    result = run.result()
    assert (result["exit_code"], result["reason"]) == (1, "fault")
    assert result["failure"]["name"] == "actor-1"
    assert result["failure"]["message"] == "ValueError: crash of incarnation 0"
    assert "in crash\n" in result["failure"]["traceback"]
    where = r"\(tiny_roles\.py:\d+, in crash\); traceback in \S*run/logs/actor-1\.log"
    for n, (note, delay) in enumerate(zip(result["notes"], ("0.1", "0.2"), strict=True)):
        sentence = rf"actor-1: ValueError: crash of incarnation {n} {where}; it is restarted in "
        assert re.fullmatch(sentence + rf"{delay} s", note)
    assert "crash of incarnation 2" in run.log("actor-1")


def test_the_learner_still_saves_when_the_actors_are_given_up(supervise: Supervise) -> None:
    run = supervise(actors=["crash"], learner="learn", limits={"max_restarts": 4})
    assert run.result()["exit_code"] == 1
    assert run.saved


def test_a_hung_environment_is_named_dumped_and_replaced(supervise: Supervise) -> None:
    run = supervise(actors=["hang_once"], learner="learn", limits={"hang_timeout_s": 0.5})
    run.wait_for(
        "actor-0: no sign of life for run.hang_timeout_s = 0.5 s, in phase environment; "
        "its stacks are in logs/actor-0.stacks; if it is only slow, raise run.hang_timeout_s; it "
        "is restarted in 0.1 s"
    )
    run.signal(signal.SIGTERM)
    assert run.result()["exit_code"] == 143
    assert "in _step_of_an_environment" in (run.folder / "run/logs/actor-0.stacks").read_text()


def starve(run: Supervised) -> None:
    """Leave a supervisor no descriptor beyond those it has, and kill its actor."""
    most = 1 + max(int(fd) for fd in os.listdir(f"/proc/{run.process.pid}/fd"))
    resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, (most, MOST_FDS))
    os.kill(pid_of(run.process.pid, "actor-0"), signal.SIGKILL)
    run.wait_for("actor-0: could not be started: Too many open files; raise the limit of")


def test_actor_restart_waits_for_a_free_descriptor(
    supervise: Supervise,
) -> None:
    run = supervise(actors=["work"], learner="learn", limits={"max_restarts": 20})
    run.wait_for_log("actor-0", "incarnation 0 works")
    starve(run)
    resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, (MOST_FDS, MOST_FDS))
    run.wait_for_log("actor-0", "works\nincarnation ")
    run.signal(signal.SIGTERM)
    assert run.result()["exit_code"] == 143


def test_a_run_that_gets_no_descriptor_ends_with_that_reason_and_is_saved(
    supervise: Supervise,
) -> None:
    run = supervise(actors=["work"], learner="learn", limits={"max_restarts": 2})
    run.wait_for_log("actor-0", "incarnation 0 works")
    starve(run)
    result = run.result()
    assert (result["exit_code"], result["reason"]) == (1, "fault")
    assert "was killed by SIGKILL" in result["failure"]["message"], "the first is told"
    assert run.saved


def test_role_that_never_starts_ends_the_run_as_a_fault(supervise: Supervise) -> None:
    limits = {"start_timeout_s": 2.5, "max_restarts": 0}  # the learner has to start in it
    result = supervise(actors=["never_ready"], learner="learn", limits=limits).result()
    assert result["exit_code"] == 1
    assert result["failure"]["message"] == (
        "no sign of life for run.start_timeout_s = 2.5 s, while it was starting, "
        "in phase starting; its stacks are in logs/actor-0.stacks; if it is only slow, raise "
        "run.start_timeout_s"
    )


def test_each_phase_of_a_start_has_its_own_timeout(supervise: Supervise) -> None:
    limits = {"start_timeout_s": 2.5, "max_restarts": 0}  # less than the parts together
    run = supervise(actors=["start_in_parts"], learner="learn", limits=limits)
    run.wait_for_log("actor-0", "incarnation 0 works")
    run.signal(signal.SIGTERM)
    assert run.result()["exit_code"] == 143


def test_actor_that_lost_its_learner_rejoins_without_a_note(supervise: Supervise) -> None:
    run = supervise(actors=["rejoin_twice"], learner="learn", limits={"max_restarts": 0})
    run.wait_for_log("actor-0", "incarnation 2 works")
    run.signal(signal.SIGINT)
    result = run.result()
    assert (result["exit_code"], result["notes"]) == (130, [])


@pytest.mark.parametrize(
    "plan", [{"actors": ["refuse"]}, {"actors": ["work"], "learner": "refuse"}]
)
def test_user_error_ends_the_run_at_once(supervise: Supervise, plan: dict[str, object]) -> None:
    result = supervise(**{"learner": "learn", **plan}).result()
    assert (result["exit_code"], result["reason"]) == (2, "user_error")
    assert result["failure"]["message"] == (
        "the game Pong-v9 does not exist; the nearest is Pong-v5"
    )
    assert (result["failure"]["traceback"], result["notes"]) == ("", [])


def test_a_learner_that_raises_ends_the_run_with_its_traceback(supervise: Supervise) -> None:
    result = supervise(actors=["work"], learner="crash").result()
    assert (result["exit_code"], result["reason"]) == (1, "fault")
    assert result["failure"]["name"] == "learner-0"
    assert "ValueError: crash of incarnation 0" in result["failure"]["traceback"]


def test_learner_killed_by_the_kernel_is_reported_with_signal_and_log(supervise: Supervise) -> None:
    result = supervise(actors=["work"], learner="segfault").result()
    assert result["exit_code"] == 1
    assert result["failure"]["message"] == "was killed by SIGSEGV"
    assert result["failure"]["traceback"].startswith("about to fall\nFatal Python error")


def test_the_current_folder_is_importable_after_the_libraries(
    supervise: Supervise, tmp_path: Path
) -> None:
    (tmp_path / "module_of_the_user.py").write_text("WORD = 'found'")
    (tmp_path / "queue.py").write_text("raise ImportError('stands in front of the library')")
    (tmp_path / "penstock").mkdir()
    run = supervise(actors=["import_from_here"], learner="learn")
    run.wait_for_log("actor-0", "incarnation 0 works")
    assert (tmp_path / "run" / "saved").read_text() == "found"
    run.signal(signal.SIGINT)
    assert run.result()["exit_code"] == 130
