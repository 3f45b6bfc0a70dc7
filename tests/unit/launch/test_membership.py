"""Groups of learners and the assignment of actors, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.membership import ActorAssignment, GroupMembership
from penstock.launch.supervisor_messages import Effect, Send


def learners(count: int) -> list[RoleSpec]:
    return [
        RoleSpec("learner", r, "m:f", Stage.LEARNER, address=f"ipc:///wire-{r}", learner=r)
        for r in range(count)
    ]


def actors(count: int, of: int) -> list[RoleSpec]:
    return [RoleSpec("actor", i, "m:f", Stage.ACTORS, learner=i % of) for i in range(count)]


def told(*members: int, epoch: int) -> list[Effect]:
    message: dict[str, Any] = {"kind": "group", "epoch": epoch, "members": list(members)}
    return [Send(f"learner-{rank}", message) for rank in members]


def test_first_group_waits_for_all_and_every_change_forms_a_new_group() -> None:
    group = GroupMembership(learners(3))
    assert group.on_join(2) == []
    assert group.on_join(0) == []
    assert group.on_join(1) == told(0, 1, 2, epoch=1)
    group.on_entered(0)
    assert group.on_leave(1) == told(0, 2, epoch=2)
    assert group.on_join(1) == told(0, 1, 2, epoch=3)


def test_first_group_waits_for_a_learner_that_ended_before_it() -> None:
    group = GroupMembership(learners(2))
    group.on_join(0)
    assert group.on_leave(0) == []
    assert group.on_join(1) == []
    assert group.on_join(0) == told(0, 1, epoch=1)


def test_learner_that_ends_before_any_entered_is_awaited_as_it_may_hold_the_state() -> None:
    group = GroupMembership(learners(2))
    group.on_join(0)
    assert group.on_join(1) == told(0, 1, epoch=1)
    assert group.on_leave(0) == []
    assert group.on_group_failed(1) == []  # learner 1 says that nobody has come
    assert group.on_join(0) == told(0, 1, epoch=2)
    group.on_entered(1)
    assert group.on_leave(0) == told(1, epoch=3)


def test_end_of_a_learner_outside_the_group_has_no_effect() -> None:
    group = GroupMembership(learners(2))
    group.on_join(0)
    group.on_join(1)
    group.on_leave(1)
    assert group.on_leave(1) == []


def test_failure_reported_by_several_members_forms_one_new_group() -> None:
    group = GroupMembership(learners(2))
    group.on_join(0)
    group.on_join(1)
    assert group.on_group_failed(1) == told(0, 1, epoch=2)
    assert group.on_group_failed(1) == []
    assert group.on_group_failed(2) == told(0, 1, epoch=3)


def test_only_entered_members_hold_the_state_of_the_run() -> None:
    group = GroupMembership(learners(3))
    assert group.holds_run(0, running={0, 2})
    assert not group.holds_run(0, running={0})
    for rank in range(3):
        group.on_join(rank)
        group.on_entered(rank)
    group.on_leave(2)  # and is started again
    assert group.holds_run(0, running={0, 1, 2})
    assert not group.holds_run(0, running={0, 2})
    group.on_join(2)  # named a member, but it has not taken the others' state yet
    assert not group.holds_run(0, running={0, 2})
    group.on_entered(2)
    assert group.holds_run(0, running={0, 2})


def place(assignment: ActorAssignment, name: str, incarnation: int) -> int:
    effect = assignment.begin_stream(name, incarnation)
    assert effect is not None
    assert effect.name == name
    assert effect.message["incarnation"] == incarnation
    rank: int = effect.message["index"]
    assert effect.message["address"] == f"ipc:///wire-{rank}"
    return rank


def test_actor_of_its_own_learner_needs_no_message() -> None:
    assignment = ActorAssignment(actors(4, of=2), learners(2))
    assert assignment.begin_stream("actor-3", 0) is None
    assert assignment.begin_stream("actor-3", 1) is None


def test_actors_of_a_dead_learner_join_the_least_loaded_and_return() -> None:
    # Homes: 0 1 2 0 1 2 0. Learner 1 (two actors) falls to 2; then learner 0 has three, 2 has two.
    assignment = ActorAssignment(actors(7, of=3), learners(3))
    assert assignment.on_learner_end(1) == ["actor-1", "actor-4"]
    assert [place(assignment, "actor-1", 1), place(assignment, "actor-4", 1)] == [2, 0]
    assert assignment.on_learner_end(2) == ["actor-1", "actor-2", "actor-5"]
    assert {place(assignment, f"actor-{i}", 2) for i in (1, 2, 5)} == {0}
    assert assignment.on_learner_ready(1) == ["actor-1", "actor-4"]
    assert [place(assignment, "actor-1", 3), place(assignment, "actor-4", 3)] == [1, 1]
    assert assignment.on_learner_ready(1) == []
    assert assignment.on_learner_ready(2) == ["actor-2", "actor-5"]


def test_actors_without_any_learner_join_the_first_that_enters() -> None:
    assignment = ActorAssignment(actors(2, of=2), learners(2))
    assert assignment.on_learner_end(0) == ["actor-0"]
    assert assignment.on_learner_end(1) == []
    assert assignment.on_learner_ready(1) == ["actor-0", "actor-1"]
    assert place(assignment, "actor-1", 1) == 1


def end(assignment: ActorAssignment, name: str, incarnation: int) -> int | None:
    return assignment.learner_of(assignment.on_actor_end(name), incarnation)


def test_end_of_a_stream_is_reported_only_to_the_incarnation_that_received_it() -> None:
    assignment = ActorAssignment(actors(2, of=2), learners(2))
    assignment.begin_stream("actor-0", 0)
    assignment.on_learner_end(0)
    assignment.begin_stream("actor-0", 1)  # for learner 1
    assert end(assignment, "actor-0", 0) is None  # it had not got there yet, and learner 0 is gone
    assignment.begin_stream("actor-0", 2)
    assignment.on_learner_ready(0)
    assignment.begin_stream("actor-0", 3)
    assert end(assignment, "actor-0", 2) == 1
    assignment.begin_stream("actor-0", 4)
    assert end(assignment, "actor-0", 4) == 0


def test_a_stream_that_was_never_begun_has_no_learner() -> None:
    assignment = ActorAssignment(actors(2, of=2), learners(2))
    assignment.begin_stream("actor-0", 0)
    assert end(assignment, "actor-0", 1) is None


def test_learners_on_several_hosts_meet_at_the_first_member() -> None:
    specs = [replace(spec, meets_at=f"10.0.0.{spec.learner}:700") for spec in learners(3)]
    group = GroupMembership(specs)
    for rank in range(3):
        effects = group.on_join(rank)
    assert {effect.message["meets_at"] for effect in effects if isinstance(effect, Send)} == {
        "10.0.0.0:700"
    }
    group.on_entered(1)
    [first, second] = group.on_leave(0)
    assert isinstance(first, Send)
    assert isinstance(second, Send)
    assert first.message == {
        "kind": "group", "epoch": 2, "members": [1, 2], "meets_at": "10.0.0.1:700"
    }  # fmt: skip
    assert second.message == first.message


def with_spare(count: int, first: int) -> list[RoleSpec]:
    return [replace(spec, spare=spec.learner >= first) for spec in learners(count)]


def test_the_first_group_waits_for_no_spare_learner() -> None:
    group = GroupMembership(with_spare(3, first=2))
    assert group.on_join(0) == []
    assert group.on_join(1) == told(0, 1, epoch=1)
    group.on_entered(0)
    assert group.on_join(2) == told(0, 1, 2, epoch=2)
    assert group.on_leave(2) == told(0, 1, epoch=3)


def test_spare_learner_alone_forms_no_first_group() -> None:
    group = GroupMembership(with_spare(2, first=1))
    assert group.on_join(1) == []
    assert group.on_join(0) == told(0, 1, epoch=1)


def test_a_spare_learner_gets_its_share_of_the_actors_when_it_is_ready() -> None:
    assignment = ActorAssignment(actors(5, of=3), with_spare(3, first=1))
    assert {place(assignment, f"actor-{i}", 0) for i in (1, 2, 4)} == {0}
    assert assignment.begin_stream("actor-0", 0) is None
    assert assignment.on_learner_ready(2) == ["actor-2"]
    assert place(assignment, "actor-2", 1) == 2
    assert assignment.on_learner_ready(1) == ["actor-1", "actor-4"]
    assert [place(assignment, "actor-1", 1), place(assignment, "actor-4", 1)] == [1, 1]
    assert assignment.on_learner_end(2) == ["actor-2"]
    assert place(assignment, "actor-2", 2) == 0
