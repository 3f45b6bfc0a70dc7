"""The numbers of actors and training threads follow from measurements of the run."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.autotune import cores as core_tuner
from penstock.autotune.cores import CoreSplit, Load, Split
from penstock.configs.load import resolve
from penstock.core import cores

LOAD = Load(learner_waits=0.0, actor_waits=0.12, actor_cores=0.5, idle_cores=0.0, ceiling=1000.0)


def split(
    actors: int = 2, least: int = 1, most: int = 64, most_threads: int = 8, learners: int = 1
) -> CoreSplit:
    return CoreSplit(actors, least=least, most=most, most_threads=most_threads, learners=learners)


def numbers(found: Split | None) -> tuple[int, int] | None:
    return None if found is None else (found.actors, found.threads)


@pytest.mark.parametrize(
    ("waits", "idle_cores", "actors"),
    [
        (0.5, 8.0, 4),  # half of the data is missing: twice as many actors
        (0.2, 8.0, 3),  # 2 / (1 - 0.2) = 2.5
        (0.9, 8.0, 4),  # 20 would be needed, and it at most doubles
        (0.9, 0.6, 3),  # a core carries two, and 0.6 of a core is idle
        (0.9, 0.4, None),  # less than one actor uses
        (0.04, 8.0, None),  # hardly ever waits
    ],
)
def test_waiting_learner_gets_the_missing_actors(
    waits: float, idle_cores: float, actors: int | None
) -> None:
    load = LOAD._replace(learner_waits=waits, actor_waits=0.02, idle_cores=idle_cores)
    assert numbers(split().decide(load)) == (None if actors is None else (actors, 1))


def test_no_actors_are_added_while_actors_wait() -> None:
    load = LOAD._replace(learner_waits=0.5, actor_waits=0.5, idle_cores=8.0)
    assert split().decide(load) is None


def test_actors_are_added_equally_for_all_learners_up_to_the_limit() -> None:
    starved = LOAD._replace(learner_waits=0.9, actor_waits=0.0, idle_cores=99.0)
    three = split(actors=3, most=9, learners=3)
    assert [numbers(three.decide(starved)) for _ in range(3)] == [(6, 1), (9, 1), None]
    assert split(actors=4, most=64, learners=4).decide(starved._replace(idle_cores=1.9)) is None


@pytest.mark.parametrize(
    ("actor_waits", "least", "actors"),
    [
        (0.6, 1, 4),  # 8 * 0.4 / 0.85 = 3.8
        (0.6, 6, 6),
        (0.2, 1, None),  # 7.5: all are needed
        (1.0, 1, 1),
    ],
)
def test_surplus_actors_end(actor_waits: float, least: int, actors: int | None) -> None:
    found = split(actors=8, least=least).decide(LOAD._replace(actor_waits=actor_waits))
    assert numbers(found) == (None if actors is None else (actors, 1))


def test_added_thread_is_kept_if_it_gives_a_quarter_of_the_possible_gain() -> None:
    chosen = split()
    idle = LOAD._replace(idle_cores=2.0)
    assert numbers(chosen.decide(idle)) == (2, 2)
    assert numbers(chosen.decide(idle._replace(ceiling=1260.0))) == (2, 3)
    # a third thread gives 1/2 more at best, and so 1/8 is a quarter of it
    found = chosen.decide(idle._replace(ceiling=1400.0))
    assert numbers(found) == (2, 2)
    assert found is not None
    assert found.reason == "a learner trains 1,400 steps/s with 3 threads, and 1,260 with 2"
    assert chosen.decide(idle._replace(ceiling=1260.0)) is None  # it is not tried again


def test_added_thread_is_removed_when_others_need_the_cores() -> None:
    chosen = split()
    chosen.decide(LOAD._replace(idle_cores=1.0))
    assert chosen.decide(LOAD._replace(ceiling=1800.0)) is None
    assert chosen.decide(LOAD._replace(ceiling=900.0)) is None  # noise
    assert numbers(chosen.decide(LOAD._replace(ceiling=400.0))) == (2, 1)


def test_thread_is_added_only_with_a_core_for_each_learner_and_enough_samples() -> None:
    assert split(learners=4, actors=4).decide(LOAD._replace(idle_cores=2.0)) is None
    fed = LOAD._replace(learner_waits=0.03, idle_cores=2.0)
    assert split().decide(fed) is None
    assert split(most_threads=1).decide(LOAD._replace(idle_cores=2.0)) is None


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores of eight are idle."""

    class Idle:
        def since_last(self) -> float:
            return 4.0

    monkeypatch.setattr(core_tuner, "IdleCores", Idle)
    monkeypatch.setattr(core_tuner, "usable_cores", lambda: 8.0)


@pytest.mark.usefixtures("idle")
def test_decisions_need_five_seconds_in_which_all_actors_play() -> None:
    chosen = split()
    ledgers = {"learner-0": {"wait": 0.9}, "actor-0": {"step": 1.0}, "actor-1": {"step": 1.0}}
    used = {"learner-0": 0.1, "actor-0": 0.5, "actor-1": 0.5}

    def intervals(begin_s: int, end_s: int, alive: int = 2) -> list[tuple[int, int] | None]:
        times = range(begin_s, end_s)
        return [numbers(chosen.interval(ledgers, used, [5e3], alive, float(s))) for s in times]

    assert intervals(0, 5) == [None] * 5  # of the first interval the beginning is not known
    assert intervals(5, 6, alive=1) == [None]  # one has crashed
    assert intervals(6, 11) == [None, None, None, None, (4, 1)]
    assert intervals(11, 13, alive=2) == [None, None]  # the new ones are not there yet
    assert chosen.interval(ledgers, {"actor-0": 0.5}, [5e3], 4, 13.0) is None  # not measured
    assert chosen.interval(ledgers, used, [None], 4, 14.0) is None


PLAYING = {f"actor-{i}": {"step": 0.9, "wait": 0.1} for i in range(8)}
WAITING = {f"actor-{i}": {"wait": 1.0} for i in range(8)}
ACTORS_USED = dict.fromkeys(PLAYING, 0.4)


@pytest.mark.usefixtures("idle")
def test_start_of_a_restarted_learner_is_not_measured() -> None:
    chosen = split(actors=8, most=8, most_threads=1)
    chosen.interval({"learner-0": {"forward": 1.0}, **PLAYING}, ACTORS_USED, [5e3], 8, 0.0)
    # Its first report, after 20 s: it has waited for nothing, and all actors for it.
    started = {"learner-0": {"other": 0.99, "forward": 0.01}, **WAITING}
    assert chosen.interval(started, ACTORS_USED, [5e3], 8, 20.0) is None
    steady = {"learner-0": {"forward": 1.0}, **PLAYING}
    used = {**ACTORS_USED, "learner-0": 1.0}
    found = [chosen.interval(steady, used, [5e3], 8, 20.0 + s) for s in range(1, 7)]
    assert found == [None] * 6


@pytest.mark.usefixtures("idle")
def test_learner_that_waits_for_another_keeps_its_threads() -> None:
    chosen = split(actors=8, most=8, most_threads=2, learners=2)
    both = {f"learner-{i}": {"forward": 1.0} for i in range(2)} | PLAYING
    used = {**ACTORS_USED, "learner-0": 1.0, "learner-1": 1.0}

    def decided(times: range, ledgers: dict[str, dict[str, float]], *each: float) -> list[Any]:
        found = [chosen.interval(ledgers, used, each, 8, float(second)) for second in times]
        return [numbers(each) for each in found if each is not None]

    assert decided(range(6), both, 1000.0, 1000.0) == [(8, 2)]
    assert decided(range(6, 17), both, 1400.0, 1400.0) == []  # the threads are kept
    alone = {name: found for name, found in both.items() if name != "learner-1"}
    assert decided(range(17, 28), alone, 1400.0) == []
    # It is started again: it has a ledger, and no rate yet.
    assert decided(range(28, 39), both, 1400.0) == []
    assert chosen.now.threads == 2


@pytest.mark.usefixtures("idle")
def test_saving_checkpoints_does_not_reduce_actors_or_threads() -> None:
    chosen = split(actors=8, most=8, most_threads=1)
    used = {**ACTORS_USED, "learner-0": 1.0}
    trains = {"learner-0": {"forward": 1.0}, **PLAYING}
    saves = {"learner-0": {"save": 1.0}, **WAITING}
    for second in range(20):  # three of each five seconds
        now = saves if second % 5 > 1 else trains
        assert chosen.interval(now, used, [5e3], 8, float(second)) is None


def test_only_auto_numbers_are_tuned() -> None:
    auto = ["actors.count=auto", "learner.threads=auto"]

    def of(*options: str) -> CoreSplit | None:
        return CoreSplit.of(resolve("cartpole", [*auto, *options]))

    assert of("actors.count=2", "learner.threads=1") is None
    assert of("transport.kind=inproc") is None
    synchronous = of("transport.max_policy_lag=0", "learner.threads=1")
    assert synchronous is None  # actors take turns, however many there are
    found = of("learner.count=3")
    assert found is not None
    assert found.now[:2] == (3, 1)


def test_actor_count_is_kept_when_only_threads_are_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_tuner, "usable_cores", lambda: 8.0)
    found = CoreSplit.of(resolve("cartpole", ["actors.count=6", "learner.threads=auto"]))
    assert found is not None
    assert found.decide(LOAD._replace(actor_waits=0.9)) is None
    assert numbers(found.decide(LOAD._replace(idle_cores=2.0))) == (6, 2)


def test_maximum_of_actors_follows_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 16.0)
    assert cores.most_actors(resolve("cartpole", ["actors.count=auto"])) == 64
    options = ["actors.count=auto", "learner.count=3"]
    assert cores.most_actors(resolve("cartpole", options)) == 63
    assert cores.most_actors(resolve("cartpole", ["actors.count=5"])) == 5
