"""The groups of metrics, in which the page of `penstock watch` lists them, and the five sections of
TensorBoard and Weights & Biases, each of several groups.

A pattern stands for names at the top level of a line of `metrics.jsonl`; the first one that matches
selects the group. Nested figures belong to the group of their outermost name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from penstock.core.formatting import finite

FALLBACK = "other"
"""Group of names that no pattern matches, such as statistics of an own algorithm."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "eval": ("eval_*", "closing_evaluation"),
    "return": ("episode_*", "episodes", "solved_at_s", "return_reached_at_s", "env_*_mean"),
    "loss": ("*_loss", "loss"),
    "policy": ("entropy*", "kl*", "teacher_kl", "ratio*", "rho*", "alpha*", "policy_std*"),
    "value": (
        *("explained_variance*", "advantage*", "return_*", "value_*", "td_error*"),
        *("q_mean*", "q_target*"),
    ),
    "optim": (
        *("learning_rate*", "lr*", "grad_norm*", "early_stop*", "epochs*", "clip_range*"),
        *("learner_steps", "updates_skipped", "rollbacks"),
    ),
    "league": ("league_*", "win_rate*", "bot_win_rates", "opponent_age_s"),
    "lag": ("policy_lag*", "latency*", "queue_fill", "effective_sample_share", "q_lag"),
    "throughput": (
        *("*_per_s", "env_steps", "env_frames", "trained_steps", "received"),
        *("replay_size", "samples_per_insert"),
    ),
    "samples": ("dropped", "lost", "rejected"),
    "time": ("time_s", "interval_s", "ledger", "ledgers", "learner_*_fraction"),
    "system": ("cpu", "actors_*", "learners_*", "games", "seats_*"),
    "ranks": ("ranks",),
    "server": ("server",),
}
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "train": ("return", "loss", "policy", "value", "optim", "league", FALLBACK),
    "eval": ("eval",),
    "time": ("time",),
    "flow": ("lag", "throughput", "samples"),
    "system": ("system", "ranks", "server"),
}
"""Sections of TensorBoard and W&B, and the groups in each."""
HISTOGRAM = "_histogram"


def group(name: str) -> str:
    """Returns the group of a metric; `FALLBACK` if no pattern matches its name."""
    for group_name, patterns in GROUPS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return group_name
    return FALLBACK


def tag(path: str) -> str:
    """Returns the name of a figure under its section: `train/grad_norm`, `time/ledger/compute`."""
    group_name = group(path.partition("/")[0])
    return next(f"{section}/{path}" for section, groups in SECTIONS.items() if group_name in groups)


def by_rank(entries: Sequence[Any]) -> dict[str, Any]:
    """Returns the entries of a list by name.

    Learners are named by their rank, since their places in the list change when one of them ends;
    other entries are named by their places.
    """
    ranks = [entry.get("rank") if isinstance(entry, Mapping) else None for entry in entries]
    has_ranks = all(type(rank) is int for rank in ranks) and len({*ranks}) == len(ranks)
    names = ranks if has_ranks else range(len(entries))
    return dict(zip(map(str, names), entries, strict=True))


def scalars(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields path and value of every number: `ledger/compute`, `ledgers/actor-0/step`,
    `ranks/1/...` (see `by_rank`).

    Histograms, texts and unknown values are left out.

    Args:
        metrics: figures, which may be nested.
        prefix: the beginning of every path.
    """
    for name, value in metrics.items():
        path = f"{prefix}{name}"
        if isinstance(value, list):
            value = by_rank(value)

        if isinstance(value, Mapping) and not name.endswith(HISTOGRAM):
            yield from scalars(value, f"{path}/")
        elif (number := finite(value)) is not None:
            yield path, float(number)
