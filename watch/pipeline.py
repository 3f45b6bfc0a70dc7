"""The way of the samples through a run: stages with their rates, fills and losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.formatting import finite
from penstock.monitor.run_folder.columns import MetricColumns
from penstock.watch.verdicts import WINDOW_S, MetricWindow, option

# The stage that limits the others, by the kind of the verdict. "host" is no stage, but the cores
# that they share.
LIMITS = {
    "slow_environment": "environments", "waiting_environment": "environments",
    "turns": "environments",
    "slow_inference": "actors", "slow_actor": "actors", "straggler": "actors", "starved": "actors",
    "slow_wire": "transport", "few_slots": "store", "filling": "store", "slow_gather": "store",
    "reduction": "learner", "slow_rank": "learner", "crowded": "host", "slow_copy": "learner",
    "launch_bound": "learner", "bookkeeping": "learner", "other": "learner",
    "slow_learner": "learner", "healthy": "learner",
    "slow_publish": "weights", "big_lag": "weights",
}  # fmt: skip


def pipeline_figures(
    columns: MetricColumns,
    last: Mapping[str, Any],
    options: Mapping[str, Any],
    verdict: Mapping[str, Any] | None,
    *,
    live: bool,
) -> dict[str, Any]:
    """Returns the figures of each stage, and the stage that limits the others.

    Rates are per second. Rates and shares are of the window of the verdict: the last seconds of a
    ``live`` run, or all of an ended one. A figure that the metrics lack is None.

    Args:
        columns: the metrics of the run.
        last: the last line of the metrics.
        options: the config, as `load_options` returns it.
        verdict: as `judge` returns it.
    """
    window = MetricWindow(columns, WINDOW_S if live else None)
    verdict_kind = (verdict or {}).get("kind")
    games_play = option(options, "actors", "games") is True
    has_wire = any(name.startswith("received/") for name in columns.names)

    return {
        "seconds": window.seconds,
        "limit": LIMITS.get(str(verdict_kind)),
        "environments": {
            "steps_per_s": window.rate("env_steps"),
            "frames_per_s": window.rate("env_frames"),
            "episodes": columns.last("episodes"),
        },
        "actors": {
            "alive": finite(last.get("actors_alive")),
            "restarted": finite(last.get("actors_restarted")),
            "count": None if games_play else option(options, "actors", "count"),
            "games": finite(last.get("games")) if games_play else None,
            "shares": _actor_shares(window),
        },
        "transport": {
            "kind": option(options, "transport", "kind"),
            "wire": has_wire,
            "coded_nbytes_per_s": window.rate("received/coded_nbytes") if has_wire else None,
            "raw_nbytes_per_s": window.rate("received/raw_nbytes") if has_wire else None,
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


def _actor_shares(window: MetricWindow) -> dict[str, float | None]:
    """Returns the mean share of each part in the time of the actors; None without actors."""
    ledgers = [ledger for name, ledger in window.ledgers().items() if name.startswith("actor-")]
    shares: dict[str, float | None] = {}
    for part in ("step", "infer", "wait", "write", "process", "compress", "send"):
        total = sum(ledger.get(part, 0.0) for ledger in ledgers)
        shares[part] = total / len(ledgers) if ledgers else None
    return shares


def counts(row: Mapping[str, Any], name: str) -> dict[str, float]:
    """Returns the counts of ``row`` below a name, such as "dropped", by their reason."""
    reasons = row.get(name)
    if not isinstance(reasons, Mapping):
        return {}
    return {reason: finite(value) or 0 for reason, value in reasons.items()}


def _nonzero(row: Mapping[str, Any], name: str) -> dict[str, float]:
    """Returns those of `counts` that are not 0."""
    return {reason: number for reason, number in counts(row, name).items() if number}
