"""`penstock plot`: learning curves of finished and live runs, as one picture.

A folder of runs with several seeds (`penstock train --seeds`) is one curve: the mean with its 95 %
confidence interval, up to the end of the shortest run, over the single runs, drawn faintly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.core.formatting import finite
from penstock.monitor.intervals import t_95
from penstock.monitor.record import EVALUATIONS, METRICS, Lines, lines

INSTALL = 'pip install "penstock[plot]"'
AXES = {"steps": ("env_steps", "agent steps"), "time": ("time_s", "seconds of training")}
RETURN = "episode_return_mean"
PANELS = {
    RETURN: "return, mean of 100 episodes",
    "steps_per_s": "agent steps / s",
    "policy_lag_mean": "policy lag, updates",
    "learner_wait_fraction": "learner waits, share of time",
}
EVALUATED = {"env_steps": "trained_steps", "time_s": "time_s"}
MOST_POINTS = 2000  # of a curve
GRID = 300  # points of a mean

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """Data of one curve: a run or a group of runs, with their evaluations."""

    name: str
    runs: list[Lines]
    evaluations: list[Lines]


def plot(folders: Sequence[str], out: str | None, axis: str | None) -> Path:
    """Draw runs over ``axis``, "steps" or "time", or both; returns the path of the PNG.

    Raises UserError if matplotlib is missing, or a folder is not a run.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"a plot needs matplotlib, which is not installed; run `{INSTALL}`"
        ) from error
    if out is not None and not Path(out).suffix:
        raise UserError(
            f"--out {out} has no suffix, which selects the format; give a name that ends in .png"
        )
    found = [load(Path(folder)) for folder in folders]
    path = Path(out) if out else (Path(folders[0]) if len(folders) == 1 else Path()) / "plot.png"
    columns = [axis] if axis else list(AXES)
    figure = Figure(figsize=(6.4 * len(columns), 2.6 * len(PANELS)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(PANELS), len(columns), squeeze=False, sharex="col")
    for column, name in enumerate(columns):
        for cell, panel in zip(grid[:, column], PANELS, strict=True):
            _draw(cell, found, AXES[name][0], panel)
            cell.set_ylabel(PANELS[panel], fontsize=9)
        grid[-1, column].set_xlabel(AXES[name][1])
    grid[0, 0].legend(fontsize=8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written ({error}); give another --out") from error
    return path


def load(folder: Path) -> Curves:
    """A run, or a group of runs in folders ``seed-...``. Raises UserError for other folders."""
    runs = [folder] if (folder / METRICS).is_file() else members(folder)
    if not runs:
        raise UserError(f"{folder} has no {METRICS}, so there is nothing to plot; name a run")
    metrics = [lines(run / METRICS) for run in runs]
    if not any(metrics):
        raise UserError(f"{folder} contains no measurement yet; try again in a moment")
    return Curves(
        str(folder),
        [found for found in metrics if found],
        [lines(run / EVALUATIONS) for run in runs],
    )


def members(folder: Path) -> list[Path]:
    """The runs of a group, in the order of their seeds."""
    found = [path.parent for path in folder.glob(f"seed-*/{METRICS}")]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def curve(found: Lines, x: str, y: str) -> tuple[Floats, Floats]:
    """The points of a run, by rising ``x``. Points that a resume from an older checkpoint has
    repeated replace the earlier ones."""
    points: list[tuple[float, float]] = []
    for line in found:
        at, value = finite(line.get(x)), finite(line.get(y))
        if at is None or value is None:
            continue
        while points and points[-1][0] >= at:
            points.pop()
        points.append((at, value))
    thinned = points[:: max(1, len(points) // MOST_POINTS)]
    xs, ys = np.array(thinned, np.float64).reshape(-1, 2).T
    return xs, ys


def whole(found: Lines) -> Lines:
    """The lines without shortened intervals, such as the last one, whose rates are unreliable."""
    times = [finite(line.get("time_s")) or 0.0 for line in found]
    gaps = np.diff(times, prepend=0.0)  # of an older version, whose lines were not thinned
    said = [finite(line.get("interval_s")) for line in found]
    lengths = [gap if own is None else own for own, gap in zip(said, gaps, strict=True)]
    least_s = np.median(lengths) / 2
    return [line for line, length in zip(found, lengths, strict=True) if length >= least_s]


def band(curves: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats, Floats]:
    """Where all curves (two at least) have values: places, mean, half of its 95 % interval."""
    start, end = max(xs[0] for xs, _ in curves), min(xs[-1] for xs, _ in curves)
    if start >= end:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    places = np.linspace(start, end, GRID)
    values = np.stack([np.interp(places, xs, ys) for xs, ys in curves])
    error = values.std(0, ddof=1) / np.sqrt(len(values))
    return places, values.mean(0), t_95(len(values)) * error


def _mean_return(evaluation: dict[str, Any]) -> Any:
    found = evaluation.get("return")
    return found.get("mean") if isinstance(found, dict) else None


def _draw(cell: Any, found: Sequence[Curves], x: str, y: str) -> None:
    for index, curves in enumerate(found):
        colour = f"C{index % 10}"
        points = [curve(run if y == RETURN else whole(run), x, y) for run in curves.runs]
        points = [point for point in points if len(point[0])]
        if len(points) > 1:
            for xs, ys in points:
                cell.plot(xs, ys, color=colour, linewidth=0.6, alpha=0.35)
            places, mean, half = band(points)
            label = f"{curves.name} ({len(points)} seeds, 95 %)"
            cell.plot(places, mean, color=colour, linewidth=1.6, label=label)
            cell.fill_between(
                places, mean - half, mean + half, color=colour, alpha=0.2, linewidth=0
            )
        elif points:
            cell.plot(*points[0], color=colour, linewidth=1.2, label=curves.name)
        if y == RETURN:
            for run in curves.evaluations:
                means = [{**line, y: _mean_return(line)} for line in run]
                cell.plot(*curve(means, EVALUATED[x], y), "o", color=colour, markersize=3.5)
    cell.grid(True, linewidth=0.4, alpha=0.5)
    cell.tick_params(labelsize=8)
