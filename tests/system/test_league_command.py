"""`penstock league`: lines as processes, their ends, and what a killed league resumes with."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from league_checks import DrawNumbers, assert_continued, assert_pool_grew, league_state, pool_ids
from train_command import Command, Penstock, assert_balanced, last, metrics

pytestmark = pytest.mark.system

LINES = """
base: rock_paper_scissors
actors: {envs: 32, unroll: 8}
league: {mirror: 0.5, games: 50, snapshot_steps: 10000}
run: {interval_s: 0.2}
checkpoint: {every_s: 0.3}
eval: {every_steps: null}
lines:
  main:
    league: {draw: main}
  exploiter:
    league: {draw: main_exploiter, mirror: 0}
"""
NAMES = ("main", "exploiter")
RUN_GROUP = "penstock.launch.run_group"
GAMES = 50  # of a draw
MOMENTS = 20


@pytest.fixture
def league(tmp_path: Path) -> Path:
    """The folder of a league, whose file is ``league.yaml``."""
    (tmp_path / "league.yaml").write_text(LINES)
    return tmp_path / "L"


def start(penstock: Penstock, *options: str, resume: str = "no") -> Command:
    return penstock("league", "league.yaml", "--json", "--resume", resume, "run.dir=L", *options)


def runs(league: Path, least_members: int = 2) -> bool:
    """Whether each line trains and has so many members."""
    ids = pool_ids(league / "pool")
    return all(len(ids.get(name, ())) >= least_members and metrics(league / name) for name in NAMES)


def test_lines_train_against_each_other_and_end_together(penstock: Penstock, league: Path) -> None:
    code, answer, err = start(penstock, "stop.env_steps=60000").end()
    assert (code, answer["exit_code"]) == (0, 0), err
    assert [line["line"] for line in answer["lines"]] == [*NAMES]
    for summary in answer["lines"]:
        assert summary["exit_reason"] == "env_steps"
        assert_balanced(summary)

    members = pool_ids(league / "pool")
    assert all(len(members[name]) >= 4 for name in NAMES)
    assert not {*members["main"]} & {*members["exploiter"]}

    # The exploiter has played nobody but main, and all its games were counted once.
    state = league_state(league / "exploiter")
    assert state is not None
    opponents = {opponent for _, opponent in state["opponents"]}
    assert opponents <= {*members["main"], "main/latest"}
    assert 0 < last(league / "exploiter")["league_games"] <= last(league / "exploiter")["episodes"]
    assert "line exploiter ended by env_steps" in err


def test_the_fault_of_one_line_ends_the_others_with_a_checkpoint(
    penstock: Penstock, league: Path
) -> None:
    command = start(penstock, "run.restarts=0")
    command.wait_until(lambda: runs(league))
    learner = next(
        process
        for process in psutil.Process(command.process.pid).children(recursive=True)
        if "learner-0" in process.cmdline() and folder_of(process) == "exploiter"
    )
    learner.kill()
    code, answer, err = command.end()
    assert code == 1, err
    reasons = {line["line"]: line["exit_reason"] for line in answer["lines"]}
    assert reasons == {"main": "terminated", "exploiter": "fault"}
    assert "the other runs save and end, as line exploiter has failed" in err
    [main] = [line for line in answer["lines"] if line["line"] == "main"]
    assert_balanced(main)
    assert league_state(league / "main") is not None


def folder_of(process: psutil.Process) -> str:
    """The line of a role's process, by the arguments of the run above it."""
    for parent in process.parents():
        words = parent.cmdline()
        if RUN_GROUP in words:
            return Path(words[words.index(RUN_GROUP) + 2]).name
    return ""


def test_ctrl_c_ends_all_lines_which_the_folder_alone_resumes(
    penstock: Penstock, league: Path
) -> None:
    command = start(penstock)
    command.wait_until(lambda: runs(league))
    command.process.send_signal(signal.SIGINT)
    code, answer, err = command.end()
    assert code == 130, err
    assert {line["exit_reason"] for line in answer["lines"]} == {"interrupted"}

    before = pool_ids(league / "pool")
    steps = {name: last(league / name)["trained_steps"] for name in NAMES}
    more = max(steps.values()) + 20_000
    resumed = penstock("league", "L", "--json", "--resume", "auto", f"stop.env_steps={more}")
    code, answer, err = resumed.end()
    assert code == 0, err
    assert_pool_grew(before, league / "pool")
    assert all(line["resumed"] for line in answer["lines"])
    assert all(last(league / name)["trained_steps"] > steps[name] for name in NAMES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_league_resumes_with_its_pool_results_and_draws(
    penstock: Penstock, league: Path
) -> None:
    """At each moment either the command alone is killed, or all processes, as by a power cut."""
    rng = random.Random(0)
    numbers = {name: DrawNumbers() for name in NAMES}
    before: dict[str, list[str]] = {}
    for moment in range(MOMENTS):
        # It has trained for a while, or has only begun.
        command = start(penstock, resume="auto")
        if moment == 0 or rng.random() < 0.8:
            wait_for_reports(command, league)
        else:
            command.wait_until(partial(lines_of, command))
        time.sleep(rng.uniform(0, 3))
        kill(command, all_processes=rng.random() < 0.5)

        assert_pool_grew(before, league / "pool")
        before = pool_ids(league / "pool")
        states = {name: league_state(league / name) for name in NAMES}

        # A run that has reached its end trains on nothing: its state is that with which it began.
        code, answer, err = start(penstock, "stop.learner_steps=1", resume="auto").end()
        assert code == 0, err
        assert_pool_grew(before, league / "pool")
        for name, state in states.items():
            resumed = league_state(league / name)
            assert resumed is not None
            if state is not None:
                numbers[name].add(state, new_process=False)
                assert_continued(state, resumed, league / "pool", GAMES)
            numbers[name].add(resumed, new_process=True)

    steps = max(last(league / name)["trained_steps"] for name in NAMES) + 20_000
    code, answer, err = start(penstock, f"stop.env_steps={steps}", resume="auto").end()
    assert code == 0, err
    for summary in answer["lines"]:
        assert_balanced(summary)
    assert all(len(pool_ids(league / "pool")[name]) > 5 for name in NAMES)


def lines_of(command: Command) -> list[psutil.Process]:
    """Returns the processes of the lines."""
    lines = []
    for child in psutil.Process(command.process.pid).children():
        with suppress(psutil.Error):  # it has ended meanwhile
            if RUN_GROUP in child.cmdline():
                lines.append(child)
    return lines


def wait_for_reports(command: Command, league: Path) -> None:
    """Waits until each line has reported metrics since this call."""
    lines = {name: len(metrics(league / name)) for name in NAMES}
    command.wait_until(lambda: all(len(metrics(league / name)) > lines[name] for name in NAMES))


def kill(command: Command, *, all_processes: bool) -> None:
    """Kills a league with SIGKILL, and waits until none of its processes is left."""
    parent = psutil.Process(command.process.pid)
    processes = parent.children(recursive=True)
    victims: Sequence[psutil.Process] = [parent, *processes] if all_processes else [parent]
    for process in victims:
        os.kill(process.pid, signal.SIGKILL)
    command.process.communicate()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive
