"""Under which policy the kernel schedules the process of an actor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
os.sched_setscheduler(0, {policy}, os.sched_param(0))
from penstock.launch import role
role._yield_to_learners()
print(os.sched_getscheduler(0))
"""


@pytest.mark.parametrize(
    ("policy", "found"),
    [(os.SCHED_OTHER, os.SCHED_BATCH), (os.SCHED_IDLE, os.SCHED_IDLE)],
    ids=["of most processes", "chrt --idle"],
)
def test_an_actor_preempts_no_learner_and_keeps_a_policy_that_the_user_has_chosen(
    policy: int, found: int
) -> None:
    # In a process of its own, as a user without privileges cannot go back from SCHED_IDLE.
    script = SCRIPT.format(policy=policy)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (str(found), "")
