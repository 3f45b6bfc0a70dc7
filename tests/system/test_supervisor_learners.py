"""Several learners in real processes, one of which dies."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from system.conftest import Supervised

pytestmark = pytest.mark.system

Supervise = Callable[..., "Supervised"]
THREE = {"learners": ["learn_together"] * 3, "actors": ["follow"] * 6}


def pid(run: Supervised, name: str) -> int:
    """The process that a role is in its newest life."""
    return int(re.findall(r"pid (\d+)", run.log(name))[-1])


def heard(run: Supervised, name: str, kind: str) -> list[tuple[float, dict[str, Any]]]:
    """When a learner heard of what, one kind of message."""
    lines = re.findall(r"heard ([\d.]+) (.*)", run.log(name))
    messages = [(float(at_s), json.loads(text)) for at_s, text in lines]
    return [(at_s, message) for at_s, message in messages if message["kind"] == kind]


def played_for(run: Supervised, name: str) -> list[tuple[int, int]]:
    """The learners of an actor, and the incarnation in which it played for each."""
    found = re.findall(r"plays for (\d+) as (\d+)", run.log(name))
    return [(int(rank), int(incarnation)) for rank, incarnation in found]


def started(supervise: Supervise, **more: Any) -> Supervised:
    run = supervise(**{**THREE, **more})
    for rank in range(3):
        run.wait_for_log(f"learner-{rank}", '"members": [0, 1, 2]')
    for i in range(6):
        run.wait_for_log(f"actor-{i}", "plays for")
    return run


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_learner_of_three_is_replaced_and_rejoins(supervise: Supervise, victim: int) -> None:
    run = started(supervise)
    others = [rank for rank in range(3) if rank != victim]
    movers = [f"actor-{victim}", f"actor-{victim + 3}"]
    pids = {name: pid(run, name) for name in (*movers, *(f"learner-{r}" for r in others))}
    killed_s = time.monotonic()
    os.kill(pid(run, f"learner-{victim}"), signal.SIGKILL)
    run.wait_for(f"learner-{victim}: was killed by SIGKILL")
    run.wait_for_log(f"learner-{victim}", "incarnation 1 works")
    for rank in range(3):
        run.wait_for_log(f"learner-{rank}", '"epoch": 3')
    for name, other in zip(movers, others, strict=True):
        run.wait_for_log(name, f"plays for {victim} as 2")
        assert played_for(run, name) == [(victim, 0), (other, 1), (victim, 2)]
    for rank in others:
        groups = heard(run, f"learner-{rank}", "group")
        assert [(m["epoch"], m["members"]) for _, m in groups] == [
            (1, [0, 1, 2]),
            (2, others),
            (3, [0, 1, 2]),
        ]
        noticed_s = groups[1][0] - killed_s
        assert noticed_s < 5  # 0.01 s by itself; a hang takes 60
    assert {name: pid(run, name) for name in pids} == pids
    run.signal(signal.SIGINT)
    result = run.result()
    assert (result["exit_code"], result["failure"]) == (130, None)
    last = result["last"]
    assert (last["learners_alive"], last["learners_restarted"]) == (3, 1)
    # 50 of each that ended well; of 50 that the dead had heard of, 40 were trained.
    assert last["accounting"] == {
        "produced": 200,
        "trained": 190,
        "dropped": {},
        "lost": {"learner": 10},
        "in_flight": 0,
    }
    ends = [m for _, m in heard(run, f"learner-{victim}", "actor_ended")]
    said = sorted((m["actor"], m["incarnation"], m["produced_steps"]) for m in ends)
    assert said == [(victim, 2, 10), (victim + 3, 2, 10)]


def test_metrics_combine_all_learners(supervise: Supervise) -> None:
    run = started(supervise)
    run.signal(signal.SIGINT)
    last = run.result()["last"]
    assert last["steps_per_s"] == 30.0
    assert last["learner_wait_fraction"] == 0.25
    assert last["ranks"] == [{"rank": rank, "steps_per_s": 10.0} for rank in range(3)]
    assert last["accounting"]["produced"] == 150


def test_learner_that_cannot_restart_ends_the_run(supervise: Supervise) -> None:
    learners = ["learn_together", "learn_together_until_told", "learn_together"]
    run = started(supervise, learners=learners, limits={"max_restarts": 2})
    for incarnation in range(2):
        run.wait_for_log("learner-1", f"incarnation {incarnation} works")
        os.kill(pid(run, "learner-1"), signal.SIGKILL)
    result = run.result()
    assert (result["exit_code"], result["reason"]) == (1, "fault")
    assert result["failure"]["name"] == "learner-1"
    assert result["failure"]["message"].startswith("was killed by SIGKILL")


def test_learners_killed_together_end_the_run(supervise: Supervise) -> None:
    run = started(supervise)
    for rank in range(3):
        os.kill(pid(run, f"learner-{rank}"), signal.SIGKILL)
    result = run.result()
    assert (result["exit_code"], result["reason"]) == (1, "fault")
