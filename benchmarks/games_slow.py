"""Thousands of slow games through `penstock serve-env`: 2,000 of one step a second, 100 killed a
minute.

It shows the memory and the core share of the process that serves them over time, how long the
others wait for their actions, and at the end whether every step is accounted for. The games are in
`pole_clients.py`, as one process; the learner trains CartPole on what they play.

    python benchmarks/games_slow.py [--minutes 10] [--games 2000] [--killed 100] [--json] [--save]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import finish, parser
from faults.vitals import memory
from games_run import GamesRun, unaccounted

PERIOD_S = 1.0
# Connecting and the first unrolls take memory; it is flat from then on.
WARM_S = 120.0


def main() -> None:
    """Play, measure and print."""
    made = parser(__doc__)
    made.add_argument("--minutes", type=float, default=10.0)
    made.add_argument("--games", type=int, default=2000)
    made.add_argument("--killed", type=float, default=100.0, help="a minute")
    args = made.parse_args()

    with tempfile.TemporaryDirectory() as folder, GamesRun(Path(folder) / "run") as run:
        run.start_games(args.games, PERIOD_S, args.killed)
        run.wait_for_training()
        rows, samples = measure(run, 60.0 * args.minutes)
        accounting = run.end()["accounting"]

    warm = [sample for sample in samples if sample["s"] >= min(WARM_S, 30.0 * args.minutes)]
    growth = warm[-1]["memory_mb"] - warm[0]["memory_mb"]
    result = {
        "minutes": args.minutes,
        "games": args.games,
        "killed_per_minute": args.killed,
        "samples": samples,
        "cores": statistics.median(sample["cores"] for sample in warm),
        "memory_growth_mb": round(growth, 2),
        "p99_ms": statistics.median(sample["p99_ms"] for sample in warm),
        "accounting": accounting,
        "difference": unaccounted(accounting),
    }
    rows.append(["median", "", "", result["cores"], "", result["p99_ms"], "", "", ""])
    finish("games_slow", result, rows, args)
    print(
        f"memory grew by {growth:.1f} MB in {warm[-1]['s'] - warm[0]['s']:.0f} s; produced "
        f"{accounting['produced']:,}, which differs from what it became by {result['difference']}",
        file=sys.stderr,
    )


def measure(run: GamesRun, seconds: float) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Returns a table and its samples, one for each report of the games."""
    rows: list[list[Any]] = [
        ["s", "connected", "memory, MB", "cores", "p50, ms", "p99, ms", "longest", "killed", "lost"]
    ]
    samples: list[dict[str, Any]] = []
    service = run.process_of("connector-0")
    began_s = time.monotonic()
    last_s, last_cpu_s = began_s, sum(service.cpu_times()[:2])
    while time.monotonic() < began_s + seconds:
        seen = run.next_report()
        now_s, cpu_s = time.monotonic(), sum(service.cpu_times()[:2])
        sample = {
            "s": round(now_s - began_s, 1),
            "memory_mb": round((memory(service.pid) or 0) / 1e6, 2),
            "cores": round((cpu_s - last_cpu_s) / (now_s - last_s), 4),
            **seen,
        }
        last_s, last_cpu_s = now_s, cpu_s
        samples.append(sample)
        names = ("s", "connected", "memory_mb", "cores", "p50_ms", "p99_ms", "longest_ms")
        rows.append([sample[name] for name in (*names, "killed", "lost")])
    return rows, samples


if __name__ == "__main__":
    main()
