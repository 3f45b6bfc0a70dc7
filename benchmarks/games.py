"""A preset from several seeds: seconds of training and agent steps until a mean return is reached.

Each seed is a run of its own, started as a user would. Training begins when the first actor begins
its first unroll. A mean return is over the last 100 episodes, as training plays them, and raw.
Short episodes end first, so a mean may be flattered as long as many go on: what the run ended with
plays 100 episodes more, with the likeliest actions, and their mean stands beside it.

    python benchmarks/games.py lunarlander [--seeds 5] [--threshold 200] [--within 300] [--save]

The result is written to `benchmarks/results/TARGET.json`.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import penstock
from common import dropped_fraction, finish, parser, point
from penstock.bench.whole import train
from penstock.configs.load import resolve

CURVE_POINTS = 60
EVALUATED = 100  # episodes


def main() -> None:
    args = parser(__doc__)
    args.add_argument("target", help="a preset, as penstock train takes it")
    args.add_argument("--seeds", type=int, default=5)
    args.add_argument("--first-seed", type=int, default=100)
    args.add_argument("--threshold", type=float, help="mean return; default: the preset's stop")
    args.add_argument("--within", type=float, default=300.0, help="seconds, then a run ends")
    args.add_argument("override", nargs="*", help="options of the config")
    options = args.parse_args()
    threshold = options.threshold or resolve(options.target, options.override).stop.return_
    if threshold is None:
        args.error(f"{options.target} has no stop.return; give --threshold")
    limits = (f"stop.return={threshold}", f"stop.minutes={options.within / 60}")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = [one(options.target, seed, *options.override, *limits) for seed in seeds]
    reached = [run for run in runs if run["solved_at_s"] is not None]
    result = {
        "target": options.target,
        "overrides": options.override,
        "threshold": threshold,
        "within_s": options.within,
        "reached": len(reached),
        "seconds": _median(reached, "solved_at_s"),
        "steps": _median(reached, "solved_at_steps"),
        "runs": runs,
    }
    rows: list[list[Any]] = [
        [
            "seed",
            f"{threshold:g} after s",
            "steps",
            "return",
            "evaluated",
            "ended after s",
            "steps/s",
        ]
    ]
    figures = ("solved_at_s", "solved_at_steps", "return", "evaluated", "seconds", "steps_per_s")
    rows += [[run[key] for key in ("seed", *figures)] for run in runs]
    rows.append([f"median of {len(reached)}/{len(runs)}", result["seconds"], result["steps"]])
    evaluated, ended, rate = (
        statistics.median(run[key] for run in runs)
        for key in ("evaluated", "seconds", "steps_per_s")
    )
    rows[-1] += ["", evaluated, ended, rate]
    finish(options.target, result, rows, options)


def one(target: str, seed: int, *overrides: str) -> dict[str, Any]:
    """A run from one seed, to the threshold or to its end."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        summary = train(target, f"run.seed={seed}", *overrides, folder=run_dir)
        evaluated = penstock.evaluate(run_dir, EVALUATED, checkpoint="best").return_mean
    lines = summary["intervals"]
    last = lines[-1]
    solved = [line["env_steps"] for line in lines if line["solved_at_s"] is not None]
    every = max(1, len(lines) // CURVE_POINTS)
    return {
        "seed": seed,
        "solved_at_s": summary["solved_at_s"],
        "solved_at_steps": solved[0] if solved else None,
        "evaluated": evaluated,
        "seconds": last["time_s"],
        "steps_per_s": last["trained_steps"] / last["time_s"],
        "return": summary["episode_return_mean"],
        "policy_lag": summary["policy_lag_mean"],
        "dropped_fraction": dropped_fraction(summary),
        "curve": [point(line) for line in [*lines[::every], last]],
    }


def _median(runs: list[dict[str, Any]], key: str) -> float | None:
    return statistics.median(run[key] for run in runs) if runs else None


if __name__ == "__main__":
    main()
