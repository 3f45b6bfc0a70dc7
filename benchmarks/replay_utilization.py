"""The share of time that a learner with replay and prefetching computes (`learner.prefetch=2`).

`benchmarks/utilization.py` for algorithms that draw from replay. Actors make about 1.3 times what
the learner needs by `replay.samples_per_insert` (their environments sleep), so that a core is free;
those of Pong play at full speed, for a learner that draws each step 32 times and needs few.

Of the learner's clock, `sampler` is what it waits for the thread that draws, `actors` what it waits
for the rate limit. For what drawing ahead gives see `replay_prefetch.py`.

    python benchmarks/replay_utilization.py [--seconds 12] [--rounds 1] [--json] [--save]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from common import finish, parser
from penstock.bench.stages import learner_rate
from penstock.bench.whole import train
from penstock.configs.load import resolve

PLENTY = 1.3
SLEEP_S = 1e-4  # by which a sleep is longer than asked for, and the rest of a step
WARM_UP_S = 3.0  # after the first update
CEILING_S = 3.0
AHEAD = "2"  # learner.prefetch
ONE = (
    *("actors.count=1", "learner.threads=1", "learner.device=cpu", "replay.min_size=320"),
    *("stop.return=null", "eval.every_steps=null"),
)
DQN = (
    *("algo={name: dqn}", "actors.envs=8", "model.activation=relu", "replay.capacity=20000"),
    *("learner.publish_every=10", "env.kwargs.n_actions=4"),
)


@dataclass(frozen=True)
class Workload:
    """A target, and its options; ``slow`` are those by which an environment can sleep."""

    target: str
    options: tuple[str, ...]
    slow: tuple[str, ...] | None = ()


CASES = {
    "dqn, mlp 256-256": Workload(
        "synthetic",
        (
            *DQN,
            *("env.kwargs.obs_shape=[64]", "model.hidden=[256,256]", "replay.batch_size=256"),
            "replay.samples_per_insert=32",
        ),
    ),
    "dqn, nature_cnn": Workload(
        "synthetic",
        (
            *DQN,
            *("env.kwargs.obs_shape=[4,84,84]", "env.kwargs.obs_dtype=uint8", "actors.unroll=5"),
            *("replay.batch_size=64", "replay.samples_per_insert=16", "replay.capacity=4000"),
        ),
    ),
    "sac, pendulum": Workload("pendulum_sac", (), ("env.id=slow_pendulum:SlowPendulum",)),
    "dqn, pong": Workload(
        "pong_apex",
        ("replay.samples_per_insert=32", "replay.capacity=20000"),
        slow=None,
    ),
}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=12.0, help="of each run, warm-up included")
    args.add_argument("--rounds", type=int, default=1, help="runs of each case")
    args.add_argument("--only", choices=CASES, help="one case instead of all")
    options = args.parse_args()
    cases = {n: w for n, w in CASES.items() if options.only in (None, n)}
    found = {name: case(w, options.seconds, options.rounds) for name, w in cases.items()}
    heads = ("run", "updates_per_s", "utilization", "sampler", "actors", "bookkeeping", "publish")
    rows: list[list[Any]] = [[*heads, "other", "cores", "supply / need"]]
    for name, result in found.items():
        run = result["median"]
        parts = (run[key] for key in heads[1:])
        rows.append([name, *parts, run["other"], run["cores"], run["supply_over_need"]])
    asked = {"utilization": 0.98, "sampler": 0.01}
    finish("replay_utilization", {"cases": found, "asked": asked}, rows, options)


def case(workload: Workload, seconds: float, rounds: int) -> dict[str, Any]:
    """Runs, and the medians of their figures."""
    settings = (
        *ONE,
        *workload.options,
        f"learner.prefetch={AHEAD}",
        f"stop.minutes={seconds / 60}",
    )
    ceiling = None
    if workload.slow is not None:
        ceiling = learner_rate(resolve(workload.target, settings), CEILING_S)
        sleep_s = max(0.0, 1 / (PLENTY * ceiling) - SLEEP_S)
        settings = (*settings, *workload.slow, f"env.kwargs.step_time_s={sleep_s}")
    runs = [one(workload.target, settings) for _ in range(rounds)]
    return {
        "settings": settings,
        "ceiling_steps_per_s": ceiling,
        "median": {key: median(run[key] for run in runs) for key in runs[0]},
        "runs": runs,
    }


def one(target: str, settings: tuple[str, ...]) -> dict[str, float]:
    """Shares of the learner's clock and its rate in one run, without the warm-up."""
    summary = train(target, *settings, cwd=Path(__file__).parent)
    trained = [m for m in summary["intervals"] if m["learner_steps"]]
    steady = [m for m in trained if m["time_s"] >= trained[0]["time_s"] + WARM_UP_S][:-1]
    if len(steady) < 2:
        raise SystemExit(f"{target}: it trained too late to be measured; give more --seconds")
    first, last = steady[0], steady[-1]

    def mean(values: list[float]) -> float:
        return float(np.mean(values))

    ledger = {name: mean([m["ledger"][name] for m in steady]) for name in first["ledger"]}
    learner = next(name for name in first["ledgers"] if name.startswith("learner"))
    gather, wait = (
        mean([m["ledgers"][learner].get(part, 0.0) for m in steady]) for part in ("gather", "wait")
    )
    idle = mean([m["ledgers"]["actor-0"].get("wait", 0.0) for m in steady])
    return {
        "updates_per_s": (last["learner_steps"] - first["learner_steps"])
        / (last["time_s"] - first["time_s"]),
        "utilization": ledger["compute"],
        "sampler": gather,
        "actors": wait,
        "bookkeeping": ledger["bookkeeping"],
        "publish": ledger["publish"],
        "other": ledger["other"],
        "cores": mean([m["cpu"][learner] for m in steady if learner in m["cpu"]]),
        "supply_over_need": 1 / max(1 - idle, 1e-3),
    }


if __name__ == "__main__":
    main()
