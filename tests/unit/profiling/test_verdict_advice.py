"""The advice of verdicts, on profiles made by hand: only what would help."""

from __future__ import annotations

from typing import Any

import pytest

from made_profiles import actor, judge, learner, profile, two

HEALTHY: dict[str, Any] = {"step": 0.5, "infer": 0.4, "wait": 0.1}
STEPPING: dict[str, Any] = {"step": 0.88, "infer": 0.1, "wait": 0.02}


def test_larger_passes_are_advised_for_a_gpu_that_waits_for_launches() -> None:
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
def test_auto_precision_is_advised_only_where_it_may_help(
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


def test_prefetching_is_not_advised_for_replay() -> None:
    for data, advised in (("unrolls", True), ("transitions", False)):
        verdict = judge(
            profile([learner(h2d_exposed=0.1)], two(**HEALTHY), algo={"trains_on": data})
        )
        assert verdict.kind == "slow_copy"
        assert ("learner.prefetch" in verdict.next_step) is advised
        assert "send uint8 observations" in verdict.next_step


def test_ended_actor_is_not_counted() -> None:
    ended = actor(1, rate=20.0, **STEPPING) | {"ended": True}
    verdict = judge(profile([learner(wait_data=0.5)], [actor(0, **STEPPING), ended]))
    assert verdict.kind == "slow_environment"
    assert verdict.reason.startswith("1 actor spends")


@pytest.mark.parametrize(
    ("learners", "size", "min_size", "says"),
    [
        (1, 2500, 20000, "begins 17,500 steps from now"),
        (2, 2500, 20000, "begins 37,500 steps from now"),  # each keeps as many
        (1, 10, 1, "begins 22 steps from now"),  # of the first batch of 32
        (1, 20000, 20000, ""),
    ],
)
def test_learner_waiting_for_min_size_gets_the_filling_verdict(
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


def trials(*entries: tuple[int, float, float]) -> list[dict[str, float]]:
    """Threads, steps/s and cores of each trial of `actors.env_threads`."""
    return [dict(zip(("threads", "steps_per_s", "cpu"), entry, strict=True)) for entry in entries]


SLEEPS = trials((1, 500.0, 0.05), (4, 1990.0, 0.2), (16, 6000.0, 0.8), (32, 6300.0, 0.9))
ASKS = trials((1, 500.0, 0.9), (2, 950.0, 1.8))  # a program of its own, which computes
LOCKED = trials((1, 500.0, 0.05), (2, 510.0, 0.05))


def one_actor_on_two_cores(cpu: float, idle: float, tried: Any) -> dict[str, Any]:
    """It plays 500 steps/s, of 10,000 that the learner would train."""
    waits = learner(wait_data=0.9, rate=500.0, ceiling=10_000.0, cpu=0.05)
    plays = actor(cpu=cpu, step=0.95, infer=0.04, wait=0.01) | {"coreless": 0.0}
    config = {"actors": {"envs": 32, "env_threads": 1}}
    known = {"config": config, "idle_cores": idle, "env_threads": tried}
    return profile([waits], [plays], cores=2) | known


@pytest.mark.parametrize(
    ("cpu", "idle", "tried", "kind", "advice"),
    [
        (0.05, 1.9, SLEEPS, "waiting_environment", "side by side: actors.env_threads=16; in a tri"),
        (0.05, 1.9, None, "waiting_environment", "actors.env_threads=16, if they are single ones"),
        (0.05, 1.9, [], "waiting_environment", "7 on this host, which has idle cores (actors.coun"),
        (0.05, 1.9, LOCKED, "waiting_environment", "7 on this host, which has idle cores (actors"),
        (0.30, 1.5, SLEEPS, "waiting_environment", "actors.env_threads=16"),  # a step in eight
        (0.10, 1.0, ASKS, "waiting_environment", "actors.env_threads=2"),
        (0.98, 0.9, None, "slow_environment", "1 on this host, which has idle cores (actors.count"),
        (0.98, 0.1, None, "slow_environment", "not on this host, where 1.9 of 2 cores are busy"),
    ],
)
def test_threads_are_advised_for_waiting_and_actors_for_computing_environments(
    cpu: float, idle: float, tried: Any, kind: str, advice: str
) -> None:
    verdict = judge(one_actor_on_two_cores(cpu, idle, tried))
    assert verdict.kind == kind
    assert advice in verdict.next_step


def test_threads_are_not_advised_when_environment_programs_fill_the_cores() -> None:
    waits = learner(wait_data=0.9, rate=1000.0, ceiling=10_000.0, cpu=0.1)
    actors = [actor(i, cpu=0.1, step=0.95, infer=0.05) | {"coreless": 0.0} for i in (0, 1)]
    for cores, advice in ((2, "not on this host, where 1.9 of 2"), (4, "actors.env_threads=2")):
        known = {"idle_cores": cores - 1.9, "env_threads": ASKS}
        assert advice in judge(profile([waits], actors, cores=cores) | known).next_step


def test_unused_threads_are_not_advised() -> None:
    own_vector_form = judge(one_actor_on_two_cores(0.05, 1.9, []))
    assert "actors.env_threads does nothing for its own vector form" in own_vector_form.next_step
    assert "actors.env_threads=" not in own_vector_form.next_step
    all_used = judge(one_actor_on_two_cores(0.05, 1.9, trials((32, 500.0, 0.05))))
    assert "each environment of an actor has a thread already" in all_used.next_step


@pytest.mark.parametrize(
    ("cpu", "coreless", "kind"),
    [
        (0.1, 0.1, "waiting_environment"),
        (0.1, 0.8, "slow_environment"),  # others have its core
        (0.1, None, "waiting_environment"),
        (0.5, None, "slow_environment"),  # others may have it in the other half
        (None, None, "slow_environment"),
    ],
)
def test_an_actor_without_a_core_does_not_wait_for_its_environment(
    cpu: float | None, coreless: float | None, kind: str
) -> None:
    plays = actor(**STEPPING) | {"cpu": cpu, "coreless": coreless}
    assert judge(profile([learner(wait_data=0.4)], [plays])).kind == kind


def test_no_more_actors_are_advised_than_auto_would_start() -> None:
    actors = [actor(i, cpu=0.02, **STEPPING) for i in range(8)]
    found = profile([learner(wait_data=0.9, cpu=0.1)], actors, cores=2) | {"env_threads": []}
    verdict = judge(found)
    assert (
        "not on this host, where 8 play, as many as actors.count=auto starts" in verdict.next_step
    )


def test_fewer_actors_with_more_threads_are_advised_when_waiting_actors_crowd_cores() -> None:
    crowded = learner(wait_data=0.02, coreless=0.4)
    for cpu, advised in ((0.2, True), (0.98, False)):
        actors = [actor(i, cpu=cpu, **STEPPING) | {"coreless": 0.0} for i in range(10)]
        verdict = judge(profile([crowded], actors, cores=2))
        assert verdict.kind == "crowded"
        assert ("more actors.env_threads" in verdict.next_step) is advised
