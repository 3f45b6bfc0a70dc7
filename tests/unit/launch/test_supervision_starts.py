"""What is decided where a process cannot be started: no descriptor, process or memory is left."""

from __future__ import annotations

import pytest

from penstock.launch.decisions import Decisions
from penstock.launch.supervisor_messages import End, Failure, Note, RestartLimits, Send, Start
from supervision_scene import ACTORS, LEARNER, Scene

WHY = "could not be started: Too many open files"


def test_an_actor_that_cannot_be_started_again_is_tried_later_and_later() -> None:
    scene = Scene((LEARNER, *ACTORS))
    scene.ends("actor-1", -9, produced=640)
    effects = scene.tick(0.2)
    assert [e for e in effects if isinstance(e, Start)] == [Start("actor-1", 1)]
    notes = []
    for incarnation in (1, 2, 3):
        effects = scene.decisions.not_started("actor-1", incarnation, WHY, scene.now_s)
        notes += [e.text for e in effects if isinstance(e, Note)]
        [ended] = [e for e in effects if isinstance(e, Send) and "incarnation" in e.message]
        assert ended.message["produced_steps"] == 0
        assert ended.message["incarnation"] == incarnation
        while not any(isinstance(e, Start) for e in scene.tick(0.05)):
            pass
    assert notes == [f"actor-1: {WHY}; it is restarted in {s} s" for s in ("0.2", "0.4", "0.8")]
    assert scene.decisions.outcome is None
    assert not scene.decisions.stopping


@pytest.mark.parametrize("name", ["actor-0", "learner-0"])
def test_a_run_that_never_can_start_a_role_ends_with_the_reason(name: str) -> None:
    decisions = Decisions((LEARNER, *ACTORS), RestartLimits(max_restarts=2))
    now_s, tries = 0.0, 0
    while not decisions.stopping:
        for effect in decisions.tick(now_s, {}, {}):
            if effect == Start(name, tries):
                tries += 1
                decisions.not_started(name, tries - 1, WHY, now_s)
        now_s += 0.05
    assert tries == 3
    for other in {"learner-0", "actor-0", "actor-1"} - {name}:
        decisions.not_started(other, 0, WHY, now_s)
    assert decisions.outcome is not None
    assert decisions.outcome.failure == Failure(name, WHY)
    assert decisions.outcome.exit_code == 1


def test_a_learner_that_starts_at_the_second_try_gets_its_actors() -> None:
    decisions = Decisions((LEARNER, *ACTORS), RestartLimits())
    decisions.tick(0.0, {}, {})
    decisions.not_started("learner-0", 0, WHY, 0.0)
    assert Start("learner-0", 1) in decisions.tick(0.2, {}, {})
    decisions.ready("learner-0", 1.0)
    effects = decisions.ready("actor-0", 1.0)
    assert effects == [Send("learner-0", {"kind": "actors", "alive": 1})]
    assert decisions.learners_alive == 1


def test_what_could_not_be_started_holds_up_no_end() -> None:
    scene = Scene((LEARNER, *ACTORS))
    scene.ends("actor-1", -9)
    scene.tick(0.2)
    scene.decisions.stop("return", scene.now_s)
    scene.ends("actor-0", 0)
    scene.decisions.not_started("actor-1", 1, WHY, scene.now_s)
    scene.ends("learner-0", 0)
    assert scene.decisions.outcome is not None
    assert scene.decisions.outcome.exit_code == 0


def test_a_kill_by_the_limit_of_memory_is_told_as_such() -> None:
    scene = Scene((LEARNER, *ACTORS))
    end = End(-9, 640, 64, out_of_memory=True)
    [note] = [e for e in scene.decisions.ended("actor-0", end, scene.now_s) if isinstance(e, Note)]
    assert note.text == (
        "actor-0: was killed by SIGKILL: its control group is out of memory; lower actors.count; "
        "it is restarted in 0.1 s"
    )
