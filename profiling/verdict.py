"""The verdict on a run: what costs it most throughput, why, and what to do about it.

`findings` is a pure function of a profile. Each rule looks for one bottleneck; one that finds it
says what it costs, as a share of throughput, and the costliest is the verdict. What costs none
comes last, in the order of `RULES`.
"""

from __future__ import annotations

from penstock.profiling.evidence import Evidence, Profile
from penstock.profiling.rule import ENV_WAITS, Rule, Verdict, nothing_to_judge
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

# Findings that cost nothing come in this order.
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
    if not any(any(learner["ledger"].values()) for learner in profile["learner"]):
        return [
            nothing_to_judge("no learner", "the run ended before it trained: see its last words")
        ]
    evidence = Evidence(profile)
    if evidence.trained_nothing:
        return [nothing_to_judge("the learner finished no step", "profile for longer: --seconds")]

    verdicts = [verdict for rule in RULES if (verdict := rule(evidence)) is not None]
    if not verdicts:
        return [nothing_waits(evidence)]
    return sorted(verdicts, key=lambda verdict: -verdict.cost)


def depends_on_threads(profile: Profile) -> bool:
    """Whether a trial of `actors.env_threads` may change what is found.

    That is so if actors spend most of their time in steps of the environment, and much of that
    without computing.
    """
    kinds = {verdict.kind for verdict in findings(profile)}
    if kinds.isdisjoint({"slow_environment", "waiting_environment"}):
        return False
    evidence = Evidence(profile)
    return evidence.env_without_computing > ENV_WAITS * evidence.actors_share("step")
