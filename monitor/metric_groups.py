"""The groups of metrics: the sections of TensorBoard and of `penstock report`.

A pattern stands for names at the top level of a line of `metrics.jsonl`; the first one that matches
selects the group. Nested figures belong to the group of their outermost name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from penstock.core.formatting import finite

FALLBACK = "other"
"""Group of names that no pattern matches, such as statistics of an own algorithm."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "eval": ("eval_*", "closing_evaluation"),
    "return": ("episode_*", "episodes", "solved_at_s", "return_reached_at_s"),
    "loss": ("*_loss", "loss"),
    "policy": ("entropy*", "kl*", "ratio*", "rho*", "alpha*", "policy_std*"),
    "value": (
        *("explained_variance*", "advantage*", "return_*", "value_*", "td_error*"),
        *("q_mean*", "q_target*"),
    ),
    "optim": (
        *("learning_rate*", "lr*", "grad_norm*", "early_stop*", "epochs*", "clip_range*"),
        *("learner_steps", "updates_skipped", "rollbacks"),
    ),
    "lag": ("policy_lag*", "latency*", "queue_fill", "effective_sample_share"),
    "throughput": (
        *("*_per_s", "env_steps", "env_frames", "trained_steps", "received"),
        *("replay_size", "samples_per_insert"),
    ),
    "samples": ("dropped", "lost", "rejected"),
    "time": ("time_s", "interval_s", "ledger", "ledgers", "learner_*_fraction"),
    "system": ("cpu", "actors_*", "learners_*"),
    "ranks": ("ranks",),
    "server": ("server",),
}
HISTOGRAM = "_histogram"


def group(name: str) -> str:
    """The group of a metric; `FALLBACK` if none is known."""
    for found, patterns in GROUPS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return found
    return FALLBACK


def tag(path: str) -> str:
    """The name of a figure under its group: `optim/grad_norm`, `time/ledger/compute`, but
    `ranks/0/steps_per_s`, as that name is its group."""
    first = path.partition("/")[0]
    return path if (found := group(first)) == first else f"{found}/{path}"


def scalars(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Path and value of every number: `ledger/compute`, `ledgers/actor-0/step`, `ranks/1/...`.
    Histograms, texts and unknown values are left out."""
    for name, value in metrics.items():
        path = f"{prefix}{name}"
        if isinstance(value, list):
            value = {str(i): entry for i, entry in enumerate(value)}
        if isinstance(value, Mapping) and not name.endswith(HISTOGRAM):
            yield from scalars(value, f"{path}/")
        elif (known := finite(value)) is not None:
            yield path, float(known)
