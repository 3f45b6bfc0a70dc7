"""A population of MinAtar Breakout against its members without exploitation, at equal steps.

First `penstock tune --pbt` trains four members, which take over weights and perturb their options.
Then each member is trained again with the options that it began with, which stay fixed. Compared
are the evaluations of the last weights: the best member of the population, its median, and the
median and the best of the fixed members. The best of four is the more favourable the more they
vary, so that the fair pairs are best with best and median with median.

A seed takes 4.8 million agent steps, about 6 minutes on two idle cores.

    python benchmarks/population.py [--seeds 3] [--steps 600000] [--interval 100000] [--save]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import compile_package, finish, parser

TARGET, MEMBERS = "minatar_breakout", 4
SPACE = (
    "learner.lr.from: {low: 1e-4, high: 1e-2, log: true}\n"
    "algo.entropy_cost: {low: 1e-3, high: 1e-1, log: true}\n"
)


def main() -> None:
    args = parser(__doc__.partition("\n\n")[0] if __doc__ else None)
    args.add_argument("--seeds", type=int, default=3)
    args.add_argument("--steps", type=int, default=600_000, help="agent steps of each member")
    args.add_argument("--interval", type=int, default=100_000, help="agent steps between decisions")
    options = args.parse_args()
    compile_package()
    results: list[dict[str, Any]] = []
    rows: list[list[Any]] = [
        ["seed", "population: best", "median", "fixed: best", "median", "taken over", "minutes"]
    ]
    for seed in range(1, options.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), seed, options.steps, options.interval)
        results.append(found)
        population, fixed = found["population"], found["fixed"]
        returns = [x for of in (population, fixed) for x in (of["best"], of["median"])]
        minutes = population["minutes"] + fixed["minutes"]
        rows.append([seed, *returns, found["taken_over"], minutes])
    finish("population", {"seeds": results}, rows, options)


def measure(folder: Path, seed: int, steps: int, interval: int) -> dict[str, Any]:
    """Train both, in folders below ``folder``."""
    common = [f"stop.env_steps={steps}", f"run.seed={seed}"]
    (folder / "space.yaml").write_text(SPACE)
    began_s = time.monotonic()
    decided = ["--trials", str(MEMBERS), "--interval", str(interval), "--dir", str(folder / "pbt")]
    penstock("tune", *common, "--space", str(folder / "space.yaml"), "--pbt", *decided)
    between_s = time.monotonic()
    members = []
    for n in range(MEMBERS):
        first = json.loads(lines(folder / "pbt" / f"trial-{n}" / "starts.jsonl")[0])["options"]
        members.append(first)
        given = [f"{name}={value}" for name, value in first.items()]
        run_dir = f"run.dir={folder / f'fixed-{n}'}"
        penstock("train", *common, f"eval.every_steps={interval}", run_dir, *given)
    ended_s = time.monotonic()
    taken_over = [
        start["from_trial"]
        for n in range(MEMBERS)
        for start in map(json.loads, lines(folder / "pbt" / f"trial-{n}" / "starts.jsonl"))
    ]
    return {
        "seed": seed,
        "steps": steps,
        "interval": interval,
        "options": members,
        "taken_over": sum(source is not None for source in taken_over),
        "population": outcome(
            [folder / "pbt" / f"trial-{n}" for n in range(MEMBERS)], between_s - began_s
        ),
        "fixed": outcome([folder / f"fixed-{n}" for n in range(MEMBERS)], ended_s - between_s),
    }


def outcome(run_dirs: Sequence[Path], seconds: float) -> dict[str, Any]:
    """The evaluations of the last weights of some runs."""
    last = [json.loads(lines(path / "evaluations.jsonl")[-1]) for path in run_dirs]
    returns = [evaluation["return"]["mean"] for evaluation in last]
    return {
        "returns": returns,
        "at_steps": [evaluation["trained_steps"] for evaluation in last],
        "best": max(returns),
        "median": statistics.median(returns),
        "minutes": seconds / 60,
    }


def penstock(command: str, *arguments: str) -> None:
    """Run a command of Penstock on the preset; its output goes to standard error."""
    called = [sys.executable, "-m", "penstock", command, TARGET, *arguments]
    subprocess.run(called, stdout=sys.stderr, check=True)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


if __name__ == "__main__":
    main()
