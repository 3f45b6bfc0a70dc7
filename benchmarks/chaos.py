"""Chaos: a seeded schedule of faults against real runs, and what must hold after each of them.

Sessions of so many faults go round the topologies (benchmarks/faults/topologies.py): kills, stops,
hangs, full disks, no descriptors, no memory, partitions, half-open connections, hostile messages,
damaged checkpoints, clock steps. After each fault training must go on within its bound, counters
must be sound and the cause must be in logs/events.jsonl; at the end of a session the accounting
balances, memory and descriptors of what lasted are flat, and no process, folder or shared memory
stays. The table has seconds from a fault, or from the end of what lasted, until training went on.

Session i has the seed S + i, which also chooses its topology. A failure prints the command that
repeats its session, and keeps the folder; the exit code is then 1. Some faults need root,
libfaketime or control groups: those that this machine cannot have are counted as skipped.

    python benchmarks/chaos.py [--seed 0] [--faults 100] [--minutes M] [--topology shm ...]
                               [--fault kill:* ...] [--without end:term ...] [--session 40]
                               [--each N] [--slack 1] [--no-strict] [--verbose] [--json] [--save]
"""

from __future__ import annotations

import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from fnmatch import filter as filter_names
from typing import Any

from common import finish, parser
from faults.session import Result, make
from faults.topologies import TOPOLOGIES

FAULTS = 100
SESSION_FAULTS = 40


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument(
        "--faults", type=int, help="of all sessions; 100, or as many as --minutes allow"
    )
    made.add_argument("--minutes", type=float, help="no new fault after so long")
    made.add_argument("--topology", action="append", choices=TOPOLOGIES, help="this alone; again")
    made.add_argument("--fault", action="append", default=[], help="this kind or pattern; again")
    made.add_argument("--without", action="append", default=[], help="not this kind; again")
    made.add_argument("--each", type=int, help="for each topology and kind a session of so many")
    made.add_argument("--session", type=int, default=SESSION_FAULTS, help="faults of a session")
    made.add_argument("--slack", type=float, default=1.0, help="factor on every bound on time")
    made.add_argument("--no-strict", dest="strict", action="store_false", help="causes unchecked")
    made.add_argument("--verbose", action="store_true", help="a line for each fault")
    args = made.parse_args()
    names = args.topology or list(TOPOLOGIES)
    all_kinds = {kind for name in names for kind in TOPOLOGIES[name].kinds}
    unknown = [kind for kind in (*args.fault, *args.without) if not filter_names(all_kinds, kind)]
    if unknown:
        made.error(f"no {', '.join(unknown)} in {', '.join(names)}; {sorted(all_kinds)} are")

    chosen = {kind for pattern in args.fault or ["*"] for kind in filter_names(all_kinds, pattern)}
    kinds = frozenset(chosen - {*args.without})
    names = [name for name in names if kinds & TOPOLOGIES[name].kinds.keys()]
    # The sessions of --each.
    single_kinds = [
        (name, frozenset({kind}))
        for name in names
        for kind in sorted(kinds & TOPOLOGIES[name].kinds.keys())
    ]

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    until_s = time.monotonic() + args.minutes * 60 if args.minutes else float("inf")
    results: list[Result] = []
    remaining = args.faults or (sys.maxsize if args.minutes else FAULTS)
    if args.each:
        remaining = args.each * len(single_kinds)
    code = 0
    try:
        while remaining > 0 and time.monotonic() < until_s:
            seed = args.seed + len(results)
            count = min(args.each or args.session, remaining)
            name, session_kinds = names[seed % len(names)], kinds
            if args.each:
                name, session_kinds = single_kinds[len(results)]
            session = make(
                TOPOLOGIES[name],
                seed,
                count,
                kinds=session_kinds,
                slack=args.slack,
                strict=args.strict,
                until_s=until_s,
                verbose=args.verbose,
            )
            results.append(session.run())
            _tell(results[-1], session_kinds)
            remaining -= count
    except KeyboardInterrupt:
        print("interrupted: the session that went on does not count", file=sys.stderr)
        code = 128 + signal.SIGINT
    finish("chaos", summary(results, args), table(results), args)
    sys.exit(code or any(result.failure for result in results))


def _tell(result: Result, kinds: Collection[str]) -> None:
    """A line for a session; of one that failed, how to repeat it."""
    took = f"{result.injected} of {result.faults} faults in {result.seconds:.0f} s"
    print(f"{result.topology:10} seed {result.seed}: {took}", file=sys.stderr, flush=True)
    if result.failure is None:
        return

    injected = TOPOLOGIES[result.topology].kinds.keys() & set(kinds)
    omitted = TOPOLOGIES[result.topology].kinds.keys() - set(kinds)
    option, listed = "without", omitted
    if len(injected) < len(omitted):
        option, listed = "fault", injected
    chosen = "".join(f" --{option} {kind}" for kind in sorted(listed))
    print(
        f"FAILED: {result.failure}\n"
        f"repeat: python benchmarks/chaos.py --seed {result.seed} --topology {result.topology} "
        f"--faults {result.faults} --session {result.faults}{chosen}\n"
        f"folder: {result.folder}",
        file=sys.stderr,
        flush=True,
    )


def table(results: Sequence[Result]) -> list[list[Any]]:
    times: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for kind, seconds in result.recoveries:
            times[kind].append(seconds)
    rows: list[list[Any]] = [["fault", "count", "median s", "p95 s", "max s"]]
    for kind, found in sorted(times.items()):
        rows.append([kind, len(found), statistics.median(found), percentile(found), max(found)])
    return rows


def percentile(values: Sequence[float], share: float = 0.95) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(results: Sequence[Result], args: Any) -> dict[str, Any]:
    skipped: Counter[str] = Counter()
    unchecked: Counter[str] = Counter()
    for result in results:
        skipped += result.skipped
        unchecked += result.unchecked
    heading, *rows = table(results)
    return {
        "faults": sum(result.injected for result in results),
        "failures": [vars(result) for result in results if result.failure],
        "seeds": [args.seed, args.seed + len(results) - 1],
        "slack": args.slack,
        "seconds": sum(result.seconds for result in results),
        "recoveries": [dict(zip(heading, row, strict=True)) for row in rows],
        "skipped": dict(skipped),
        "unchecked": dict(unchecked),
    }


if __name__ == "__main__":
    main()
