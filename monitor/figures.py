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
# The mean over all environments, where `episode_return_mean` is of those that explore least.
ALL = "episode_return_all_mean"
EXPLORING = "where exploration is least"
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

    remaining_s = eta_s(metrics, stop)
    to_go = "" if remaining_s is None else f", {clock(remaining_s)} to go"
    shown = {
        "time": clock(m("time_s")) + to_go,
        "steps": f"{count(m('env_steps'))}, {count(m('steps_per_s'))}/s",
    }
    # Frames are shown where an environment repeats actions.
    if m("env_frames") != m("env_steps"):
        shown["frames"] = f"{count(m('env_frames'))}, {count(frames_per_s(metrics))}/s"

    trained_per_s = count(m("trained_steps_per_s"))
    shown["trained"] = f"{trained_per_s}/s, {count(m('learner_steps'))} updates"
    goal = None if stop is None else stop.return_
    # In a game of several sides evaluations alone reach the goal.
    is_opposed = "eval_win_rates" in metrics
    shown["return"] = _training_return(metrics, None if is_opposed else goal)
    if "league_members" in metrics:
        shown["league"] = _league(metrics)
    shown |= _losses(metrics)

    shown["lag"] = f"{number(m('policy_lag_mean'))}, at most {number(m('policy_lag_max'))}"
    if m("policy_lag_limit"):
        shown["lag"] += f"; limit {count(m('policy_lag_limit'))}"
    shown["queue"] = f"{percent(m('queue_fill'))} full"

    shown["learner"] = shares(m("ledger") or {}) + _ceiling(metrics)
    shown |= _each_learner(metrics)
    shown |= _connectors(metrics)
    shown["latency"] = f"{duration(m('latency_p50_s'))}, p95 {duration(m('latency_p95_s'))}"
    shown["dropped"] = reasons(m("dropped") or {})

    if "games" in metrics:
        shown["games"] = f"{_games(metrics)}, {count(m('seats_held'))} of them held"
    else:
        shown["actors"] = _actors(metrics)
    if "eval_return_mean" in metrics:
        shown["evaluation"] = evaluated(metrics)
    if "learners_alive" in metrics:
        shown["learners"] = f"{m('learners_alive')} alive, {m('learners_restarted')} restarted"
    return shown


def _training_return(metrics: Metrics, goal: float | None) -> str:
    """Returns the mean return in training as text, with the best one so far and the goal."""
    mean = number(metrics.get("episode_return_mean"))
    text = f"{mean} in training, {_recent_episodes(metrics.get('episodes'))}"
    if ALL in metrics:
        text = f"{mean} in training {EXPLORING}, {number(metrics[ALL])} over all environments"
    if BEST in metrics:
        text += f", best {number(metrics[BEST])}"
    if goal is not None:
        text += f", goal {number(goal)}"
    return text


def _league(metrics: Metrics) -> str:
    """Returns the members of the pool, and how often the policy wins against them and bots."""
    m = metrics.get
    members = m("league_members")
    text = f"{count(members)} member{'' if members == 1 else 's'}"
    if m("win_rate") is not None:
        text += f", won {percent(m('win_rate'))}"
    if m("win_rate_worst") is not None:
        text += f", the hardest so far {percent(m('win_rate_worst'))}"
    for bot, rate in (m("bot_win_rates") or {}).items():
        text += f", {percent(rate)} against {bot}"
    return text


def evaluated(metrics: Metrics) -> str:
    """Returns the last evaluation as text, and the mean return of the best weights so far.

    Each way to play, greedy and sampled, has its mean return with the 95 % confidence interval, and
    the number of episodes behind it. In a game of several sides there are also the win rates by
    opponent.
    """
    m = metrics.get
    returns = [
        f"{play} {_with_interval(metrics, play)}"
        for play in ("greedy", "sampled")
        if f"eval_return_{play}" in metrics
    ]

    text = ", ".join(returns) or number(m("eval_return_mean"))
    if "eval_episodes" in metrics:
        text += f" ({_evaluated_episodes(metrics)} each)"

    trained_steps = count(m("eval_trained_steps"))
    text += f" at {trained_steps} steps, best {number(m('eval_return_best'))}"
    win_rates = m("eval_win_rates") or {}
    if win_rates:
        rates = (f"{percent(rate)} against {name}" for name, rate in win_rates.items())
        text += f", win rate {', '.join(rates)}"
    return text


def _evaluated_episodes(metrics: Metrics) -> str:
    """Returns the number of episodes of the last evaluation: "4 episodes"."""
    episodes = metrics.get("eval_episodes")
    return f"{count(episodes)} episode{'' if episodes == 1 else 's'}"


def _with_interval(metrics: Metrics, play: str) -> str:
    """Returns the mean return of the last evaluation ± half its 95 % confidence interval.

    The interval of few episodes is wide.

    Args:
        metrics: figures of the evaluation.
        play: how it was played, "greedy" or "sampled".
    """
    mean = number(metrics.get(f"eval_return_{play}"))
    half = half_95(metrics.get(f"eval_return_{play}_se"), metrics.get("eval_episodes"))
    return mean if half is None else f"{mean} ± {number(half)}"


def _losses(metrics: Metrics) -> dict[str, str]:
    """Returns a row of the algorithm's losses, whatever their names; empty if there are none."""
    losses = {
        name.removesuffix("loss").rstrip("_"): value
        for name, value in metrics.items()
        if name.endswith("loss") and isinstance(value, int | float)
    }
    if not losses:
        return {}
    # A metric named `loss` has no name left, so its value stands alone.
    return {"loss": ", ".join(f"{name} {number(value)}".strip() for name, value in losses.items())}


def _ceiling(metrics: Metrics) -> str:
    """Returns which share the learner achieves of its speed if it never waited; empty if either is
    unknown."""
    rate = metrics.get("trained_steps_per_s")
    ceiling = metrics.get("learner_ceiling_steps_per_s")
    if not rate or not ceiling:
        return ""
    return f"; {percent(rate / ceiling)} of its ceiling of {count(ceiling)}/s"


def _each_learner(metrics: Metrics) -> dict[str, str]:
    """Returns a row for each of the first learners of several: its speed and its time."""
    rows = {}
    for learner in (metrics.get("ranks") or [])[:SHOWN_RANKS]:
        rate = count(learner.get("trained_steps_per_s"))
        rows[f"rank {learner['rank']}"] = f"{rate}/s; {shares(learner.get('ledger') or {})}"
    return rows


def _connectors(metrics: Metrics) -> dict[str, str]:
    """Returns a row for each connector: its time."""
    ledgers = metrics.get("ledgers") or {}
    return {name: shares(ledgers[name]) for name in ledgers if name.startswith("connector-")}


def line(metrics: Metrics, stop: StopConfig | None) -> str:
    """Returns the main figures in a line of about a hundred characters.

    `metrics.jsonl` has all. The arguments are those of `figures`.
    """
    m = metrics.get
    parts = [
        figures(metrics, stop)["time"],
        f"{count(m('env_steps'))} steps, {count(m('steps_per_s'))}/s",
        f"training return {number(m('episode_return_mean'))}"
        + (f" ({number(m(ALL))} over all environments)" if ALL in metrics else ""),
        *([_league(metrics)] if "league_games" in metrics else []),
        f"trained {count(m('trained_steps_per_s'))}/s",
        f"lag {number(m('policy_lag_mean'))}",
        f"learner busy {percent((m('ledger') or {}).get('compute'))}",
    ]

    dropped = sum((m("dropped") or {}).values())
    if dropped:
        parts.append(f"dropped {count(dropped)}")

    actors = f"actors {m('actors_alive')}"
    if m("actors_restarted"):
        actors += f", {m('actors_restarted')} restarted"
    parts.append(_games(metrics) if "games" in metrics else actors)
    if "learners_alive" in metrics:
        parts.append(f"learners {m('learners_alive')}")

    if "eval_return_mean" in metrics:
        play = m("eval_play")
        if play:
            episodes = _evaluated_episodes(metrics)
            parts.append(f"evaluation {_with_interval(metrics, play)} over {episodes}")
        else:  # an evaluation of an earlier version
            parts.append(f"evaluation {number(m('eval_return_mean'))}")
    return " | ".join(parts)


def _actors(metrics: Metrics) -> str:
    """Returns the number of actors, and their time."""
    text = f"{metrics.get('actors_alive')} alive, {metrics.get('actors_restarted')} restarted"
    actor_shares = shares(role_mean(metrics.get("ledgers") or {}, "actor"))
    return f"{text}; {actor_shares}" if actor_shares else text


def _games(metrics: Metrics) -> str:
    """Returns the number of games that are connected, and of their seats."""
    games = metrics["games"]
    seats = metrics.get("actors_alive")
    plural = "" if games == 1 else "s"
    return f"{count(games)} game{plural} with {count(seats)} seat{'' if seats == 1 else 's'}"


def _recent_episodes(episodes: int | None) -> str:
    """Returns which of the ``episodes`` of a run have `episode_return_mean` as their mean."""
    if not episodes:
        return "no episode yet"
    last_of = f"last {RECENT} of " if episodes > RECENT else ""
    return f"{last_of}{count(episodes)} episode{'' if episodes == 1 else 's'}"


def frames_per_s(metrics: Metrics) -> float | None:
    """Returns emulator frames per second, from steps per second and the frames of a step; None if
    these are unknown."""
    steps = metrics.get("env_steps")
    frames = metrics.get("env_frames")
    rate = metrics.get("steps_per_s")  # absent in the final report of a run that ended at once
    return rate * frames / steps if steps and frames and rate is not None else None


def eta_s(metrics: Metrics, stop: StopConfig | None) -> float | None:
    """Returns the seconds until the first limit that can be predicted; None if there is none.

    The limits are agent steps, learner steps and minutes. The first is predicted by the speed of
    the last interval, the second by the mean speed of the run.
    """
    if stop is None:
        return None

    time_s = metrics.get("time_s") or 0.0
    learner_steps = metrics.get("learner_steps") or 0
    steps_per_s = metrics.get("steps_per_s")
    predictions_s: list[float] = []
    if stop.env_steps is not None and steps_per_s:
        predictions_s.append((stop.env_steps - metrics["env_steps"]) / steps_per_s)
    if stop.learner_steps is not None and learner_steps and time_s:
        predictions_s.append((stop.learner_steps - learner_steps) * time_s / learner_steps)
    if stop.minutes is not None:
        predictions_s.append(stop.minutes * 60 - time_s)

    return max(0.0, min(predictions_s)) if predictions_s else None


def role_mean(ledgers: Mapping[str, Mapping[str, float]], role: str) -> dict[str, float]:
    """Returns the mean time ledger of the processes of a role; empty if there are none.

    Args:
        ledgers: by process, such as "actor-3", the share of each part of its time.
        role: the kind of role, such as "actor".
    """
    of_role = [parts for name, parts in ledgers.items() if name.rpartition("-")[0] == role]
    names = dict.fromkeys(name for parts in of_role for name in parts)
    return {name: sum(parts.get(name) or 0.0 for parts in of_role) / len(of_role) for name in names}
