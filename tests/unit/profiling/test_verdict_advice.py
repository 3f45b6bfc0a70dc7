"""What a verdict advises, on profiles made by hand: only what would help there."""

from __future__ import annotations

from typing import Any

import pytest

from made_profiles import actor, judge, learner, profile, two

HEALTHY: dict[str, Any] = {"step": 0.5, "infer": 0.4, "wait": 0.1}
STEPPING: dict[str, Any] = {"step": 0.88, "infer": 0.1, "wait": 0.02}


def test_a_gpu_that_waits_for_launches_is_given_more_at_once() -> None:
    on_gpu = {"device": "cuda", "config": {"learner": {"micro_batch": 640}}}
    rank = learner(wait_data=0.02, gpu_kernel_busy=0.5)
    verdict = judge(profile([rank], two(**HEALTHY)) | on_gpu)
    assert verdict.kind == "launch_bound"
    assert verdict.cost == pytest.approx(0.48)
    assert "passes take 98 % of the time, and kernels run in 50 %" in verdict.reason
    assert "whole updates in one pass (learner.micro_batch=null)" in verdict.next_step
    # Gaps between kernels are small, or the learner has nothing to compute.
    assert (
        judge(profile([learner(gpu_kernel_busy=0.85)], two(**HEALTHY)) | on_gpu).kind == "healthy"
    )
    idle = learner(wait_data=0.7, gpu_kernel_busy=0.25)
    assert judge(profile([idle], two(**STEPPING)) | on_gpu).kind == "slow_environment"


@pytest.mark.parametrize(
    ("device", "convolutional", "precision", "advised"),
    [
        ("cpu", False, "fp32", False),  # a plain MLP on a CPU gains nothing
        ("cpu", True, "fp32", True),
        ("cuda", False, "fp32", True),
        ("cpu", True, "bf16", False),  # it is already
    ],
)
@pytest.mark.parametrize("playing", [HEALTHY, {"step": 0.2, "wait": 0.8}])
def test_the_faster_format_is_advised_where_it_may_help(
    playing: dict[str, Any], device: str, convolutional: bool, precision: str, advised: bool
) -> None:
    found = profile(
        [learner()],
        two(**playing),
        learner={"precision": precision},
        model={"convolutional": convolutional},
    )
    verdict = judge(found | {"device": device})
    assert verdict.kind in ("healthy", "slow_learner")
    assert ("precision=auto" in verdict.next_step) is advised


def test_no_more_prefetching_is_advised_where_batches_come_from_replay() -> None:
    for data, advised in (("unrolls", True), ("transitions", False)):
        verdict = judge(
            profile([learner(h2d_exposed=0.1)], two(**HEALTHY), algo={"trains_on": data})
        )
        assert verdict.kind == "slow_copy"
        assert ("learner.prefetch" in verdict.next_step) is advised
        assert "send uint8 observations" in verdict.next_step


def test_who_has_ended_is_not_counted_among_those_who_play() -> None:
    ended = actor(1, rate=20.0, **STEPPING) | {"ended": True}
    verdict = judge(profile([learner(wait_data=0.5)], [actor(0, **STEPPING), ended]))
    assert verdict.kind == "slow_environment"
    assert verdict.reason.startswith("1 actor spend")


@pytest.mark.parametrize(
    ("learners", "size", "min_size", "says"),
    [
        (1, 2500, 20000, "begins 17,500 steps from now"),
        (2, 2500, 20000, "begins 37,500 steps from now"),  # each keeps as many
        (1, 10, 1, "begins 22 steps from now"),  # of the first batch of 32
        (1, 20000, 20000, ""),
    ],
)
def test_replay_that_is_not_full_enough_is_what_a_learner_waits_for(
    learners: int, size: int, min_size: int, says: str
) -> None:
    waiting = [learner(i, wait_data=1.0, updates_per_s=0.0) for i in range(learners)]
    replay = {"min_size": min_size, "batch_size": 32}
    found = profile(waiting, two(**STEPPING), flow={"replay_size": size}, replay=replay)
    verdict = judge(found)
    assert verdict.kind == ("filling" if says else "slow_environment")
    assert says in verdict.finding
    if learners == 1 and min_size == 20000 and says:  # 17,500 at 1,000 a second
        assert "takes 18 s more" in verdict.reason
        assert "--seconds 48" in verdict.next_step
    # Where no step comes, it is because of those who play.
    assert judge(found | {"flow": found["flow"] | {"produced_steps_per_s": 0.0}}).kind != "filling"


def test_replay_that_is_trained_on_was_full_enough() -> None:
    replay = {"min_size": 20000, "batch_size": 32}
    rank = learner(wait_data=0.5)
    found = profile([rank], two(**STEPPING), flow={"replay_size": 500}, replay=replay)
    assert judge(found).kind == "slow_environment"
