"""How much of its time a learner that draws from replay computes, and what drawing ahead gives.

`benchmarks/utilization.py` for algorithms that draw from replay. Actors make about 1.3 times what
the learner needs by `replay.samples_per_insert` (their environments sleep), so that a core is free;
those of Pong play at full speed, for a learner that draws each step 32 times and needs few. Each
case runs with a thread that draws ahead (`learner.prefetch=2`) and without one.

Of the learner's clock, `sampler` is what it spends collecting and drawing, or waits for the thread
that does; `actors` is what it waits for the rate limit. Without the thread, a share s of collecting
and drawing could at most make it 1 / (1 - s) times as fast; `of possible` is the achieved part.
Updates a second are those of the fastest tenth of all intervals, which other users of the machine
disturb least; the rest are medians of the runs.

    python benchmarks/replay_utilization.py [--seconds 12] [--rounds 1] [--json] [--save]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from common import finish, parser
from penstock.bench.learner_alone import measure
from penstock.bench.whole import train
from penstock.configs.load import resolve

PLENTY = 1.3
SLEEP_S = 1e-4  # by which a sleep is longer than asked for, and the rest of a step
WARM_UP_S = 3.0  # after the first update
CEILING_S = 3.0
FAST = 0.9
AHEAD, IN_LINE = "2", "0"  # learner.prefetch
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
    args.add_argument("--rounds", type=int, default=1, help="runs of each case and mode, in turns")
    args.add_argument("--only", choices=CASES, help="one case instead of all")
    options = args.parse_args()
    cases = {n: w for n, w in CASES.items() if options.only in (None, n)}
    found = {name: case(w, options.seconds, options.rounds) for name, w in cases.items()}
    heads = ("run", "updates/s", "utilization", "sampler", "actors", "bookkeeping", "publish")
    rows: list[list[Any]] = [[*heads, "other", "cores", "supply / need", "gain", "of possible"]]
    for name, result in found.items():
        for mode, label in ((AHEAD, ""), (IN_LINE, ", no prefetch")):
            run = result["runs"][mode]
            parts = (run[key] for key in heads[2:])
            gains = (result["gain"], result["of_possible"]) if mode == AHEAD else (None, None)
            rows.append(
                [name + label, run["updates_per_s"], *parts, run["other"], run["cores"],
                 run["supply_over_need"], *gains]
            )  # fmt: skip
    asked = {"utilization": 0.98, "sampler": 0.01, "of_possible": 0.95}
    finish("replay_utilization", {"cases": found, "asked": asked}, rows, options)


def case(workload: Workload, seconds: float, rounds: int) -> dict[str, Any]:
    """Runs of both modes in turns, the medians of each, and what drawing ahead gives."""
    settings = (*ONE, *workload.options, f"stop.minutes={seconds / 60}")
    ceiling = None
    if workload.slow is not None:
        ceiling = measure(resolve(workload.target, settings), CEILING_S)
        sleep_s = max(0.0, 1 / (PLENTY * ceiling) - SLEEP_S)
        settings = (*settings, *workload.slow, f"env.kwargs.step_time_s={sleep_s}")
    modes = (AHEAD, IN_LINE)
    runs: dict[str, list[dict[str, float]]] = {mode: [] for mode in modes}
    for number in range(rounds):
        for mode in modes[:: -1 if number % 2 else 1]:  # the machine's speed may drift
            runs[mode].append(one(workload.target, (*settings, f"learner.prefetch={mode}")))
    middle = {mode: summed_up(of_mode) for mode, of_mode in runs.items()}
    ahead, in_line = middle[AHEAD], middle[IN_LINE]
    gain = ahead["updates_per_s"] / in_line["updates_per_s"]
    possible = 1 / (1 - in_line["sampler"])
    return {
        "settings": settings,
        "ceiling_steps_per_s": ceiling,
        "runs": middle,
        "all_runs": runs,
        "gain": gain,
        "possible": possible,
        "of_possible": gain / possible,
    }


def summed_up(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The medians of the runs, and of all their intervals the rate that a tenth exceeds."""
    rates = [rate for run in runs for rate in run["rates"]]
    middle = {key: median(run[key] for run in runs) for key in runs[0] if key != "rates"}
    return {**middle, "updates_per_s": float(np.quantile(rates, FAST))}


def one(target: str, settings: tuple[str, ...]) -> dict[str, Any]:
    """Shares of the learner's clock and its rates in one run, without the warm-up."""
    summary = train(target, *settings, cwd=Path(__file__).parent)
    trained = [m for m in summary["intervals"] if m["learner_steps"]]
    steady = [m for m in trained if m["time_s"] >= trained[0]["time_s"] + WARM_UP_S][:-1]
    if len(steady) < 2:
        raise SystemExit(f"{target}: it trained too late to be measured; give more --seconds")
    first = steady[0]

    def mean(values: list[float]) -> float:
        return float(np.mean(values))

    ledger = {name: mean([m["ledger"][name] for m in steady]) for name in first["ledger"]}
    learner = next(name for name in first["ledgers"] if name.startswith("learner"))
    gather, wait = (
        mean([m["ledgers"][learner].get(part, 0.0) for m in steady]) for part in ("gather", "wait")
    )
    idle = mean([m["ledgers"]["actor-0"].get("wait", 0.0) for m in steady])
    steps = np.diff([m["learner_steps"] for m in steady])
    return {
        "rates": (steps / np.diff([m["time_s"] for m in steady])).tolist(),
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
