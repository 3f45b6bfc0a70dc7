"""Pong on the cores of this machine: trained agent steps per second, and what the parts allow.

The ideal is cores / (environment + inference + write + learner core-seconds per step), each stage
alone in this run, with the settings of the preset, as in `penstock bench`. Then the preset trains
for some minutes over shared memory and over ZeroMQ. Rates are agent steps (four emulator frames
each), each trained once. `penstock bench --target pong_impala --peers` compares with other systems.

    python benchmarks/pong.py [--minutes 5] [--kinds shm zmq] [--json] [--save]
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from common import dropped_fraction, finish, parser
from penstock.bench.compare import SHARING
from penstock.bench.stages import in_place, learner
from penstock.bench.whole import train, trained_rate
from penstock.configs.load import resolve
from penstock.core.cores import usable_cores

TARGET = "pong_impala"
SECONDS = 4.0  # of each stage
WARM_UP_S = 15.0
PEERS = {"rllib_impala": 311, "ppo_150_lines": 887}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--minutes", type=float, default=5.0)
    args.add_argument("--kinds", nargs="*", default=["shm", "zmq"])
    args.add_argument("override", nargs="*", help="options of the config")
    options = args.parse_args()
    config = resolve(TARGET, options.override)
    cores = usable_cores()
    measured = in_place(config, SHARING[:-1], SECONDS) | {"learner": learner(config, SECONDS)}
    parts = {name: stage["core_ms"] for name, stage in measured.items()}
    ideal = cores / (sum(parts.values()) / 1000)
    runs = {
        kind: one(kind, f"stop.minutes={options.minutes}", *options.override)
        for kind in options.kinds
    }
    result: dict[str, Any] = {
        "core_ms_per_step": parts,
        "ideal_steps_per_s": ideal,
        "runs": runs,
        "asked": {"steps_per_s": 1600, "aim": 2150, "zmq_over_shm": 0.9},
        "peers_elsewhere": PEERS,
    }
    rows: list[list[Any]] = [["what", "steps/s", "of the ideal", "dropped", "policy lag"]]
    rows += [[f"{part} alone, one core", 1000 / ms, "", "", ""] for part, ms in parts.items()]
    rows.append([f"ideal on {cores:g} cores", ideal, 1.0, "", ""])
    for kind, run in runs.items():
        rate = run["steps_per_s"]
        rows.append([f"training over {kind}", rate, rate / ideal, run["dropped"], run["lag"]])
    if {"shm", "zmq"} <= runs.keys():
        result["zmq_over_shm"] = runs["zmq"]["steps_per_s"] / runs["shm"]["steps_per_s"]
        rows.append(["zmq / shm", result["zmq_over_shm"], "", "", ""])
    finish("pong", result, rows, options)


def one(kind: str, *overrides: str) -> dict[str, Any]:
    summary = train(TARGET, f"transport.kind={kind}", *overrides)
    return {
        "steps_per_s": trained_rate(summary, WARM_UP_S),
        "dropped": dropped_fraction(summary),
        "lag": mean(summary, "policy_lag_mean"),
        "return": summary["episode_return_mean"],
        "learner_wait_fraction": mean(summary, "learner_wait_fraction"),
    }


def mean(summary: dict[str, Any], name: str) -> float:
    """Of the intervals after the warm-up; the last one may be too short to have trained in it."""
    lines = [line for line in summary["intervals"] if line["time_s"] >= WARM_UP_S]
    return fmean(line[name] for line in lines if line[name] is not None)


if __name__ == "__main__":
    main()
