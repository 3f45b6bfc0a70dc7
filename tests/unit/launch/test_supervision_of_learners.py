"""The supervisor's decisions about several learners, without a process or a clock."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

from penstock.core.role import EXIT_REJOIN, StoreAddress
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.decisions import Decisions
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

TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)
KILLED = "was killed by SIGKILL, possibly for lack of memory; check the kernel's log with dmesg"
SERVER = RoleSpec("server", 0, "m:f", Stage.SERVER)


class Scene:
    """Three learners with two actors each, all at work, and a clock that a test turns."""

    def __init__(self, *more: RoleSpec, learners: int = 3, joined: bool = True, **limits: float):
        ranks = range(learners)
        actors = range(2 * learners)
        specs = (
            *(RoleSpec("learner", r, "m", Stage.LEARNER, informed=True, learner=r) for r in ranks),
            *(RoleSpec("actor", i, "m", Stage.ACTORS, learner=i % learners) for i in actors),
            *more,
        )
        self.decisions = Decisions(specs, RestartLimits(**limits))  # type: ignore[arg-type]
        self.now_s = 1000.0
        self.tick()
        for spec in specs:
            self.decisions.on_ready(spec.name, self.now_s)
        for rank in ranks if joined else ():
            self.decisions.on_join(f"learner-{rank}")
        for rank in ranks if joined else ():
            self.decisions.on_group_entered(f"learner-{rank}")

    def tick(self, after_s: float = 0.0) -> list[Effect]:
        self.now_s += after_s
        return self.decisions.tick(self.now_s, {}, {})

    def ends(
        self,
        name: str,
        code: int = -9,
        *,
        produced: int = 0,
        sequence: int = 0,
        incarnation: int = 0,
    ) -> list[Effect]:
        end = End(code, produced, sequence, incarnation)
        return self.decisions.on_ended(name, end, self.now_s)

    def starts_again(self, name: str) -> list[Effect]:
        """It starts, works and joins after a crash; what is done at that."""
        assert any(isinstance(e, Start) and e.name == name for e in self.tick(20))
        return [*self.decisions.on_ready(name, self.now_s), *self.decisions.on_join(name)]

    def ends_all(self, *names: str, code: int = 0) -> list[Effect]:
        return [effect for name in names for effect in self.ends(name, code)]


def sent(effects: list[Effect], kind: str) -> dict[str, Any]:
    """Messages of a kind, by whom they are for."""
    sends = [e for e in effects if isinstance(e, Send) and e.message["kind"] == kind]
    return {e.name: e.message for e in sends}


def test_dead_learner_is_replaced_while_the_others_continue() -> None:
    scene = Scene()
    effects = scene.ends("learner-1")
    group = {"kind": "group", "epoch": 2, "members": [0, 2]}
    assert effects[:2] == [Send("learner-0", group), Send("learner-2", group)]
    assert {name: m["index"] for name, m in sent(effects, "learner").items()} == {
        "actor-1": 0,
        "actor-4": 2,
    }
    assert effects[-1] == Note(
        f"learner-1: {KILLED}; it is restarted in 0.1 s; the other learners continue without it"
    )
    assert scene.decisions.learners_alive == 2
    assert scene.tick(0.1) == [Start("learner-1", 1)]
    assert scene.decisions.restarts == {
        Stage.ACTORS: 0,
        Stage.CARRIERS: 0,
        Stage.LEARNER: 1,
        Stage.SERVER: 0,
        Stage.EVALUATOR: 0,
    }
    back = sent(scene.decisions.on_ready("learner-1", scene.now_s), "learner")
    assert {name: (m["index"], m["incarnation"]) for name, m in back.items()} == {
        "actor-1": (1, 2),
        "actor-4": (1, 2),
    }
    assert sent(scene.decisions.on_join("learner-1"), "group").keys() == {
        "learner-0",
        "learner-1",
        "learner-2",
    }


def test_error_report_of_one_learner_does_not_end_the_run() -> None:
    scene = Scene()
    failure = Failure("learner-0", "RuntimeError: out of luck", "its traceback")
    assert scene.decisions.on_error(failure, scene.now_s) == []
    [note] = [e for e in scene.ends("learner-0", 1) if isinstance(e, Note)]
    assert note.text.startswith("learner-0: RuntimeError: out of luck; it is restarted")
    assert not scene.decisions.stopping


def test_user_error_of_one_learner_ends_the_run() -> None:
    scene = Scene()
    failure = Failure("learner-2", "the loss became nan", user=True)
    effects = scene.decisions.on_error(failure, scene.now_s)
    assert [e.name for e in effects if isinstance(e, Kill)] == [f"actor-{i}" for i in range(6)]


def test_a_learner_that_keeps_dying_is_given_up_with_the_first_traceback() -> None:
    scene = Scene(max_restarts=2)
    for n in range(3):
        failure = Failure("learner-1", f"crash {n}", f"traceback {n}")
        scene.decisions.on_error(failure, scene.now_s)
        assert not scene.decisions.stopping
        scene.ends("learner-1", 1, produced=900)  # what it heard of is no sign of health
        if n < 2:
            scene.starts_again("learner-1")
    scene.ends_all(*(f"actor-{i}" for i in range(6)), "learner-0", "learner-2")
    failure = Failure("learner-1", "crash 0", "traceback 0")
    assert scene.decisions.outcome == Outcome(1, "fault", failure)


def test_run_ends_when_the_last_member_dies_before_a_restarted_learner_joins() -> None:
    scene = Scene(learners=2)
    scene.ends("learner-0")
    scene.tick(1)  # it starts again, knowing nothing yet
    scene.ends("learner-1")
    assert scene.decisions.stopping


def test_all_learners_resume_from_the_checkpoint_when_none_holds_the_state() -> None:
    scene = Scene(learners=2)
    scene.decisions.recovery.on_checkpoint_written()
    scene.ends("learner-0")
    scene.tick(1)  # it starts again, knowing nothing yet
    effects = scene.ends("learner-1")
    assert [e for e in effects if isinstance(e, Kill)] == [Kill("learner-0", KILL)]
    assert scene.decisions.recovery.resumes
    assert not scene.decisions.group_begun
    scene.ends("learner-0")
    assert {e.name for e in scene.tick(1) if isinstance(e, Start)} == {"learner-0", "learner-1"}
    assert scene.decisions.on_join("learner-0") == []  # the first group contains all learners
    assert sent(scene.decisions.on_join("learner-1"), "group").keys() == {"learner-0", "learner-1"}


def test_messages_of_a_killed_learner_do_not_count_as_held_state() -> None:
    """Else learner-0 would be told that others have the state, and would not resume it."""
    scene = Scene(learners=2)
    scene.decisions.recovery.on_checkpoint_written()
    scene.ends("learner-0")
    scene.starts_again("learner-0")
    scene.ends("learner-1")
    assert scene.decisions.on_join("learner-0") == []
    scene.decisions.on_group_entered("learner-0")  # it had the state, and is killed
    scene.ends("learner-0")
    assert not scene.decisions.group_begun
    scene.tick(1)
    assert scene.decisions.on_join("learner-1") == []
    assert sent(scene.decisions.on_join("learner-0"), "group").keys() == {"learner-0", "learner-1"}


def test_a_dead_parameter_server_takes_its_learners_to_the_checkpoint() -> None:
    scene = Scene(SERVER, learners=2)
    scene.decisions.recovery.on_checkpoint_written()
    killed = [e.name for e in scene.ends("server-0") if isinstance(e, Kill)]
    assert killed == ["learner-0", "learner-1"]
    for name in killed:
        scene.ends(name)
    assert {e.name for e in scene.tick(1) if isinstance(e, Start)} == {"server-0", *killed}
    assert not scene.decisions.stopping


def test_learners_wait_for_a_shard_that_has_no_host() -> None:
    """They are told its address when they start, and it may have another one then."""
    scene = Scene(SERVER, learners=2)
    scene.decisions.update_specs(
        [
            RoleSpec("learner", r, "m", Stage.LEARNER, learner=r, servers=("tcp://a:1",))
            for r in range(2)
        ]
    )
    scene.decisions.recovery.on_checkpoint_written()
    gone = {"server-0": "its host does not answer"}
    effects = scene.decisions.on_hosts_changed(gone, scene.now_s)
    assert sent(effects, "save") == {"learner-0": {"kind": "save"}}
    for name in ("server-0", "learner-0", "learner-1"):
        scene.ends(name)
    assert not [e for e in scene.tick(5) if isinstance(e, Start)]
    scene.decisions.on_hosts_changed({}, scene.now_s)
    started = [e.name for e in scene.tick(1) if isinstance(e, Start)]
    assert set(started) == {"server-0", "learner-0", "learner-1"}


def test_a_learner_is_restarted_while_a_shard_runs_on_a_host_that_is_about_to_end() -> None:
    scene = Scene(SERVER, learners=2)
    served = [
        RoleSpec("learner", r, "m", Stage.LEARNER, learner=r, servers=("tcp://a:1",))
        for r in range(2)
    ]
    scene.decisions.update_specs(served)
    scene.decisions.recovery.on_checkpoint_written()
    ends = {"server-0": "its host is about to end"}
    scene.decisions.on_hosts_changed(ends, scene.now_s)
    scene.ends("learner-1")
    assert scene.tick(1) == [Start("learner-1", 1)]
    scene.ends("learner-0")
    scene.ends("learner-1")
    assert scene.tick(1) == [], "the shard is about to be restarted at another address"
    scene.ends("server-0")
    assert scene.tick(1) == []
    scene.decisions.on_hosts_changed({}, scene.now_s)
    started = {e.name for e in scene.tick(1) if isinstance(e, Start)}
    assert started == {"server-0", "learner-0", "learner-1"}


def test_run_continues_with_any_learner_before_the_first_group() -> None:
    scene = Scene(learners=2, joined=False)
    assert sent(scene.ends("learner-0"), "group") == {}
    assert not scene.decisions.stopping
    scene.decisions.on_join("learner-1")
    assert sent(scene.starts_again("learner-0"), "group").keys() == {"learner-0", "learner-1"}


def test_end_of_an_actor_is_reported_to_its_current_learner() -> None:
    scene = Scene()
    ended = sent(scene.ends("actor-4", produced=80, sequence=8), "actor_ended")
    assert ended == {
        "learner-1": {
            "kind": "actor_ended",
            "actor": 4,
            "incarnation": 0,
            "produced_steps": 80,
            "sequence": 8,
        }
    }
    scene.ends("learner-1")
    ended = sent(scene.ends("actor-1", produced=10, sequence=2, incarnation=1), "actor_ended")
    assert list(ended) == ["learner-0"]


def test_counts_sent_to_a_dead_learner_are_reported_to_no_learner() -> None:
    scene = Scene()
    scene.ends("learner-1")
    # It dies before it has followed: its page still names the stream of the dead learner.
    assert sent(scene.ends("actor-1", produced=70), "actor_ended") == {}
    scene.starts_again("learner-1")
    scene.ends("actor-4", incarnation=0)
    assert sent(scene.ends("actor-0", produced=5), "actor_ended").keys() == {"learner-0"}


def test_actor_started_while_its_learner_is_dead_is_assigned_another() -> None:
    scene = Scene()
    scene.ends("actor-1", produced=10)
    scene.ends("learner-1")
    effects = scene.tick(0.1)
    assert Start("actor-1", 1) in effects
    assert sent(effects, "learner")["actor-1"]["index"] in (0, 2)
    assert sent(effects, "learner")["actor-1"]["incarnation"] == 1


def test_counts_of_a_connector_are_for_its_own_learner() -> None:
    connectors = [RoleSpec("connector", r, "m", Stage.CARRIERS, learner=r) for r in range(3)]
    scene = Scene(*connectors)
    message = {"kind": "connector", "received": 3}
    assert scene.decisions.forward("connector-2", message) == [Send("learner-2", message)]


def test_connector_reports_for_a_dead_learner_are_not_passed_to_its_successor() -> None:
    scene = Scene(*(RoleSpec("connector", r, "m", Stage.CARRIERS, learner=r) for r in range(3)))
    scene.ends("learner-1")
    scene.starts_again("learner-1")
    assert scene.decisions.forward("connector-1", {"kind": "connector"}) == []
    assert scene.decisions.forward("connector-0", {"kind": "connector"}) != []
    scene.ends("connector-1", EXIT_REJOIN)
    scene.tick(1)
    scene.decisions.on_ready("connector-1", scene.now_s)
    assert scene.decisions.forward("connector-1", {"kind": "connector"}) != []


def test_learners_finish_together_before_the_server() -> None:
    scene = Scene(SERVER)
    scene.decisions.stop("return", scene.now_s)
    scene.decisions.stop("env_steps", scene.now_s)
    effects = scene.ends_all(*(f"actor-{i}" for i in range(6)))
    assert [e for e in effects if isinstance(e, Kill)] == [
        Kill(f"learner-{rank}", TERM) for rank in range(3)
    ]
    assert sent(effects, "finish").keys() == {"learner-0", "learner-1", "learner-2"}
    assert not any(isinstance(e, Kill) for e in scene.ends_all("learner-0", "learner-2"))
    assert Kill("server-0", TERM) in scene.ends("learner-1", 0)
    scene.ends("server-0", 0)
    assert scene.decisions.outcome == Outcome(0, "return")


def test_lowest_live_learner_saves_the_run_at_the_end() -> None:
    scene = Scene()
    scene.decisions.on_signal(TERM, scene.now_s)
    effects = scene.ends("learner-0")  # while the actors end: the others have what it had
    [note] = [e for e in effects if isinstance(e, Note)]
    assert note.text == f"learner-0: {KILLED}; another learner writes the checkpoint"
    effects = scene.ends_all(*(f"actor-{i}" for i in range(6)))
    saver = {"kind": "saver", "rank": 1, "saved": False}
    assert sent(effects, "saver") == {"learner-1": saver, "learner-2": saver}
    assert sent(effects, "finish").keys() == {"learner-1", "learner-2"}
    scene.ends_all("learner-1", "learner-2")
    assert scene.decisions.outcome == Outcome(128 + TERM, "terminated")


def test_next_learner_saves_when_the_saving_one_dies() -> None:
    scene = Scene()
    scene.decisions.on_signal(TERM, scene.now_s)
    scene.ends_all(*(f"actor-{i}" for i in range(6)))
    saver = {"kind": "saver", "rank": 1, "saved": False}
    assert sent(scene.ends("learner-0"), "saver") == {"learner-1": saver, "learner-2": saver}
    saver = {**saver, "saved": True}
    assert sent(scene.ends("learner-1", 0), "saver") == {"learner-2": saver}
    assert sent(scene.ends("learner-2", 0), "saver") == {}
    assert scene.decisions.outcome == Outcome(128 + TERM, "terminated")


def test_death_of_all_learners_before_saving_is_a_fault() -> None:
    scene = Scene(learners=2)
    scene.decisions.on_signal(TERM, scene.now_s)
    scene.ends_all(*(f"actor-{i}" for i in range(4)))
    scene.ends_all("learner-0", "learner-1", code=-9)
    assert scene.decisions.outcome == Outcome(1, "fault", Failure("learner-1", KILLED))


def test_next_learner_saves_when_the_first_has_no_state() -> None:
    scene = Scene(learners=2)
    scene.decisions.stop("env_steps", scene.now_s)
    scene.ends_all(*(f"actor-{i}" for i in range(4)))
    failures = [Failure(f"learner-{r}", "the server sent no state", fault=False) for r in range(2)]
    scene.decisions.on_error(failures[0], scene.now_s)
    effects = scene.ends("learner-0", 1)
    saver = {"kind": "saver", "rank": 1, "saved": False}
    assert sent(effects, "saver") == {"learner-1": saver}
    [note] = [e for e in effects if isinstance(e, Note)]
    assert note.text == (
        "learner-0: the server sent no state; another learner writes the checkpoint"
    )
    assert scene.decisions.stop_cause == ("env_steps", None)
    scene.decisions.on_error(failures[1], scene.now_s)  # and there is no other learner
    scene.ends("learner-1", 1)
    assert scene.decisions.outcome == Outcome(1, "fault", failures[1])


def test_restarting_learner_is_not_chosen_to_save() -> None:
    scene = Scene()
    scene.ends("learner-0")
    scene.tick(1)  # it starts again
    scene.decisions.stop("return", scene.now_s)
    effects = scene.ends_all(*(f"actor-{i}" for i in range(6)))
    assert Kill("learner-0", KILL) in effects
    assert sent(effects, "saver")["learner-2"]["rank"] == 1


def test_server_gets_time_to_end_after_learners_used_the_grace() -> None:
    scene = Scene(SERVER, learners=2, grace_s=10)
    scene.decisions.stop("return", scene.now_s)
    scene.ends_all(*(f"actor-{i}" for i in range(4)), "learner-0")
    assert scene.tick(10) == [Kill("learner-1", KILL)]
    assert Kill("server-0", TERM) in scene.ends("learner-1")
    assert scene.tick(1.9) == []
    assert scene.tick(0.2) == [Kill("server-0", KILL)]


def test_death_of_the_server_ends_the_run() -> None:
    scene = Scene(SERVER)
    scene.ends("server-0", -11)
    assert scene.decisions.stopping


def test_learners_wait_for_one_that_dies_before_the_first_group_trains() -> None:
    scene = Scene(joined=False)
    for rank in range(3):
        scene.decisions.on_join(f"learner-{rank}")
    effects = scene.ends("learner-0")
    assert not sent(effects, "group")
    assert effects[-1] == Note(
        f"learner-0: {KILLED}; it is restarted in 0.1 s; the other learners wait for it"
    )
    group = sent(scene.starts_again("learner-0"), "group")
    assert {m["epoch"] for m in group.values()} == {2}
    assert group["learner-1"]["members"] == [0, 1, 2]


def test_shard_outlives_its_own_learner_unless_that_failed() -> None:
    """They notice by its end that something is wrong here."""
    store = StoreAddress("10.0.0.1", 29500)
    shard = replace(SERVER, store=store)
    learner = RoleSpec("learner", 1, "m:f", Stage.LEARNER, informed=True, learner=1, store=store)
    for code, expected in ((0, TERM), (-9, KILL)):
        decisions = Decisions((learner, shard), RestartLimits())
        decisions.tick(1000.0, {}, {})
        for spec in (learner, shard):
            decisions.on_ready(spec.name, 1000.0)
        if not code:
            decisions.stop("stopped", 1001.0)
        effects = decisions.on_ended("learner-1", End(code, 0, 0, 0), 1002.0)
        assert [int(e.signum) for e in effects if isinstance(e, Kill)] == [expected]
        assert bool(sent(effects, "finish")) == (not code)
