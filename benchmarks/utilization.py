"""How much of its time the learner computes, and how much of its ceiling it reaches.

Synthetic actors make 1.3 times what the learner can train on (their environments sleep), or as much
as they can. The ceiling is the learner's rate on data that is in place already, alone, measured
before and after each run; the supply is what the actors would make if they never waited for a slot,
from their own ledgers. Runs with prefetching off show what it is worth. For learners that draw from
replay see `replay_utilization.py`.

    python benchmarks/utilization.py [--seconds 20] [--json] [--save]
"""

from __future__ import annotations

from typing import Any

import numpy as np

from common import dropped_fraction, finish, parser
from penstock.bench.stages import learner_rate
from penstock.bench.whole import train, trained_rate
from penstock.configs.load import resolve

PLENTY = 1.3
# Without evaluations, each of which takes a checkpoint of the learner.
LONG = ("stop.return=null", "actors.count=1", "eval.every_steps=null")
NETWORKS = {
    "mlp 256-256": ("env.kwargs.obs_shape=[64]", "model.hidden=[256,256]", *LONG),
    "nature_cnn": (
        "env.kwargs.obs_shape=[4,84,84]",
        "env.kwargs.obs_dtype=uint8",
        "actors.unroll=20",
        "actors.envs=32",
        *LONG,
    ),
}
PREFETCH = ("learner.prefetch=1", "transport.slots=3")
MODES = {
    "all they can": PREFETCH,  # first: it shows what a step costs an actor
    "1.3x": PREFETCH,
    "1.3x, no prefetch": ("learner.prefetch=0", "transport.slots=3"),
}
WARM_UP_S = 4.0
CEILING_S = 4.0


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=20.0)
    options = args.parse_args()
    stop = f"stop.minutes={options.seconds / 60}"
    runs: dict[str, Any] = {}
    for network, game in NETWORKS.items():
        actor_s = None
        for mode, settings in MODES.items():
            if mode == "1.3x":  # a trial: sleeping costs an actor more than the time that it sleeps
                trial = one((*game, *settings), stop, actor_s)
                actor_s = 1 / trial["supply_steps_per_s"] - trial["sleep_s"]
            run = runs[f"{network}, {mode}"] = one((*game, *settings), stop, actor_s)
            actor_s = actor_s or 1 / run["supply_steps_per_s"]
    rows: list[list[Any]] = [
        ["run", "supply / ceiling", "utilization", "achieved / ceiling", "waits", "other", "p95 ms"]
    ]
    for name, run in runs.items():
        ledger = run["ledger"]
        rows.append(
            [
                name,
                run["supply_steps_per_s"] / run["ceiling_steps_per_s"],
                ledger["compute"],
                run["achieved_over_ceiling"],
                ledger["wait_data"],
                ledger["other"],
                run["latency_p95_s"] * 1e3,
            ]
        )
    finish(
        "utilization",
        {"runs": runs, "asked": {"utilization": 0.98, "achieved": 0.95}},
        rows,
        options,
    )


def one(settings: tuple[str, ...], stop: str, actor_s: float | None) -> dict[str, Any]:
    """A run, and the ceiling around it. Actors are slowed down to 1.3 times the ceiling where a
    step is known to cost them ``actor_s``."""
    config = resolve("synthetic", settings)
    before = learner_rate(config, CEILING_S)
    sleep_s = 0.0
    if actor_s is not None:
        sleep_s = max(0.0, 1 / (PLENTY * before) - actor_s)
        settings = (*settings, f"env.kwargs.step_time_s={sleep_s}")
    summary = train("synthetic", *settings, stop)
    ceiling = (before + learner_rate(config, CEILING_S)) / 2
    steady = [m for m in summary["intervals"] if m["time_s"] >= WARM_UP_S][:-1]
    waits = float(np.mean([m["ledgers"]["actor-0"].get("wait", 0.0) for m in steady]))
    rate = trained_rate(summary, WARM_UP_S)
    return {
        "steps_per_s": rate,
        "ceiling_steps_per_s": ceiling,
        "achieved_over_ceiling": rate / ceiling,
        "sleep_s": sleep_s,
        "supply_steps_per_s": rate / max(1 - waits, 1e-9),
        "ledger": {
            n: float(np.mean([m["ledger"][n] for m in steady])) for n in steady[0]["ledger"]
        },
        "latency_p95_s": float(np.median([m["latency_p95_s"] for m in steady])),
        "queue_fill": float(np.mean([m["queue_fill"] for m in steady])),
        "dropped": dropped_fraction(summary),
    }


if __name__ == "__main__":
    main()
