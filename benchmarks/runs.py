"""Running `penstock train` from a benchmark, as a user would."""

from __future__ import annotations

from typing import Any

from penstock.bench.whole import train, trained_rate

__all__ = ["dropped_fraction", "point", "train", "trained_rate"]


def dropped_fraction(summary: dict[str, Any]) -> float:
    """Share of produced steps that were dropped or lost."""
    accounting = summary["accounting"]
    gone = sum(accounting["dropped"].values()) + sum(accounting["lost"].values())
    return float(gone / max(accounting["produced"], 1))


def point(line: dict[str, Any], megabytes: float | None = None) -> dict[str, Any]:
    """Of a curve, from one interval's metrics."""
    return {
        "seconds": line["time_s"],
        "steps": line["env_steps"],
        "updates": line["learner_steps"],
        "return": line["episode_return_mean"],
        "megabytes": megabytes,
    }
