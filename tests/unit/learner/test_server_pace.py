"""The paces of a parameter server: sequences by hand, and invariants under any order of events."""

from __future__ import annotations

from collections import Counter
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.configs.sections import LearnerConfig
from penstock.learner.extras.parameter_server.server_pace import (
    Backup,
    Bounded,
    ServerPace,
    make_server_pace,
)

A, B, C, D = 1, 2, 3, 4


def joined(pace: ServerPace, *workers: int) -> ServerPace:
    for worker in workers:
        pace.join(worker)
        pace.go(worker)
    return pace


def push(pace: ServerPace, worker: int, samples: int = 8) -> int | None:
    """Push and make what is due, as the server does."""
    lag = pace.push(worker, samples)
    while pace.due():
        pace.finish_step(updated=samples > 0)
    return lag


def test_staleness_of_zero_is_a_barrier() -> None:
    pace = joined(Bounded(0), A, B, C)
    assert push(pace, A) == 0  # nobody was before
    assert not pace.may_go(A)
    assert push(pace, B) == 1  # A's update came between
    assert not pace.may_go(A)
    assert not pace.may_go(B)
    assert push(pace, C) == 2
    assert all(pace.may_go(worker) for worker in (A, B, C))
    assert pace.version == 3
    assert pace.lag == Counter({0: 1, 1: 1, 2: 1})


def test_fastest_worker_runs_ahead_only_by_the_bound() -> None:
    pace = joined(Bounded(2), A, B)
    for _ in range(2):  # clocks 1 and 2: ahead by 1 and by 2
        push(pace, A)
        assert pace.may_go(A)
        pace.go(A)
    push(pace, A)  # clock 3, and B has not pushed yet
    assert not pace.may_go(A)
    assert push(pace, B) == 3
    assert pace.may_go(A)
    assert pace.widest == 2
    assert pace.lag == Counter({0: 3, 3: 1})


def test_dead_worker_does_not_block_the_others() -> None:
    pace = joined(Bounded(0), A, B, C)
    push(pace, A)
    push(pace, B)
    assert not pace.may_go(A)
    pace.leave(C)
    assert pace.may_go(A)
    assert pace.may_go(B)


def test_late_worker_starts_at_the_clock_of_the_slowest() -> None:
    pace = joined(Bounded(1), A, B)
    for _ in range(5):
        for worker in (A, B):
            push(pace, worker)
            pace.go(worker)
    push(pace, A)
    pace.join(C)
    assert pace.workers[C].clock == 5  # as B
    assert pace.may_go(C)
    assert pace.may_go(A)


def test_push_without_samples_advances_the_clock_without_an_update() -> None:
    pace = joined(Bounded(0), A, B)
    push(pace, A, samples=0)
    assert pace.version == 0
    push(pace, B)
    assert pace.version == 1
    assert pace.may_go(A)
    assert pace.lag == Counter({0: 1})


def test_no_worker_waits_without_a_staleness_bound() -> None:
    pace = joined(Bounded(None), A, B)
    for _ in range(100):
        push(pace, A)
        assert pace.may_go(A)
        pace.go(A)
    assert push(pace, B) == 100


def test_prefetched_parameters_lack_the_workers_own_push() -> None:
    pace = joined(Bounded(2), A, B)
    assert pace.may_go_ahead(A)  # for clock 1, and B is at 0
    pace.go_ahead(A)  # with version 0
    assert pace.workers[A].parameters.version == 0
    assert push(pace, B) == 0  # version 1
    assert push(pace, A) == 1  # version 2
    assert pace.workers[A].working  # with version 0, which lacks both
    pace.go_ahead(A)  # with version 2, for clock 2
    assert push(pace, A) == 2  # version 3
    assert push(pace, A) == 1  # version 2, and version 3 lay between
    assert not pace.workers[A].working
    assert pace.lag == Counter({0: 1, 1: 2, 2: 1})


def test_worker_that_would_exceed_the_bound_gets_no_prefetch() -> None:
    pace = joined(Bounded(1), A, B)
    push(pace, A)
    pace.go(A)  # clock 1, B at 0: its next step would be 2 ahead
    assert not pace.may_go_ahead(A)
    push(pace, B)
    assert pace.may_go_ahead(A)
    assert not joined(Bounded(0), A, B).may_go_ahead(A)  # a barrier needs the own push
    assert not joined(Backup(1), A, B).may_go_ahead(A)
    assert joined(Bounded(None), A, B).may_go_ahead(A)


def test_parameters_are_cached_as_long_as_the_bound_allows() -> None:
    pace = joined(Bounded(2), A, B)
    assert pace.spare(A) == 2  # clocks 1 and 2, after 0
    lags = []
    for _ in range(3):
        lags.append(push(pace, A))
        push(pace, B)
        pace.go(B)
        if len(lags) < 3:
            assert pace.go_again(A)
    assert lags == [0, 2, 4]  # each turn made two updates of which it knows none
    assert not pace.go_again(A)  # at clock 3 it needs the pushes of clock 0, and has none
    pace.go(A)
    assert pace.spare(A) == 2  # from clock 3 to clock 5


def test_cached_parameters_of_the_slowest_last_longer() -> None:
    """What is missing counts in clocks of the worker that reads, as in the paper."""
    pace = joined(Bounded(3), A, B)
    for _ in range(2):
        push(pace, A)
        pace.go(A)
    assert pace.spare(A) == 1  # at clock 2, with all pushes of clocks below 0
    pace.go(B)
    assert pace.spare(B) == 3


def test_no_parameters_are_cached_without_a_bound() -> None:
    for pace in (joined(Bounded(None), A), joined(Backup(1), A)):
        push(pace, A)
        assert pace.spare(A) == 0
        assert not pace.go_again(A)


def test_backup_pace_uses_the_first_gradients_and_drops_late_ones() -> None:
    pace = joined(Backup(3), A, B, C, D)
    assert push(pace, A) == 0
    assert push(pace, B) == 0
    assert not pace.may_go(A)  # its step is not over
    assert pace.version == 0
    assert push(pace, D) == 0  # the third
    assert pace.version == 1
    assert all(pace.may_go(worker) for worker in (A, B, D))
    assert push(pace, C) is None  # of the step before
    assert pace.may_go(C)
    assert pace.lag == Counter({0: 3})
    assert pace.late == Counter({1: 1})
    for worker in (A, B, C, D):
        pace.go(worker)
    assert push(pace, C) == 0  # no harm done


def test_backup_pace_needs_fewer_gradients_with_fewer_workers() -> None:
    pace = joined(Backup(3), A, B, C, D)
    pace.leave(D)
    push(pace, A)
    push(pace, B)
    assert pace.version == 0  # three live, three are wanted
    pace.leave(C)
    assert pace.due()  # two live, and both have come
    pace.finish_step(updated=True)
    assert pace.may_go(A)


def test_backup_pace_keeps_the_gradient_of_a_worker_that_died_since() -> None:
    pace = joined(Backup(2), A, B, C)
    push(pace, A)
    pace.leave(A)
    assert not pace.due()
    push(pace, B)
    assert pace.version == 1


def test_push_without_samples_does_not_count_in_a_backup_step() -> None:
    pace = joined(Backup(1), A, B)
    for _ in range(3):
        push(pace, B, samples=0)
        assert not pace.may_go(B)
        assert push(pace, A) == 0
        assert pace.may_go(B)
        pace.go(A)
        pace.go(B)
    assert (pace.version, pace.late.total()) == (3, 0)
    push(pace, B, samples=0)
    pace.leave(A)
    assert pace.due()  # there is no other one to wait for


def test_backup_step_without_any_samples_makes_no_update() -> None:
    pace = joined(Backup(2), A, B)
    push(pace, A, samples=0)
    push(pace, B, samples=0)
    assert pace.version == 0
    assert pace.may_go(A)
    pace.go(A)
    assert push(pace, A) == 0  # of the next step


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"pace": "ssp", "staleness": 5}, 5),
        ({"pace": "asp", "staleness": 2}, 2),
        ({"pace": "tap", "staleness": 5}, None),
    ],
)
def test_settings_choose_the_bound(chosen: dict[str, object], expected: int | None) -> None:
    pace = joined(make_server_pace(LearnerConfig.model_validate(chosen | {"count": 2})), A, B)
    ahead = 0
    while ahead < 100 and pace.may_go(A):
        pace.go(A)
        push(pace, A)
        ahead += 1
    assert ahead == (100 if expected is None else expected + 1)


def test_settings_choose_how_many_gradients_a_step_has() -> None:
    pace = make_server_pace(LearnerConfig(pace="backup", count=4, spare=2))
    joined(pace, A, B, C, D)
    push(pace, A)
    assert pace.version == 0
    push(pace, C)
    assert pace.version == 1


class AnyOrder(RuleBasedStateMachine):
    """Workers join, die, push and ask to go in any order; `ask` notes what they were told."""

    pace: ServerPace

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)
        self.working: dict[int, int] = {}  # worker -> version it went with
        self.ahead: dict[int, int] = {}  # the same of those who have their next one
        self.waiting: set[int] = set()
        self.pushes: dict[int, int] = {}
        self.applied = 0

    @property
    def living(self) -> set[int]:
        return self.waiting | self.working.keys()

    def settle(self) -> None:
        while self.pace.due():
            self.pace.finish_step(updated=True)

    @rule()
    def join(self) -> None:
        worker = next(self.numbers)
        self.pushes[worker] = min((self.pushes[w] for w in self.living), default=0)
        self.pace.join(worker)
        self.waiting.add(worker)

    @precondition(lambda self: self.living)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.living)))
        self.pace.leave(worker)
        self.working.pop(worker, None)
        self.ahead.pop(worker, None)
        self.waiting.discard(worker)
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.waiting)))
        if self.pace.may_go(worker):
            self.pace.go(worker)
            self.waiting.discard(worker)
            self.working[worker] = self.pace.version
            self.went(worker)

    def went(self, worker: int) -> None:
        """It was given parameters."""

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.working)))
        expected = self.pace.version - self.working.pop(worker)
        lag = self.pace.push(worker, 1)
        assert lag in (None, expected)
        self.applied += lag is not None
        self.pushes[worker] += 1
        if worker in self.ahead:
            self.working[worker] = self.ahead.pop(worker)
        else:
            self.waiting.add(worker)
        self.settle()

    @invariant()
    def somebody_works_or_may(self) -> None:
        if self.living:
            assert self.working or any(self.pace.may_go(w) for w in self.waiting)

    @invariant()
    def every_applied_gradient_is_counted(self) -> None:
        assert self.pace.lag.total() == self.applied


class AnyOrderBounded(AnyOrder):
    staleness = 2

    def __init__(self) -> None:
        super().__init__()
        self.pace = Bounded(self.staleness)
        self.read: dict[int, tuple[int, int]] = {}  # version and slowest when it was given them

    @property
    def slowest(self) -> int:
        return min((self.pushes[w] for w in self.living), default=0)

    def went(self, worker: int) -> None:
        self.read[worker] = self.pace.version, self.slowest
        last = self.slowest + self.staleness
        assert self.pace.spare(worker) == last - self.pushes[worker] - (worker in self.ahead)

    @precondition(lambda self: self.working.keys() - self.ahead.keys())
    @rule(data=st.data())
    def go_ahead(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.working.keys() - self.ahead.keys())))
        allowed = self.pushes[worker] + 1 - self.slowest <= self.staleness
        assert self.pace.may_go_ahead(worker) == allowed
        if allowed:
            self.pace.go_ahead(worker)
            self.ahead[worker] = self.pace.version
            self.went(worker)

    @precondition(lambda self: self.waiting & self.read.keys())
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.waiting & self.read.keys())))
        version, includes = self.read[worker]
        allowed = self.pushes[worker] - includes <= self.staleness
        assert self.pace.go_again(worker) == allowed
        if allowed:
            self.waiting.discard(worker)
            self.working[worker] = version

    @invariant()
    def nobody_works_beyond_the_bound(self) -> None:
        slowest = min((self.pushes[w] for w in self.living), default=0)
        assert all(self.pushes[w] - slowest <= self.staleness for w in self.working)
        assert all(self.pushes[w] - slowest <= self.staleness + 1 for w in self.waiting)
        assert self.pace.widest <= self.staleness

    @invariant()
    def nobody_waits_without_need(self) -> None:
        slowest = min((self.pushes[w] for w in self.living), default=0)
        for worker in self.waiting:
            assert self.pace.may_go(worker) == (self.pushes[worker] - slowest <= self.staleness)


class AnyOrderBackup(AnyOrder):
    wanted = 3

    def __init__(self) -> None:
        super().__init__()
        self.pace = Backup(self.wanted)

    @invariant()
    def gradients_are_never_stale(self) -> None:
        assert set(self.pace.lag) <= {0}

    @invariant()
    def no_step_has_more_than_wanted(self) -> None:
        assert self.applied < (self.pace.version + 1) * self.wanted


TestAnyOrderBounded = AnyOrderBounded.TestCase
TestAnyOrderBounded.settings = settings(max_examples=60, stateful_step_count=60)
TestAnyOrderBackup = AnyOrderBackup.TestCase
TestAnyOrderBackup.settings = settings(max_examples=60, stateful_step_count=60)
