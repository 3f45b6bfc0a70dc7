"""The supervisor's decisions when the only learner dies, without a process or a clock."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from penstock.core.role import StoreAddress
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.supervisor_messages import Effect, Failure, Kill, Note, Outcome, Send, Start
from supervision_scene import ACTORS, LEARNER, Scene

KILL = -int(signal.SIGKILL)


@pytest.fixture
def scene() -> Scene:
    """A learner and two actors, with a checkpoint."""
    scene = Scene((LEARNER, *ACTORS), restarts=2)
    scene.decisions.recovery.on_checkpoint_written()
    return scene


def text(effects: list[Effect]) -> str:
    return next(e.text for e in effects if isinstance(e, Note))


def test_dead_learner_is_restarted_while_actors_stay(scene: Scene) -> None:
    effects = scene.ends("learner-0", KILL)
    assert "continues from its newest checkpoint in 0.1 s (restart 1 of" in text(effects)
    assert not [e for e in effects if isinstance(e, Kill)]
    assert scene.tick(0.1) == [Start("learner-0", 1)]
    assert scene.decisions.recovery.resumes
    moved = [e for e in scene.decisions.on_ready("learner-0", scene.now_s) if isinstance(e, Send)]
    place = {"kind": "learner", "index": 0, "address": None, "incarnation": 1}
    assert [e for e in moved if e.message["kind"] == "learner"] == [
        Send("actor-0", place),
        Send("actor-1", place),
    ]


def test_dead_learner_without_a_checkpoint_ends_the_run() -> None:
    scene = Scene((LEARNER, *ACTORS))
    scene.ends("learner-0", KILL)
    assert scene.decisions.stopping


def test_repeated_learner_deaths_end_the_run_with_the_last_failure(scene: Scene) -> None:
    for n in range(3):
        failure = Failure("learner-0", f"crash {n}")
        scene.decisions.on_error(failure, scene.now_s)
        assert not scene.decisions.stopping or n == 2
        scene.ends("learner-0", 1)
        scene.tick(1)
    assert scene.decisions.stop_cause == ("fault", Failure("learner-0", "crash 2"))


def test_new_checkpoint_resets_the_count_of_learner_deaths(scene: Scene) -> None:
    for _ in range(9):
        scene.ends("learner-0", KILL)
        scene.tick(10)
        scene.decisions.recovery.on_checkpoint_written()
    assert not scene.decisions.stopping


def test_user_error_of_the_learner_is_not_retried(scene: Scene) -> None:
    scene.decisions.on_error(Failure("learner-0", "no such file", user=True), scene.now_s)
    assert scene.decisions.stopping


def test_hung_learner_is_restarted() -> None:
    scene = Scene((LEARNER,), restarts=2, hang_timeout_s=5.0)
    scene.decisions.recovery.on_checkpoint_written()
    scene.wait(7)
    assert "no sign of life" in text(scene.ends("learner-0", KILL))
    assert not scene.decisions.stopping


def test_learners_of_several_supervisors_end_together() -> None:
    by_hand = replace(LEARNER, store=StoreAddress("127.0.0.1", 29500))
    scene = Scene((by_hand, *ACTORS))
    scene.decisions.recovery.on_checkpoint_written()
    scene.ends("learner-0", KILL)
    assert scene.decisions.stopping


def test_no_learner_is_restarted_once_the_run_stops(scene: Scene) -> None:
    scene.decisions.stop("return", scene.now_s)
    for name in ("actor-0", "actor-1"):
        scene.ends(name, 0)
    scene.ends("learner-0", KILL)
    assert scene.decisions.outcome is not None
    assert scene.decisions.outcome.exit_code == 1


def test_existing_checkpoint_is_resumed_but_does_not_count_as_progress() -> None:
    scene = Scene((LEARNER, *ACTORS), restarts=1)
    scene.decisions.recovery.on_checkpoint_found()
    scene.decisions.on_presumed_dead("learner-0", 0, "a", 0, scene.now_s)
    assert scene.decisions.recovery.resumes
    assert Start("learner-0", 1) in scene.wait(1, ("actor-0", "actor-1"))
    scene.decisions.recovery.on_checkpoint_found()
    scene.decisions.on_presumed_dead("learner-0", 1, "a", 0, scene.now_s)
    assert scene.decisions.stopping


@pytest.mark.parametrize("reports", [False, True])
def test_signal_during_the_kill_of_roles_is_the_reason_of_the_end(reports: bool) -> None:
    """Their end was ordered, so it is no failure, even if a role reports an error before it."""
    server = RoleSpec("server", 0, "m:f", Stage.SERVER)
    scene = Scene((LEARNER, server, *ACTORS), restarts=2)
    scene.decisions.recovery.on_checkpoint_written()
    effects = scene.ends("server-0", KILL)
    assert [e.name for e in effects if isinstance(e, Kill)] == ["learner-0"]
    scene.decisions.on_signal(signal.SIGINT, scene.now_s)
    for name in ("actor-0", "actor-1"):
        scene.ends(name, 0)
    if reports:
        failure = Failure("learner-0", "the parameter server has ended")
        scene.decisions.on_error(failure, scene.now_s)
    scene.ends("learner-0", KILL)
    assert scene.decisions.outcome == Outcome(130, "interrupted")


def test_new_checkpoint_resets_the_restart_delay(scene: Scene) -> None:
    for _ in range(9):
        delays = [scene.crash_and_restart("learner-0") for _ in range(2)]
        assert delays == pytest.approx([0.1, 0.2], abs=0.06)
        scene.decisions.recovery.on_checkpoint_written()
