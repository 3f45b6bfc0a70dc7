"""The verdict on a run: what costs it most throughput, why, and what to do about it.

`findings` is a pure function of a profile. Each rule looks for one bottleneck; one that finds it
says what it costs, as a share of throughput, and the costliest is the verdict. What costs none
comes last, in the order of `RULES`.
"""

from __future__ import annotations

from penstock.profiling.evidence import Evidence, Profile
from penstock.profiling.rule import WAITS, Rule, Verdict, empty
from penstock.profiling.rules_feed import waits_for_data
from penstock.profiling.rules_learner import (
    bookkeeping_is_large,
    copies_to_device,
    cores_are_crowded,
    gathering_is_exposed,
    lag_is_big,
    launches_are_slow,
    learner_is_slow,
    nothing_waits,
    one_rank_is_slow,
    other_is_large,
    publishes_long,
    reduction_is_exposed,
)

__all__ = ["Verdict", "depends_on_threads", "findings"]

RULES: tuple[Rule, ...] = (
    waits_for_data,
    gathering_is_exposed,
    reduction_is_exposed,
    one_rank_is_slow,
    cores_are_crowded,
    copies_to_device,
    launches_are_slow,
    publishes_long,
    bookkeeping_is_large,
    other_is_large,
    lag_is_big,
    learner_is_slow,
)


def findings(profile: Profile) -> list[Verdict]:
    """Returns all that is found, the costliest first; "healthy" where nothing costs anything.

    ``profile`` is what `penstock profile --json` prints.
    """
    if not any(any(rank["ledger"].values()) for rank in profile["learner"]):
        return [empty("no learner", "the run ended before it trained: see its last words")]
    evidence = Evidence(profile)
    if evidence.idle:
        return [empty("the learner finished no step", "profile for longer: --seconds")]

    found = [verdict for rule in RULES if (verdict := rule(evidence))]
    return sorted(found, key=lambda verdict: -verdict.cost) or [nothing_waits(evidence)]


def depends_on_threads(profile: Profile) -> bool:
    """Whether a trial of `actors.env_threads` may change what is found.

    That is so if actors spend most of their time in steps of the environment, and much of that
    without computing.
    """
    slow = {"slow_environment", "waiting_environment"}
    if slow.isdisjoint(verdict.kind for verdict in findings(profile)):
        return False
    evidence = Evidence(profile)
    return evidence.env_rests > WAITS * evidence.played("step")
