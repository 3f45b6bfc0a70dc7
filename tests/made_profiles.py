"""Profiles made by hand, of roles that say just what a test needs them to."""

from __future__ import annotations

from typing import Any

from penstock.profiling.rule import Verdict
from penstock.profiling.verdict import findings

LEDGER = (
    "wait_data",
    "h2d_exposed",
    "compute",
    "reduce_exposed",
    "pull_exposed",
    "publish",
    "bookkeeping",
    "other",
)


def learner(
    rank: int = 0, *, ceiling: float | None = None, rate: float = 1000.0, **more: Any
) -> dict[str, Any]:
    """Returns a learner's part of a profile; "compute" gets the time that no other part takes."""
    parts = {name: more.pop(name, 0.0) for name in LEDGER}
    parts["compute"] = more.pop("computes", 1.0 - sum(parts.values()))
    return {
        "rank": rank, "name": f"learner-{rank}", "ledger": parts, "parts": {}, "threads": {},
        "utilization": parts["compute"], "cpu": parts["compute"], "steps_per_s": rate,
        "updates_per_s": 1.0, "ceiling_steps_per_s": ceiling,
        "achieved_over_ceiling": rate / ceiling if ceiling else None, "queue_fill": 0.5, **more,
    }  # fmt: skip


def actor(
    index: int = 0, *, rate: float = 500.0, cpu: float | None = None, rank: int = 0, **parts: float
) -> dict[str, Any]:
    """Returns an actor's part of a profile; it computes while it does not wait, unless ``cpu``."""
    cpu = 1.0 - parts.get("wait", 0.0) - parts.get("send", 0.0) if cpu is None else cpu
    return {
        "name": f"actor-{index}", "learner": rank, "ledger": parts, "cpu": cpu, "steps_per_s": rate
    }  # fmt: skip


def connector(**parts: float) -> dict[str, Any]:
    """Returns a connector's part of a profile."""
    return {
        "name": "connector-0", "learner": 0, "ledger": parts, "cpu": 0.3, "slots_per_s": 10.0,
        "raw_nbytes_per_s": 80e6, "coded_nbytes_per_s": 20e6,
    }  # fmt: skip


def profile(
    learners: list[dict[str, Any]],
    actors: list[dict[str, Any]],
    connectors: list[dict[str, Any]] | None = None,
    *,
    cores: int = 16,
    flow: dict[str, Any] | None = None,
    **config: dict[str, Any],
) -> dict[str, Any]:
    """Returns a profile of ten seconds with these roles."""
    return {
        "target": "pong", "seconds": 10.0, "cores": cores, "device": "cpu", "learner": learners,
        "actors": actors, "connectors": connectors or [],
        "flow": {"produced_steps_per_s": 1000.0, "dropped": {}, **(flow or {})}, "config": config,
    }  # fmt: skip


def two(**parts: Any) -> list[dict[str, Any]]:
    """Returns the parts of two equal actors."""
    return [actor(0, **parts), actor(1, **parts)]


def judge(profile: dict[str, Any]) -> Verdict:
    """Returns the finding with the highest cost."""
    return findings(profile)[0]
