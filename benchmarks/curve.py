"""Draws learning curves: mean return against agent steps and against minutes.

python benchmarks/curve.py RUN_FOLDER OUT.svg        # one run; a .csv is written beside it
python benchmarks/curve.py results/lunarlander.json OUT.svg    # every seed that games.py has run
python benchmarks/curve.py results/bars.json OUT.svg --bars pendulum_sac OTHER    # of bars.py

Of a bar each seed's mean return in training is a line and its evaluations are dots.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from common import point
from penstock.monitor.run_folder.lines import lines
from penstock.monitor.run_folder.record import METRICS

MOST_POINTS = 400

Curve = list[dict[str, Any]]


def main() -> None:
    args = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    args.add_argument("source", type=Path, help="a run's folder, or what games.py --save wrote")
    args.add_argument("out", type=Path, help="an .svg or .png file")
    args.add_argument("--bars", nargs="+", metavar="BAR", help="of a result of bars.py, these")
    options = args.parse_args()
    if options.bars:
        draw_bars(json.loads(options.source.read_text())["tasks"], options.bars, options.out)
        return
    curves = of_run(options.source) if options.source.is_dir() else of_result(options.source)
    draw(curves, options.out)
    if options.source.is_dir():
        rows = [f"{p['seconds']:.1f},{p['steps']},{p['return']:.3f}" for p in curves[0]]
        text = "\n".join(["time_s,env_steps,episode_return_mean", *rows])
        options.out.with_suffix(".csv").write_text(text + "\n")


def of_run(folder: Path) -> list[Curve]:
    """The one curve of a run."""
    points = [p for p in map(point, lines(folder / METRICS)) if p["return"] is not None]
    return [points[:: max(1, len(points) // MOST_POINTS)]]


def of_result(file: Path) -> list[Curve]:
    """A curve of each seed."""
    result = json.loads(file.read_text())
    return [[p for p in run["curve"] if p["return"] is not None] for run in result["runs"]]


def draw_bars(tasks: dict[str, Any], names: Sequence[str], out: Path) -> None:
    """Write the picture of some bars, each in a colour."""
    mpl.rcParams["svg.hashsalt"] = "penstock"
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    is_short = max(tasks[name]["steps"] for name in names) < 500_000
    units = {
        "steps": (1e3, "thousand agent steps") if is_short else (1e6, "million agent steps"),
        "seconds": (60.0, "minutes"),
    }
    for cell, (key, (unit, label)) in zip(axes, units.items(), strict=True):
        for index, name in enumerate(names):
            colour = f"C{index}"
            cell.plot([], [], color=colour, label=name)
            for seed in tasks[name]["seeds"].values():
                course = [point for point in seed["training"] if "episode_return_mean" in point]
                xs = [point[key] / unit for point in course]
                cell.plot(xs, [p["episode_return_mean"] for p in course], color=colour, lw=0.9)
                evaluated = sorted(seed["evaluations"].values(), key=lambda point: point["steps"])
                xs = [point[key] / unit for point in evaluated]
                cell.plot(xs, [p["return"] for p in evaluated], "o", color=colour, markersize=3)
        cell.set(xlabel=label)
        cell.grid(alpha=0.3)
    axes[0].set(ylabel="return: line in training, dots greedy")
    axes[0].legend(fontsize="small")
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def draw(curves: list[Curve], out: Path) -> None:
    """Write the picture."""
    mpl.rcParams["svg.hashsalt"] = "penstock"  # the same curve gives the same file
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    longest_s = max(curve[-1]["seconds"] for curve in curves if curve)
    unit, seconds = ("minutes", 60) if longest_s > 120 else ("seconds", 1)
    for curve in curves:
        returns = [p["return"] for p in curve]
        left.plot([p["steps"] / 1e6 for p in curve], returns)
        right.plot([p["seconds"] / seconds for p in curve], returns)
    left.set(xlabel="million agent steps", ylabel="return, mean of 100 episodes")
    right.set(xlabel=unit)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
