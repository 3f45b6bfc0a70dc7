"""A role that the run can do without: it is started again, and never ends the run."""

from __future__ import annotations

from dataclasses import replace

from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.supervisor_messages import Failure, Note, Send, Start
from supervision_scene import ACTORS, LEARNER, Scene

EVALUATOR = RoleSpec("evaluator", 0, "m:f", Stage.CARRIERS, expendable=True)
GONE = Send("learner-0", {"kind": "gone", "role": "evaluator"})  # which waits for no evaluation


def evaluated_scene(max_restarts: int = 5) -> Scene:
    return Scene([LEARNER, *ACTORS, EVALUATOR], max_restarts=max_restarts)


def test_an_expendable_role_is_started_again_as_an_actor_would_be() -> None:
    run = evaluated_scene()
    [note] = run.ends("evaluator-0", -9)
    assert isinstance(note, Note)
    assert "evaluator-0: was killed by SIGKILL" in note.text
    beating = ("learner-0", "actor-0", "actor-1")
    assert Start("evaluator-0", 1) in run.wait(1, beating)
    assert not run.decisions.stopping


def test_a_crash_loop_of_an_expendable_role_is_told_and_the_run_goes_on() -> None:
    run = evaluated_scene(max_restarts=2)
    beating = ("learner-0", "actor-0", "actor-1")
    for _ in range(2):
        run.ends("evaluator-0", 1)
        run.wait(10, beating)
    last = run.ends("evaluator-0", 1)
    assert last == [
        Note(
            "evaluator-0: ended with exit code 1 and without an error report; the run continues "
            "without it"
        ),
        GONE,
    ]
    assert not any(isinstance(e, Start) for e in run.wait(30, beating))
    assert not run.decisions.stopping


def test_what_only_an_expendable_role_stumbles_over_is_told_and_not_tried_again() -> None:
    run = evaluated_scene()
    failure = Failure("evaluator-0", "there is a NaN", user=True)
    assert run.decisions.failed(failure, run.now_s) == []
    assert run.ends("evaluator-0", 2) == [
        Note("evaluator-0: there is a NaN; the run continues without it"),
        GONE,
    ]
    assert not run.decisions.stopping


def test_an_expendable_role_has_ended_before_the_learner_is_asked_to() -> None:
    run = evaluated_scene()
    run.decisions.stop("minutes", run.now_s)
    for actor in ACTORS:
        run.ends(actor.name, 0)
    assert run.decisions.outcome is None
    effects = run.ends("evaluator-0", 0)
    assert {getattr(e, "name", "") for e in effects} == {"learner-0"}
    run.ends("learner-0", 0)
    assert run.decisions.outcome is not None
    assert (run.decisions.outcome.exit_code, run.decisions.outcome.reason) == (0, "minutes")


def test_the_messages_of_an_expendable_role_reach_every_learner() -> None:
    learners = [replace(LEARNER, index=i, learner=i) for i in range(2)]
    run = Scene([*learners, *ACTORS, EVALUATOR])
    verdict = {"kind": "verdict", "solved": True}
    sent = [Send(learner.name, verdict) for learner in learners]
    assert run.decisions.pass_on("evaluator-0", verdict) == sent
