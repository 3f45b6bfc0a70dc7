"""`penstock train --seeds N`: runs of the same config with several seeds, one after another.

The runs are in folders ``seed-K`` of one folder, which `penstock plot` shows as a group. Ctrl-C
ends the current run cleanly, and the group with it.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from penstock.configs.load import Resolved, resolve_target
from penstock.core.formatting import clock, count, number
from penstock.core.run_dir import Resume, check, default_run_dir
from penstock.launch import run, topology
from penstock.launch.resumed import check_folder_named
from penstock.monitor.intervals import ConfidenceInterval, interval
from penstock.monitor.summary import INTERRUPTED

Summary = Mapping[str, Any]

SIGNALLED = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)


def train(target: str, overrides: Sequence[str], seeds: int, resume: Resume, as_json: bool) -> int:
    """Train ``seeds`` times, with run.seed, run.seed + 1, ...; returns the exit code: that of an
    interrupted run, otherwise 1 if a run failed, otherwise 0."""
    resolved = resolve_target(target, overrides)
    check_folder_named(resolved.config, resume)
    folder = Path(resolved.config.run.dir or default_run_dir(resolved.name))
    stream = sys.stderr if as_json else sys.stdout
    summaries: dict[int, Summary] = {}
    code = 0
    first = resolved.config.run.seed
    paths = {seed: folder / f"seed-{seed}" for seed in range(first, first + seeds)}
    for path in paths.values():
        check(path, resume)
    for seed, path in paths.items():
        _say(f"seed {seed}, {len(summaries) + 1} of {seeds}", stream)
        own = _with_seed(resolved, seed)
        make_specs = partial(topology.train, own.config)
        outcome, summaries[seed] = run.with_learner(own, path, resume, as_json, make_specs)
        code = max(code, outcome.exit_code)
        if outcome.exit_code == 2 or outcome.exit_code in SIGNALLED:
            break
    result = together(summaries, resolved.config.stop.return_)
    plot = _plot(folder)
    with suppress(OSError):
        _show(summaries, result, folder, plot, stream)
    if as_json:
        runs = [{"seed": seed, **summary} for seed, summary in summaries.items()]
        about = {"run_dir": str(folder), "exit_code": code, "asked": seeds, "plot": plot}
        print(json.dumps({**about, **result, "runs": runs}))
    return code


def together(summaries: Mapping[int, Summary], goal: float | None) -> dict[str, Any]:
    """Means over the runs that were not interrupted: return and seconds to ``goal``, with half of
    the 95 % confidence interval."""
    ended = [s for s in summaries.values() if s["error"] is None]
    whole = [s for s in ended if s["exit_reason"] not in INTERRUPTED]
    solved = [s["solved_at_s"] for s in whole if s["solved_at_s"] is not None]
    returns = [s["episode_return_mean"] for s in whole if s.get("episode_return_mean") is not None]
    return {
        "return": _interval(returns),
        "goal": goal,
        "solved": len(solved),
        "solved_at_s": _interval(solved),
        "finished": len(whole),
    }


def _interval(values: Sequence[float]) -> dict[str, float | None] | None:
    return interval(values)._asdict() if values else None


def _with_seed(resolved: Resolved, seed: int) -> Resolved:
    config = resolved.config
    section = config.run.model_copy(update={"seed": seed})
    return replace(resolved, config=config.model_copy(update={"run": section}))


def _plot(folder: Path) -> str | None:
    """Plot the group, if matplotlib is installed and there are metrics; returns the file."""
    from penstock.configs.errors import UserError
    from penstock.monitor import plot

    if find_spec("matplotlib") is None:
        return None
    try:
        return str(plot.plot([str(folder)], None, None))
    except UserError:
        return None


def _show(
    summaries: Mapping[int, Summary],
    result: Mapping[str, Any],
    folder: Path,
    plot: str | None,
    stream: TextIO,
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("seed", "ended by", "return", "steps", "time", "to stop.return"):
        table.add_column(name, justify="right", no_wrap=True)
    for seed, s in summaries.items():
        solved = "-" if s["solved_at_s"] is None else f"{s['solved_at_s']:.2f} s"
        steps, time = count(s.get("env_steps")), clock(s.get("time_s"))
        shown = number(s.get("episode_return_mean"))
        table.add_row(str(seed), s["exit_reason"], shown, steps, time, solved)
    table.add_section()
    solved = f"{_text(result['solved_at_s'])} s, {result['solved']} of {len(summaries)}"
    table.add_row("mean", "", _text(result["return"]), "", "", solved if result["solved"] else "-")
    width = None if stream.isatty() else 120
    Console(file=stream, width=width, markup=False, highlight=False).print(table)
    drawn = f", their learning curves in {plot}" if plot else ""
    if folder.is_dir():  # it does not exist if the first run was refused
        _say(f"the runs are in {folder}{drawn}", stream)


def _text(found: Mapping[str, float | None] | None) -> str:
    """470.2 ± 12.3."""
    if found is None:
        return "-"
    mean, half = ConfidenceInterval(**found)  # type: ignore[arg-type]
    return number(mean) + ("" if half is None else f" ± {number(half)}")


def _say(text: str, stream: TextIO) -> None:
    with suppress(OSError):
        print(text, file=stream, flush=True)
