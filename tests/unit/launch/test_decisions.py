"""The supervisor's decisions, without a process or a clock."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from penstock.core.role import EXIT_REJOIN
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.decisions import Decisions
from penstock.launch.supervisor_messages import (
    Effect,
    Failure,
    Kill,
    Note,
    Outcome,
    RestartLimits,
    Send,
    Start,
    describe_exit,
)
from supervision_scene import ACTORS, CONNECTOR, LEARNER, Scene

TERM, KILL, DUMP = int(signal.SIGTERM), int(signal.SIGKILL), int(signal.SIGUSR1)
FINISH = {"kind": "finish"}


def without_news(effects: list[Effect]) -> list[Effect]:
    """Leave out the messages that only inform."""
    return [e for e in effects if not (isinstance(e, Send) and e.message != FINISH)]


def test_all_roles_start_at_once() -> None:
    decisions = Decisions((LEARNER, *ACTORS), RestartLimits())
    assert decisions.tick(5.0, {}, {}) == [
        Start("learner-0", 0),
        Start("actor-0", 0),
        Start("actor-1", 0),
    ]
    assert decisions.tick(5.1, {}, {}) == []


def test_learner_is_sent_the_number_of_live_actors() -> None:
    decisions = Decisions((LEARNER, *ACTORS), RestartLimits())
    decisions.tick(5.0, {}, {})
    assert decisions.on_ready("actor-1", 6.0) == [Send("learner-0", {"kind": "actors", "alive": 1})]
    assert decisions.actors_alive == 1


def test_end_of_an_actor_is_reported_to_the_learner_with_its_counts() -> None:
    scene = Scene((LEARNER, *ACTORS))
    effects = scene.ends("actor-1", -9, produced=640)
    message = {
        "kind": "actor_ended",
        "actor": 1,
        "incarnation": 0,
        "produced_steps": 640,
        "sequence": 64,
    }
    assert effects == [
        Send("learner-0", message),
        Send("learner-0", {"kind": "actors", "alive": 1}),
        Note(
            "actor-1: was killed by SIGKILL, possibly for lack of memory; check the kernel's log "
            "with dmesg; it is restarted in 0.1 s"
        ),
    ]
    [note] = [effect for effect in effects if isinstance(effect, Note)]
    assert note.data == {"delay_s": 0.1, "cause": "was killed by SIGKILL"}
    assert scene.tick(0.05) == []
    assert scene.tick(0.06) == [Start("actor-1", 1)]
    assert scene.decisions.restarts[Stage.ACTORS] == 1


def test_restart_delays_double_up_to_ten_seconds_and_reset_after_healthy_time() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=100, hang_timeout_s=1e9)
    delays = [scene.crash_and_restart("actor-0") for _ in range(9)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0], abs=0.06)
    scene.decisions.on_ready("actor-0", scene.now_s)
    scene.wait(11)
    assert scene.crash_and_restart("actor-0") == pytest.approx(0.1, abs=0.06)


def test_actor_that_produces_between_crashes_is_always_restarted() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=1)
    for _ in range(20):
        scene.crash_and_restart("actor-0", produced=10)
    assert not scene.decisions.stopping


def test_crash_loop_without_samples_ends_the_run_with_the_first_failure() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=2)
    for n in range(3):
        failure = Failure("actor-0", f"crash {n}", f"traceback {n}")
        assert scene.decisions.on_error(failure, scene.now_s) == []
        effects = scene.ends("actor-0", 1)
        scene.tick(20)
    assert Kill("actor-1", TERM) in effects
    scene.ends("actor-1", 0)
    scene.ends("learner-0", 0)
    assert scene.decisions.outcome == Outcome(
        1, "fault", Failure("actor-0", "crash 0", "traceback 0")
    )


def test_samples_between_crashes_reset_the_crash_count() -> None:
    scene = Scene((LEARNER, *ACTORS), max_restarts=2)
    for produced in (0, 0, 10, 0):
        scene.crash_and_restart("actor-0", produced)
    assert not scene.decisions.stopping


def test_actor_that_lost_its_learner_restarts_at_once_uncounted() -> None:
    scene = Scene(ACTORS, max_restarts=0)
    for incarnation in range(1, 6):
        assert scene.ends("actor-0", EXIT_REJOIN) == []
        assert scene.tick(0.1) == [Start("actor-0", incarnation)]


def test_user_error_stops_at_once_with_exit_code_2() -> None:
    scene = Scene((LEARNER, *ACTORS))
    failure = Failure("actor-0", "there is no Pong-v9", user=True)
    effects = scene.decisions.on_error(failure, scene.now_s)
    assert effects == [Kill("actor-0", TERM), Kill("actor-1", TERM)]
    for name in ("actor-0", "actor-1", "learner-0"):
        scene.ends(name, 2)
    assert scene.decisions.outcome == Outcome(2, "user_error", failure)


def test_death_of_the_learner_ends_the_run_with_its_report_or_log() -> None:
    for report in (Failure("learner-0", "NaN loss", "its traceback"), None):
        scene = Scene((LEARNER, *ACTORS))
        if report:
            scene.decisions.on_error(report, scene.now_s)
        scene.ends("learner-0", 1 if report else -11, log="the tail of its log")
        for name in ("actor-0", "actor-1"):
            scene.ends(name, EXIT_REJOIN)
        log = Failure("learner-0", "was killed by SIGSEGV", "the tail of its log")
        assert scene.decisions.outcome == Outcome(1, "fault", report or log)


def test_learner_that_exits_without_a_report_is_a_fault() -> None:
    scene = Scene((LEARNER,))
    scene.ends("learner-0", 0)
    assert scene.decisions.outcome == Outcome(
        1, "fault", Failure("learner-0", "ended unexpectedly with exit code 0")
    )


def test_stopping_proceeds_by_stages_with_the_learner_last() -> None:
    scene = Scene((LEARNER, *ACTORS, CONNECTOR))
    assert scene.decisions.stop("return", scene.now_s) == [
        Kill("actor-0", TERM),
        Kill("actor-1", TERM),
    ]
    assert without_news(scene.ends("actor-0", 0)) == []
    assert without_news(scene.ends("actor-1", 0)) == [Kill("connector-0", TERM)]
    assert without_news(scene.ends("connector-0", 0)) == [
        Send("learner-0", FINISH),
        Kill("learner-0", TERM),
    ]
    assert scene.decisions.outcome is None
    assert scene.ends("learner-0", 0) == []
    assert scene.decisions.outcome == Outcome(0, "return")


@pytest.mark.parametrize(
    ("reason", "over"),
    [
        *(("return", True), ("minutes", True), ("callback", True)),
        *(("stopped", False), ("terminated", False), ("diverged", False)),
    ],
)
def test_connector_and_learner_are_sent_over_only_at_a_final_end(reason: str, over: bool) -> None:
    scene = Scene((LEARNER, *ACTORS[:1], CONNECTOR))
    failure = Failure("learner-0", "10 updates were skipped") if reason == "diverged" else None
    scene.decisions.stop(reason, scene.now_s, failure)
    for ended, told in (("actor-0", "connector-0"), ("connector-0", "learner-0")):
        assert (Send(told, {"kind": "over"}) in scene.ends(ended, 0)) is over


def test_each_stage_of_stopping_has_its_deadline() -> None:
    scene = Scene((LEARNER, *ACTORS, CONNECTOR), grace_s=10)
    scene.decisions.stop("minutes", scene.now_s)
    scene.ends("actor-0", 0)
    assert scene.tick(1.9) == []
    assert scene.tick(0.2) == [Kill("actor-1", KILL)]
    scene.ends("actor-1", -9)
    assert scene.tick(6.1) == [Kill("connector-0", KILL)]
    scene.ends("connector-0", -9)
    assert scene.tick(1.7) == []
    assert scene.tick(0.2) == [Kill("learner-0", KILL)]
    scene.ends("learner-0", -9)
    outcome = scene.decisions.outcome
    assert outcome is not None
    assert outcome.failure is not None
    assert outcome.exit_code == 1
    assert outcome.failure.message.startswith("did not finish within run.grace_s = 10 s")


def test_killed_actors_do_not_spoil_a_clean_end() -> None:
    scene = Scene((LEARNER, *ACTORS))
    scene.decisions.on_signal(signal.SIGINT, scene.now_s)
    for name, code in (("actor-0", -9), ("actor-1", -11), ("learner-0", 0)):
        scene.ends(name, code)
    assert scene.decisions.outcome == Outcome(130, "interrupted")


def test_failing_last_checkpoint_becomes_the_outcome() -> None:
    scene = Scene((LEARNER,))
    scene.decisions.stop("return", scene.now_s)
    failure = Failure("learner-0", "the disk is full; free some space", user=True)
    scene.decisions.on_error(failure, scene.now_s)
    scene.ends("learner-0", 2)
    assert scene.decisions.outcome == Outcome(2, "user_error", failure)


def test_a_learner_that_was_terminated_first_ends_the_run_as_terminated() -> None:
    """SIGTERM to a process group reaches its members in any order."""
    scene = Scene((LEARNER, *ACTORS[:1]))
    scene.decisions.stop("terminated", scene.now_s)
    scene.decisions.on_signal(signal.SIGTERM, scene.now_s)
    scene.ends("actor-0", 0)
    scene.ends("learner-0", 0)
    assert scene.decisions.outcome == Outcome(143, "terminated")


def test_a_learner_may_end_the_run_cleanly_for_a_failure() -> None:
    scene = Scene((LEARNER, *ACTORS[:1]))
    failure = Failure("learner-0", "10 updates in a row were skipped")
    assert scene.decisions.stop("diverged", scene.now_s, failure) == [Kill("actor-0", TERM)]
    scene.ends("actor-0", 0)
    scene.decisions.on_error(Failure("learner-0", "the disk is full", user=True), scene.now_s)
    scene.ends("learner-0", 2)
    assert scene.decisions.outcome == Outcome(1, "diverged", failure)


def test_actor_failure_while_stopping_does_not_change_the_outcome() -> None:
    scene = Scene((LEARNER, *ACTORS))
    scene.decisions.on_signal(signal.SIGTERM, scene.now_s)
    scene.decisions.on_error(Failure("actor-0", "no learner at this address", user=True), 1.0)
    for name, code in (("actor-0", 2), ("actor-1", 0), ("learner-0", 0)):
        scene.ends(name, code)
    assert scene.decisions.outcome == Outcome(143, "terminated")


def test_interrupt_kills_starting_roles_and_starts_no_others() -> None:
    scene = Scene((LEARNER, *ACTORS), ready=False)
    scene.ends("actor-0", 1)
    assert scene.decisions.on_signal(signal.SIGINT, scene.now_s) == [Kill("actor-1", KILL)]
    assert without_news(scene.ends("actor-1", -9)) == [Kill("learner-0", KILL)]
    assert scene.tick(1.0) == []
    scene.ends("learner-0", -9)
    assert scene.decisions.outcome == Outcome(130, "interrupted")


def test_second_signal_kills_all_roles() -> None:
    scene = Scene((LEARNER, *ACTORS))
    scene.decisions.on_signal(signal.SIGINT, scene.now_s)
    scene.ends("actor-0", 0)
    effects = scene.decisions.on_signal(signal.SIGINT, scene.now_s)
    assert effects == [Kill("learner-0", KILL), Kill("actor-1", KILL)]
    scene.ends("actor-1", -9)
    scene.ends("learner-0", -9)
    killed = Failure.killed_by_user("learner-0", has_checkpoint=False)
    assert scene.decisions.outcome == Outcome(130, "interrupted", killed)


def test_second_signal_claims_a_checkpoint_only_where_one_was_written() -> None:
    claims = []
    for has_checkpoint in (False, True):
        scene = Scene((LEARNER,))
        if has_checkpoint:
            scene.decisions.recovery.on_checkpoint_written()
        for _ in range(2):
            scene.decisions.on_signal(signal.SIGINT, scene.now_s)
        scene.ends("learner-0", -9)
        assert scene.decisions.outcome is not None
        claims.append(str(scene.decisions.outcome.error).rpartition("; ")[2])
    assert claims == ["it had written no checkpoint", "its last checkpoint is valid"]


def test_first_signal_during_a_normal_end_is_not_taken_for_a_second() -> None:
    scene = Scene((LEARNER,))
    scene.decisions.stop("return", scene.now_s)
    assert scene.decisions.on_signal(signal.SIGINT, scene.now_s) == [
        Note("the run is stopping; another signal kills it")
    ]
    assert scene.decisions.on_signal(signal.SIGTERM, scene.now_s) == [Kill("learner-0", KILL)]
    scene.ends("learner-0", -9)
    killed = Failure.killed_by_user("learner-0", has_checkpoint=False)
    assert scene.decisions.outcome == Outcome(143, "terminated", killed)


def test_silent_actor_is_noted_once_per_silence() -> None:
    scene = Scene((LEARNER, *ACTORS), hang_timeout_s=60)
    beating = ("actor-1",)  # and no word of a learner, which may well work so long
    assert scene.wait(9, beating) == []
    told = Note(
        "actor-0: no sign of life for 10 s, in phase environment; penstock stacks RUN shows where; "
        "at run.hang_timeout_s = 60 s it is killed and restarted"
    )
    assert scene.wait(1, beating) == [told]
    assert scene.wait(20, beating) == []
    assert scene.wait(1, ("actor-0", "actor-1")) == []
    assert scene.wait(10, beating) == [told]


def test_starting_actor_is_not_noted_as_silent() -> None:
    assert Scene(ACTORS, ready=False, start_timeout_s=60).wait(59) == []


def test_hung_role_is_dumped_then_killed_then_restarted() -> None:
    scene = Scene((LEARNER, *ACTORS), hang_timeout_s=30)
    beating = ("actor-1", "learner-0")
    assert [type(effect) for effect in scene.wait(29, beating)] == [Note]
    assert scene.wait(1, beating) == [Kill("actor-0", DUMP)]
    assert scene.wait(1, beating) == [Kill("actor-0", KILL)]
    [note] = [e for e in scene.ends("actor-0", -9) if isinstance(e, Note)]
    assert note.text == (
        "actor-0: no sign of life for run.hang_timeout_s = 30 s, in phase environment; "
        "its stacks are in logs/actor-0.stacks; if it is only slow, raise run.hang_timeout_s; it "
        "is restarted in 0.1 s"
    )
    assert scene.tick(0.1) == [Start("actor-0", 1)]
    assert scene.wait(29, beating) == []


def test_a_learner_that_saves_may_be_silent_for_longer() -> None:
    scene = Scene((LEARNER, *ACTORS), hang_timeout_s=30)
    scene.phases["learner-0"] = "saving"
    assert scene.wait(299, ("actor-0", "actor-1")) == []
    assert scene.wait(1, ("actor-0", "actor-1")) == [Kill("learner-0", DUMP)]
    scene.ends("learner-0", -9)
    scene.ends("actor-0", 0)
    scene.ends("actor-1", 0)
    outcome = scene.decisions.outcome
    assert outcome is not None
    assert outcome.error is not None
    assert "for 10 times run.hang_timeout_s = 300 s, in phase saving" in outcome.error


def test_start_timeout_applies_to_starting_roles_and_beats_extend_it() -> None:
    scene = Scene(ACTORS, ready=False, hang_timeout_s=5, start_timeout_s=20)
    assert (
        scene.wait(40, beating=("actor-1",))
        == [Kill("actor-0", DUMP)] + [Kill("actor-0", KILL)] * 20
    )


def test_an_actor_that_always_hangs_ends_the_run_however_long_each_time() -> None:
    scene = Scene(ACTORS[:1], hang_timeout_s=30, max_restarts=2)
    for _ in range(3):
        scene.decisions.on_ready("actor-0", scene.now_s)
        assert Kill("actor-0", DUMP) in scene.wait(30)
        scene.ends("actor-0", -9)
        assert Start("actor-0", 3) not in scene.wait(1)
    assert scene.decisions.outcome is not None
    assert scene.decisions.outcome.reason == "fault"


def test_an_actor_that_hangs_after_good_work_begins_with_a_clean_record() -> None:
    scene = Scene(ACTORS[:1], hang_timeout_s=30, max_restarts=2)
    for _ in range(6):
        scene.decisions.on_ready("actor-0", scene.now_s)
        scene.wait(11, ("actor-0",))
        assert Kill("actor-0", DUMP) in scene.wait(30)
        scene.ends("actor-0", -9)
        scene.wait(1)
    assert not scene.decisions.stopping


def test_suspended_supervisor_kills_no_role_as_hung() -> None:
    scene = Scene((LEARNER, *ACTORS), hang_timeout_s=30)
    assert scene.tick(3600) == []
    assert len([effect for effect in scene.wait(30) if isinstance(effect, Kill)]) == 3


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (0, "ended unexpectedly with exit code 0"),
        (3, "ended with exit code 3 and without an error report"),
        (-11, "was killed by SIGSEGV"),
        (
            -9,
            "was killed by SIGKILL, possibly for lack of memory; check the kernel's log with dmesg",
        ),
        (-40, "was killed by signal 40"),
    ],
)
def test_describe_exit(code: int, sentence: str) -> None:
    assert describe_exit(code) == sentence


def spares(count: int) -> tuple[RoleSpec, ...]:
    return tuple(RoleSpec("actor", 2 + i, "m:f", Stage.ACTORS, spare=True) for i in range(count))


def test_spare_actors_start_when_more_actors_are_needed() -> None:
    scene = Scene((LEARNER, *ACTORS, *spares(3)), ready=False)
    assert scene.incarnations.keys() == {"learner-0", "actor-0", "actor-1"}
    assert scene.decisions.roles_in_status() == ["learner-0", "actor-0", "actor-1"]
    assert scene.decisions.set_actors(4, scene.now_s) == []
    assert scene.decisions.roles_in_status()[3:] == ["actor-2", "actor-3"]
    assert scene.tick(0.1) == [Start("actor-2", 1), Start("actor-3", 1)]
    scene.decisions.on_ready("actor-2", scene.now_s)
    assert scene.decisions.actors_alive == 1
    assert scene.decisions.restarts[Stage.ACTORS] == 0


def test_surplus_actor_ends_and_restarts_when_needed() -> None:
    scene = Scene((LEARNER, *ACTORS))
    assert scene.decisions.set_actors(1, scene.now_s) == [Kill("actor-1", TERM)]
    assert not scene.decisions.needs("actor-1")
    effects = scene.ends("actor-1", 0, produced=640)
    kinds = [e.message["kind"] for e in effects if isinstance(e, Send)]
    assert kinds == ["actor_ended", "actors"]  # its steps are counted
    assert len(effects) == 2
    assert scene.wait(5) == []
    scene.decisions.set_actors(2, scene.now_s)
    assert scene.tick(0.1) == [Start("actor-1", 1)]


def test_actor_needed_again_while_ending_restarts_after_its_end() -> None:
    scene = Scene((LEARNER, *ACTORS))
    scene.decisions.set_actors(1, scene.now_s)
    assert scene.decisions.set_actors(2, scene.now_s) == []
    assert scene.tick(1.0) == []
    assert not scene.decisions.needs("actor-1"), "its end is expected"
    effects = scene.ends("actor-1", 0)
    assert not [e for e in effects if isinstance(e, Note)], "it is no crash"
    assert scene.tick(0.2) == [Start("actor-1", 1)]


def test_surplus_actor_awaiting_a_restart_is_not_restarted() -> None:
    scene = Scene((LEARNER, *ACTORS))
    scene.ends("actor-1", 1)
    assert scene.decisions.set_actors(1, scene.now_s) == []
    assert scene.wait(5) == []


def test_a_run_ends_with_actors_that_never_started() -> None:
    scene = Scene((LEARNER, *ACTORS, *spares(2)))
    effects = without_news(scene.decisions.stop("minutes", scene.now_s))
    assert effects == [Kill("actor-0", TERM), Kill("actor-1", TERM)]
    for name in ("actor-0", "actor-1", "learner-0"):
        scene.ends(name, 0)
    assert scene.decisions.outcome == Outcome(0, "minutes")
    assert scene.decisions.set_actors(4, scene.now_s) == []


def test_learners_are_sent_their_threads_including_restarted_ones() -> None:
    learners = tuple(
        RoleSpec("learner", i, "m:f", Stage.LEARNER, informed=True, learner=i) for i in range(2)
    )
    scene = Scene((*learners, *ACTORS))
    message = {"kind": "threads", "threads": 3}
    assert scene.decisions.set_learner_threads(3) == [Send(s.name, message) for s in learners]
    scene.decisions.on_group_entered("learner-0")
    scene.decisions.on_group_entered("learner-1")
    scene.ends("learner-1", -9)
    scene.tick(5.0)
    assert Send("learner-1", message) in scene.decisions.on_ready("learner-1", scene.now_s)


RELAY = RoleSpec("relay", 1, "m:f", Stage.CARRIERS, spare=True, relays=True)


def test_actors_without_a_host_start_once_a_host_is_found() -> None:
    scene = Scene((LEARNER, *ACTORS, *spares(2), RELAY))
    away = dict.fromkeys(("actor-2", "actor-3", "relay-1"), "no host has been found yet")
    [note] = scene.decisions.on_hosts_changed(away, scene.now_s)
    assert note == Note("actor-2, actor-3, relay-1: no host has been found yet")
    assert scene.decisions.on_hosts_changed(away, scene.now_s) == []
    [note] = scene.decisions.on_hosts_changed(
        {"actor-3": "no host has been found yet"}, scene.now_s
    )
    assert note == Note("actor-2, relay-1: a host was found")
    assert scene.tick(0.1) == [Start("actor-2", 1), Start("relay-1", 1)]


def test_actors_that_lost_their_host_wait_for_another() -> None:
    scene = Scene((LEARNER, *ACTORS))
    effects = scene.decisions.on_hosts_changed({"actor-1": "its host is about to end"}, scene.now_s)
    assert effects == [Note("actor-1: its host is about to end"), Kill("actor-1", TERM)]
    scene.ends("actor-1", 0, produced=640)
    assert scene.wait(5) == []
    scene.decisions.on_hosts_changed({}, scene.now_s)
    assert scene.tick(0.1) == [Start("actor-1", 1)]


def test_learner_on_a_draining_host_saves_and_continues() -> None:
    scene = Scene((LEARNER, *ACTORS))
    why = {"learner-0": "its host is about to end"}
    effects = scene.decisions.on_hosts_changed(why, scene.now_s)
    assert effects[1:] == [Send("learner-0", {"kind": "save"})]
    assert scene.decisions.needs("learner-0")


def test_learner_that_lost_its_host_restarts_elsewhere_and_actors_follow() -> None:
    learner = replace(LEARNER, address="tcp://10.0.0.1:7700")
    scene = Scene((learner, *ACTORS))
    scene.decisions.recovery.on_checkpoint_written()
    scene.decisions.on_hosts_changed({"learner-0": "its host a does not answer"}, scene.now_s)
    scene.decisions.on_presumed_dead("learner-0", 0, "a", 0, scene.now_s)
    assert scene.wait(5, ("actor-0", "actor-1")) == []
    moved = replace(learner, address="tcp://10.0.0.2:7700")
    scene.decisions.update_specs((moved, *ACTORS))
    scene.decisions.on_hosts_changed({}, scene.now_s)
    assert scene.tick(0.1) == [Start("learner-0", 1)]
    effects = scene.decisions.on_ready("learner-0", scene.now_s)
    sent = [e.message for e in effects if isinstance(e, Send) and e.name == "actor-0"]
    assert sent[0]["address"] == "tcp://10.0.0.2:7700"


def test_note_on_roles_without_a_host_names_the_first_three() -> None:
    scene = Scene((LEARNER, *ACTORS, *spares(9)))
    [note] = scene.decisions.on_hosts_changed(
        {f"actor-{i}": "none" for i in range(2, 11)}, scene.now_s
    )
    assert note == Note("actor-2, actor-3, actor-4 and 6 more: none")


def of_learner(rank: int, *, spare: bool) -> tuple[RoleSpec, ...]:
    """A learner with its connector, and its relay on the hosts of actors."""
    address = f"tcp://10.0.0.{rank}:770{rank}"
    connector = replace(CONNECTOR, index=rank, learner=rank, address=address, spare=spare)
    return (
        replace(LEARNER, index=rank, learner=rank, address=address, spare=spare),
        connector,
        replace(connector, role="relay", relays=True),
    )


GROWING = (
    *of_learner(0, spare=False),
    *of_learner(1, spare=True),
    *(replace(spec, learner=spec.index) for spec in ACTORS),
)
NO_HOST = dict.fromkeys(("learner-1", "connector-1"), "no host has been found yet")


def grown() -> Scene:
    """A run that had one learner, and has two."""
    scene = Scene(GROWING, ready=False)
    scene.decisions.on_hosts_changed(NO_HOST, scene.now_s)
    for spec in GROWING:
        scene.decisions.on_ready(spec.name, scene.now_s)
    scene.decisions.on_join("learner-0")
    scene.decisions.on_group_entered("learner-0")
    scene.decisions.on_hosts_changed({}, scene.now_s)
    scene.tick(0.1)
    scene.decisions.on_join("learner-1")
    scene.decisions.on_group_entered("learner-1")
    scene.decisions.on_ready("learner-1", scene.now_s)
    return scene


def test_spare_learner_starts_with_its_roles_once_a_host_is_found() -> None:
    scene = Scene(GROWING, ready=False)
    assert "learner-1" not in scene.incarnations
    assert "relay-1" not in scene.incarnations, "it would look for the learner at no address"
    [note] = scene.decisions.on_hosts_changed(NO_HOST, scene.now_s)
    assert note == Note("connector-1, learner-1: no host has been found yet")
    for name in ("learner-0", "actor-0", "actor-1"):
        scene.decisions.on_ready(name, scene.now_s)
    [first] = scene.decisions.on_join("learner-0")
    assert isinstance(first, Send)
    assert first.message["members"] == [0]
    scene.decisions.on_group_entered("learner-0")
    scene.decisions.on_hosts_changed({}, scene.now_s)
    started = [e.name for e in scene.tick(0.1) if isinstance(e, Start)]
    assert started == ["learner-1", "connector-1", "relay-1"]
    groups = [e.message for e in scene.decisions.on_join("learner-1") if isinstance(e, Send)]
    assert [group["members"] for group in groups] == [[0, 1], [0, 1]]
    effects = scene.decisions.on_ready("learner-1", scene.now_s)
    moved = [e for e in effects if isinstance(e, Send) and e.message["kind"] == "learner"]
    assert [(e.name, e.message["address"]) for e in moved] == [("actor-1", "tcp://10.0.0.1:7701")]
    assert scene.decisions.learners_alive == 2


def test_a_spare_learner_whose_host_ends_leaves_the_group_smaller() -> None:
    scene = grown()
    away = dict.fromkeys(("learner-1", "connector-1"), "its host b does not answer")
    scene.decisions.on_hosts_changed(away, scene.now_s)
    effects = scene.decisions.on_presumed_dead("learner-1", 1, "b", 0, scene.now_s)
    sent = [e.message for e in effects if isinstance(e, Send)]
    assert [m["members"] for m in sent if m["kind"] == "group"] == [[0]]
    assert [m["index"] for m in sent if m["kind"] == "learner"] == [0]
    scene.decisions.on_presumed_dead("connector-1", 1, "b", 0, scene.now_s)
    assert not any(isinstance(e, Note) for e in effects), "it is not restarted"
    assert scene.wait(5, ("learner-0", "connector-0", "relay-0", "actor-0", "actor-1")) == []
    assert not scene.decisions.stopping
    assert scene.decisions.learners_alive == 1
    assert scene.decisions.restarts[Stage.LEARNER] == 0
    scene.decisions.on_hosts_changed({}, scene.now_s)
    started = [e.name for e in scene.tick(0.1) if isinstance(e, Start)]
    assert started[:2] == ["learner-1", "connector-1"]


def test_spare_learner_on_a_draining_host_trains_until_its_end() -> None:
    scene = grown()
    effects = scene.decisions.on_hosts_changed(
        {"learner-1": "its host is about to end"}, scene.now_s
    )
    assert effects[1:] == [Send("learner-1", {"kind": "save"})]
    assert scene.decisions.learners_alive == 2
    assert scene.decisions.needs("relay-1"), "actors still need its weights"
    scene.ends("learner-1", -9)
    assert not any(isinstance(e, Start) for e in scene.wait(5, ("learner-0", "actor-0")))


def test_crashed_spare_learner_is_restarted_on_its_host() -> None:
    scene = grown()
    scene.ends("learner-1", 1)
    assert [e.name for e in scene.tick(0.2) if isinstance(e, Start)] == ["learner-1"]


@pytest.mark.parametrize("name", ["learner-1", "connector-1"])
def test_user_error_of_a_spare_learner_excludes_only_that_learner(
    name: str,
) -> None:
    scene = grown()
    for _ in range(9):
        mistake = Failure(name, "tcp://*:7701 is taken", user=True)
        assert scene.decisions.on_error(mistake, scene.now_s) == []
        effects = scene.ends(name, 1)
        [note] = [e for e in effects if isinstance(e, Note)]
        assert note.text == (
            f"{name}: tcp://*:7701 is taken; the run continues without learner-1 until it has "
            "another host"
        )
        killed = {e.name: e.signum for e in effects if isinstance(e, Kill)}
        signals = {"learner-1": KILL, "connector-1": TERM, "relay-1": TERM}
        del signals[name]
        assert killed == signals
        for other in killed:
            scene.ends(other, -9)
        busy = ("learner-0", "connector-0", "relay-0", "actor-0", "actor-1")
        assert scene.wait(5, busy) == [], "nor does its relay start without it"
        scene.decisions.on_hosts_changed(NO_HOST, scene.now_s)
        scene.decisions.on_hosts_changed({}, scene.now_s)
        started = [e.name for e in scene.tick(0.1) if isinstance(e, Start)]
        assert started == ["learner-1", "connector-1", "relay-1"]
        scene.decisions.on_join("learner-1")
        for role in started:
            scene.decisions.on_ready(role, scene.now_s)
    scene.ends(name, -9)
    assert not scene.decisions.stopping, "failures on other hosts do not count"


def test_relay_of_an_excluded_learner_does_not_start() -> None:
    scene = grown()
    scene.decisions.on_error(Failure("learner-1", "no package", user=True), scene.now_s)
    scene.ends("learner-1", 1)
    scene.ends("connector-1", 0)
    scene.ends("relay-1", 0)
    scene.decisions.on_hosts_changed({"relay-1": "no host has been found yet"}, scene.now_s)
    scene.decisions.on_hosts_changed({}, scene.now_s)
    assert not any(isinstance(e, Start) for e in scene.tick(0.1))


def test_user_error_of_the_last_learner_with_the_state_ends_the_run() -> None:
    scene = grown()
    scene.ends("learner-0", -9)
    mistake = Failure("connector-1", "tcp://*:7701 is taken", user=True)
    scene.decisions.on_error(mistake, scene.now_s)
    assert scene.decisions.stop_cause == ("user_error", mistake)


def test_restarted_spare_role_has_no_state_of_its_last_process() -> None:
    scene = grown()
    scene.decisions.on_ready("connector-1", scene.now_s)
    counts = {"kind": "connector", "received": 3}
    assert scene.decisions.forward("connector-1", counts)
    away = dict.fromkeys(("learner-1", "connector-1"), "its host b does not answer")
    busy = tuple(spec.name for spec in GROWING if spec.name != "learner-1")
    assert Kill("learner-1", KILL) in scene.wait(62, busy), "it hangs"
    scene.decisions.on_hosts_changed(away, scene.now_s)
    scene.decisions.on_presumed_dead("learner-1", 1, "b", 0, scene.now_s)
    assert not scene.decisions.forward("connector-1", counts), "it is of a learner that has ended"
    scene.decisions.on_presumed_dead("connector-1", 1, "b", 0, scene.now_s)
    scene.decisions.on_hosts_changed({}, scene.now_s)
    effects = scene.tick(0.1, busy)
    assert [e.name for e in effects if isinstance(e, Start)][:2] == ["learner-1", "connector-1"]
    assert not [e for e in effects if isinstance(e, Kill)]
    scene.decisions.on_ready("learner-1", scene.now_s)
    scene.decisions.on_ready("connector-1", scene.now_s)
    assert scene.decisions.forward("connector-1", counts) == [Send("learner-1", counts)]


def test_spare_learner_ending_for_a_restart_without_a_host_counts_as_one_loss() -> None:
    scene = grown()
    scene.decisions.recovery.on_checkpoint_written()
    scene.ends("learner-1", 1)
    scene.tick(0.2)  # it starts again, without the trained state
    effects = scene.ends("learner-0", -9)
    assert [e for e in effects if isinstance(e, Kill)] == [Kill("learner-1", KILL)]
    scene.decisions.on_hosts_changed(NO_HOST, scene.now_s)
    assert not any(isinstance(e, Note) for e in scene.ends("learner-1", -9))
    assert [e.name for e in scene.tick(0.2) if isinstance(e, Start)] == ["learner-0"]
    scene.decisions.on_hosts_changed({}, scene.now_s)
    assert Start("learner-1", 3) in scene.tick(0.1)


def test_run_without_learners_resumes_with_its_initial_learners() -> None:
    scene = grown()
    scene.decisions.recovery.on_checkpoint_written()
    scene.decisions.on_presumed_dead("learner-0", 0, "a", 0, scene.now_s)
    scene.decisions.on_hosts_changed({"learner-1": "its host b does not answer"}, scene.now_s)
    scene.decisions.on_presumed_dead("learner-1", 1, "b", 0, scene.now_s)
    assert scene.decisions.recovery.resumes
    assert [e.name for e in scene.tick(1.0) if isinstance(e, Start)] == ["learner-0"]
    groups = [e.message for e in scene.decisions.on_join("learner-0") if isinstance(e, Send)]
    assert [group["members"] for group in groups] == [[0]]


def test_a_relay_follows_its_learner_to_another_address() -> None:
    scene = grown()
    scene.decisions.on_ready("relay-1", scene.now_s)
    relay = GROWING[5]
    assert relay.name == "relay-1"
    moved = replace(relay, address="tcp://10.0.0.9:7701")
    specs = [moved if spec is relay else spec for spec in GROWING]
    assert scene.decisions.update_specs(specs) == [Kill("relay-1", TERM)]
    assert scene.decisions.update_specs(specs) == []
    scene.ends("relay-1", 0)
    assert [e.name for e in scene.tick(0.2) if isinstance(e, Start)] == ["relay-1"]
