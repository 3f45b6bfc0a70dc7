"""CartPole-v1: trained steps per second, and seconds of training to a mean return of 475.

Each seed is a run of its own of the preset `cartpole`, which goes on for a while after 475 was
reached. Training begins when the first actor begins its first unroll; the import of torch comes
before, and `benchmarks/startup.py` measures it. A mean return is over the last 100 episodes, as
training plays them. Other systems stand beside it in `penstock bench --target cartpole --peers`.

    python benchmarks/cartpole.py [--seeds 10] [--hold 30] [--json] [--save]
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from common import dropped_fraction, finish, parser
from penstock.bench.whole import train, trained_rate

PEERS = {"pufferlib_steps_per_s": 28_000, "best_475_s": 6.3}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--seeds", type=int, default=10)
    args.add_argument("--first-seed", type=int, default=100)
    args.add_argument("--hold", type=float, default=30.0, help="seconds to go on after 475")
    args.add_argument("override", nargs="*", help="options of the config")
    options = args.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    # By the return in training, as the peers measure it.
    limits = (f"stop.hold_s={options.hold}", "stop.minutes=2", "stop.confirm_episodes=0")
    runs = [one(seed, *limits, *options.override) for seed in seeds]
    solved = [run["solved_at_s"] for run in runs if run["solved_at_s"] is not None]
    result = {
        "runs": runs,
        "trained_steps_per_s": statistics.median(run["steps_per_s"] for run in runs),
        "solved_at_s": median_s(runs),
        "within_3_s": sum(at_s <= 3 for at_s in solved),
        "still_solved": sum(run["return"] >= 475 for run in runs),
        "asked": {"steps_per_s": 200_000, "within_3_s": "9 of 10", "aim_s": 0.8},
        "peers_elsewhere": PEERS,
    }
    rows: list[list[Any]] = [
        ["seed", "475 after s", "trained steps/s", "return at the end", "dropped"]
    ]
    rows += [
        [r["seed"], r["solved_at_s"], r["steps_per_s"], r["return"], r["dropped_fraction"]]
        for r in runs
    ]
    rows.append(["median", result["solved_at_s"], result["trained_steps_per_s"], "", ""])
    finish("cartpole", result, rows, options)


def median_s(runs: Sequence[dict[str, Any]]) -> float | None:
    """Median seconds to 475 of all runs; None where half of them or more did not reach it."""
    found = statistics.median(
        math.inf if run["solved_at_s"] is None else run["solved_at_s"] for run in runs
    )
    return found if found < math.inf else None


def one(seed: int, *overrides: str) -> dict[str, Any]:
    summary = train("cartpole", f"run.seed={seed}", *overrides)
    return {
        "seed": seed,
        "solved_at_s": summary["solved_at_s"],
        "steps_per_s": trained_rate(summary),
        "return": summary["episode_return_mean"],
        "policy_lag": summary["policy_lag_mean"],
        "dropped_fraction": dropped_fraction(summary),
    }


if __name__ == "__main__":
    main()
