"""What the figures of `penstock bench` say: the ideal, and what changed since another time.

Pure functions of the rates of each round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

LEAST_NOISE = 0.1  # relative difference of two times on one machine that has no reason
# Upper limit of the noise of two times, where every round of one is faster than all of the other.
MOST_NOISE = 0.5
SHARING = ("environment", "inference", "write", "learner")
BARE_SHARING = ("bare_environment", "bare_inference", "bare_learner")

Verdict = Literal["slower", "faster", "same"]


class RateChange(NamedTuple):
    """The change of one stage's rate; rates are medians of the rounds."""

    stage: str
    old: float
    new: float
    noise: float
    """Relative difference up to which there is no change: the spread of both, at least LEAST_NOISE,
    and at most MOST_NOISE where the rounds do not overlap."""
    verdict: Verdict


def ideal(
    core_s: Mapping[str, float],
    cores: float,
    learner_rate: float,
    *,
    on_gpu: bool,
    sharing: Sequence[str] = SHARING,
) -> float | None:
    """Predict the rate if every core were always busy with something that a step needs.

    Args:
        core_s: core-seconds per agent step of each stage. For a learner on a GPU, those in which a
            core launches its kernels.
        cores: cores that the stages share.
        learner_rate: agent steps per second of the learner, a second limit where it is on a GPU.
        on_gpu: whether the learner is on a GPU.
        sharing: the stages that share the cores.

    Returns:
        Agent steps per second; None where one of these stages was not measured.
    """
    if not set(sharing) <= core_s.keys():
        return None

    rate = cores / sum(core_s[stage] for stage in sharing)
    return min(rate, learner_rate) if on_gpu else rate


def spread(rates: Sequence[float]) -> float:
    """Returns the difference of the fastest and the slowest round, as a fraction of the median."""
    return (max(rates) - min(rates)) / statistics.median(rates)


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[RateChange]:
    """Returns the change of each stage, and of the whole, that two results both have."""
    old_rates = _rates(old)
    new_rates = _rates(new)
    return [
        _change(stage, old_rates[stage], rates)
        for stage, rates in new_rates.items()
        if stage in old_rates
    ]


def elsewhere(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Returns a sentence where two results are of two machines, or may be; otherwise None."""
    old_facts = _facts(old.get("machine") or {})
    new_facts = _facts(new.get("machine") or {})
    differences = [
        f"{name} {old_facts[name] or 'unknown'} then and {fact} now"
        for name, fact in new_facts.items()
        if old_facts[name] != fact
    ]
    if not differences:
        return None

    return (
        f"what is compared may differ by its machine alone: {', '.join(differences)}; for the "
        "code's own changes measure both on one machine"
    )


def _facts(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of a machine by which figures of the same code differ most."""
    packages = machine.get("packages") or {}
    return {
        "cpu": machine.get("cpu"),
        "cores": machine.get("cores"),
        "torch": packages.get("torch"),
    }


def _rates(result: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """Returns the rates of each round by stage, without stages of which one round has none."""
    by_stage = {stage: figures["rates"] for stage, figures in result["stages"].items()}
    by_stage["whole"] = result.get("achieved_rates") or []
    return {stage: rates for stage, rates in by_stage.items() if rates and min(rates) > 0}


def _change(stage: str, old_rates: Sequence[float], new_rates: Sequence[float]) -> RateChange:
    """Judge by the rates of two times whether a stage became slower or faster."""
    noise = max(LEAST_NOISE, spread(old_rates) + spread(new_rates))
    if min(new_rates) > max(old_rates) or max(new_rates) < min(old_rates):
        noise = min(noise, MOST_NOISE)

    # The difference is relative to the larger rate, so that half and twice are the same distance.
    old = statistics.median(old_rates)
    new = statistics.median(new_rates)
    verdict: Verdict = "same"
    if abs(new - old) > noise * max(old, new):
        verdict = "slower" if new < old else "faster"
    return RateChange(stage, old=old, new=new, noise=noise, verdict=verdict)
