"""The figures of a run as text: during the run, and at its end.

Agent steps (decisions) and emulator frames are counted and shown separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.core.formatting import clock, count, duration, number, percent, reasons, shares
from penstock.monitor.student_t import half_95

if TYPE_CHECKING:
    from penstock.configs.sections import StopConfig

Metrics = Mapping[str, Any]

RECENT = 100  # the most episodes whose mean is `episode_return_mean`
# More learners would fill a terminal; `metrics.jsonl` has all.
SHOWN_RANKS = 8
BEST = "return_best"  # the highest mean return that a view has seen


def figures(metrics: Metrics, stop: StopConfig | None) -> dict[str, str]:
    """Returns the figures of an interval as text, by their labels, in the order of display.

    Args:
        metrics: a line of `metrics.jsonl`, and `BEST` if the view knows it.
        stop: the limits of the run, which give the time to go and the goal; None: unknown.
    """
    m = metrics.get
    left_s = eta_s(metrics, stop)
    to_go = "" if left_s is None else f", {clock(left_s)} to go"
    goal = None if stop is None else stop.return_
    playing = shares(role_mean(m("ledgers") or {}, "actor"))
    frames = f"{count(m('env_frames'))}, {count(frames_per_s(metrics))}/s"
    shown = {
        "time": clock(m("time_s")) + to_go,
        "steps": f"{count(m('env_steps'))}, {count(m('steps_per_s'))}/s",
        **({"frames": frames} if m("env_frames") != m("env_steps") else {}),
        "trained": f"{count(m('trained_steps_per_s'))}/s, {count(m('learner_steps'))} updates",
        "return": f"{number(m('episode_return_mean'))} in training, "
        + _recent_episodes(m("episodes"))
        + (f", best {number(m(BEST))}" if BEST in metrics else "")
        + ("" if goal is None else f", goal {number(goal)}"),
        **_losses(metrics),
        "lag": f"{number(m('policy_lag_mean'))}, at most {number(m('policy_lag_max'))}"
        + (f"; limit {count(m('policy_lag_limit'))}" if m("policy_lag_limit") else ""),
        "queue": f"{percent(m('queue_fill'))} full",
        "learner": shares(m("ledger") or {}) + _ceiling(metrics),
        **_each_learner(metrics),
        **_connectors(metrics),
        "latency": f"{duration(m('latency_p50_s'))}, p95 {duration(m('latency_p95_s'))}",
        "dropped": reasons(m("dropped") or {}),
        "actors": f"{m('actors_alive')} alive, {m('actors_restarted')} restarted"
        + (f"; {playing}" if playing else ""),
    }
    if "eval_return_mean" in metrics:
        shown["evaluation"] = evaluated(metrics)
    if "learners_alive" in metrics:
        shown["learners"] = f"{m('learners_alive')} alive, {m('learners_restarted')} restarted"
    return shown


def evaluated(metrics: Metrics) -> str:
    """Returns the last evaluation as text, and the mean return of the best weights so far.

    Each way to play, greedy and sampled, has its mean return with the 95 % confidence interval, and
    the number of episodes behind it.
    """
    m = metrics.get
    ways = [
        f"{way} {_with_interval(metrics, way)}"
        for way in ("greedy", "sampled")
        if f"eval_return_{way}" in metrics
    ]
    by = f" ({_evaluated_episodes(metrics)} each)" if "eval_episodes" in metrics else ""
    return (
        f"{', '.join(ways) or number(m('eval_return_mean'))}{by} at "
        f"{count(m('eval_trained_steps'))} steps, best {number(m('eval_return_best'))}"
    )


def _evaluated_episodes(metrics: Metrics) -> str:
    """Returns the number of episodes of the last evaluation: "4 episodes"."""
    episodes = metrics.get("eval_episodes")
    return f"{count(episodes)} episode{'' if episodes == 1 else 's'}"


def _with_interval(metrics: Metrics, way: str) -> str:
    """Returns the mean return of the last evaluation ± half its 95 % confidence interval.

    The interval of few episodes is wide.

    Args:
        metrics: figures of the evaluation.
        play: how it was played, "greedy" or "sampled".
    """
    mean = number(metrics.get(f"eval_return_{way}"))
    half = half_95(metrics.get(f"eval_return_{way}_se"), metrics.get("eval_episodes"))
    return mean if half is None else f"{mean} ± {number(half)}"


def _losses(metrics: Metrics) -> dict[str, str]:
    """Returns a row of the algorithm's losses, whatever their names; empty if there are none."""
    found = {
        name.removesuffix("loss").rstrip("_"): value
        for name, value in metrics.items()
        if name.endswith("loss") and isinstance(value, int | float)
    }
    text = ", ".join(f"{name} {number(value)}".strip() for name, value in found.items())
    return {"loss": text} if found else {}


def _ceiling(metrics: Metrics) -> str:
    """Returns which share the learner achieves of its speed if it never waited; empty if either is
    unknown."""
    rate, most = metrics.get("trained_steps_per_s"), metrics.get("learner_ceiling_steps_per_s")
    return f"; {percent(rate / most)} of its ceiling of {count(most)}/s" if rate and most else ""


def _each_learner(metrics: Metrics) -> dict[str, str]:
    """Returns a row for each of the first learners of several: its speed and its time."""
    return {
        f"rank {own['rank']}": f"{count(own.get('trained_steps_per_s'))}/s; "
        + shares(own.get("ledger") or {})
        for own in (metrics.get("ranks") or [])[:SHOWN_RANKS]
    }


def _connectors(metrics: Metrics) -> dict[str, str]:
    """Returns a row for each connector: its time."""
    ledgers = metrics.get("ledgers") or {}
    return {name: shares(ledgers[name]) for name in ledgers if name.startswith("connector-")}


def line(metrics: Metrics, stop: StopConfig | None) -> str:
    """Returns the main figures in a line of about a hundred characters.

    `metrics.jsonl` has all. The arguments are those of `figures`.
    """
    m = metrics.get
    dropped, restarted = sum((m("dropped") or {}).values()), m("actors_restarted")
    parts = [
        figures(metrics, stop)["time"],
        f"{count(m('env_steps'))} steps, {count(m('steps_per_s'))}/s",
        f"training return {number(m('episode_return_mean'))}",
        f"trained {count(m('trained_steps_per_s'))}/s",
        f"lag {number(m('policy_lag_mean'))}",
        f"learner busy {percent((m('ledger') or {}).get('compute'))}",
        *([f"dropped {count(dropped)}"] if dropped else []),
        f"actors {m('actors_alive')}" + (f", {restarted} restarted" if restarted else ""),
    ]
    if "learners_alive" in metrics:
        parts.append(f"learners {m('learners_alive')}")
    if "eval_return_mean" in metrics:
        way = m("eval_play")
        shown = _with_interval(metrics, way) if way else number(m("eval_return_mean"))
        parts.append(
            f"evaluation {shown}" + (f" over {_evaluated_episodes(metrics)}" if way else "")
        )
    return " | ".join(parts)


def _recent_episodes(episodes: int | None) -> str:
    """Returns which of the ``episodes`` of a run have `episode_return_mean` as their mean."""
    if not episodes:
        return "no episode yet"
    of = f"last {RECENT} of " if episodes > RECENT else ""
    return f"{of}{count(episodes)} episode{'s' * (episodes > 1)}"


def frames_per_s(metrics: Metrics) -> float | None:
    """Returns emulator frames per second, from steps per second and the frames of a step; None if
    these are unknown."""
    steps, frames = metrics.get("env_steps"), metrics.get("env_frames")
    rate = metrics.get("steps_per_s")  # absent in the final report of a run that ended at once
    return rate * frames / steps if steps and frames and rate is not None else None


def eta_s(metrics: Metrics, stop: StopConfig | None) -> float | None:
    """Returns the seconds until the first limit that can be predicted; None if there is none.

    The limits are agent steps, learner steps and minutes. The first is predicted by the speed of
    the last interval, the second by the mean speed of the run.
    """
    if stop is None:
        return None
    time_s, steps = metrics.get("time_s") or 0.0, metrics.get("learner_steps") or 0
    rate = metrics.get("steps_per_s")
    left: list[float] = []
    if stop.env_steps is not None and rate:
        left.append((stop.env_steps - metrics["env_steps"]) / rate)
    if stop.learner_steps is not None and steps and time_s:
        left.append((stop.learner_steps - steps) * time_s / steps)
    if stop.minutes is not None:
        left.append(stop.minutes * 60 - time_s)
    return max(0.0, min(left)) if left else None


def role_mean(ledgers: Mapping[str, Mapping[str, float]], role: str) -> dict[str, float]:
    """Returns the mean time ledger of the processes of a role; empty if there are none.

    Args:
        ledgers: by process, such as "actor-3", the share of each part of its time.
        role: the kind of role, such as "actor".
    """
    own = [parts for name, parts in ledgers.items() if name.rpartition("-")[0] == role]
    names = dict.fromkeys(name for parts in own for name in parts)
    return {n: sum(parts.get(n) or 0.0 for parts in own) / len(own) for n in names}
