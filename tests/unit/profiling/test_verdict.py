"""Verdicts on profiles made by hand, whose bottleneck is known."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from made_profiles import actor, connector, judge, learner, profile, two
from penstock.profiling.rule import Kind
from penstock.profiling.verdict import findings

HEALTHY: dict[str, Any] = {"step": 0.5, "infer": 0.4, "wait": 0.1}
STEPPING: dict[str, Any] = {"step": 0.88, "infer": 0.1, "wait": 0.02}
BUSY_FEEDER = {"feeder": {"gather": 0.85, "h2d": 0.1, "wait": 0.05}}
IDLE_FEEDER = {"feeder": {"gather": 0.3, "wait": 0.7}}
KINDS = {
    "healthy": profile([learner(wait_data=0.02)], two(**HEALTHY)),
    "slow_environment": profile([learner(wait_data=0.4)], two(**STEPPING)),
    "waiting_environment": profile([learner(wait_data=0.4)], two(cpu=0.1, **STEPPING)),
    "slow_inference": profile([learner(wait_data=0.4)], two(step=0.2, infer=0.8)),
    "slow_actor": profile([learner(wait_data=0.4)], two(step=0.2, infer=0.2, write=0.3, other=0.3)),
    "few_slots": profile([learner(wait_data=0.3)], two(step=0.3, infer=0.2, wait=0.5)),
    "slow_wire": profile(
        [learner(wait_data=0.3)], two(step=0.3, send=0.3, wait=0.4), [connector(wait=0.9)]
    ),
    "straggler": profile(
        [learner(wait_data=0.3)], [actor(0, **STEPPING), actor(1, rate=50.0, **STEPPING)]
    ),
    "turns": profile(
        [learner(wait_data=0.2)], two(step=0.3, wait=0.7),
        transport={"max_policy_lag": 0, "lent_by_batch": True},
    ),
    "starved": profile([learner(wait_data=0.3)], [], [connector(wait=0.7, decompress=0.3)]),
    "slow_gather": profile(
        [learner(wait_data=0.3, threads=BUSY_FEEDER)], two(step=0.1, infer=0.1, wait=0.8)
    ),
    "reduction": profile([learner(i, reduce_exposed=0.22) for i in (0, 1)], two(**HEALTHY)),
    "slow_rank": profile([learner(0, reduce_exposed=0.4), learner(1)], two(**HEALTHY)),
    "crowded": profile(
        [learner(ceiling=2000.0)], [actor(i, cpu=1.0, **HEALTHY) for i in (0, 1)], cores=3
    ),
    "slow_copy": profile([learner(h2d_exposed=0.1)], two(**HEALTHY)),
    "launch_bound": profile([learner(gpu_kernel_busy=0.6)], two(**HEALTHY)),
    "slow_publish": profile([learner(publish=0.1)], two(**HEALTHY)),
    "bookkeeping": profile([learner(bookkeeping=0.1)], two(**HEALTHY)),
    "other": profile([learner(other=0.1)], two(**HEALTHY)),
    "big_lag": profile([learner()], two(**HEALTHY), flow={"dropped": {"lag": 2000}}),
    "slow_learner": profile([learner()], two(step=0.2, wait=0.8)),
    "empty": profile([learner(wait_data=1.0, rate=0.0, updates_per_s=0.0)], []),
    "filling": profile(
        [learner(wait_data=1.0, updates_per_s=0.0)], two(**STEPPING), flow={"replay_size": 2500},
        replay={"min_size": 20000, "batch_size": 32},
    ),
}  # fmt: skip


def test_every_kind_of_verdict_has_a_profile() -> None:
    assert KINDS.keys() == {*get_args(Kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_each_bottleneck_is_distinguished_from_the_others(kind: str) -> None:
    verdict = judge(KINDS[kind])
    assert verdict.kind == kind
    assert all((verdict.finding, verdict.reason, verdict.next_step))


def played_by_games(**parts: float) -> Any:
    """The profile of a run whose games' service spends its time in these parts."""
    result = profile([learner(wait_data=0.6)], [], [connector(**parts)])
    return {**result, "config": {**result.get("config", {}), "actors": {"games": True}}}


def test_a_learner_that_waits_for_games_is_told_who_is_the_limit() -> None:
    idle = judge(played_by_games(wait=0.9))
    assert (idle.kind, idle.finding) == (
        "starved",
        "the games are the limit: the learner waits 60 % for data",
    )
    assert "90 % of its time" in idle.reason

    busy = judge(played_by_games(infer=0.7, receive=0.25, wait=0.05))
    assert (busy.kind, busy.finding) == (
        "slow_wire",
        "the service of the games is busy: the learner waits 60 % for it",
    )
    assert "70 % in infer" in busy.reason


def test_actors_that_would_feed_the_learner_are_counted() -> None:
    # Each plays 500 steps/s and 1000 are trained in 40 % of the time: 2500 need three more.
    verdict = judge(profile([learner(wait_data=0.6)], two(**STEPPING)))
    assert "the learner waits 60 %" in verdict.finding
    assert "2 actors spend 88 % in env.step" in verdict.reason
    assert "3 more actors would feed it: actors.count=5" in verdict.next_step
    assert verdict.cost == pytest.approx(0.6)
    # A measured ceiling says it better: 4200 steps/s are seven such actors more, the last not full.
    verdict = judge(profile([learner(wait_data=0.6, ceiling=4200.0)], two(**STEPPING)))
    assert "7 more actors would feed it: actors.count=9" in verdict.next_step


@pytest.mark.parametrize(
    ("cores", "advice"),
    [
        (2, "3 more actors would feed it, but not on this host, where 2.0 of 2 cores are busy"),
        (
            4,
            "3 more actors would feed it: 2 on this host, which has idle cores (actors.count=4), "
            "and 1 on other hosts",
        ),
        (5, "3 more actors would feed it: actors.count=5"),
    ],
)
def test_more_actors_are_not_advised_without_a_free_core(cores: int, advice: str) -> None:
    # The learner takes 0.4 of a core, each actor 0.8.
    actors = [actor(i, cpu=0.8, **STEPPING) for i in (0, 1)]
    verdict = judge(profile([learner(wait_data=0.6)], actors, cores=cores))
    assert verdict.kind == "slow_environment"
    assert advice in verdict.next_step


def test_window_without_a_finished_unroll_gives_no_number_of_actors() -> None:
    waits = learner(wait_data=1.0, rate=0.0, updates_per_s=0.0)
    verdict = judge(profile([waits], [actor(0, rate=0.0, step=1.0)]))
    assert verdict.kind == "slow_environment"
    assert "profile for longer" in verdict.next_step


@pytest.mark.parametrize(
    ("empty", "says"),
    [
        (profile([], []), "no learner"),
        (profile([learner(computes=0.0)], []), "no learner"),
        (profile([learner(rate=0.0, updates_per_s=None)], two(**HEALTHY)), "finished no step"),
        (profile([learner(wait_data=0.9)], []), "no actor plays"),
    ],
)
def test_empty_window_is_reported_as_empty(empty: dict[str, Any], says: str) -> None:
    verdict = judge(empty)
    assert verdict.kind == "empty"
    assert says in verdict.finding


@pytest.mark.parametrize(("wait", "kind"), [(0.049, "healthy"), (0.05, "slow_environment")])
def test_short_wait_is_healthy(wait: float, kind: str) -> None:
    assert judge(profile([learner(wait_data=wait)], two(**STEPPING))).kind == kind


@pytest.mark.parametrize(("wait", "kind"), [(0.25, "healthy"), (0.26, "slow_learner")])
def test_a_reserve_of_actors_is_healthy(wait: float, kind: str) -> None:
    verdict = judge(profile([learner(ceiling=1020.0)], two(step=1 - wait, wait=wait)))
    assert verdict.kind == kind
    assert verdict.reason == "utilization is 100 % and its rate 98 % of its ceiling"


def test_fewer_actors_keep_the_reserve() -> None:
    # Eight that wait 70 % do the work of 2.4; with a quarter of reserve that is 3.2.
    actors = [actor(i, step=0.3, wait=0.7) for i in range(8)]
    network = {"convolutional": True}
    verdict = judge(profile([learner()], actors, learner={"precision": "fp32"}, model=network))
    assert verdict.next_step == (
        "learner.precision=auto, a GPU, or fewer actors: 4 would keep it as busy (actors.count)"
    )


def test_stale_steps_dropped_by_option_count_as_a_surplus() -> None:
    flow = {"dropped": {"stale": 6000}}
    assert judge(profile([learner()], two(**HEALTHY), flow=flow)).kind == "slow_learner"


def test_queue_fill_decides_when_all_actors_are_remote() -> None:
    full = profile([learner(queue_fill=0.95)], [], [connector(wait=0.9)])
    half = profile([learner(queue_fill=0.5)], [], [connector(wait=0.9)])
    assert [judge(p).kind for p in (full, half)] == ["slow_learner", "healthy"]


@pytest.mark.parametrize(
    ("rate", "wait", "kind"),
    [
        (240.0, 0.3, "straggler"),  # less than half the others' 500
        (250.0, 0.3, "slow_environment"),
        # It makes 50 of 500 steps/s, which is 45 % of what two could: more than half of 89 %.
        (50.0, 0.89, "straggler"),
        (50.0, 0.91, "slow_environment"),
    ],
)
def test_a_slow_actor_is_named_if_it_explains_the_wait(rate: float, wait: float, kind: str) -> None:
    actors = [actor(0, step=1.0), actor(1, rate=rate, step=1.0)]
    assert judge(profile([learner(wait_data=wait)], actors)).kind == kind


def test_waiting_actor_is_not_slow() -> None:
    # At work a fifth of the time it makes 100 steps/s: 500 while it works, like the other.
    actors = [actor(0, step=1.0), actor(1, rate=100.0, step=0.2, wait=0.8)]
    assert judge(profile([learner(wait_data=0.3)], actors)).kind == "slow_environment"


def test_a_straggler_is_named_with_its_pace() -> None:
    verdict = judge(KINDS["straggler"])
    assert verdict.finding == "actor-1 is slow, which costs 30 % of the throughput"
    assert "actor-1 plays 51 steps/s and the others 510; it spends 88 % in step" in verdict.reason


@pytest.mark.parametrize(
    ("parts", "advice"),
    [
        ({"decompress": 0.6, "receive": 0.3, "wait": 0.1}, "transport.codec=none"),
        ({"decompress": 0.3, "receive": 0.6, "wait": 0.1}, "larger messages"),
        ({"process": 0.9, "wait": 0.1}, "process()"),
        ({"publish": 0.9, "wait": 0.1}, "learner.count=2"),
    ],
)
def test_verdict_on_a_busy_connector_names_its_work(parts: dict[str, float], advice: str) -> None:
    verdict = judge(profile([learner(wait_data=0.3)], two(**STEPPING), [connector(**parts)]))
    assert verdict.kind == "slow_wire"
    assert "connector-0 is busy 90 % of the time" in verdict.reason
    assert advice in verdict.next_step


@pytest.mark.parametrize(
    ("parts", "codec", "advice"),
    [
        ({"compress": 0.6, "step": 0.4}, "snappy", "transport.codec=none"),
        ({"send": 0.6, "step": 0.4}, "none", "transport.codec=auto"),
        ({"wait": 0.6, "step": 0.4}, "auto", "transport.slots=2"),
    ],
)
def test_verdict_on_sending_actors_names_what_they_wait_for(
    parts: dict[str, float], codec: str, advice: str
) -> None:
    transport = {"codec": codec, "slots": 1}
    verdict = judge(
        profile([learner(wait_data=0.3)], two(**parts), [connector(wait=0.9)], transport=transport)
    )
    assert verdict.kind == "slow_wire"
    assert "20.0 MB/s, 80.0 MB/s before compression" in verdict.reason
    assert advice in verdict.next_step


def test_gathering_between_steps_is_distinguished_from_waiting() -> None:
    # Of 35 % without data, 25 % are its own gathering: the environment costs the rest.
    own = learner(wait_data=0.35, parts={"wait": 0.1, "gather": 0.25})
    first, second, *_ = findings(profile([own], two(**STEPPING)))
    assert (first.kind, first.cost) == ("slow_gather", 0.25)
    assert "learner.prefetch=1" in first.next_step
    assert second.kind == "slow_environment"
    assert second.cost == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("data", "advice"), [("unrolls", "uint8 observations"), ("transitions", "replay.batch_size")]
)
def test_a_busy_feeder_is_given_less_to_do(data: str, advice: str) -> None:
    busy = learner(wait_data=0.3, threads=BUSY_FEEDER)
    verdict = judge(profile([busy], two(**STEPPING), algo={"trains_on": data}))
    assert (verdict.kind, advice in verdict.next_step) == ("slow_gather", True)


@pytest.mark.parametrize(
    ("feeder", "also"), [(BUSY_FEEDER, False), (IDLE_FEEDER, True)], ids=["busy", "at times"]
)
def test_waiting_for_the_feeder_is_separate_from_waiting_for_actors(
    feeder: dict[str, Any], also: bool
) -> None:
    parts = {"wait": 0.08, "gather": 0.22}
    waits = learner(wait_data=0.3, parts=parts, threads=feeder)
    first, second, *_ = findings(
        profile([waits], two(**STEPPING), algo={"trains_on": "transitions"})
    )
    assert (first.kind, first.cost) == ("slow_gather", 0.22)
    assert "replay.batch_size" in first.next_step
    assert "learner.prefetch" not in first.next_step, "batches are drawn ahead already"
    assert second.cost == pytest.approx(0.08)
    assert (second.kind == "slow_environment") == also


def test_rate_limit_of_replay_is_named_when_it_holds_up_the_learner() -> None:
    algo, ratio = {"trains_on": "transitions"}, {"samples_per_insert": 4.0}
    waits = learner(wait_data=0.3, parts={"wait": 0.3}, threads=IDLE_FEEDER)
    verdict = judge(profile([waits], two(**STEPPING), algo=algo, replay=ratio))
    assert verdict.kind == "slow_environment"
    assert "replay.samples_per_insert=4 is reached" in verdict.reason
    assert "a larger replay.samples_per_insert" in verdict.next_step
    for data in ({"algo": {"trains_on": "unrolls"}, "replay": ratio}, {"algo": algo}):
        other = judge(profile([waits], two(**STEPPING), **data))
        assert "samples_per_insert" not in other.reason + other.next_step


def test_a_feeder_with_time_to_spare_is_not_the_cause() -> None:
    found = judge(profile([learner(wait_data=0.3, threads=IDLE_FEEDER)], two(**STEPPING)))
    assert found.kind == "slow_environment"


@pytest.mark.parametrize(
    ("codec", "pace", "advice"),
    [
        # Bytes: int8 a quarter of fp32, half of fp16.
        ("none", "bsp", "codec=int8 would save about 16 %"),
        ("fp16", "bsp", "codec=int8 would save about 11 %"),
        ("int8", "bsp", "saves about 11 %: learner.accumulate=2"),
        ("none", "local_sgd", "twice learner.local_steps"),
    ],
)
def test_verdict_on_reductions_advises_unused_options(codec: str, pace: str, advice: str) -> None:
    # What the one waits longer is for the other, not for the exchange.
    learners = [learner(0, reduce_exposed=0.24), learner(1, reduce_exposed=0.22)]
    verdict = judge(
        profile(learners, two(**HEALTHY), learner={"reduce": {"codec": codec}, "pace": pace})
    )
    assert verdict.kind == "reduction"
    assert advice in verdict.next_step


def test_codec_is_not_advised_for_time_spent_waiting_for_other_learners() -> None:
    lanes = ({"reduce": 0.3, "wait": 0.7}, {"reduce": 0.1, "wait": 0.9})
    steps = []
    for lane in lanes:
        ranks = [learner(i, reduce_exposed=0.4, threads={"reduce": lane}) for i in (0, 1)]
        steps.append(judge(profile(ranks, two(**HEALTHY))).next_step)
    assert "codec=int8 would save about 22 %" in steps[0]  # three quarters of 30 %
    assert "int8" not in steps[1]


def test_learners_waiting_for_a_slow_learner_name_it() -> None:
    learners = [learner(0, reduce_exposed=0.5), learner(1, reduce_exposed=0.0)]
    verdict = judge(profile(learners, two(**HEALTHY)))
    assert verdict.finding == "learner-1 is slow: the other learners wait 50 % for it"
    assert verdict.cost == pytest.approx(0.25)


def test_slowest_learner_is_judged_by_its_own_actors() -> None:
    learners = [learner(0, reduce_exposed=0.5), learner(1, wait_data=0.5)]
    actors = [actor(0, infer=1.0), actor(1, rank=1, **STEPPING)]
    verdict = judge(profile(learners, actors))
    assert verdict.kind == "slow_environment"
    assert "1 actor spends" in verdict.reason


@pytest.mark.parametrize(("cores", "kind"), [(3, "crowded"), (4, "healthy")])
def test_a_learner_below_its_ceiling_is_crowded_only_where_cores_are_busy(
    cores: int, kind: str
) -> None:
    actors = [actor(i, cpu=1.0, **HEALTHY) for i in (0, 1)]
    assert judge(profile([learner(ceiling=1250.0)], actors, cores=cores)).kind == kind


@pytest.mark.parametrize(("cpu", "kind"), [(0.8, "crowded"), (0.9, "healthy")])
def test_learner_that_lacks_a_core_is_crowded(cpu: float, kind: str) -> None:
    verdict = judge(profile([learner(cpu=cpu)], two(**HEALTHY)))
    assert verdict.kind == kind
    assert ("what else runs on this host" in verdict.next_step) == (kind == "crowded")
    on_gpu = profile([learner(cpu=cpu)], two(**HEALTHY)) | {"device": "cuda"}
    assert judge(on_gpu).kind == "healthy"
    counted = judge(on_gpu | {"learner": [learner(cpu=cpu, coreless=0.3)]})
    assert (counted.kind, counted.cost) == ("crowded", 0.3)


def test_replay_without_a_rate_limit_has_no_share_of_its_ceiling() -> None:
    actors = [actor(i, cpu=1.0, **HEALTHY) for i in (0, 1)]
    for samples_per_insert, kind in ((8.0, "crowded"), (None, "healthy")):
        replay = {"samples_per_insert": samples_per_insert}
        found = judge(profile([learner(ceiling=9e9)], actors, cores=3, replay=replay))
        assert found.kind == kind


def test_verdict_on_bookkeeping_distinguishes_saving_from_counting() -> None:
    saves = judge(profile([learner(bookkeeping=0.2, parts={"save": 0.15})], two(**HEALTHY)))
    counts = judge(profile([learner(bookkeeping=0.2, parts={"save": 0.05})], two(**HEALTHY)))
    assert "checkpoint.every_s" in saves.next_step
    assert "learner.batch_slots" in counts.next_step


@pytest.mark.parametrize(("mean", "kind"), [(12.0, "healthy"), (12.1, "big_lag")])
def test_lag_is_compared_with_what_the_queue_needs(mean: float, kind: str) -> None:
    # Two actors with a slot each, a batch ahead and one in training: four updates behind.
    lag = {"policy_lag": {"mean": mean, "max": 20.0}}
    verdict = judge(profile([learner()], two(**HEALTHY), flow=lag, transport={"slots": 8}))
    assert verdict.kind == kind
    if kind == "big_lag":
        assert "this queue needs 4" in verdict.reason
        assert "transport.slots=1 instead of 8" in verdict.next_step


def test_more_updates_per_batch_allow_more_lag_and_replay_any() -> None:
    lag = {"policy_lag": {"mean": 30.0, "max": 40.0}}
    for config in ({"learner": {"updates_per_batch": 4}}, {"algo": {"trains_on": "transitions"}}):
        assert judge(profile([learner()], two(**HEALTHY), flow=lag, **config)).kind == "healthy"


@pytest.mark.parametrize(
    ("lag", "wait", "step"),
    [
        # It computes 80 % of the time, 40 updates: 10 more would pass while it waits.
        (0, 0.2, "transport.max_policy_lag=10"),
        (8, 0.2, "transport.max_policy_lag=18"),
        (30, 0.2, "transport.max_policy_lag=1000"),  # as a whole batch is not enough
    ],
)
def test_a_bound_on_lag_that_makes_the_learner_wait_is_named_with_a_better_one(
    lag: int, wait: float, step: str
) -> None:
    config: dict[str, Any] = {
        "transport": {"max_policy_lag": lag, "lent_by_batch": True},
        "learner": {"updates_per_batch": 4},
        "algo": {"passes": 10},
    }
    verdict = judge(profile([learner(wait_data=wait)], two(step=0.3, wait=0.7), **config))
    assert verdict.kind == "turns"
    assert verdict.next_step.endswith(step)
    # Actors that never wait are too slow; their bound does not matter.
    busy = judge(profile([learner(wait_data=wait)], two(step=0.99, wait=0.01), **config))
    assert busy.kind == "slow_environment"


def test_where_slots_are_lent_by_batch_no_option_without_effect_is_advised() -> None:
    lent = {"lent_by_batch": True}
    gathers = learner(wait_data=0.06, parts={"gather": 0.06})
    assert "learner.prefetch" in judge(profile([gathers], two(**HEALTHY))).next_step
    verdict = judge(profile([gathers], two(**HEALTHY), transport=lent))
    assert verdict.kind == "slow_gather"
    assert "learner.prefetch" not in verdict.next_step
    publishes = profile([learner(publish=0.1)], two(**HEALTHY), transport=lent)
    assert "learner.publish_every" not in judge(publishes).next_step
    waiting = profile([learner()], two(step=0.15, wait=0.85), transport=lent)
    assert "fewer actors" not in judge(waiting).next_step
    assert "fewer actors" in judge(profile([learner()], two(step=0.15, wait=0.85))).next_step
    lag = {"policy_lag": {"mean": 19.5, "max": 35.0}}  # of 32 minibatches, and a bound of 4
    old = profile([learner()], two(**HEALTHY), flow=lag, transport={"max_policy_lag": 4, **lent})
    assert judge(old).kind == "healthy"


@pytest.mark.parametrize(("steps", "kind"), [(499, "healthy"), (500, "big_lag")])
def test_steps_dropped_for_their_lag_are_a_cost(steps: int, kind: str) -> None:
    # Of 10,000 steps in the window.
    flow = {"dropped": {"lag": steps}}
    assert judge(profile([learner()], two(**HEALTHY), flow=flow)).kind == kind


def test_findings_are_ordered_by_cost() -> None:
    flow = {"dropped": {"lag": 1500}}
    busy = learner(wait_data=0.1, publish=0.2, other=0.06)
    found = findings(profile([busy], two(**STEPPING), flow=flow))
    assert [(f.kind, round(f.cost, 2)) for f in found] == [
        ("slow_publish", 0.2), ("big_lag", 0.15), ("slow_environment", 0.1), ("other", 0.06)
    ]  # fmt: skip


def test_old_samples_come_before_a_surplus_of_actors() -> None:
    # Neither costs throughput, and fewer slots cure the one without buying anything.
    lag = {"policy_lag": {"mean": 40.0, "max": 50.0}}
    found = findings(profile([learner()], two(step=0.1, wait=0.9), flow=lag))
    assert [f.kind for f in found] == ["big_lag", "slow_learner"]
