"""What costs a learner time that has data, and what costs none: old samples, idle actors."""

from __future__ import annotations

import math

from penstock.profiling.evidence import Evidence, percent
from penstock.profiling.rule import (
    ACTOR_RESERVE,
    CROWDED_CORES,
    ENV_WAITS,
    EXPLAINING_SHARE,
    FULL_QUEUE,
    KERNEL_GAPS,
    LARGE_LAG,
    SIGNIFICANT_COST,
    SIGNIFICANT_SLOWDOWN,
    Verdict,
)
from penstock.profiling.rules_feed import gather_is_slow

# The bytes of a gradient in each codec that int8 would improve on, and in int8, as shares of fp32.
CODEC_RATIO = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}
INT8_RATIO = 0.25


def gathering_is_exposed(evidence: Evidence) -> Verdict | None:
    """The learner's thread gathers instead of training, or waits for the thread that gathers."""
    share = evidence.gather_exposed
    if share < SIGNIFICANT_COST:
        return None
    if evidence.gathers_ahead:
        return gather_is_slow(evidence, share)

    next_step = f"prefetch: learner.prefetch={2 if evidence.from_replay else 1}"
    if evidence.lent_by_batch:
        next_step = (
            "batches are gathered ahead only where transport.max_policy_lag is not below the "
            f"{evidence.updates_of_batch} updates of one"
        )
    return Verdict(
        kind="slow_gather",
        finding=f"gathering is slow: it takes {percent(share)} of the learner's time",
        reason="batches are gathered between the steps, not ahead of them",
        next_step=next_step,
        cost=share,
    )


def reduction_is_exposed(evidence: Evidence) -> Verdict | None:
    """Learners wait for the exchange itself, not for one of them."""
    share = evidence.reduction
    if len(evidence.learners) < 2 or share < SIGNIFICANT_COST:
        return None

    codec = evidence.option("learner.reduce", "codec", "none")
    pace = evidence.option("learner", "pace", "bsp")
    in_transfer = min(evidence.exchanging, share)
    if in_transfer < EXPLAINING_SHARE * share:
        reason = (
            f"gradients travel {percent(in_transfer)} of the time; in the rest learners wait for "
            "each other, now for the one and now for the other"
        )
        next_step = f"{_exchange_half_as_often(evidence)}; give each learner a core of its own"
    elif pace == "bsp" and codec in CODEC_RATIO:
        saving = in_transfer * (1.0 - INT8_RATIO / CODEC_RATIO[codec])
        reason = f"gradients travel as codec {codec}"
        next_step = (
            f"learner.reduce.codec=int8 would save about {percent(saving)}; codec=auto measures "
            "which one pays on this network"
        )
    else:
        reason = f"gradients travel as codec {codec}"
        next_step = _exchange_half_as_often(evidence)

    return Verdict(
        kind="reduction",
        finding=f"the reduction is exposed: {percent(share)} of every learner's time",
        reason=reason,
        next_step=next_step,
        cost=share,
    )


def _exchange_half_as_often(evidence: Evidence) -> str:
    """Returns the advice to exchange gradients half as often, with the option for that."""
    if evidence.option("learner", "pace", "bsp") == "local_sgd":
        change = "twice learner.local_steps"
    else:
        accumulate = int(evidence.option("learner", "accumulate", 1))
        change = f"learner.accumulate={2 * accumulate}"
    saving = percent(evidence.reduction / 2)
    return f"exchange half as often, which saves about {saving}: {change}"


def one_rank_is_slow(evidence: Evidence) -> Verdict | None:
    """Learners wait for another, which has data and computes longer."""
    others_wait = evidence.others_wait
    if evidence.wait >= SIGNIFICANT_COST or others_wait < SIGNIFICANT_COST:
        return None

    name = evidence.learner.get("name", "a learner")
    learners = len(evidence.learners)
    return Verdict(
        kind="slow_rank",
        finding=f"{name} is slow: the other learners wait {percent(others_wait)} for it",
        reason=f"it computes {percent(evidence.share('compute'))} of the time and does not wait",
        next_step="look at its host; if it stays slow, set learner.pace=backup or tap, which do "
        "not wait for it: backup drops its samples, tap applies them late",
        cost=others_wait * (learners - 1) / learners,
    )


def cores_are_crowded(evidence: Evidence) -> Verdict | None:
    """The learner computes longer than it would alone, as others take its cores."""
    cores = evidence.cores
    busy_cores = evidence.busy_cores
    run_fills_cores = busy_cores >= CROWDED_CORES * cores
    slowdown = evidence.coreless
    if run_fills_cores:
        slowdown = max(slowdown, evidence.below_ceiling)
    if slowdown < SIGNIFICANT_SLOWDOWN:
        return None

    if run_fills_cores:
        next_step = "move actors to other hosts (`penstock actor`), or let fewer play: actors.count"
        if evidence.env_waits > ENV_WAITS * evidence.actors_share("step"):
            next_step += "; as the environment waits, give each more actors.env_threads instead"
    else:
        next_step = "see what else runs on this host, or limits this run (a container's quota)"

    learner_cpu = evidence.learner_cpu
    return Verdict(
        kind="crowded",
        finding="the cores are crowded: the learner has work for "
        f"{percent(evidence.share('compute'))} of the clock, and for {percent(slowdown)} of the "
        "clock it waits for a core that other programs and processes of this host have "
        f"({cores:g} cores)",
        reason=f"{evidence.describe_learner()}; it keeps {learner_cpu:.2f} of {cores:g} cores "
        f"busy, the rest of the run {busy_cores - learner_cpu:.2f}",
        next_step=next_step,
        cost=slowdown,
    )


def copies_to_device(evidence: Evidence) -> Verdict | None:
    """The learner waits for copies to the device."""
    share = evidence.share("h2d_exposed")
    if share < SIGNIFICANT_COST:
        return None

    next_step = "send uint8 observations and stack frames on the device"
    if not evidence.from_replay and not evidence.lent_by_batch:
        next_step = f"copy ahead, learner.prefetch=2; {next_step}"
    return Verdict(
        kind="slow_copy",
        finding=f"copying to the device is exposed: {percent(share)} of the learner's time",
        reason="the copy is not overlapped with training",
        next_step=next_step,
        cost=share,
    )


def launches_are_slow(evidence: Evidence) -> Verdict | None:
    """The host puts kernels on the GPU more slowly than that runs them."""
    share = evidence.between_kernels
    if share < KERNEL_GAPS:
        return None

    one_pass = ""
    if evidence.option("learner", "micro_batch", None) is not None:
        one_pass = "whole updates in one pass (learner.micro_batch=null), "
    compute = evidence.share("compute")
    return Verdict(
        kind="launch_bound",
        finding=f"the GPU waits for launches: in {percent(share)} of the learner's time it is to "
        "compute and runs no kernel",
        reason=f"its passes take {percent(compute)} of the time, and kernels run in "
        f"{percent(compute - share)}",
        next_step=f"fewer and larger kernels: {one_pass}larger batches (learner.batch_slots), a "
        "network of fewer and wider layers",
        cost=share,
    )


def publishes_long(evidence: Evidence) -> Verdict | None:
    """Publishing weights takes a large share of the learner's time."""
    share = evidence.share("publish")
    if share < SIGNIFICANT_COST:
        return None

    publish_every = int(evidence.option("learner", "publish_every", 1))
    steps = (
        f"every {publish_every} optimizer steps" if publish_every > 1 else "every optimizer step"
    )
    if evidence.lent_by_batch:
        next_step = "make batches larger: learner.batch_slots, actors.envs or actors.unroll"
    else:
        next_step = f"publish half as often: learner.publish_every={2 * publish_every}"
    return Verdict(
        kind="slow_publish",
        finding=f"publishing weights takes {percent(share)} of the learner's time",
        reason=f"weights go out after {steps}",
        next_step=next_step,
        cost=share,
    )


def bookkeeping_is_large(evidence: Evidence) -> Verdict | None:
    """Saving, counting and reporting take a large share of the learner's time."""
    share = evidence.share("bookkeeping")
    if share < SIGNIFICANT_COST:
        return None

    saving = float(evidence.learner["parts"].get("save", 0.0))
    if saving > share / 2:
        next_step = "checkpoint less often: checkpoint.every_s"
    else:
        next_step = (
            "make batches fewer and larger: learner.batch_slots, actors.envs or actors.unroll"
        )
    return Verdict(
        kind="bookkeeping",
        finding=f"bookkeeping takes {percent(share)} of the learner's time",
        reason=f"{percent(saving)} is saving, the rest counting and reporting",
        next_step=next_step,
        cost=share,
    )


def other_is_large(evidence: Evidence) -> Verdict | None:
    """No part of the ledger claims a large share of the learner's time."""
    share = evidence.share("other")
    if share < SIGNIFICANT_COST:
        return None

    return Verdict(
        kind="other",
        finding=f"{percent(share)} of the learner's time is neither data nor training",
        reason="no part of the ledger claims it",
        next_step="find its cause: the trace shows when it occurs, `penstock stacks RUN` and "
        "`penstock profile --torch` show the code",
        cost=share,
    )


def lag_is_big(evidence: Evidence) -> Verdict | None:
    """Samples are older than they need be; dropped for it, or trained on."""
    policy_lag = evidence.flow.get("policy_lag") or {}
    mean_lag = float(policy_lag.get("mean") or 0.0)
    needed = needed_lag(evidence)
    dropped = evidence.dropped("lag")

    if dropped >= SIGNIFICANT_COST:
        limit = int(evidence.option("transport", "max_policy_lag", 1000))
        cost = dropped
        finding = f"samples are too old: {percent(dropped)} are dropped"
        reason = f"they were played with weights more than {limit} updates behind"
        next_step = (
            "play shorter unrolls (actors.unroll), or allow more: "
            f"transport.max_policy_lag={2 * limit}"
        )
    elif needed and mean_lag > LARGE_LAG * needed:
        largest_lag = float(policy_lag.get("max") or 0.0)
        cost = 0.0
        finding = (
            f"samples are old: policy lag is {mean_lag:.0f} updates, at most {largest_lag:.0f}"
        )
        reason = f"this queue needs {needed:.0f} to keep the learner fed; the rest only waits in it"
        next_step = "fewer actors wait less"
    else:
        return None

    slots = int(evidence.option("transport", "slots", 2))
    if slots > 1:
        next_step = f"keep less waiting: transport.slots=1 instead of {slots}; {next_step}"
    return Verdict(kind="big_lag", finding=finding, reason=reason, next_step=next_step, cost=cost)


def learner_is_slow(evidence: Evidence) -> Verdict | None:
    """Actors could make far more than is trained."""
    actors = len(evidence.actors)
    queue_fill = float(evidence.learner.get("queue_fill") or 0.0)
    surplus = max(evidence.actors_share("wait"), evidence.dropped("stale"))
    has_surplus = surplus > ACTOR_RESERVE
    has_unseen_actors = not actors and queue_fill >= FULL_QUEUE  # they play on other hosts
    if not has_surplus and not has_unseen_actors:
        return None

    advice = []
    if evidence.gains_by_bf16:
        advice.append("learner.precision=auto")
    learners = len(evidence.learners)
    advice.append("a GPU" if evidence.device == "cpu" else f"learner.count={learners + 1}")

    # Fewer actors would do, except where they only wait for their turn.
    enough = math.ceil(actors * (1.0 - surplus) / (1.0 - ACTOR_RESERVE))
    if 0 < enough < actors and not evidence.lent_by_batch:
        count = max(1, len(evidence.all_actors) - (actors - enough) * learners)
        advice.append(f"or fewer actors: {count} would keep it as busy (actors.count)")

    waits = f"; actors wait {percent(surplus)} for it" if actors else ""
    return Verdict(
        kind="slow_learner",
        finding=f"the learner is the limit: the queue is {percent(queue_fill)} full{waits}",
        reason=evidence.describe_learner(),
        next_step=", ".join(advice),
    )


def nothing_waits(evidence: Evidence) -> Verdict:
    """The verdict where no rule has found anything."""
    faster = []
    if evidence.device == "cpu":
        faster.append("a GPU")
    if evidence.gains_by_bf16:
        faster.append("learner.precision=auto")
    faster.append(f"learner.count={len(evidence.learners) + 1}")

    return Verdict(
        kind="healthy",
        finding="nothing waits: the learner is the limit",
        reason=evidence.describe_learner(),
        next_step="nothing to change here; more throughput takes a faster learner: "
        + ", ".join(faster),
    )


def needed_lag(evidence: Evidence) -> float:
    """Returns the updates between acting and training that keep the learner fed.

    Each actor has one slot in hand then, and the learner its batches ahead. 0 for replay, whose
    samples are meant to be old; for slots lent by batch, whose lag is set; and without actors.
    """
    if evidence.from_replay or evidence.lent_by_batch or not evidence.actors:
        return 0.0

    batch_slots = int(evidence.option("learner", "batch_slots", 1))
    batches_in_hand = math.ceil(len(evidence.actors) / batch_slots)
    batches_ahead = int(evidence.option("learner", "prefetch", 1)) + 1
    updates_per_batch = evidence.updates_of_batch / evidence.option("learner", "accumulate", 1)
    publish_every = int(evidence.option("learner", "publish_every", 1))
    return float((batches_in_hand + batches_ahead) * updates_per_batch + publish_every - 1)
