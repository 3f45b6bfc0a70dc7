"""`penstock status` and `penstock stacks` beside runs that work, hang, stop and have ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from train_command import SMALL, Penstock, trained

if TYPE_CHECKING:
    from system.conftest import Supervised

pytestmark = pytest.mark.system

Supervise = Callable[..., "Supervised"]
ROLES = {"learner-0", "actor-0", "actor-1"}
PARTS = {"step", "infer", "write", "wait", "process", "other"}


def by_name(answer: dict[str, Any]) -> dict[str, Any]:
    return {process["name"]: process for process in answer["processes"]}


def ask(penstock: Penstock, command: str) -> dict[str, Any]:
    code, answer, err = penstock(command, "run", "--json").end()
    assert code == 0, err
    return by_name(answer)


def test_status_shows_the_state_of_each_process_and_how_long_an_actor_is_stopped(
    penstock: Penstock, tmp_path: Path
) -> None:
    run = penstock("train", "cartpole", "--json", *SMALL, "run.dir=run")
    run.wait_until(lambda: trained(tmp_path / "run"))
    told = ask(penstock, "status")
    assert told.keys() == ROLES
    for name, process in told.items():
        assert process["pid"] == run.pid_of(name)
        assert process["silent_s"] < 5
        main = process["threads"][0]
        assert main["name"] == "main"
        assert sum(main["ledger"].values()) == pytest.approx(1)
    actor_pid = run.pid_of("actor-0")
    os.kill(actor_pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    time.sleep(2)
    told = ask(penstock, "status")
    most_s = time.monotonic() - stopped_s + 1
    actor, main = told["actor-0"], told["actor-0"]["threads"][0]
    assert (actor["state"], actor["cpu"]) == ("stopped", 0)
    assert 2 <= actor["silent_s"] < most_s
    assert 2 <= main["for_s"] < most_s
    assert main["part"] in PARTS
    assert main["ledger"][main["part"]] == pytest.approx(1)
    assert told["actor-1"]["silent_s"] < 2
    written = ask(penstock, "stacks")
    assert written.keys() == ROLES | {"supervisor"}
    why_not = written["actor-0"].pop("why_not")
    assert why_not.startswith(f"no reply within 2 s; it is stopped, in {main['part']} for ")
    assert written["actor-0"]["stacks"] is None
    for name, call in {"learner-0": "learner/role.py", "supervisor": "supervisor.py"}.items():
        assert written[name]["why_not"] is None
        assert call in written[name]["stacks"]
    os.kill(actor_pid, signal.SIGCONT)
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.end()
    assert code == 130, err
    for command in ("status", "stacks"):
        code, answer, err = penstock(command, "run", "--json").end()
        assert (code, answer["exit_code"]) == (2, 2)
        assert answer["error"].startswith("the run in run has ended, at 2")
        assert answer["error"].endswith(": interrupted")
        assert err == f"penstock: {answer['error']}\n"


def test_stacks_come_from_a_process_that_is_stuck_in_c_with_the_interpreter_locked(
    supervise: Supervise, penstock: Penstock
) -> None:
    run = supervise(actors=["work", "stuck_in_c"], learner="learn", limits={"grace_s": 1})
    run.wait_for_log("actor-1", "stuck")
    penstock("stacks", "run").process.communicate()
    start_s = time.monotonic()
    written = ask(penstock, "stacks")
    assert time.monotonic() - start_s < 5
    assert "in stuck_in_c" in written["actor-1"]["stacks"]
    assert "in _turns" in written["actor-0"]["stacks"]
    assert written["actor-1"]["stacks"].count("Current thread") == 1  # of this time alone
    assert written["actor-1"]["status"]["phase"] == "environment"
    run.signal(signal.SIGTERM)
    assert run.result()["exit_code"] == 143
    left = {path.name for path in (run.folder / "run" / "logs").glob("*.stacks")}
    assert left == {f"{name}.stacks" for name in ("supervisor", "learner-0", "actor-0", "actor-1")}
    assert not (run.folder / "run" / "supervisor.json").exists()


@pytest.mark.slow
def test_stacks_are_written_even_if_the_supervisor_is_stuck(
    supervise: Supervise, penstock: Penstock
) -> None:
    run = supervise(actors=["work"], learner="learn")
    run.wait_for_log("actor-0", "works")
    run.signal(signal.SIGSTOP)
    code, answer, _ = penstock("status", "run", "--json").end()
    assert code == 2
    assert answer["error"].startswith(f"the supervisor of run (pid {run.process.pid}) did not rep")
    code, answer, _ = penstock("stacks", "run", "--json").end()
    assert (code, answer["supervisor_answers"]) == (0, False)
    written = by_name(answer)
    assert written["supervisor"]["why_not"] == "no reply within 2 s"
    assert "in _turns" in written["actor-0"]["stacks"]
    run.signal(signal.SIGCONT)
    run.signal(signal.SIGTERM)
    assert run.result()["exit_code"] == 143


def test_killed_supervisor_is_distinguished_from_an_ended_run(
    supervise: Supervise, penstock: Penstock
) -> None:
    run = supervise(actors=["work"], learner="learn")
    run.wait_for_log("actor-0", "works")
    run.signal(signal.SIGKILL)
    run.process.wait()
    for command in ("status", "stacks"):
        code, answer, _ = penstock(command, "run", "--json").end()
        assert code == 2
        assert answer["error"].startswith(
            f"the supervisor of run (pid {run.process.pid}) has died without ending the run"
        )
    again = supervise(actors=["work"] * 2, learner="stop_soon")  # sweeps away what is left
    assert again.result()["exit_code"] == 0
