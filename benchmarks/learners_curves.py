"""Draws what four learners reached over slow links: mean return against seconds and megabytes.

Reads benchmarks/results/learners.json, which `benchmarks/learners.py --link 100mbit --save` writes.

    python benchmarks/learners_curves.py OUT.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from common import RESULTS


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__)
    args.add_argument("out", type=Path, help="an .svg or .png file")
    options = args.parse_args()
    saved = json.loads((RESULTS / "learners.json").read_text())["tasks"]
    tasks = {title: task["runs"] for title, task in saved.items() if " at " in title}
    mpl.rcParams["svg.hashsalt"] = "penstock"  # the same curves give the same file
    figure = Figure(figsize=(9, 3.2 * len(tasks)), layout="constrained")
    rows = figure.subplots(len(tasks), 2, sharey="row", squeeze=False)
    for (title, runs), (left, right) in zip(tasks.items(), rows, strict=True):
        for i, (name, (run, *_)) in enumerate(runs.items()):
            codec, _, optimizer = name.partition("/")
            points = [point for point in run["curve"] if point["return"] is not None]
            returns = [point["return"] for point in points]
            label = f"{'fp32' if codec == 'none' else codec}, {optimizer}"
            for axes, of in ((left, "seconds"), (right, "megabytes")):
                axes.plot([point[of] for point in points], returns, label=label, color=f"C{i}")
        left.set(title=title, xlabel="seconds", ylabel="return, mean of 100 episodes")
        right.set(xlabel="megabytes sent by a learner", xscale="log")
        right.legend(fontsize="small")
        for axes in (left, right):
            axes.grid(alpha=0.3)
    figure.savefig(options.out, metadata={"Date": None} if options.out.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
