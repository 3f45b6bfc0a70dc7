"""Counters, returns, lag and stop conditions, from batches made by hand."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from penstock.algos.slots import UnrollSummary
from penstock.configs.sections import StopConfig
from penstock.league.results import GameCounts
from penstock.learner.progress import (
    BOOKED,
    EPISODES,
    UNCOUNTED,
    LagHistogram,
    LocalCounts,
    Progress,
    ReturnWindow,
)
from penstock.profiling.ledger import Part, TimeLedger


def batch(returns: list[float], version: int = 0, reset_rows: int = 0) -> dict[str, np.ndarray]:
    """One step of ``len(returns)`` environments that all end; the first rows are reset rows."""
    n = len(returns)
    alive = np.ones((1, n), bool)
    alive[0, :reset_rows] = False
    return {
        "alive": alive,
        "policy_version": np.full((1, n), version, np.uint32),
        "terminated": np.ones((1, n), bool),
        "truncated": np.zeros((1, n), bool),
        "episode_return": np.array([returns], np.float32),
        "episode_length": np.full((1, n), 7, np.int32),
    }


def progress(**stop: Any) -> Progress:
    return Progress(StopConfig.model_validate(stop), frames_per_step=4)


def train(run: Progress, batch: dict[str, np.ndarray], steps: int, updates: int) -> None:
    """What a single learner does with a batch."""
    run.count_unrolls(UnrollSummary.of(batch), steps)
    run.count_lag(UnrollSummary.of(batch), updates)
    run.commit(run.growth(), run.growth())
    run.count_updates(updates)


def test_return_mean_is_over_the_last_hundred_episodes_without_reset_rows() -> None:
    run = progress()
    train(run, batch([1000.0] * 50), 50, 1)
    train(run, batch([5.0] * 60 + [7.0] * 50, reset_rows=10), 100, 1)
    assert run.episodes == 150
    assert run.return_mean == pytest.approx((50 * 5 + 50 * 7) / 100)


def test_returns_of_a_run_are_those_of_the_environments_that_explore_least() -> None:
    run = progress(**{"return": 9.0})
    run.follow_least_exploring()
    least = np.array([False, False, False, True])

    def play(*returns: float, times: int) -> None:
        for _ in range(times):
            run.count_unrolls(UnrollSummary.of(batch([*returns]), (), least), 4)
        run.commit(run.growth(), run.growth())

    play(0.0, 1.0, 2.0, 9.0, times=24)
    metrics = run.interval(TimeLedger())
    assert (metrics["episode_return_mean"], run.episodes) == (9.0, 96)
    assert metrics["episode_return_all_mean"] == 3.0
    assert run.stop_reason() is None, "the mean of 24 episodes may be luck"
    assert not run.returns.is_full
    play(0.0, 1.0, 2.0, 9.0, times=1)
    assert run.returns.is_full
    assert run.stop_reason() == "return"

    resumed = progress()
    resumed.follow_least_exploring()
    resumed.load_state_dict(run.state_dict())
    metrics = resumed.interval(TimeLedger())
    assert metrics["episode_return_mean"] == 9.0
    assert metrics["episode_return_all_mean"] == 3.0


def test_run_whose_environments_explore_alike_has_one_return() -> None:
    run = progress()
    train(run, batch([5.0] * 4), 4, 1)
    assert "episode_return_all_mean" not in run.interval(TimeLedger())
    assert "all_returns" not in run.state_dict()


def test_lost_life_does_not_count_as_an_episode() -> None:
    run, lives = progress(), batch([3.0, 5.0])
    lives["episode_length"][0, 0] = 0
    train(run, lives, 2, 1)
    assert (run.episodes, run.return_mean) == (1, 5.0)


def test_results_are_counts_by_opponent_of_the_rows_that_end_a_match_game() -> None:
    ended = batch([0.0] * 8, reset_rows=1)
    ended["terminated"][0, 1] = False
    ended["opponent"] = np.array([[5, 5, 0, 5, 5, 1 << 62, 5, 5]], np.uint64)
    ended["outcome"] = np.array([[1, 1, 1, 1, 1, -1, 0, -1]], np.int8)

    # Row 0 only resets, row 1 has not ended, and row 2 is in a mirror game.
    assert UnrollSummary.of(ended).results == {
        5: GameCounts(wins=2, draws=1, losses=1),
        1 << 62: GameCounts(wins=0, draws=0, losses=1),
    }


def test_results_of_many_opponents_equal_those_counted_row_by_row() -> None:
    """As a hostile actor may send them: any numbers, and outcomes that are none."""
    rng, rows = np.random.default_rng(0), 3000
    ended = batch([0.0] * rows)
    ended["opponent"] = rng.choice(rng.integers(0, 2**63, 900, np.uint64), (1, rows))
    ended["outcome"] = rng.integers(-3, 4, (1, rows), np.int8)

    counted: dict[int, list[int]] = {}
    for number, outcome in zip(ended["opponent"][0], ended["outcome"][0], strict=True):
        kind = 0 if outcome > 0 else 1 if outcome == 0 else 2
        counted.setdefault(int(number), [0, 0, 0])[kind] += 1
    expected = {number: GameCounts(*counts) for number, counts in counted.items()}
    assert UnrollSummary.of(ended).results == expected


def test_results_are_taken_once() -> None:
    run, ended = progress(), batch([0.0] * 2)
    ended["opponent"] = np.array([[5, 7]], np.uint64)
    ended["outcome"] = np.array([[1, 0]], np.int8)
    train(run, ended, 2, 1)
    train(run, ended, 2, 1)

    assert run.take_results() == {5: GameCounts(2, 0, 0), 7: GameCounts(0, 2, 0)}
    assert run.take_results() == {}


def test_runs_without_match_games_have_no_results() -> None:
    run = progress()
    train(run, batch([1.0]), 1, 1)

    assert run.take_results() == {}


def test_solved_needs_a_hundred_episodes() -> None:
    run = progress(**{"return": 10.0})
    run.start(time.monotonic())
    train(run, batch([20.0] * 99), 99, 1)
    assert run.stop_reason() is None
    train(run, batch([20.0]), 1, 1)
    assert run.goal.solved_at_s is not None
    assert run.stop_reason() == "return"


def test_hold_time_delays_the_stop_after_the_return_is_reached() -> None:
    run = progress(**{"return": 10.0, "hold_s": 1000})
    run.start(time.monotonic())
    train(run, batch([20.0] * 100), 100, 1)
    assert run.goal.solved_at_s is not None
    assert run.stop_reason() is None


def test_return_to_be_confirmed_is_solved_at_its_confirmation() -> None:
    run = progress(**{"return": 10.0, "hold_s": 0.05})
    run.goal.needs_confirmation = True
    run.start(time.monotonic())
    train(run, batch([20.0] * 100), 100, 1)
    assert (run.goal.solved_at_s, run.goal.awaits_confirmation) == (None, False)  # it is held first
    time.sleep(0.06)
    assert run.goal.awaits_confirmation
    train(run, batch([0.0] * 100), 100, 1)
    assert not run.goal.awaits_confirmation
    train(run, batch([20.0] * 100), 100, 1)
    assert run.goal.awaits_confirmation
    assert run.stop_reason() is None
    run.goal.confirm()
    assert run.goal.reached_at_s is not None
    assert run.goal.solved_at_s is not None
    assert run.goal.reached_at_s + 0.05 <= run.goal.solved_at_s
    assert run.stop_reason() == "return"
    after = progress(**{"return": 10.0})
    after.goal.needs_confirmation = True
    after.load_state_dict(run.state_dict())
    assert (after.goal.reached_at_s, after.stop_reason()) == (run.goal.reached_at_s, "return")


def test_state_of_an_earlier_version_counts_as_solved_when_reached() -> None:
    run = progress(**{"return": 10.0})
    run.start(time.monotonic())
    train(run, batch([20.0] * 100), 100, 1)
    state = {key: value for key, value in run.state_dict().items() if key != "reached_at_s"}
    after = progress(**{"return": 10.0})
    after.load_state_dict(state)
    assert after.goal.reached_at_s == after.goal.solved_at_s == run.goal.solved_at_s


@pytest.mark.parametrize(
    ("stop", "reason"), [({"learner_steps": 3}, "learner_steps"), ({"minutes": 1e-9}, "minutes")]
)
def test_other_limits_stop_the_run(stop: dict[str, Any], reason: str) -> None:
    run = progress(**stop)
    run.start(time.monotonic())
    train(run, batch([1.0]), 1, updates=3)
    assert run.stop_reason() == reason


def test_lag_is_counted_per_step_against_the_training_version() -> None:
    run = progress()
    run.version = 10
    train(run, batch([0.0] * 4, version=8), 4, updates=2)  # half of it at version 10, half at 11
    assert run.version == 12
    train(run, batch([0.0] * 1, version=12), 1, updates=1)
    metrics = run.interval(TimeLedger())
    assert metrics["policy_lag_histogram"] == {"0": 1, "2": 2, "3": 2}
    assert metrics["policy_lag_mean"] == pytest.approx((2 * 2 + 2 * 3) / 5)
    assert metrics["policy_lag_max"] == 3


def test_lag_is_counted_by_the_version_at_which_a_batch_was_trained() -> None:
    run = progress()
    for number in range(3 * UNCOUNTED // 2):
        run.version = number
        run.count_unrolls(UnrollSummary.of(batch([0.0] * 2, version=0)), 2)
        run.count_lag(UnrollSummary.of(batch([0.0] * 2, version=0)), 1)
    assert len(run.lag._uncounted) < UNCOUNTED, "they would take memory"
    assert run.lag.counts == dict.fromkeys(range(3 * UNCOUNTED // 2), 2)


def test_lag_of_single_version_unrolls_is_counted_per_step() -> None:
    run = progress()
    run.version = 10
    played = batch([0.0] * 4, version=8)
    played["alive"][:, 0] = False
    run.count_unrolls(UnrollSummary.of(played), 3)
    run.count_lag(UnrollSummary.of(played), 1)
    assert run.lag.counts == {2: 3}
    played["policy_version"][:, 1] = 10  # two versions from here on
    run.count_unrolls(UnrollSummary.of(played), 3)
    run.count_lag(UnrollSummary.of(played), 1)
    assert run.lag.counts == {2: 5, 0: 1}
    assert {type(count) for count in run.lag.counts.values()} == {int}  # as JSON takes it
    played["alive"][:] = False
    run.count_unrolls(UnrollSummary.of(played), 0)
    run.count_lag(UnrollSummary.of(played), 1)
    assert run.lag.counts == {2: 5, 0: 1}


def test_restored_state_continues_counters_and_returns() -> None:
    run = progress(**{"return": 10.0})
    run.start(time.monotonic())
    train(run, batch([20.0] * 100), 100, 5)
    run.env_steps = 120
    after = progress(**{"return": 10.0})
    after.load_state_dict(run.state_dict())
    assert (after.learner_steps, after.version, after.trained_steps) == (5, 5, 100)
    assert after.generation == run.generation + 1
    assert after.time_s == pytest.approx(run.time_s, abs=0.1)
    assert after.return_mean == 20.0
    assert after.goal.solved_at_s == run.goal.solved_at_s


def test_restored_state_with_another_goal_is_not_solved() -> None:
    run = progress(**{"return": 10.0})
    run.start(time.monotonic())
    train(run, batch([20.0] * 100), 100, 1)
    assert run.stop_reason() == "return"
    for goal, reached in [(10.0, True), (30.0, False), (None, False), (15.0, True)]:
        after = progress(**{"return": goal})
        after.load_state_dict(run.state_dict())
        after.start(time.monotonic())
        train(after, batch([20.0]), 1, 1)
        assert (after.stop_reason() == "return") == reached


def test_another_environment_resets_returns_and_solved() -> None:
    run = progress(**{"return": 10.0})
    run.start(time.monotonic())
    train(run, batch([20.0] * 100), 100, 5)
    after = progress(**{"return": 10.0})
    after.load_state_dict(run.state_dict(), same_env=False)
    assert (after.return_mean, after.returns.agreed.episodes) == (None, 0)
    assert after.goal.solved_at_s is None
    assert (after.learner_steps, after.episodes) == (5, 100)
    train(after, batch([20.0] * 99), 99, 1)
    assert after.stop_reason() is None


def test_interval_reports_its_duration() -> None:
    run = progress()
    run.start(time.monotonic())
    first = run.interval(TimeLedger())
    time.sleep(0.02)
    second = run.interval(TimeLedger())
    assert second["interval_s"] == second["time_s"] - first["time_s"] >= 0.02


def test_ceiling_is_the_rate_during_the_time_with_data() -> None:
    run = progress()
    run.start(time.monotonic())
    ledger = TimeLedger(part=Part.WAIT)
    run.interval(ledger)
    time.sleep(0.03)
    begun_s = time.perf_counter()
    ledger.switch(Part.FORWARD)
    time.sleep(0.01)
    ledger.switch(Part.WAIT)
    fed_s = time.perf_counter() - begun_s
    train(run, batch([1.0] * 8), 8, 1)
    metrics = run.interval(ledger)
    assert metrics["learner_ceiling_steps_per_s"] == pytest.approx(8 / fed_s, rel=0.1)
    assert metrics["trained_steps_per_s"] < 8 / 0.03
    time.sleep(0.01)
    assert run.interval(ledger)["learner_ceiling_steps_per_s"] is None  # it only waited


def test_shares_of_reports_before_the_first_unroll_do_not_count_again() -> None:
    run = progress()
    ledger = TimeLedger(part=Part.WAIT)
    time.sleep(0.05)
    assert run.interval(ledger)["ledger"]["wait_data"] == 1.0
    run.start(time.monotonic())
    ledger.switch(Part.FORWARD)
    time.sleep(0.01)
    shares = run.interval(ledger)["ledger"]
    assert shares["compute"] > shares["wait_data"]


def test_steps_played_before_the_clock_starts_have_no_rate() -> None:
    run = progress()
    ledger = TimeLedger(part=Part.WAIT)
    run.interval(ledger)
    run.resumed_in_flight(576)  # played again before the first new unroll begins
    report = run.interval(ledger)
    assert report["interval_s"] == 0.0
    assert report["steps_per_s"] == report["trained_steps_per_s"] == 0.0


def test_unacknowledged_counts_are_sent_again() -> None:
    run = progress()
    run.count_unrolls(UnrollSummary.of(batch([1.0] * 3)), 3)
    alone = run.growth()
    run.commit(alone, np.zeros(len(alone)))  # a word of its own, as between two rounds
    run.count_unrolls(UnrollSummary.of(batch([1.0] * 2)), 2)
    run.rollback(alone[: len(BOOKED)])
    assert run.growth()[: len(BOOKED)].tolist() == [0, 5, 5]
    assert run.trained_steps == 0


def test_acknowledged_counts_are_not_sent_again() -> None:
    run = progress()
    run.count_unrolls(UnrollSummary.of(batch([1.0] * 3)), 3)
    run.join({**run.state_dict(), "trained_steps": 10})  # of one who has heard of these three
    run.acknowledge()
    assert run.growth()[: len(BOOKED)].tolist() == [0, 0, 0]
    run.commit(run.growth(), run.growth())
    assert run.trained_steps == 10


def test_publications_are_due_by_the_steps_of_all_learners() -> None:
    run = progress()
    due = []
    for version in (3, 6, 7, 9, 20, 23):  # a server counts those of all learners
        run.follow(version)
        due.append(run.publish_due(4))
    assert due == [False, True, False, True, True, False]
    run.join({**run.state_dict(), "learner_steps": 42})
    assert not run.publish_due(4)
    run.follow(44)
    assert run.publish_due(4)


def test_start_time_is_bounded_by_the_start_of_the_learner() -> None:
    """What an actor says of its own time would reach `stop.minutes` at once."""
    run = progress(minutes=1)
    run.start(time.monotonic() - 1e5)
    assert run.time_s < 10
    assert run.stop_reason() is None


def test_a_learner_keeps_its_share_of_the_last_episodes() -> None:
    window = ReturnWindow()
    window.add([float(i) for i in range(EPISODES)], [1] * EPISODES)
    window.share(3)
    assert list(window.returns) == [float(i) for i in range(66, 100)]
    assert window.local == (sum(range(66, 100)), 34, 34)
    assert window.mean is None, "the others have not agreed yet"
    window.agree(window.local)
    assert window.mean == sum(range(66, 100)) / 34
    assert window.length_mean == 1


def test_lag_that_was_taken_is_not_counted_again() -> None:
    histogram = LagHistogram()
    histogram.add(UnrollSummary.of(batch([0.0] * 2, version=3)), version=5, updates=1)
    assert histogram.take() == {2: 2}
    assert histogram.counts == {}


def test_a_count_is_pending_until_it_is_part_of_the_sum() -> None:
    counts = LocalCounts()
    counts.set_total("env_steps", 10)
    counts.add("trained_steps", 4)
    assert counts.pending() == [10, 4, 0]
    counts.agree("env_steps", 10)
    counts.set_total("env_steps", 13)
    assert counts.pending() == [3, 4, 0]
    counts.agree_on_all()
    assert counts.pending() == [0, 0, 0]
    assert (counts.total("env_steps"), counts.total("trained_steps")) == (13, 4)
