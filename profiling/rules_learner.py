"""What costs a learner time that has data, and what costs none: old samples, idle actors."""

from __future__ import annotations

import math

from penstock.profiling.evidence import Evidence, percent
from penstock.profiling.rule import (
    CROWDED,
    EXPLAINS,
    FAR,
    FULL,
    GAPS,
    RESERVE,
    SLOWED,
    WAITS,
    WORTH,
    Verdict,
)
from penstock.profiling.rules_feed import gather_is_slow

CODEC_RATIO = {"none": 1.0, "fp16": 0.5, "bf16": 0.5}  # bytes of those that int8 would improve on
INT8_RATIO = 0.25


def gathering_is_exposed(e: Evidence) -> Verdict | None:
    """The learner's thread gathers instead of training, or waits for the thread that gathers."""
    if e.gather_exposed < WORTH:
        return None
    if e.gathers_ahead:
        return gather_is_slow(e, e.gather_exposed)

    step = f"prefetch: learner.prefetch={2 if e.from_replay else 1}"
    if e.lent_by_batch:
        step = (
            "batches are gathered ahead only where transport.max_policy_lag is not below the "
            f"{e.updates_of_batch} updates of one"
        )
    return Verdict(
        "slow_gather",
        f"gathering is slow: it takes {percent(e.gather_exposed)} of the learner's time",
        "batches are gathered between the steps, not ahead of them",
        step,
        e.gather_exposed,
    )


def reduction_is_exposed(e: Evidence) -> Verdict | None:
    """Learners wait for the exchange itself, not for one of them."""
    share, exchanging = e.reduction, min(e.exchanging, e.reduction)
    if len(e.learners) < 2 or share < WORTH:
        return None

    codec, pace = e.option("learner.reduce", "codec", "none"), e.option("learner", "pace", "bsp")
    twice = f"learner.accumulate={2 * int(e.option('learner', 'accumulate', 1))}"
    if pace == "local_sgd":
        twice = "twice learner.local_steps"
    reason = f"gradients travel as codec {codec}"
    step = f"exchange half as often, which saves about {percent(share / 2)}: {twice}"
    if exchanging < EXPLAINS * share:
        reason = f"gradients travel {percent(exchanging)} of the time; in the rest learners wait "
        reason += "for each other, now for the one and now for the other"
        step = f"{step}; give each learner a core of its own"
    elif pace == "bsp" and codec in CODEC_RATIO:
        saves = exchanging * (1.0 - INT8_RATIO / CODEC_RATIO[codec])
        step = (
            f"learner.reduce.codec=int8 would save about {percent(saves)}; codec=auto measures "
            "which one pays on this network"
        )
    finding = f"the reduction is exposed: {percent(share)} of every learner's time"

    return Verdict("reduction", finding, reason, step, share)


def one_rank_is_slow(e: Evidence) -> Verdict | None:
    """Learners wait for another, which has data and computes longer."""
    if e.wait >= WORTH or e.others_wait < WORTH:
        return None

    name = e.learner.get("name", "a learner")
    others = e.others_wait
    return Verdict(
        "slow_rank",
        f"{name} is slow: the other learners wait {percent(others)} for it",
        f"it computes {percent(e.share('compute'))} of the time and does not wait",
        "look at its host; if it stays slow, set learner.pace=backup or tap, which do not wait for "
        "it: backup drops its samples, tap applies them late",
        others * (len(e.learners) - 1) / len(e.learners),
    )


def cores_are_crowded(e: Evidence) -> Verdict | None:
    """The learner computes longer than it would alone, as others take its cores."""
    full = e.busy_cores >= CROWDED * e.cores
    slowed = max(e.coreless, e.below_ceiling if full else 0.0)
    if slowed < SLOWED:
        return None

    if full:
        step = "move actors to other hosts (`penstock actor`), or let fewer play: actors.count"
        if e.env_waits > WAITS * e.played("step"):
            step += "; as the environment waits, give each more actors.env_threads instead"
    else:
        step = "see what else runs on this host, or limits this run (a container's quota)"
    return Verdict(
        "crowded",
        f"the cores are crowded: the learner has work for {percent(e.share('compute'))} of the "
        f"clock, and for {percent(slowed)} of the clock it waits for a core that other programs "
        f"and processes of this host have ({e.cores:g} cores)",
        f"{e.computes}; it keeps {e.learner_cpu:.2f} of {e.cores:g} cores busy, the rest of the "
        f"run {e.busy_cores - e.learner_cpu:.2f}",
        step,
        slowed,
    )


def copies_to_device(e: Evidence) -> Verdict | None:
    """The learner waits for copies to the device."""
    share = e.share("h2d_exposed")
    if share < WORTH:
        return None
    return Verdict(
        "slow_copy",
        f"copying to the device is exposed: {percent(share)} of the learner's time",
        "the copy is not overlapped with training",
        ("" if e.from_replay or e.lent_by_batch else "copy ahead, learner.prefetch=2; ")
        + "send uint8 observations and stack frames on the device",
        share,
    )


def launches_are_slow(e: Evidence) -> Verdict | None:
    """The host puts kernels on the GPU more slowly than that runs them."""
    share = e.between_kernels
    if share < GAPS:
        return None
    micro_batch = e.option("learner", "micro_batch", None)
    passes = "" if micro_batch is None else "whole updates in one pass (learner.micro_batch=null), "
    return Verdict(
        "launch_bound",
        f"the GPU waits for launches: in {percent(share)} of the learner's time it is to compute "
        "and runs no kernel",
        f"its passes take {percent(e.share('compute'))} of the time, and kernels run in "
        f"{percent(e.share('compute') - share)}",
        f"fewer and larger kernels: {passes}larger batches "
        "(learner.batch_slots), a network of fewer and wider layers",
        share,
    )


def publishes_long(e: Evidence) -> Verdict | None:
    """Publishing weights takes a large share of the learner's time."""
    share = e.share("publish")
    if share < WORTH:
        return None

    every = int(e.option("learner", "publish_every", 1))
    return Verdict(
        "slow_publish",
        f"publishing weights takes {percent(share)} of the learner's time",
        f"weights go out after every {every} optimizer steps"
        if every > 1
        else "weights go out after every optimizer step",
        "make batches larger: learner.batch_slots, actors.envs or actors.unroll"
        if e.lent_by_batch
        else f"publish half as often: learner.publish_every={2 * every}",
        share,
    )


def bookkeeping_is_large(e: Evidence) -> Verdict | None:
    """Saving, counting and reporting take a large share of the learner's time."""
    share = e.share("bookkeeping")
    if share < WORTH:
        return None

    save = float(e.learner["parts"].get("save", 0.0))
    many = "make batches fewer and larger: learner.batch_slots, actors.envs or actors.unroll"
    return Verdict(
        "bookkeeping",
        f"bookkeeping takes {percent(share)} of the learner's time",
        f"{percent(save)} is saving, the rest counting and reporting",
        "checkpoint less often: checkpoint.every_s" if save > share / 2 else many,
        share,
    )


def other_is_large(e: Evidence) -> Verdict | None:
    """No part of the ledger claims a large share of the learner's time."""
    share = e.share("other")
    if share < WORTH:
        return None

    return Verdict(
        "other",
        f"{percent(share)} of the learner's time is neither data nor training",
        "no part of the ledger claims it",
        "find its cause: the trace shows when it occurs, `penstock stacks RUN` and `penstock "
        "profile --torch` show the code",
        share,
    )


def lag_is_big(e: Evidence) -> Verdict | None:
    """Samples are older than they need be; dropped for it, or trained on."""
    lag = e.flow.get("policy_lag") or {}
    mean, largest = float(lag.get("mean") or 0.0), float(lag.get("max") or 0.0)
    dropped, needed = e.dropped("lag"), needed_lag(e)
    limit = int(e.option("transport", "max_policy_lag", 1000))
    slots = int(e.option("transport", "slots", 2))
    if dropped >= WORTH:
        finding = f"samples are too old: {percent(dropped)} are dropped"
        reason = f"they were played with weights more than {limit} updates behind"
        step = (
            "play shorter unrolls (actors.unroll), or allow more: "
            f"transport.max_policy_lag={2 * limit}"
        )
    elif needed and mean > FAR * needed:
        finding = f"samples are old: policy lag is {mean:.0f} updates, at most {largest:.0f}"
        reason = f"this queue needs {needed:.0f} to keep the learner fed; the rest only waits in it"
        step = "fewer actors wait less"
    else:
        return None
    if slots > 1:
        step = f"keep less waiting: transport.slots=1 instead of {slots}; {step}"
    return Verdict("big_lag", finding, reason, step, dropped if dropped >= WORTH else 0.0)


def learner_is_slow(e: Evidence) -> Verdict | None:
    """Actors could make far more than is trained."""
    fill = float(e.learner.get("queue_fill") or 0.0)
    surplus = max(e.played("wait"), e.dropped("stale"))
    if surplus <= RESERVE and (e.actors or fill < FULL):
        return None

    steps = []
    if e.gains_by_bf16:
        steps.append("learner.precision=auto")
    steps.append("a GPU" if e.device == "cpu" else f"learner.count={len(e.learners) + 1}")

    # Fewer actors would do, except where they only wait for their turn.
    enough = math.ceil(len(e.actors) * (1.0 - surplus) / (1.0 - RESERVE))
    if 0 < enough < len(e.actors) and not e.lent_by_batch:  # there they wait for their turn
        fewer = len(e.all_actors) - (len(e.actors) - enough) * len(e.learners)
        steps.append(f"or fewer actors: {max(1, fewer)} would keep it as busy (actors.count)")

    waits = f"; actors wait {percent(surplus)} for it" if e.actors else ""
    return Verdict(
        "slow_learner",
        f"the learner is the limit: the queue is {percent(fill)} full{waits}",
        e.computes,
        ", ".join(steps),
    )


def nothing_waits(e: Evidence) -> Verdict:
    """The verdict where no rule has found anything."""
    faster = ["a GPU"] if e.device == "cpu" else []
    faster += ["learner.precision=auto"] if e.gains_by_bf16 else []

    return Verdict(
        "healthy",
        "nothing waits: the learner is the limit",
        e.computes,
        "nothing to change here; more throughput takes a faster learner: "
        + ", ".join([*faster, f"learner.count={len(e.learners) + 1}"]),
    )


def needed_lag(e: Evidence) -> float:
    """Returns the updates between acting and training that keep the learner fed.

    Each actor has one slot in hand then, and the learner its batches ahead. 0 for replay, whose
    samples are meant to be old; for slots lent by batch, whose lag is set; and without actors.
    """
    if e.from_replay or e.lent_by_batch or not e.actors:
        return 0.0

    batch = int(e.option("learner", "batch_slots", 1))
    ahead = int(e.option("learner", "prefetch", 1)) + 1
    updates = e.updates_of_batch / e.option("learner", "accumulate", 1)
    every = int(e.option("learner", "publish_every", 1))
    return float((math.ceil(len(e.actors) / batch) + ahead) * updates + every - 1)
