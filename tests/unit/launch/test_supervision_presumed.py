"""Roles whose host does not answer: decisions on a presumed death, without a process or a clock."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest

from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.supervisor_messages import Effect, End, Failure, Kill, Note, Send, Start
from supervision_scene import ACTORS, CONNECTOR, LEARNER, Scene

TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)
ALIVE = {"kind": "actors", "alive": 1}
WHY = "is presumed dead: its host far-1 does not answer"


def ended(incarnation: int, produced: int) -> dict[str, object]:
    """What a learner is told of the end of the first actor."""
    counts = {"produced_steps": produced, "sequence": produced // 10}
    return {"kind": "actor_ended", "actor": 0, "incarnation": incarnation, **counts}


class FarScene(Scene):
    """A scene whose hosts may be lost."""

    def lost(self, name: str, produced: int = 10) -> list[Effect]:
        at = self.incarnations.get(name, 0)
        return self.decisions.on_presumed_dead(name, at, "far-1", produced, self.now_s)

    def replaced(self, name: str) -> None:
        """Its successor has started and works."""
        assert any(isinstance(e, Start) and e.name == name for e in self.wait(12, ["learner-0"]))
        self.decisions.on_ready(name, self.now_s)

    def confirmed(self, name: str, at: int, produced: int) -> list[Effect]:
        end = End(-9, produced, produced // 10, at)
        return self.decisions.on_confirmed_dead(name, at, end)


def several_learners(count: int) -> Sequence[RoleSpec]:
    ranks = range(count)
    learners = [RoleSpec("learner", r, "m", Stage.LEARNER, informed=True, learner=r) for r in ranks]
    return [*learners, *(RoleSpec("actor", r, "m", Stage.ACTORS, learner=r) for r in ranks)]


def test_presumed_dead_actor_is_replaced_and_its_end_reported_once_confirmed() -> None:
    scene = FarScene((LEARNER, *ACTORS))
    note = Note(f"actor-0: {WHY}; it is restarted in 0.1 s")
    assert scene.lost("actor-0") == [Send("learner-0", ALIVE), note]
    assert scene.tick(0.1) == [Start("actor-0", 1)]
    scene.decisions.on_ready("actor-0", scene.now_s)
    told = scene.confirmed("actor-0", 0, 640)
    assert told == [Send("learner-0", ended(0, 640))]
    assert scene.decisions.actors_alive == 2
    of_successor = scene.ends("actor-0", -9, produced=50)
    assert of_successor[0] == Send("learner-0", ended(1, 50))


def test_confirmation_may_precede_the_successor() -> None:
    scene = FarScene((LEARNER, *ACTORS))
    scene.lost("actor-0")
    assert scene.confirmed("actor-0", 0, 640) == [Send("learner-0", ended(0, 640))]
    assert scene.tick(0.1) == [Start("actor-0", 1)]


def test_presumed_dead_actor_found_alive_is_killed() -> None:
    scene = FarScene((LEARNER, *ACTORS))
    scene.lost("actor-0")
    scene.replaced("actor-0")
    assert scene.decisions.on_found_alive("actor-0", 0) == [Kill("actor-0", KILL, incarnation=0)]
    assert scene.decisions.actors_alive == 2, "its successor is not touched"


def test_repeated_host_losses_are_survived() -> None:
    scene = FarScene((LEARNER, *ACTORS), max_restarts=1)
    for _ in range(5):
        scene.lost("actor-0", produced=0)
        scene.replaced("actor-0")
    assert not scene.decisions.stopping, "that says nothing about the actor"
    for at in (3, 0, 4):
        assert scene.confirmed("actor-0", at, 10) == [Send("learner-0", ended(at, 10))]


def test_successor_refused_because_of_its_predecessor_is_retried() -> None:
    scene = FarScene((LEARNER, *ACTORS), max_restarts=1, hang_timeout_s=60.0)
    scene.lost("actor-0")
    for _ in range(3):
        scene.replaced("actor-0")
        taken = Failure("actor-0", "actor 0 is played by another process", user=True)
        assert scene.decisions.on_error(taken, scene.now_s) == []
        effects = scene.ends("actor-0", 2)
        assert isinstance(effects[-1], Note)
        assert effects[-1].text.startswith("actor-0: actor 0 is played by another process; ")
    assert not scene.decisions.stopping


@pytest.mark.parametrize("how", ["confirmed", "long ago"])
def test_refused_role_without_a_predecessor_ends_the_run(how: str) -> None:
    scene = FarScene((LEARNER, *ACTORS), hang_timeout_s=60.0)
    scene.lost("actor-0")
    scene.replaced("actor-0")
    if how == "confirmed":
        scene.confirmed("actor-0", 0, 10)
    else:
        scene.wait(60, ["learner-0", "actor-0", "actor-1"])
    mistake = Failure("actor-0", "no such game", user=True)
    assert Kill("actor-1", TERM) in scene.decisions.on_error(mistake, scene.now_s)


def test_lost_host_of_the_only_learner_ends_the_run() -> None:
    scene = FarScene((LEARNER, CONNECTOR, *ACTORS))
    effects = scene.lost("learner-0")
    assert {e.name for e in effects if isinstance(e, Kill)} == {"actor-0", "actor-1"}
    for name in ("actor-0", "actor-1"):
        scene.ends(name, 0)
    scene.lost("connector-0")
    outcome = scene.decisions.outcome
    assert outcome is not None
    assert (outcome.exit_code, outcome.error) == (1, f"learner-0: {WHY}")
    assert scene.confirmed("learner-0", 0, 0) == []


def test_learner_in_a_group_on_a_lost_host_is_replaced_and_its_actors_move() -> None:
    scene = FarScene(several_learners(2))
    for rank in (0, 1):
        scene.decisions.on_join(f"learner-{rank}")
    for rank in (0, 1):
        scene.decisions.on_group_entered(f"learner-{rank}")
    effects = scene.lost("learner-1")
    assert effects[0] == Send("learner-0", {"kind": "group", "epoch": 2, "members": [0]})
    moved = [e for e in effects if isinstance(e, Send) and e.name == "actor-1"]
    assert [e.message["index"] for e in moved] == [0]
    assert isinstance(effects[-1], Note)
    assert effects[-1].text.endswith(
        "it is restarted in 0.1 s; the other learners continue without it"
    )
    assert Start("learner-1", 1) in scene.tick(0.1)
    assert scene.confirmed("learner-1", 0, 0) == [], "its actors and the others know already"


def test_lost_host_does_not_delay_stopping() -> None:
    scene = FarScene((LEARNER, *ACTORS))
    scene.decisions.stop("return", scene.now_s)
    scene.ends("actor-0", 0)
    effects = scene.lost("actor-1")
    assert Kill("learner-0", TERM) in effects
    assert not [e for e in effects if isinstance(e, Send) and e.message["kind"] == "actor_ended"]
    scene.ends("learner-0", 0)
    outcome = scene.decisions.outcome
    assert outcome is not None
    assert outcome.exit_code == 0
    assert scene.tick(20) == []
