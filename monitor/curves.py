"""Runs as curves: what `penstock plot` and `compare` read of run folders.

A setting is what one line of a plot shows: a run, or runs that differ in their seed, or those of
one algorithm in several environments (tasks).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.monitor.intervals import STATISTICS, Floats, bootstrap
from penstock.monitor.metric_groups import scalars
from penstock.monitor.run_folder.columns import Points
from penstock.monitor.run_folder.reader import RunReader, figures_of, is_evaluation, is_return
from penstock.monitor.run_folder.record import METRICS

RETURN = "episode_return_mean"
# Options in which environments of one id may differ.
FORM = ("env.kwargs", "env.wrappers")
STATISTIC_NAMES = {"mean": "mean", "iqm": "interquartile mean"}
# Options that differ between the runs of a setting.
OF_ONE_RUN = ("run.seed", "run.dir")

Ranges = Mapping[str, tuple[float, float]]
"""By task, the values of a metric that are scaled to 0 and 1."""


@dataclass(frozen=True)
class RunCurves:
    """The measurements and the options of one run."""

    files: RunReader
    """The reader of its metrics and evaluations."""
    options: Mapping[str, Any]
    """By dotted name, as in `config.yaml`; empty if that cannot be read."""
    env: EnvConfig | None
    """The environment since the last start; None if it cannot be read."""
    task: str = "?"
    """Name of the environment, with its options where the runs of a setting differ in them."""

    @property
    def env_id(self) -> str:
        """The option `env.id`."""
        return str(self.options.get("env.id", "?"))

    def identity(self) -> str:
        """Returns a text that is equal for runs which differ only in options of `run`."""
        options = {key: value for key, value in self.options.items() if not key.startswith("run.")}
        return json.dumps(options, sort_keys=True, default=str)


@dataclass(frozen=True)
class Setting:
    """Runs that are shown as one line or one row."""

    name: str
    runs: Sequence[RunCurves]

    @property
    def tasks(self) -> dict[str, list[RunCurves]]:
        """The runs by environment."""
        tasks: dict[str, list[RunCurves]] = {}
        for run in self.runs:
            tasks.setdefault(run.task, []).append(run)
        return tasks

    def label(self, drawn: int) -> str:
        """Returns the name with the number of its runs, and how many are ``drawn`` if not all."""
        runs = len(self.runs)
        if runs == 1:
            return self.name

        tasks = len(self.tasks)
        extent = f"{runs} runs, {tasks} environments" if tasks > 1 else f"{runs} seeds"
        if drawn != runs:
            extent = f"{drawn} of {extent}"
        return f"{self.name} ({extent})"


@dataclass(frozen=True)
class Band:
    """A statistic of several runs at places of an axis, and its 95 % interval."""

    middle: Floats
    low: Floats
    high: Floats


def load(folders: Sequence[str], metrics: Collection[str] | None = None) -> list[Setting]:
    """Loads the settings in the folders, in their order.

    Runs that are given one by one and differ only in their seed become one setting.

    Args:
        folders: each is a run, a folder of `train --seeds`, or a folder of such folders for several
            environments.
        metrics: those of which curves are made, by their names or paths such as `ledger/compute`;
            None: all, with the gaps of `MetricColumns` in a long run.

    Raises:
        UserError: for a folder without runs or measurements, or with runs that do not belong
            together.
    """
    settings: list[Setting] = []
    for folder in folders:
        loaded = _load_setting(Path(folder), metrics)
        same = [i for i, setting in enumerate(settings) if _are_seeds(setting, loaded)]
        if not same:
            settings.append(loaded)
            continue

        first = settings[same[0]]
        name = first.name.removesuffix(", …") + ", …"
        settings[same[0]] = Setting(name, [*first.runs, *loaded.runs])
    return _with_tasks(settings)


def load_run(folder: Path, metrics: Collection[str] | None = None) -> RunCurves:
    """Loads one run as far as it can be read, with the columns of ``metrics``; see `load`."""
    files = RunReader(folder, only=metrics, follow_links=True)
    files.read()
    env = None
    with suppress(ValueError):
        env = EnvConfig.model_validate(files.config.get("env"))
    return RunCurves(files, files.options, env)


def run_curve(
    run: RunCurves, x: str, y: str, *, smooth: int = 1, ranges: Ranges | None = None
) -> Points:
    """Returns the points of the metric ``y`` of a run by rising ``x``; see `RunReader.curve`.

    Args:
        run: the run.
        x: "env_steps" or "time_s".
        y: name of the metric.
        smooth: each point is the mean of as many measurements, up to and with its own.
        ranges: values are scaled by the range of the run's task, if it has one.
    """
    xs, ys = run.files.curve(x, y)
    low, high = (ranges or {}).get(run.task, (0.0, 1.0))
    return xs, (smoothed(ys, smooth) - low) / ((high - low) or 1.0)


def smoothed(values: Floats, count: int) -> Floats:
    """Returns each value's mean with the ``count`` - 1 values before it, or with all if there are
    fewer."""
    if count <= 1 or not len(values):
        return values

    # The first ones have fewer values before them.
    head = np.cumsum(values[: count - 1])
    means = head / np.arange(1, len(head) + 1)
    if len(values) < count:
        return means
    return np.concatenate([means, sliding_window_view(values, count).mean(-1)])


def strata(
    setting: Setting,
    places: Floats,
    x: str,
    y: str,
    *,
    smooth: int = 1,
    ranges: Ranges | None = None,
) -> list[Floats]:
    """Interpolates a metric of all runs of a setting at the same places of an axis.

    Args:
        setting: its runs that have the metric are taken.
        places: positions on the axis ``x``, float64 ``[places]``.
        x: "env_steps" or "time_s".
        y: name of the metric.
        smooth: see `run_curve`.
        ranges: see `run_curve`.

    Returns:
        An array for each task with such runs, float64 ``[runs, places]``; NaN before the first and
        beyond the last measurement of a run.
    """
    tasks = []
    for runs in setting.tasks.values():
        curves = [run_curve(run, x, y, smooth=smooth, ranges=ranges) for run in runs]
        rows = [
            np.interp(places, xs, ys, left=np.nan, right=np.nan) for xs, ys in curves if len(xs)
        ]
        if rows:
            tasks.append(np.stack(rows))
    return tasks


def band(values: Sequence[Floats], statistic: str | None = None) -> Band:
    """Returns a statistic of the values of several runs, with its interval.

    Args:
        values: as `strata` returns them.
        statistic: "mean" or "iqm"; None: the mean of one task, the interquartile mean over several.
    """
    function = STATISTICS[statistic or default_statistic(len(values))]
    low, high = bootstrap(values, function)
    return Band(function(np.concatenate(values), 0), low, high)


def default_statistic(tasks: int) -> str:
    """Returns the name of the statistic for so many tasks."""
    return "iqm" if tasks > 1 else "mean"


def common_span(runs: Sequence[RunCurves], x: str, y: str) -> tuple[float, float] | None:
    """Returns the part of the axis ``x`` in which all runs that have a metric have values, as its
    start and end; None if there is no such part."""
    curves = [run_curve(run, x, y)[0] for run in runs]
    curves = [xs for xs in curves if len(xs)]
    if not curves:
        return None

    start = max(xs[0] for xs in curves)
    end = min(xs[-1] for xs in curves)
    return (float(start), float(end)) if start <= end else None


def observed_ranges(settings: Sequence[Setting], y: str, smooth: int = 1) -> Ranges:
    """Returns, by task, the lowest and the highest value of a metric in any of the runs."""
    extremes: dict[str, list[float]] = {}
    for setting in settings:
        for task, runs in setting.tasks.items():
            for run in runs:
                _, ys = run_curve(run, "env_steps", y, smooth=smooth)
                if len(ys):
                    extremes.setdefault(task, []).extend([ys.min(), ys.max()])
    return {task: (min(values), max(values)) for task, values in extremes.items()}


def parse_ranges(arguments: Sequence[str]) -> Ranges:
    """Returns the ranges that arguments such as `ALE/Pong-v5=-20.7,14.6` name.

    Raises:
        UserError: for one that is not ENV=LOW,HIGH with LOW below HIGH.
    """
    ranges = {}
    for argument in arguments:
        task, _, ends = argument.rpartition("=")
        try:
            low, high = map(float, ends.split(","))
        except ValueError:
            low = high = 0.0  # refused below, as one that is empty

        if not task or not low < high or not np.isfinite([low, high]).all():
            raise UserError(
                f"--range {argument} is not ENV=LOW,HIGH with LOW below HIGH; give the returns "
                "that stand for 0 and 1, such as ALE/Pong-v5=-20.7,14.6"
            )
        ranges[task] = low, high
    return ranges


def is_scaled(settings: Sequence[Setting], y: str) -> bool:
    """Whether a metric is a return, and any setting has several tasks."""
    return is_return(y) and any(len(setting.tasks) > 1 for setting in settings)


def ranges_of(
    settings: Sequence[Setting], y: str, user_ranges: Ranges, smooth: int = 1
) -> Ranges | None:
    """Returns the ranges by which a metric is scaled: those of the user, and the observed ones of
    other tasks; None if it is not scaled."""
    if not is_scaled(settings, y):
        return None
    return {**observed_ranges(settings, y, smooth), **user_ranges}


def check_ranges(settings: Sequence[Setting], metrics: Sequence[str], user_ranges: Ranges) -> None:
    """Checks the ranges that a user gives.

    Raises:
        UserError: if they scale none of the metrics, or name an unknown environment.
    """
    if user_ranges and not any(is_scaled(settings, metric) for metric in metrics):
        raise UserError(
            f"--range {next(iter(user_ranges))} has no effect: only returns are scaled, and only "
            "where a folder contains runs of several environments; leave it out"
        )

    tasks = dict.fromkeys(task for setting in settings for task in setting.tasks)
    for task in user_ranges:
        if task not in tasks:
            raise UserError(
                f"--range {task} is not an environment of these runs; give one of: "
                + ", ".join(tasks)
            )


def check_metric(settings: Sequence[Setting], y: str) -> None:
    """Checks that some run has a metric.

    Raises:
        UserError: otherwise, with the metric whose name is nearest.
    """
    names: dict[str, None] = {}
    for setting in settings:
        for run in setting.runs:
            if run.files.has(y):
                return

            paths = [path for path, _ in scalars(run.files.last) if not is_evaluation(path)]
            names |= dict.fromkeys(paths)
            for line in run.files.evaluations[-1:]:
                names |= dict.fromkeys(path for path, _ in scalars(figures_of(line)))

    close = get_close_matches(y, names, n=1, cutoff=0.0)
    nearest = f"; the nearest name is {close[0]}" if close else ""
    raise UserError(
        f"--metric {y} is in none of the runs{nearest}; give a name from {METRICS}, such as "
        f"{RETURN} or ledger/compute"
    )


def _load_setting(folder: Path, metrics: Collection[str] | None) -> Setting:
    """Loads the runs in a folder as one setting; see `load`.

    Raises:
        UserError: if the folder has no run with measurements, or runs of several algorithms, or
            runs of one environment whose options differ.
    """
    members = _members(folder)
    if not members:
        raise UserError(f"{folder} has no {METRICS}, so there is nothing to show; name a run")

    loaded = [load_run(path, metrics) for path in members]
    runs = [run for run in loaded if run.files.columns.lines]
    if not runs and any(run.files.state == "running" for run in loaded):
        raise UserError(f"{folder} contains no measurement yet; try again in a moment")
    if not runs:
        raise UserError(
            f"{folder} contains no measurement, and it is not in progress; see its folder logs for "
            "the reason, and name another run"
        )

    [setting] = _with_tasks([Setting(str(folder), runs)])
    algorithms = sorted({str(run.options.get("algo.name")) for run in runs})
    if len(algorithms) > 1:
        raise UserError(
            f"{folder} contains runs of {' and '.join(algorithms)}; give the runs of each as an "
            "argument of its own"
        )
    for task, task_runs in setting.tasks.items():
        if differing := sorted(_differing(task_runs)):
            raise UserError(
                f"{folder} contains runs of {task} with different options ({differing[0]}); give "
                "the runs of each setting as an argument of its own"
            )
    return setting


def _members(folder: Path) -> list[Path]:
    """Returns the runs in a folder, in the order of their names and seeds.

    The folder is a run itself, or contains one for each seed, or contains folders of these.
    """
    for patterns in (("",), ("seed-*/",), ("*/", "*/seed-*/")):
        runs = [path.parent for pattern in patterns for path in folder.glob(pattern + METRICS)]
        if runs:
            # "seed-10" follows "seed-9".
            return sorted(runs, key=lambda path: (path.parent, len(path.name), path.name))
    return []


def _differing(runs: Sequence[RunCurves]) -> set[str]:
    """Returns the options in which runs of one task differ, those of `run` left out."""
    keys = {key for run in runs for key in run.options if not key.startswith("run.")}
    return {key for key in keys if len({str(run.options.get(key)) for run in runs}) > 1}


def _are_seeds(first: Setting, second: Setting) -> bool:
    """Whether both are runs of one setting with different seeds."""
    runs = [*first.runs, *second.runs]
    seeds = [run.options.get("run.seed") for run in runs]
    alike = len({run.identity() for run in runs}) == 1 and all(run.options for run in runs)
    return alike and len({*map(str, seeds)}) == len(seeds)


def _with_tasks(settings: Sequence[Setting]) -> list[Setting]:
    """Returns the settings with the tasks of their runs named.

    Where environments of one id differ in their options within a setting, these are a part of the
    name, such as `penstock/MinAtar-v0 game=asterix`.
    """
    # The options that differ within any setting are in the names of that environment in all.
    naming_options: dict[str, set[str]] = {}
    for setting in settings:
        runs_by_id: dict[str, list[RunCurves]] = {}
        for run in setting.runs:
            runs_by_id.setdefault(run.env_id, []).append(run)
        for env_id, runs in runs_by_id.items():
            options = {key for key in _differing(runs) if key.startswith(FORM)}
            naming_options.setdefault(env_id, set()).update(options)

    named = []
    for setting in settings:
        runs = [
            replace(run, task=_task_name(run, sorted(naming_options[run.env_id])))
            for run in setting.runs
        ]
        named.append(Setting(setting.name, runs))
    return named


def _task_name(run: RunCurves, options: Sequence[str]) -> str:
    """Returns the name of a run's environment with the values of some options."""
    parts = [run.env_id]
    for key in options:
        value = run.options.get(key)
        if value not in (None, {}, []):
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            parts.append(f"{key.removeprefix('env.').removeprefix('kwargs.')}={text}")
    return " ".join(parts)
