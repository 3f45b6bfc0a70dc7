"""Whether agents still learn: five seeds of six presets, against bands that ten seeds gave before.

Each run is a `penstock train` of a fixed number of agent steps, in separate processes, as a user
would start it. So it sees what asynchrony does to learning, which runs in lockstep cannot. Two
figures are compared, each as the mean over the seeds:

    trained     mean raw return of the last 100 training episodes
    evaluated   mean raw return of 20 further episodes with the likeliest actions

A band is the prediction interval for the mean of so many new seeds, at 99.9 %, from the mean and
the deviation of the seeds that made it (Student's t). A figure below its band fails; one above it
is shown, and asks for new bands.

    python benchmarks/learn_check.py [PRESET ...] [--seeds 5]
    python benchmarks/learn_check.py --bands      # ten seeds, written to learn_bands.json

Asynchronous learning depends on the speed of the machine. The bands name theirs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import penstock
from common import finish, machine, parser, print_table
from penstock.bench.whole import train

BANDS = Path(__file__).with_name("learn_bands.json")
FIGURES = ("trained", "evaluated")
EVALUATED = 20  # episodes
BAND_SEEDS, FIRST_SEED = range(10), 100
T = 4.781  # Student's t, 9 degrees of freedom, two-sided 99.9 %


class Check(NamedTuple):
    """A run of ``steps`` agent steps: long enough to have learned, too short to be done."""

    preset: str
    steps: int
    options: tuple[str, ...] = ()


CHECKS = (
    Check("cartpole", 250_000),
    Check("lunarlander", 300_000),
    Check("halfcheetah", 300_000),
    Check("minatar_breakout", 500_000),
    Check("cartpole_dqn", 40_000),
    Check("pendulum_sac", 10_000),
)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("preset", nargs="*", help="only these")
    args.add_argument("--seeds", type=int, default=5)
    args.add_argument("--bands", action="store_true", help="write new bands, from ten seeds")
    options = args.parse_args()
    checks = [check for check in CHECKS if not options.preset or check.preset in options.preset]
    if unknown := sorted(set(options.preset) - {check.preset for check in CHECKS}):
        args.error(f"{', '.join(unknown)}: the presets are {', '.join(c.preset for c in CHECKS)}")
    if options.bands:
        write_bands({check.preset: run_all(check, BAND_SEEDS) for check in checks})
        return
    bands = read_bands()
    if missing := [check.preset for check in checks if check.preset not in bands]:
        args.error(f"no bands for {', '.join(missing)}; make them first: --bands")
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    rows: list[list[Any]] = [["preset", "figure", "mean", "band", "", "seconds"]]
    runs: dict[str, list[dict[str, Any]]] = {}
    failed = False
    for check in checks:
        found = runs[check.preset] = run_all(check, seeds)
        for name in FIGURES:
            mean = statistics.fmean(run[name] for run in found)
            low, high = band([run[name] for run in bands[check.preset]], options.seeds)
            verdict = "below" if mean < low else "above" if mean > high else ""
            failed |= mean < low
            seconds = sum(run["seconds"] for run in found)
            rows.append([check.preset, name, mean, f"{low:,.1f} ... {high:,.1f}", verdict, seconds])
    finish("learn_check", {"runs": runs, "failed": failed}, rows, options)
    sys.exit(failed)


def run_all(check: Check, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The figures of each seed."""
    found = []
    for seed in seeds:
        found.append(run(check, seed))
        trained, evaluated, seconds = (found[-1][key] for key in (*FIGURES, "seconds"))
        print(
            f"{check.preset} seed {seed}: trained {trained:.1f}, evaluated {evaluated:.1f}, "
            f"{seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    return found


def run(check: Check, seed: int) -> dict[str, Any]:
    """Train and evaluate once."""
    began_s = time.monotonic()
    limits = ("stop.return=null", "stop.minutes=10", f"stop.env_steps={check.steps}")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        summary = train(check.preset, f"run.seed={seed}", *limits, *check.options, folder=run_dir)
        evaluated = penstock.evaluate(run_dir, EVALUATED, checkpoint="last").return_mean
    return {
        "seed": seed,
        "trained": summary["episode_return_mean"],
        "evaluated": evaluated,
        "trained_steps": summary["trained_steps"],
        "policy_lag": summary["policy_lag_mean"],
        "seconds": time.monotonic() - began_s,
    }


def band(before: Sequence[float], seeds: int) -> tuple[float, float]:
    """Where the mean of so many new seeds lies, if nothing has changed."""
    assert len(before) == len(BAND_SEEDS), "T is for ten seeds"
    spread = T * statistics.stdev(before) * math.sqrt(1 / seeds + 1 / len(before))
    mean = statistics.fmean(before)
    return mean - spread, mean + spread


def read_bands() -> dict[str, list[dict[str, Any]]]:
    """The runs that made the bands, by preset; empty before the first."""
    if not BANDS.exists():
        return {}
    presets: dict[str, list[dict[str, Any]]] = json.loads(BANDS.read_text())["presets"]
    return presets


def write_bands(runs: Mapping[str, list[dict[str, Any]]]) -> None:
    """Replace the presets that were run; others stay."""
    presets = {**read_bands(), **runs}
    BANDS.write_text(json.dumps({"machine": machine(), "presets": presets}, indent=2) + "\n")
    rows: list[list[Any]] = [["preset", "figure", "mean", "deviation"]]
    for preset, found in runs.items():
        for name in FIGURES:
            values = [run[name] for run in found]
            rows.append([preset, name, statistics.fmean(values), statistics.stdev(values)])
    print_table(rows)


if __name__ == "__main__":
    main()
