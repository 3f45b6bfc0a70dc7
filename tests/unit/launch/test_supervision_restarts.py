"""Restarts by the supervisor's decisions: failed starts, repeated crashes, expendable roles."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.decisions import Decisions
from penstock.launch.shutdown import LAST_EVALUATION_S
from penstock.launch.supervisor_messages import (
    Effect,
    End,
    Failure,
    Kill,
    Note,
    Outcome,
    RestartLimits,
    Send,
    Start,
)
from supervision_scene import ACTORS, LEARNER, Scene

WHY = "could not be started: Too many open files"


def test_failed_actor_restarts_are_retried_with_growing_delays() -> None:
    scene = Scene((LEARNER, *ACTORS))
    scene.ends("actor-1", -9, produced=640)
    effects = scene.tick(0.2)
    assert [e for e in effects if isinstance(e, Start)] == [Start("actor-1", 1)]
    notes = []
    for incarnation in (1, 2, 3):
        effects = scene.decisions.on_start_failed("actor-1", incarnation, WHY, scene.now_s)
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
def test_role_that_can_never_start_ends_the_run_with_the_reason(name: str) -> None:
    decisions = Decisions((LEARNER, *ACTORS), RestartLimits(max_restarts=2))
    now_s, tries = 0.0, 0
    while not decisions.stopping:
        for effect in decisions.tick(now_s, {}, {}):
            if effect == Start(name, tries):
                tries += 1
                decisions.on_start_failed(name, tries - 1, WHY, now_s)
        now_s += 0.05
    assert tries == 3
    for other in {"learner-0", "actor-0", "actor-1"} - {name}:
        decisions.on_start_failed(other, 0, WHY, now_s)
    assert decisions.outcome is not None
    assert decisions.outcome.failure == Failure(name, WHY)
    assert decisions.outcome.exit_code == 1


def test_learner_started_at_the_second_attempt_gets_its_actors() -> None:
    decisions = Decisions((LEARNER, *ACTORS), RestartLimits())
    decisions.tick(0.0, {}, {})
    decisions.on_start_failed("learner-0", 0, WHY, 0.0)
    assert Start("learner-0", 1) in decisions.tick(0.2, {}, {})
    decisions.on_ready("learner-0", 1.0)
    effects = decisions.on_ready("actor-0", 1.0)
    assert effects == [Send("learner-0", {"kind": "actors", "alive": 1})]
    assert decisions.learners_alive == 1


def test_failed_restart_does_not_delay_the_end() -> None:
    scene = Scene((LEARNER, *ACTORS))
    scene.ends("actor-1", -9)
    scene.tick(0.2)
    scene.decisions.stop("return", scene.now_s)
    scene.ends("actor-0", 0)
    scene.decisions.on_start_failed("actor-1", 1, WHY, scene.now_s)
    scene.ends("learner-0", 0)
    assert scene.decisions.outcome is not None
    assert scene.decisions.outcome.exit_code == 0


def test_kill_by_the_memory_limit_is_reported_as_such() -> None:
    scene = Scene((LEARNER, *ACTORS))
    end = End(-9, 640, 64, out_of_memory=True)
    [note] = [
        e for e in scene.decisions.on_ended("actor-0", end, scene.now_s) if isinstance(e, Note)
    ]
    assert note.text == (
        "actor-0: was killed by SIGKILL: its control group is out of memory; lower actors.count; "
        "it is restarted in 0.1 s"
    )


BRIDGE = Failure(
    "actor-0", "ValueError: the bridge is out", "Trace", place="bad.py:8, in step", log="logs/a.log"
)


LONG_S = 11  # of work, after which an actor has a clean record


def crash(scene: Scene, failure: Failure = BRIDGE, works_s: float = LONG_S) -> list[str]:
    """The actor works, raises, and starts again; the notes."""
    scene.decisions.on_ready("actor-0", scene.now_s)
    scene.wait(works_s, ("actor-0", "actor-1", "learner-0"))
    assert scene.decisions.on_error(failure, scene.now_s) == []
    effects = scene.ends("actor-0", 1, produced=64)
    scene.wait(11, ("actor-1", "learner-0"))
    return [effect.text for effect in effects if isinstance(effect, Note)]


def test_place_of_an_error_is_reported() -> None:
    assert crash(Scene((LEARNER, *ACTORS))) == [
        "actor-0: ValueError: the bridge is out (bad.py:8, in step); traceback in logs/a.log; "
        "it is restarted in 0.1 s"
    ]


def test_same_error_repeated_without_an_episode_ends_the_run() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=2)
    for _ in range(2):
        crash(scene)
        scene.decisions.restart_policy.on_episodes(0, scene.now_s)
        assert not scene.decisions.stopping
    crash(scene)
    assert scene.decisions.stopping
    scene.ends("actor-1", 0)
    scene.ends("learner-0", 0)
    assert scene.decisions.outcome == Outcome(1, "fault", BRIDGE)


def test_finished_episodes_or_another_place_reset_the_crash_count() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=2)
    other = Failure("actor-0", BRIDGE.message, place="bad.py:9, in step")
    for n in range(12):
        crash(scene)
        if n % 2:
            scene.decisions.restart_policy.on_episodes(n, scene.now_s)
    for n in range(12):
        crash(scene, other if n % 2 else BRIDGE)
        scene.decisions.restart_policy.on_episodes(12, scene.now_s)
    assert not scene.decisions.stopping


def test_same_error_soon_after_each_start_ends_the_run_although_episodes_end() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=2)
    for n in range(3):
        assert not scene.decisions.stopping
        crash(scene, works_s=3)
        scene.decisions.restart_policy.on_episodes(n + 1, scene.now_s)
    assert scene.decisions.stopping
    scene.ends("actor-1", 0)
    scene.ends("learner-0", 0)
    assert scene.decisions.outcome == Outcome(1, "fault", BRIDGE)
    assert scene.decisions.outcome.error == (
        "actor-0: ValueError: the bridge is out (bad.py:8, in step)"
    )


def test_other_error_or_long_play_between_equal_errors_resets_the_crash_count() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=2)
    other = Failure("actor-0", "KeyError: 'bridge'", place=BRIDGE.place)
    for n in range(12):
        crash(scene, other if n % 3 == 2 else BRIDGE, works_s=3)
        scene.decisions.restart_policy.on_episodes(2 * n, scene.now_s)
    for n in range(12):
        crash(scene, works_s=LONG_S if n % 2 else 3)
        scene.decisions.restart_policy.on_episodes(100 + n, scene.now_s)
    assert not scene.decisions.stopping


def test_crash_loop_ends_the_run_only_after_episodes_were_counted() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=2)
    for _ in range(10):
        crash(scene)
    assert not scene.decisions.stopping
    scene.decisions.restart_policy.on_episodes(0, scene.now_s)
    crash(scene)
    assert scene.decisions.stopping


EVALUATOR = RoleSpec("evaluator", 0, "m:f", Stage.EVALUATOR, expendable=True)
GONE = Send("learner-0", {"kind": "gone", "role": "evaluator"})  # which waits for no evaluation


def evaluated_scene(max_restarts: int = 5) -> Scene:
    return Scene([LEARNER, *ACTORS, EVALUATOR], max_restarts=max_restarts)


def test_expendable_role_is_restarted_like_an_actor() -> None:
    run = evaluated_scene()
    [note] = run.ends("evaluator-0", -9)
    assert isinstance(note, Note)
    assert "evaluator-0: was killed by SIGKILL" in note.text
    beating = ("learner-0", "actor-0", "actor-1")
    assert Start("evaluator-0", 1) in run.wait(1, beating)
    assert not run.decisions.stopping


def test_crash_loop_of_an_expendable_role_is_noted_and_the_run_continues() -> None:
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


def test_restarted_learner_is_informed_of_missing_expendable_roles() -> None:
    """Else it would wait for an evaluation to confirm `stop.return`."""
    scene = Scene((LEARNER, EVALUATOR))
    scene.decisions.recovery.on_checkpoint_written()
    scene.decisions.on_error(Failure("evaluator-0", "no such file", user=True), scene.now_s)
    assert GONE in scene.ends("evaluator-0", 2)
    scene.ends("learner-0", -9)
    assert scene.tick(1) == [Start("learner-0", 1)]
    assert GONE in scene.decisions.on_ready("learner-0", scene.now_s)


def test_user_error_of_an_expendable_role_is_noted_and_not_retried() -> None:
    run = evaluated_scene()
    failure = Failure("evaluator-0", "there is a NaN", user=True)
    assert run.decisions.on_error(failure, run.now_s) == []
    assert run.ends("evaluator-0", 2) == [
        Note("evaluator-0: there is a NaN; the run continues without it"),
        GONE,
    ]
    assert not run.decisions.stopping


FINISH = Send("evaluator-0", {"kind": "finish"})
TERMINATE = Kill("evaluator-0", signal.SIGTERM)


def stop_until_the_evaluator(run: Scene, reason: str) -> tuple[list[Effect], list[Effect]]:
    """The effects of the stop until the learner is asked to end, and those of the learner's end."""
    effects = run.decisions.stop(reason, run.now_s)
    for actor in ACTORS:
        effects += run.ends(actor.name, 0)
    return effects, run.ends("learner-0", 0)


def test_evaluator_plays_the_last_weights_at_a_limit_of_the_run() -> None:
    run = evaluated_scene()
    before, after = stop_until_the_evaluator(run, "env_steps")
    assert "evaluator-0" not in {getattr(e, "name", "") for e in before}
    assert after == [FINISH]
    assert run.wait(LAST_EVALUATION_S - 1) == []
    assert run.decisions.outcome is None
    run.ends("evaluator-0", 0)
    assert run.decisions.outcome is not None
    assert (run.decisions.outcome.exit_code, run.decisions.outcome.reason) == (0, "env_steps")


def test_an_evaluation_of_the_last_weights_is_bounded() -> None:
    run = evaluated_scene()
    stop_until_the_evaluator(run, "minutes")
    note, kill = run.wait(LAST_EVALUATION_S)
    assert isinstance(note, Note)
    assert note.text == (
        "evaluator-0 takes longer than 600 s for the last weights and is killed; penstock eval "
        "evaluates them"
    )
    assert kill == Kill("evaluator-0", signal.SIGKILL)
    run.ends("evaluator-0", -9)
    assert run.decisions.outcome is not None
    assert run.decisions.outcome.exit_code == 0


def test_a_signal_ends_the_evaluation_of_the_last_weights() -> None:
    run = evaluated_scene()
    stop_until_the_evaluator(run, "minutes")
    assert TERMINATE in run.decisions.on_signal(signal.SIGINT, run.now_s)
    run.ends("evaluator-0", 0)
    assert run.decisions.outcome is not None
    assert (run.decisions.outcome.exit_code, run.decisions.outcome.reason) == (0, "minutes")


@pytest.mark.parametrize("reason", ["return", "callback", "terminated"])
def test_evaluator_ends_at_once_at_any_other_stop(reason: str) -> None:
    run = evaluated_scene()
    before, after = stop_until_the_evaluator(run, reason)
    assert before[0] == TERMINATE
    assert FINISH not in after


def test_the_messages_of_an_expendable_role_reach_every_learner() -> None:
    learners = [replace(LEARNER, index=i, learner=i) for i in range(2)]
    run = Scene([*learners, *ACTORS, EVALUATOR])
    verdict = {"kind": "verdict", "solved": True}
    sent = [Send(learner.name, verdict) for learner in learners]
    assert run.decisions.forward("evaluator-0", verdict) == sent
