"""The way of the samples through a run: stages with their rates, fills and losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.formatting import finite
from penstock.monitor.run_folder.columns import MetricColumns
from penstock.watch.verdicts import WINDOW_S, MetricWindow, option

LIMITS = {  # the stage that a verdict names; "host": none of them, but the cores that they share
    "slow_environment": "environments", "waiting_environment": "environments",
    "turns": "environments",
    "slow_inference": "actors", "slow_actor": "actors", "straggler": "actors", "starved": "actors",
    "slow_wire": "transport", "few_slots": "store", "filling": "store", "slow_gather": "store",
    "reduction": "learner", "slow_rank": "learner", "crowded": "host", "slow_copy": "learner",
    "launch_bound": "learner", "bookkeeping": "learner", "other": "learner",
    "slow_learner": "learner", "healthy": "learner",
    "slow_publish": "weights", "big_lag": "weights",
}  # fmt: skip


def flow(
    columns: MetricColumns,
    last: Mapping[str, Any],
    options: Mapping[str, Any],
    verdict: Mapping[str, Any] | None,
    *,
    live: bool,
) -> dict[str, Any]:
    """The figures of each stage, and the stage that limits the others. Rates and shares are of the
    window of the verdict: the last seconds, or all of an ended run. A figure that the metrics lack
    is null."""
    window = MetricWindow(columns, WINDOW_S if live else None)
    ledgers = [found for name, found in window.ledgers().items() if name.startswith("actor-")]
    share = {
        part: sum(ledger.get(part, 0.0) for ledger in ledgers) / len(ledgers) if ledgers else None
        for part in ("step", "infer", "wait", "write", "process", "compress", "send")
    }
    wire = any(name.startswith("received/") for name in columns.names)
    kind = (verdict or {}).get("kind")
    return {
        "seconds": window.seconds,
        "limit": LIMITS.get(str(kind)),
        "environments": {
            "steps_per_s": window.rate("env_steps"),
            "frames_per_s": window.rate("env_frames"),
            "episodes": columns.last("episodes"),
        },
        "actors": {
            "alive": finite(last.get("actors_alive")),
            "restarted": finite(last.get("actors_restarted")),
            "count": option(options, "actors", "count"),
            "shares": share,
        },
        "transport": {
            "kind": option(options, "transport", "kind"),
            "wire": wire,
            "coded_nbytes_per_s": window.rate("received/coded_nbytes") if wire else None,
            "raw_nbytes_per_s": window.rate("received/raw_nbytes") if wire else None,
            "lost": _nonzero(last, "lost"),
            "rejected": _nonzero(last, "rejected"),
        },
        "store": {
            "queue_fill": window.mean("queue_fill"),
            "replay_size": columns.last("replay_size"),
            "samples_per_insert": columns.last("samples_per_insert"),
            "dropped": _nonzero(last, "dropped"),
            "latency_p50_s": window.mean("latency_p50_s"),
            "latency_p95_s": window.mean("latency_p95_s"),
        },
        "learner": {
            "steps_per_s": window.rate("trained_steps"),
            "updates_per_s": window.rate("learner_steps"),
            "ledger": window.shares("ledger/"),
            "cpu": window.mean("cpu/learner-0"),
            "alive": finite(last.get("learners_alive")),
        },
        "weights": {
            "lag_mean": window.mean("policy_lag_mean"),
            "lag_max": window.highest("policy_lag_max"),
            "lag_limit": finite(last.get("policy_lag_limit")),
            "publish_share": window.mean("ledger/publish"),
        },
    }


def counts(row: Mapping[str, Any], name: str) -> dict[str, float]:
    """The counts of ``row`` below a name, such as "dropped", by their reason."""
    found = row.get(name)
    if not isinstance(found, Mapping):
        return {}
    return {reason: finite(value) or 0 for reason, value in found.items()}


def _nonzero(row: Mapping[str, Any], name: str) -> dict[str, float]:
    return {reason: number for reason, number in counts(row, name).items() if number}
