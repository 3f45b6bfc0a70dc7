"""An environment that always raises at the same line ends the run, though actors make samples."""

from __future__ import annotations

from penstock.launch.supervisor_messages import Failure, Note, Outcome
from supervision_scene import ACTORS, LEARNER, Scene

BRIDGE = Failure(
    "actor-0", "ValueError: the bridge is out", "Trace", place="bad.py:8, in step", log="logs/a.log"
)


def crash(scene: Scene, failure: Failure = BRIDGE) -> list[str]:
    """An unroll arrives, the actor raises, and starts again; the notes."""
    scene.decisions.ready("actor-0", scene.now_s)
    assert scene.decisions.failed(failure, scene.now_s) == []
    effects = scene.ends("actor-0", 1, produced=64)
    scene.wait(11, ("actor-1", "learner-0"))
    return [effect.text for effect in effects if isinstance(effect, Note)]


def test_where_it_was_raised_is_told() -> None:
    assert crash(Scene((LEARNER, *ACTORS))) == [
        "actor-0: ValueError: the bridge is out (bad.py:8, in step); traceback in logs/a.log; "
        "it is restarted in 0.1 s"
    ]


def test_the_same_line_again_and_again_without_an_episode_ends_the_run() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=2)
    for _ in range(2):
        crash(scene)
        scene.decisions.restart_policy.episodes(0, scene.now_s)
        assert not scene.decisions.stopping
    crash(scene)
    assert scene.decisions.stopping
    scene.ends("actor-1", 0)
    scene.ends("learner-0", 0)
    assert scene.decisions.outcome == Outcome(1, "fault", BRIDGE)


def test_finished_episodes_or_another_place_begin_a_new_row() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=2)
    other = Failure("actor-0", BRIDGE.message, place="bad.py:9, in step")
    for n in range(12):
        crash(scene)
        if n % 2:
            scene.decisions.restart_policy.episodes(n, scene.now_s)
    for n in range(12):
        crash(scene, other if n % 2 else BRIDGE)
        scene.decisions.restart_policy.episodes(12, scene.now_s)
    assert not scene.decisions.stopping


def test_nobody_is_given_up_before_episodes_have_been_counted() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=2)
    for _ in range(10):
        crash(scene)
    assert not scene.decisions.stopping
    scene.decisions.restart_policy.episodes(0, scene.now_s)
    crash(scene)
    assert scene.decisions.stopping
