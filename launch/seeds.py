"""`penstock train --seeds N`: runs of the same config with several seeds.

The runs are in folders ``seed-K`` of one folder, which `penstock plot` shows as a group. As many
run at a time as the cores allow: one by one in this process, with its live view, or several in
processes of their own, whose lines are shown with their seed. Ctrl-C ends the current runs cleanly,
and the group with them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from penstock.configs.errors import UserError
from penstock.configs.load import Resolved, resolve_target
from penstock.core.cores import usable_cores
from penstock.core.formatting import clock, count, number
from penstock.core.run_dir import Resume, check, default_run_dir
from penstock.launch.resumed import check_run_dir_given
from penstock.launch.run_group import (
    RunEnd,
    Summary,
    check_shared,
    cores_of,
    group_exit_code,
    run_command,
    run_commands,
    runs_at_once,
    say_line,
    train_one,
)
from penstock.launch.signals import SignalsAfterRun
from penstock.monitor.intervals import ConfidenceInterval, interval
from penstock.monitor.summary import INTERRUPTED


def train_seeds(
    target: str,
    overrides: Sequence[str],
    seeds: int,
    resume: Resume,
    as_json: bool,
    parallel: int | None = None,
) -> int:
    """Train a target with several seeds: run.seed, run.seed + 1, and so on.

    Args:
        target: target as of `penstock train`.
        overrides: options of the run, each ``key=value``.
        seeds: number of runs.
        resume: how each run resumes from its own folder.
        as_json: whether the results go to standard output as JSON, and all other text to standard
            error.
        parallel: number of runs at a time; None: as many as the cores allow.

    Returns: the exit code.
    """
    resolved = resolve_target(target, overrides)
    config = resolved.config
    check_run_dir_given(config, resume)
    folder = Path(config.run.dir or default_run_dir(resolved.name))
    stream = sys.stderr if as_json else sys.stdout
    first_seed = config.run.seed
    paths = {seed: folder / f"seed-{seed}" for seed in range(first_seed, first_seed + seeds)}
    for path in paths.values():
        check(path, resume)

    at_once = min(seeds, parallel or runs_at_once(config, usable_cores()))
    check_shared(config, at_once)
    after = SignalsAfterRun()
    if at_once == 1:
        ends = _train_one_by_one(
            resolved, paths, resume, as_json=as_json, stream=stream, handler_after=after
        )
    else:
        run_cores = cores_of(config)
        say_line(
            f"{at_once} runs at a time: {usable_cores():g} cores, and a run uses {run_cores}",
            stream,
        )
        commands = {
            seed: run_command(target, [*overrides, f"run.seed={seed}"], path, resume)
            for seed, path in paths.items()
        }
        say = partial(say_line, stream=stream)
        ends = run_commands(commands, at_once, say, handler_after=after)

    summaries = {seed: end.summary for seed, end in ends.items()}
    code = group_exit_code(ends, seeds)
    result = group_means(summaries, config.stop.return_)
    plot = _plot(folder)

    # A full disk or a closed pipe does not hide the results from `as_json`.
    with suppress(OSError):
        _show(summaries, result, folder, plot, stream)
    if as_json:
        runs = [{"seed": seed, **summary} for seed, summary in summaries.items()]
        group = {"run_dir": str(folder), "exit_code": code, "asked": seeds, "plot": plot}
        print(json.dumps({**group, **result, "runs": runs}), flush=True)
    return code


def _train_one_by_one(
    resolved: Resolved,
    paths: Mapping[int, Path],
    resume: Resume,
    *,
    as_json: bool,
    stream: TextIO,
    handler_after: SignalsAfterRun,
) -> dict[int, RunEnd]:
    """Train in this process, with its live view, one seed after the other.

    Args:
        resolved: the target.
        paths: folder of each run, by its seed.
        resume: how each run resumes.
        as_json: whether a run shows itself as JSON.
        stream: where lines between the runs are printed.
        handler_after: handles signals between the runs; one that has arrived ends the group.

    Returns: how each run has ended, by its seed, as far as they were started.
    """
    ends: dict[int, RunEnd] = {}
    for seed, path in paths.items():
        handler_after.restore()
        if handler_after.signalled:
            break

        say_line(f"seed {seed}, {len(ends) + 1} of {len(paths)}", stream)
        ends[seed] = train_one(
            _with_seed(resolved, seed), path, resume, as_json, handler_after=handler_after
        )
        if ends[seed].ends_group:
            break
    return ends


def group_means(summaries: Mapping[int, Summary], goal: float | None) -> dict[str, Any]:
    """Returns means over the runs that were not interrupted and did not fail.

    Args:
        summaries: summary of each run, by its seed.
        goal: the return that a run had to reach; None without one.

    Returns: fields for JSON: means of the return and of the seconds to ``goal``, with half of the
    95 % confidence interval, and how many runs were solved and finished.
    """
    finished = [
        summary
        for summary in summaries.values()
        if summary["error"] is None and summary["exit_reason"] not in INTERRUPTED
    ]

    # A run that has not reached the goal, or has no finished episode, has no such figure.
    solved_at_s = [summary["solved_at_s"] for summary in finished]
    solved_at_s = [seconds for seconds in solved_at_s if seconds is not None]
    returns = [summary.get("episode_return_mean") for summary in finished]
    return {
        "return": _interval([value for value in returns if value is not None]),
        "goal": goal,
        "solved": len(solved_at_s),
        "solved_at_s": _interval(solved_at_s),
        "finished": len(finished),
    }


def _interval(values: Sequence[float]) -> dict[str, float | None] | None:
    """Returns mean and interval of some values for JSON; None if there are none."""
    return interval(values)._asdict() if values else None


def _with_seed(resolved: Resolved, seed: int) -> Resolved:
    """Returns the target with another seed."""
    config = resolved.config
    section = config.run.model_copy(update={"seed": seed})
    return replace(resolved, config=config.model_copy(update={"run": section}))


def _plot(folder: Path) -> str | None:
    """Plot the group, if matplotlib is installed and there are metrics.

    Returns: the path of the file, or None.
    """
    from penstock.monitor import plot

    if find_spec("matplotlib") is None:
        return None
    try:
        return str(plot.plot([str(folder)]))
    except UserError:
        return None


def _show(
    summaries: Mapping[int, Summary],
    result: Mapping[str, Any],
    folder: Path,
    plot: str | None,
    stream: TextIO,
) -> None:
    """Print a table of the runs with their means, then errors and where the files are.

    Args:
        summaries: summary of each run, by its seed.
        result: means over the runs, from `group_means`.
        folder: folder of the group.
        plot: path of the plot, if there is one.
        stream: where to print.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("seed", "ended by", "training return", "steps", "time", "to stop.return"):
        table.add_column(column, justify="right", no_wrap=True)
    for seed, summary in summaries.items():
        solved_at_s = summary["solved_at_s"]
        table.add_row(
            str(seed),
            summary["exit_reason"],
            number(summary.get("episode_return_mean")),
            count(summary.get("env_steps")),
            clock(summary.get("time_s")),
            "-" if solved_at_s is None else f"{solved_at_s:.2f} s",
        )

    # The last row has the means.
    table.add_section()
    solved = "-"
    if result["solved"]:
        solved = f"{_text(result['solved_at_s'])} s, {result['solved']} of {len(summaries)}"
    table.add_row("mean", "", _text(result["return"]), "", "", solved)

    width = None if stream.isatty() else 120
    Console(file=stream, width=width, markup=False, highlight=False).print(table)

    for seed, summary in summaries.items():
        if summary["error"] is not None:
            say_line(f"seed {seed} failed: {summary['error']}", stream)

    # There is no folder if the first run was refused.
    if folder.is_dir():
        plot_text = f", their learning curves in {plot}" if plot else ""
        say_line(f"the runs are in {folder}{plot_text}", stream)


def _text(mean_and_interval: Mapping[str, float | None] | None) -> str:
    """Returns a mean with half of its interval as text, such as "470.2 ± 12.3"."""
    if mean_and_interval is None:
        return "-"

    mean, half = ConfidenceInterval(**mean_and_interval)  # type: ignore[arg-type]
    if half is None:
        return number(mean)
    return f"{number(mean)} ± {number(half)}"
