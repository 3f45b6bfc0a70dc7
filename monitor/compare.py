"""`penstock compare`: compares settings at equal agent steps and by their way to a return.

It also lists the options in which they differ.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.core.formatting import aligned, clock, count, finite, number
from penstock.monitor.curves import (
    OF_ONE_RUN,
    RETURN,
    STATISTIC_NAMES,
    Ranges,
    RunCurves,
    Setting,
    band,
    check_metric,
    check_ranges,
    common_span,
    default_statistic,
    load,
    parse_ranges,
    ranges_of,
    run_curve,
    strata,
)
from penstock.monitor.run_folder.folder import versions
from penstock.monitor.run_folder.reader import evaluation_curve, lower_end, mean_return

# A longer value of an option is cut to as many characters.
LONGEST = 40

Result = dict[str, Any]


class _Reach(NamedTuple):
    """When a run first had a value: after how many agent steps, and after how many seconds."""

    env_steps: float
    time_s: float


def compare(
    folders: Sequence[str],
    metric: str = RETURN,
    at: float | None = None,
    reach: float | None = None,
    ranges: Sequence[str] = (),
) -> Result:
    """Returns the comparison of runs as plain data, which `--json` prints and `describe` shows.

    Args:
        folders: see `curves.load`.
        metric: name in `metrics.jsonl`.
        at: agent steps at which settings are compared; None: those of the shortest run.
        reach: steps and time are measured to the first value at or above it; None: `stop.return`,
            if the metric is the return, it is not scaled, and all runs have the same.
        ranges: see `curves.parse_ranges`.

    Raises:
        UserError: for a folder that is not a run, an unknown metric, a number that is not finite,
            or `at` where no setting has a value.
    """
    if at is not None and not 0 < at < math.inf:
        raise UserError(f"--at is {at:g}; it must be a number of agent steps above 0, such as 1e6")
    if reach is not None and not math.isfinite(reach):
        raise UserError(f"--reach is {reach:g}; it must be a finite value of {metric}")

    user_ranges = parse_ranges(ranges)
    settings = load(folders, [metric])
    check_metric(settings, metric)
    check_ranges(settings, [metric], user_ranges)

    scales = ranges_of(settings, metric, user_ranges)
    steps = _shortest(settings, metric) if at is None else at
    values = [_value_at(setting, metric, steps, scales) for setting in settings]
    if at is not None and all(value["value"] is None for value in values):
        raise UserError(f"--at is {at:g}, {_where(settings, metric)}")
    if reach is None and metric == RETURN and scales is None:
        reach = _common_goal(settings)

    rows = []
    for setting, value in zip(settings, values, strict=True):
        row: Result = {
            "name": setting.name,
            "runs": [str(run.files.folder) for run in setting.runs],
            "environments": list(setting.tasks),
            "statistic": default_statistic(len(setting.tasks)),
        }
        rows.append(row | value | _reaching(setting, metric, reach, scales) | _totals(setting))

    return {
        "metric": metric,
        "at_env_steps": steps,
        "reach": reach,
        "scaled": scales is not None,
        "settings": rows,
        "options": _differences(settings),
    }


def describe(result: Result) -> str:
    """Returns a comparison as text: a table of results, and one of the options that differ.

    Args:
        result: what `compare` returned.
    """
    lines = [_heading(result), *aligned(_table(result), numbers_from=1)]
    if not result["options"]:
        return "\n".join([*lines, "", "no option differs"])

    names = [setting["name"] for setting in result["settings"]]
    options = [["option", *names]]
    options += [[key, *map(_short, values)] for key, values in result["options"].items()]
    return "\n".join([*lines, "", *aligned(options)])


def _heading(result: Result) -> str:
    """Says above the table what its values are."""
    settings = result["settings"]
    heading = f"{result['metric']} at {count(result['at_env_steps'])} agent steps"
    if any(len(setting["runs"]) > 1 for setting in settings):
        names = dict.fromkeys(STATISTIC_NAMES[setting["statistic"]] for setting in settings)
        heading += f"; {' or '.join(names)} of the runs, with its bootstrap interval"
    if result["scaled"]:
        heading += "; returns are scaled by environment"
    if all(setting["value"] is None for setting in settings):
        heading += "; the runs of a line have no value in common there"
    return heading


def _table(result: Result) -> list[list[str]]:
    """The cells of the results: a row of titles, then one for each setting."""
    goal = result["reach"]
    shows_solved = any(setting["solved"] is not None for setting in result["settings"])

    titles = ["run", "runs", result["metric"], "95 %"]
    if goal is not None:
        titles += [f"steps to {number(goal)}", "time", "reached"]
    if shows_solved:
        titles.append("solved")
    titles += ["steps/s", "best evaluation", "steps", "time"]

    rows = [titles]
    for setting in result["settings"]:
        runs = len(setting["runs"])
        averaged = setting["averaged"]
        low = setting["low"]

        row = [setting["name"]]
        row.append(str(runs) if averaged == runs else f"{averaged} of {runs}")
        row.append(number(setting["value"]))
        row.append("-" if low is None else f"{number(low)} to {number(setting['high'])}")
        if goal is not None:
            row.append(count(setting["reach_env_steps"]))
            row.append(_time(setting["reach_s"]))
            row.append(f"{setting['reached']} of {runs}")
        if shows_solved:
            solved = setting["solved"]
            row.append("-" if solved is None else f"{solved} of {runs}")
        row.append(count(setting["steps_per_s"]))
        row.append(number(setting["evaluation_best"]))
        row.append(count(setting["env_steps"]))
        row.append(_time(setting["time_s"]))
        rows.append(row)
    return rows


def _shortest(settings: Sequence[Setting], metric: str) -> float:
    """Returns the agent steps up to which all runs have the metric.

    Raises UserError if no run has it.
    """
    ends = []
    for setting in settings:
        for run in setting.runs:
            xs, _ = run_curve(run, "env_steps", metric)
            if len(xs):
                ends.append(float(xs[-1]))

    if not ends:
        raise UserError(f"no run has {metric} at a known number of agent steps; give another run")
    return min(ends)


def _where(settings: Sequence[Setting], metric: str) -> str:
    """Returns the end of an error about `--at`: which agent steps it may name."""
    span = common_span([run for setting in settings for run in setting.runs], "env_steps", metric)
    if span is None:
        return f"and the runs have {metric} at no common agent steps; compare fewer runs"
    first, last = map(count, span)
    return f"where no line has {metric} of all its runs; give steps from {first} to {last}"


def _common_goal(settings: Sequence[Setting]) -> float | None:
    """Returns the `stop.return` of all runs; None if they differ, or have none."""
    goals = [finite(run.options.get("stop.return")) for setting in settings for run in setting.runs]
    return goals[0] if len({*goals}) == 1 else None


def _value_at(setting: Setting, metric: str, env_steps: float, scales: Ranges | None) -> Result:
    """Computes the statistic of a setting's metric after so many agent steps.

    Returns:
        ``value``, with ``low`` and ``high``, the ends of its interval, if any environment has
        several runs; all are None if a run that has the metric has no value there. ``averaged`` is
        the number of runs that have the metric.
    """
    places = np.array([env_steps])
    values = strata(setting, places, "env_steps", metric, ranges=scales)
    averaged = sum(map(len, values))
    if not values or any(np.isnan(runs).any() for runs in values):
        return {"averaged": averaged, "value": None, "low": None, "high": None}

    estimate = band(values, default_statistic(len(setting.tasks)))
    value = float(estimate.middle[0])
    if all(len(runs) == 1 for runs in values):
        return {"averaged": averaged, "value": value, "low": None, "high": None}
    low = float(estimate.low[0])
    high = float(estimate.high[0])
    return {"averaged": averaged, "value": value, "low": low, "high": high}


def _reaching(setting: Setting, metric: str, reach: float | None, scales: Ranges | None) -> Result:
    """Computes how the runs of a setting reach a value.

    Returns:
        ``reached``, the number of runs that have reached it; the means over these of the agent
        steps and of the seconds until then; and ``solved``, how many of the runs are solved, None
        where the value is not the `stop.return` of all.
    """
    is_goal = metric == RETURN and scales is None and reach == _common_goal([setting])
    reaches: list[_Reach] = []
    for run in setting.runs:
        first = None if reach is None else _first_at(run, metric, reach, scales)
        if first is None and reach is not None and is_goal:
            first = _goal_by_learner(run)
        if first is not None:
            reaches.append(first)

    solved = [run for run in setting.runs if _moment(run, "solved_at_s") is not None]
    return {
        "reached": len(reaches),
        "reach_env_steps": _mean_or_none([first.env_steps for first in reaches]),
        "reach_s": _mean_or_none([first.time_s for first in reaches]),
        "solved": len(solved) if reach is not None and is_goal else None,
    }


def _first_at(run: RunCurves, metric: str, reach: float, scales: Ranges | None) -> _Reach | None:
    """Finds the first measurement at or above a value; None without one."""
    steps, by_steps = run_curve(run, "env_steps", metric, ranges=scales)
    times, by_time = run_curve(run, "time_s", metric, ranges=scales)
    if not (by_steps >= reach).any() or not (by_time >= reach).any():
        return None

    # `argmax` of truth values is the place of the first that is true.
    first_step = float(steps[np.argmax(by_steps >= reach)])
    first_s = float(times[np.argmax(by_time >= reach)])
    return _Reach(first_step, first_s)


def _goal_by_learner(run: RunCurves) -> _Reach | None:
    """Finds when the return in training reached `stop.return`, by the learner's own account.

    The learner also notices what happens between two lines of metrics. None if the return has not
    been reached.
    """
    at_s = _moment(run, "return_reached_at_s")
    times, steps = run.files.columns.points("time_s", "env_steps")
    if at_s is None or not len(times):
        return None
    return _Reach(float(np.interp(at_s, times, steps)), at_s)


def _moment(run: RunCurves, name: str) -> float | None:
    """Returns a time of the run, in seconds of training; None if it has not come."""
    return finite({**run.files.last, **run.files.summary}.get(name))


def _totals(setting: Setting) -> Result:
    """Returns means over the runs of a setting: steps, seconds and steps per second.

    Also the mean of the best evaluations, if every run has one and all are of one environment.
    A figure that no run has is None.
    """
    totals = []
    for run in setting.runs:
        steps = finite(run.files.last.get("env_steps"))
        seconds = finite(run.files.last.get("time_s"))
        if steps and seconds:
            totals.append((steps, seconds))

    best = []
    for run in setting.runs:
        evaluation = _best_evaluation(run)
        if evaluation is not None:
            best.append(evaluation)
    comparable = len(best) == len(setting.runs) and len(setting.tasks) == 1

    return {
        "env_steps": _mean_or_none([steps for steps, _ in totals]),
        "time_s": _mean_or_none([seconds for _, seconds in totals]),
        "steps_per_s": _mean_or_none([steps / seconds for steps, seconds in totals]),
        "evaluation_best": statistics.fmean(best) if comparable else None,
    }


def _mean_or_none(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _best_evaluation(run: RunCurves) -> float | None:
    """Returns the mean return of the best evaluation in the environment of the run.

    Evaluations after a checkpoint to which the run has returned do not count. None if there are no
    others.
    """
    evaluations = run.files.evaluations
    if run.env is not None:
        evaluations = [line for line in evaluations if _is_in(line.get("env"), run.env)]
    _, means = evaluation_curve(evaluations, "env_steps", mean_return)
    _, lower_ends = evaluation_curve(evaluations, "env_steps", lower_end)
    return float(means[lower_ends.argmax()]) if len(means) else None


def _is_in(recorded_env: Any, env: EnvConfig) -> bool:
    """Whether an evaluation was in an environment; older versions did not record it."""
    return not isinstance(recorded_env, dict) or env.is_same(recorded_env)


def _differences(settings: Sequence[Setting]) -> dict[str, list[Any]]:
    """Finds the options and versions that differ between settings.

    Returns:
        By dotted name, in the order of their sections, one value for each setting: None where it
        has no such option, a list of the values where the runs of a setting differ.
    """
    tables = [[{**run.options, **_versions(run)} for run in setting.runs] for setting in settings]
    keys = dict.fromkeys(key for table in tables for options in table for key in options)
    sections = list(dict.fromkeys(key.partition(".")[0] for key in keys))

    differences = {}
    for key in sorted(keys, key=lambda key: sections.index(key.partition(".")[0])):
        if key in OF_ONE_RUN:
            continue

        columns = [_distinct([options.get(key) for options in table]) for table in tables]
        if len({json.dumps(column, default=str) for column in columns}) > 1:
            differences[key] = [column[0] if len(column) == 1 else column for column in columns]
    return differences


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Returns the values without repetitions; they need not be hashable."""
    return list({json.dumps(value, default=str): value for value in values}.values())


def _versions(run: RunCurves) -> dict[str, Any]:
    """Returns machine and versions at the last start of a run, by names such as
    `versions.torch`."""
    last_start = next(reversed(run.files.starts), {})
    return {f"versions.{name}": value for name, value in versions(last_start).items()}


def _time(seconds: float | None) -> str:
    """Returns a duration as text, with tenths of seconds below a minute; "-" for None."""
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def _short(value: Any) -> str:
    """Returns the value of an option as text of at most `LONGEST` characters; "-" for None."""
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
