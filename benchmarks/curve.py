"""Draws the learning curve of a run: mean return against agent steps and against minutes.

python benchmarks/curve.py RUN_FOLDER OUT.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("run_dir", type=Path)
    args.add_argument("out", type=Path, help="an .svg or .png file; a .csv is written beside it")
    options = args.parse_args()
    lines = (options.run_dir / "metrics.jsonl").read_text().splitlines()
    points = [m for m in map(json.loads, lines) if m["episode_return_mean"] is not None]
    points = points[:: max(1, len(points) // 400)]
    mpl.rcParams["svg.hashsalt"] = "penstock"  # the same curve gives the same file
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    returns = [m["episode_return_mean"] for m in points]
    left.plot([m["env_steps"] / 1e6 for m in points], returns)
    right.plot([m["time_s"] / 60 for m in points], returns)
    left.set(xlabel="million agent steps", ylabel="return, mean of 100 episodes")
    right.set(xlabel="minutes")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(options.out, metadata={"Date": None} if options.out.suffix == ".svg" else None)
    rows = [f"{m['time_s']:.1f},{m['env_steps']},{m['episode_return_mean']:.3f}" for m in points]
    text = "\n".join(["time_s,env_steps,episode_return_mean", *rows])
    options.out.with_suffix(".csv").write_text(text + "\n")


if __name__ == "__main__":
    main()
