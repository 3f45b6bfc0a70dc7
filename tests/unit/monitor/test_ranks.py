"""Reports of several learners merged into one, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.monitor.ranks import RankPhase, Ranks, merge, whereabouts
from penstock.profiling.histogram import bin_of, upper_edge_s


def report(steps_per_s: float, wait: float, lag: dict[str, int], **more: Any) -> dict[str, Any]:
    return {
        "time_s": 3.0,
        "env_steps": 5000,
        "steps_per_s": steps_per_s,
        "learner_wait_fraction": wait,
        "ledger": {"wait_data": wait, "compute": 1 - wait},
        "policy_lag_histogram": lag,
        "policy_lag_mean": -1.0,
        "policy_lag_max": -1,
        "episode_return_mean": 20.0,
        "dropped": {},
        "lost": {},
        "rejected": {},
        **more,
    }


def final(
    produced: int, trained: int, in_flight: int = 0, **counts: dict[str, int]
) -> dict[str, Any]:
    dropped, lost = counts.get("dropped", {}), counts.get("lost", {})
    accounting = {"produced": produced, "trained": trained, "in_flight": in_flight}
    by_reason = {"dropped": dropped, "lost": lost}
    return {"accounting": {**accounting, **by_reason}, "env_steps": 9, **by_reason}


def went(accounting: dict[str, Any]) -> int:
    counted = [*accounting["dropped"].values(), *accounting["lost"].values()]
    return sum([accounting["trained"], accounting["in_flight"], *counted])


def test_counters_do_not_fall_when_another_rank_reports() -> None:
    ranks = Ranks(range(2))
    assert ranks.metrics(1, report(0, 0.0, {}, learner_steps=70)) is None
    ahead = ranks.metrics(0, report(0, 0.0, {}, learner_steps=80))
    assert ahead is not None
    assert ahead["learner_steps"] == 80
    ranks.learner_ended(0, produced=0, trained=0)
    behind = ranks.metrics(1, report(0, 0.0, {}, learner_steps=75, env_steps=6000))
    assert behind is not None
    assert (behind["learner_steps"], behind["env_steps"]) == (80, 6000)
    last = ranks.final(1, final(0, 0) | {"learner_steps": 78, "env_steps": 6100})
    assert (last["learner_steps"], last["env_steps"]) == (80, 6100)


def test_counters_are_those_of_the_rank_furthest_ahead() -> None:
    ranks = Ranks(range(2))
    assert ranks.metrics(1, report(0, 0.0, {}, trained_steps=70)) is None
    merged = ranks.metrics(0, report(0, 0.0, {}, trained_steps=60))
    assert merged is not None
    assert merged["trained_steps"] == 70


def test_amounts_are_summed_and_shares_averaged() -> None:
    ranks = Ranks(range(2))
    second = report(300, 0.5, {"1": 10, "4": 10}, dropped={"lag": 2}, rejected={"run": 1})
    assert ranks.metrics(1, second | {"actors_alive": 2}) is None
    first = report(100, 0.1, {"1": 20}, dropped={"lag": 3, "stale": 1})
    merged = ranks.metrics(0, first | {"actors_alive": 3, "entropy": 0.5})
    assert merged is not None
    assert merged.pop("ranks") == [
        {
            "rank": 0,
            "steps_per_s": 100,
            "actors_alive": 3,
            "ledger": {"wait_data": 0.1, "compute": 0.9},
        },
        {
            "rank": 1,
            "steps_per_s": 300,
            "actors_alive": 2,
            "ledger": {"wait_data": 0.5, "compute": 0.5},
        },
    ]
    assert merged.pop("ledger") == pytest.approx({"wait_data": 0.3, "compute": 0.7})
    assert merged.pop("learner_wait_fraction") == pytest.approx(0.3)
    assert merged == {
        "time_s": 3.0,
        "env_steps": 5000,
        "episode_return_mean": 20.0,
        "steps_per_s": 400,
        "actors_alive": 5,
        "entropy": 0.5,
        "policy_lag_histogram": {"1": 30, "4": 10},
        "policy_lag_mean": 1.75,  # (30 * 1 + 10 * 4) / 40
        "policy_lag_max": 4,
        "dropped": {"lag": 5, "stale": 1},
        "lost": {},
        "rejected": {"run": 1},
    }


def test_metric_missing_on_one_rank_is_averaged_over_the_others() -> None:
    ranks = Ranks(range(2))
    ranks.metrics(1, report(1, 0, {}, grad_norm=4.0))
    merged = ranks.metrics(0, report(1, 0, {}, grad_norm=None))
    assert merged is not None
    assert (merged["grad_norm"], merged["policy_lag_mean"]) == (4.0, None)


def test_metric_missing_on_the_lowest_rank_is_taken_from_the_others() -> None:
    """A learner without samples reports no losses."""
    ranks = Ranks(range(3))
    ranks.metrics(1, report(1, 0, {}, entropy=0.5))
    ranks.metrics(2, report(1, 0, {}, entropy=0.7))
    merged = ranks.metrics(0, report(1, 0, {}))
    assert merged is not None
    assert merged["entropy"] == pytest.approx(0.6)


def test_merged_report_comes_with_the_lowest_live_rank_after_all_reported() -> None:
    ranks = Ranks(range(3))
    assert ranks.metrics(0, report(1, 0, {"0": 1})) is None
    assert ranks.metrics(1, report(2, 0, {"0": 1})) is None
    ranks.learner_ended(2, 0, 0)
    assert ranks.metrics(0, report(1, 0, {"0": 1})) is not None
    assert ranks.metrics(1, report(2, 0, {"0": 1})) is None
    ranks.learner_ended(0, 0, 0)
    merged = ranks.metrics(1, report(4, 0, {"0": 1}))
    assert merged is not None
    assert merged["steps_per_s"] == 4
    assert merged["policy_lag_histogram"] == {"0": 2}  # of rank 1, two intervals
    assert ranks.metrics(2, report(8, 0, {})) is None  # it is back
    assert ranks.metrics(0, report(16, 0, {})) is not None


def test_merged_report_includes_the_parameter_server() -> None:
    ranks = Ranks(range(1))
    ranks.server = {"version": 7}
    merged = ranks.metrics(0, report(1, 0, {}))
    assert merged is not None
    assert merged["server"] == {"version": 7}


def test_final_counts_of_all_ranks_add_up() -> None:
    ranks = Ranks(range(2))
    first = final(100, 80, 10, dropped={"lag": 10})
    assert ranks.final(1, first) == first | {"rejected": {}}
    merged = ranks.final(0, final(50, 40, 3, dropped={"stale": 1}, lost={"disconnect": 6}))
    assert merged["accounting"] == {
        "produced": 150,
        "trained": 120,
        "in_flight": 13,
        "dropped": {"lag": 10, "stale": 1},
        "lost": {"disconnect": 6},
    }
    assert merged["dropped"] == {"lag": 10, "stale": 1}


def test_steps_held_by_a_dead_learner_count_as_lost() -> None:
    ranks = Ranks(range(2))
    ranks.metrics(1, report(1, 0, {}, dropped={"lag": 7}, lost={"disconnect": 3}))
    # It had heard of 200 steps: 150 trained, 10 counted out, 40 in its memory.
    assert ranks.learner_ended(1, produced=200, trained=150) is None
    merged = ranks.metrics(0, report(1, 0, {}, dropped={"lag": 1}))
    assert merged is not None
    assert merged["dropped"] == {"lag": 8}
    assert merged["lost"] == {"disconnect": 3, "learner": 40}
    last = ranks.final(0, final(1000, 990, 10))
    assert last["accounting"] == {
        "produced": 1200,
        "trained": 1140,
        "in_flight": 10,
        "dropped": {"lag": 7},
        "lost": {"disconnect": 3, "learner": 40},
    }
    assert last["lost"] == {"disconnect": 3, "learner": 40}


def test_steps_that_never_reached_a_dead_learner_are_counted_from_its_actors() -> None:
    ranks = Ranks(range(2))
    ranks.learner_ended(1, produced=200, trained=150)
    for played in (700, 540):
        ranks.actor_ended(played)
    accounting = ranks.final(0, final(1000, 990, 10))["accounting"]
    assert accounting["produced"] == 1240
    assert accounting["lost"] == {"learner": 90}
    assert went(accounting) == 1240


def test_slightly_outdated_status_pages_still_balance() -> None:
    ranks = Ranks(range(2))
    ranks.metrics(1, report(1, 0, {}, dropped={"lag": 60}))
    ranks.learner_ended(1, produced=200, trained=150)
    accounting = ranks.final(0, final(10, 10))["accounting"]
    assert (accounting["produced"], went(accounting)) == (220, 220)
    assert accounting["lost"].get("learner", 0) == 0


def test_learner_that_dies_during_the_final_reports_is_counted() -> None:
    ranks = Ranks(range(2))
    ranks.final(0, final(100, 100))
    assert ranks.learner_ended(0, produced=100, trained=100) is None  # as it should
    merged = ranks.learner_ended(1, produced=60, trained=50)
    assert merged is not None
    assert merged["accounting"]["lost"] == {"learner": 10}
    assert (merged["accounting"]["produced"], went(merged["accounting"])) == (160, 160)


def test_merged_report_lists_each_rank() -> None:
    reducing = RankPhase("all-reduce", 30.2, 1207)
    places = {0: reducing, 1: reducing, 2: RankPhase("wait_data", 41.4), 3: reducing}
    assert whereabouts(places) == ("rank 2 is in wait_data for 41 s; 0, 1, 3 in all-reduce 1207")
    assert whereabouts({0: reducing, 1: reducing}) == "ranks 0, 1 are in all-reduce 1207 for 30 s"


def test_received_counts_of_ranks_are_summed() -> None:
    first = {"received": {"slots": 3, "raw_nbytes": 10}}
    second = {"received": {"slots": 4, "raw_nbytes": 20}}
    assert merge(first, [first, second, {}]) == {"received": {"slots": 7, "raw_nbytes": 30}}


def test_latency_quantiles_are_over_the_steps_of_all_learners() -> None:
    # 90 steps of one learner took up to 0.1 ms, 10 of the other 100 ms: so do those at 95 %.
    quick = {"latency_p50_s": 5e-5, "latency_p95_s": 9.5e-5, "latency_p99_s": 9.9e-5}
    slow = {"latency_p50_s": 0.1, "latency_p95_s": 0.1, "latency_p99_s": 0.1}
    bin_ = bin_of(0.1)
    ranks = Ranks(range(2))
    assert ranks.metrics(1, report(1, 0, {}, **slow, latency_histogram={str(bin_): 10.0})) is None
    merged = ranks.metrics(0, report(1, 0, {}, **quick, latency_histogram={"0": 90.0}))
    assert merged is not None
    assert merged["latency_histogram"] == {"0": 90.0, str(bin_): 10.0}
    assert merged["latency_p50_s"] == pytest.approx(1e-4 * 50 / 90)
    low, high = upper_edge_s(bin_ - 1), upper_edge_s(bin_)
    assert merged["latency_p95_s"] == pytest.approx((low + high) / 2)
    assert merged["latency_p99_s"] == pytest.approx(low + 0.9 * (high - low))
    # The next interval begins anew.
    merged = ranks.metrics(0, report(1, 0, {}, **quick, latency_histogram={"0": 9.0}))
    assert merged is not None
    assert merged["latency_p99_s"] == pytest.approx(9.9e-5)


def test_updates_skipped_by_all_learners_count_once() -> None:
    ranks = Ranks((0, 1))
    ranks.metrics(1, {"updates_skipped": 4, "rollbacks": 1})
    merged = ranks.metrics(0, {"updates_skipped": 3, "rollbacks": 1})
    assert merged is not None
    assert (merged["updates_skipped"], merged["rollbacks"]) == (4, 1)
    ranks.final(0, final(10, 10) | {"updates_skipped": 3, "rollbacks": 1})
    assert (
        ranks.final(1, final(10, 10) | {"updates_skipped": 5, "rollbacks": 1})["updates_skipped"]
        == 5
    )


def test_final_counts_of_connectors_are_summed() -> None:
    """The last report of an interval is of before the last unrolls came."""
    ranks = Ranks([0, 1])
    ranks.final(0, final(10, 10, 0) | {"received": {"slots": 2, "steps": 10}})
    merged = ranks.final(1, final(20, 20, 0) | {"received": {"slots": 3, "steps": 20}})
    assert merged["received"] == {"slots": 5, "steps": 30}


def test_counts_of_a_restarted_learner_include_both_incarnations() -> None:
    ranks = Ranks([0])
    first = report(500.0, 0.1, {}, env_steps=900, dropped={"lag": 30}, lost={})
    assert ranks.metrics(0, first) == first  # nothing is added while it has one life
    assert ranks.learner_ended(0, produced=1000, trained=850) is None
    second = report(500.0, 0.1, {}, env_steps=600, dropped={"lag": 5}, lost={"disconnect": 2})
    merged = ranks.metrics(0, second)
    assert merged is not None
    assert merged["env_steps"] == 600  # from the checkpoint, whose count is lower
    assert merged["dropped"] == {"lag": 35}
    assert merged["lost"] == {"disconnect": 2, "learner": 120}
    ranks.actor_ended(1560)  # 60 of its steps reached neither
    accounting = ranks.final(0, final(500, 490, in_flight=10))["accounting"]
    assert (accounting["produced"], accounting["trained"]) == (1560, 1340)
    assert accounting["lost"] == {"learner": 180}
    assert went(accounting) == 1560


def test_spare_rank_is_not_awaited_and_counts_once_it_joins() -> None:
    ranks = Ranks([0], several=True)
    alone = ranks.metrics(0, report(10, 0.0, {"0": 4}, trained_steps_per_s=10))
    assert alone is not None
    assert [rank["rank"] for rank in alone["ranks"]] == [0]
    assert ranks.metrics(1, report(20, 0.0, {"1": 4}, trained_steps_per_s=20)) is None
    both = ranks.metrics(0, report(10, 0.0, {"0": 4}, trained_steps_per_s=10))
    assert both is not None
    assert both["trained_steps_per_s"] == 30
    assert both["policy_lag_histogram"] == {"0": 4, "1": 4}
