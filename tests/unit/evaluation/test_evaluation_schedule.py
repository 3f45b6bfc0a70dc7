"""When a run is evaluated, and by how many episodes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from penstock.configs.load import resolve
from penstock.core.control import Message
from penstock.evaluation.schedule import (
    LONGEST_S,
    EvaluationSchedule,
    PairCost,
    Spacing,
    choose_spacing,
    episodes_within,
)
from penstock.learner.evaluation_requests import EvaluationRequests
from penstock.learner.progress import Progress


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("cost_s", [0.001, 0.06, 3.0])
@pytest.mark.parametrize("rate", [2_000.0, 30_000.0, 400_000.0])
def test_interval_is_the_first_doubling_that_is_cheap_enough(
    share: float, cost_s: float, rate: float
) -> None:
    every = 100_000
    while cost_s > share * every / rate:
        every *= 2
    pair = PairCost(cost_s / 20, cost_s / 10)
    assert choose_spacing(100_000, 20, pair, share, rate) == (every, 20)


@pytest.mark.parametrize(
    ("rate", "pair", "found"),
    [
        # Pong: complete ones would be 560 s apart. 400,000 steps take 210.5 s, and 5 % 10.5 s.
        (1_900.0, PairCost(1.4, 2.8), Spacing(400_000, 7)),
        (1_900.0, PairCost(1.4, 20.0), Spacing(400_000, 5)),  # at most half of 210.5 s on the clock
        # A slow game, of which 100,000 steps take 1,000 s: a complete one in an eighth of that.
        (100.0, PairCost(0.1, 0.2), Spacing(12_500, 20)),
        # The smallest take 20 s, and so 400 s: 8 times 62.5 s are the first that are enough.
        (1_600.0, PairCost(10.0, 10.0), Spacing(800_000, 2)),
    ],
)
def test_evaluations_shrink_to_be_in_time(rate: float, pair: PairCost, found: Spacing) -> None:
    assert choose_spacing(100_000, 20, pair, 0.05, rate) == found


@pytest.mark.parametrize("rate", [3.0, 170.0, 1_000.0, 7_000.0, 90_000.0])
@pytest.mark.parametrize("cpu_s", [1e-4, 0.03, 0.7, 5.9])
def test_evaluations_keep_their_time_and_cost_limits(rate: float, cpu_s: float) -> None:
    every, episodes = choose_spacing(100_000, 20, PairCost(cpu_s, 2 * cpu_s), 0.05, rate)
    assert every / rate <= LONGEST_S
    assert every in {100_000 * 2**n for n in range(20)} | {100_000 // 2**n for n in range(20)}
    assert 2 <= episodes <= 20
    assert episodes == 2 or episodes * cpu_s <= 0.05 * every / rate


def test_unlimited_share_evaluates_every_point_completely() -> None:
    assert choose_spacing(100_000, 20, PairCost(1e6, 1e6), None, 1e6) == (100_000, 20)


def test_number_of_episodes_fits_the_interval_and_the_share() -> None:
    assert episodes_within(20, PairCost(1.4, 2.0), share=0.05, seconds=120.0) == 4  # of 6 s
    assert episodes_within(20, PairCost(1.4, 20.0), share=0.05, seconds=120.0) == 3  # of 60 s
    assert episodes_within(20, PairCost(0.0, 0.0), share=0.05, seconds=120.0) == 20
    assert episodes_within(20, PairCost(99.0, 99.0), share=0.05, seconds=120.0) == 2
    assert episodes_within(1, PairCost(99.0, 99.0), share=0.05, seconds=120.0) == 1


class Made(NamedTuple):
    """An evaluation: seconds of training at its begin and at its end, and episodes in each way."""

    began_s: float
    ended_s: float
    episodes: int


def simulated(rate: float, pair: PairCost, minutes: float, first_s: float = 10.0) -> list[Made]:
    """The evaluations of a run that trains on ``rate`` steps a second, where a ``pair`` of episodes
    costs as much; the first episode in training ends after ``first_s``."""
    config = resolve("cartpole", ["stop.return=null"])
    progress, plan = Progress(config.stop, 1), EvaluationSchedule(config.eval)
    now_s, done, ends_s, play = 0.0, 0, 0.0, None
    requests = EvaluationRequests(config, progress, clock=lambda: now_s)
    made: list[Made] = []
    while now_s < 60 * minutes:
        now_s += 0.5
        progress.trained_steps = round(now_s * rate)
        if now_s >= ends_s:
            message: Message = {
                "kind": "evaluator",
                "every": plan.every,
                "done": done,
                "play": play,
            }
            requests.handle_messages([message])
        requests.turn()
        if (request := requests.due()) is None:
            continue
        requests.on_requested(request)
        done = progress.trained_steps
        about: dict[str, Any] = {"trained_steps": done, "time_s": now_s}
        about["lengths"] = [900] if now_s >= first_s else []
        if episodes := plan.episodes(request, about, lambda: pair):
            plan.on_evaluated(request, about, pair)
            play, ends_s = {"way": "greedy"}, now_s + episodes * pair.wall_s
            made.append(Made(now_s, ends_s, episodes))
    return made


@pytest.mark.parametrize("rate", [60.0, 190.0, 750.0, 1_900.0, 12_000.0])
@pytest.mark.parametrize(("cpu_s", "wall_s"), [(1.4, 4.0), (1.4, 20.0), (0.2, 0.5), (3.0, 9.0)])
def test_a_run_is_evaluated_within_two_minutes_and_then_every_five(
    rate: float, cpu_s: float, wall_s: float
) -> None:
    made = simulated(rate, PairCost(cpu_s, wall_s), minutes=60)
    assert made[0].ended_s <= 120
    starts = [each.began_s for each in made]
    assert max(later - earlier for earlier, later in pairwise(starts)) <= 300
    assert sum(each.episodes for each in made) * cpu_s <= 0.05 * 3600 * 1.05


def test_cheap_environment_is_evaluated_completely_at_the_multiples_only() -> None:
    """20,000 steps a second: a multiple every 5 s. A complete evaluation may take 0.25 s."""
    made = simulated(20_000.0, PairCost(0.01, 0.02), minutes=2)
    assert [each.began_s for each in made] == [5.0 * n for n in range(2, 25)]
    assert {each.episodes for each in made} == {20}


def test_the_first_evaluation_waits_for_the_first_episode() -> None:
    [first, *_] = simulated(190.0, PairCost(1.4, 4.0), minutes=6, first_s=100.0)
    assert 100 <= first.began_s <= 110


def test_closing_and_confirming_evaluations_are_complete() -> None:
    config = resolve("cartpole", [])
    plan = EvaluationSchedule(config.eval)
    about = {"trained_steps": 100_000, "time_s": 52.0, "lengths": [900]}
    assert plan.episodes("point", about, lambda: PairCost(1.4, 4.0)) is None
    assert plan.episodes("closing", about, lambda: PairCost(1.4, 4.0)) == 20
    assert plan.last_episodes() == 20
    plan.on_evaluated("first", about, PairCost(14.0, 100.0))
    assert plan.last_episodes() == 3  # 20 would take more than half an hour
